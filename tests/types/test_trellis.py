"""The trellis types: the generator, known answers, and the search against an exhaustive one."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families import trellis_code
from tests.types import data, on_cpu
from tests.types.naive.trellis import values

NAMES = ["iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt"]
by_name = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize(
    ("name", "first", "last", "crc"),
    [("iq1_kt", [-1406, 76, 304, 1254, 1634, 380], [-2670, 979], "6d8246ef"),
     ("iq2_kt", [-456, -2014, -152, -532, 3458, 1596], [3432, -1144], "d1d26623"),
     ("iq3_kt", [-132, 583, -44, 154, -1001, 462], [33, -11], "7efbd6cd"),
     ("iq4_kt", [361, -399, -779, -912, 513, -38], [-418, -836], "95a45961")],
)  # fmt: skip
def test_known_answers(name, first, last, crc):
    t = types.get(name)
    row = ((149 * np.arange(t.row_bytes(256)) + 7) % 256).astype(np.uint8)
    row[:4] = np.frombuffer(np.float32(1).tobytes(), np.uint8)
    y = t.dequantize(row[None], 256)[0]
    assert y[:6].tolist() == first
    assert y[-2:].tolist() == last
    assert f"{zlib.crc32(y):08x}" == crc


@pytest.mark.parametrize(("bits", "group", "offset"), [(13, 8, 4096), (16, 8, 4096), (15, 4, 36864)])
def test_tables_are_what_the_generator_gives(bits, group, offset):
    table = trellis_code.code_values(bits, group, offset)
    for index in (0, 1, 2, 77, 4095, (1 << bits) - 1):
        assert table[index].tolist() == values(index + offset, group)


@by_name
def test_every_index_can_be_found(name):
    """The index of the search holds every point of every table, under its own number."""
    from quantkit.types.native import trellis_index

    t = type(types.get(name))
    tables = np.stack([trellis_code.code_values(t.index_bits, t.group, offset) for offset in t.offsets])
    _, points, names, _, _ = trellis_index.build(tables, t.clusters)
    for table, chunks, numbers in zip(tables, points, names):
        assert np.array_equal(np.unique(numbers), np.arange(len(table)))
        stored = chunks.transpose(0, 2, 1, 3).reshape(-1, t.group)
        assert np.array_equal(stored, table[numbers])


@by_name
@pytest.mark.parametrize("weighted", [False, True], ids=["none", "importance"])
def test_groups_are_nearly_the_best_there_are(name, weighted):
    """Under the scales that were chosen, all points compared."""
    t = types.get(name)
    kind, n = type(t), 256
    x = data.rows("student4", 12, 2, n)
    weights = data.importance(12, n) if weighted else None
    y = t.dequantize(t.quantize(x, weights), n).astype(np.float64)
    w = np.empty_like(x)
    for row, out in zip(x, w):
        trellis_code.weigh(row / np.abs(row).max(), np.empty(0, np.float32) if weights is None else weights, out)
    tables = [trellis_code.code_values(kind.index_bits, kind.group, offset).astype(float) for offset in kind.offsets]
    if kind.folded:
        x, y, tables = np.abs(x), np.abs(y), [np.abs(table) for table in tables]
    actual = best = 0.0
    for part in range(0, 2 * n, 32):
        given, result, weight = (a.reshape(-1)[part : part + 32].reshape(-1, kind.group) for a in (x, y, w))
        step, table = max((likeness_and_points(result, table) for table in tables), key=lambda each: each[0])[1:]
        errors = ((given[:, None] - step * table) ** 2 * weight[:, None]).sum(axis=2)
        actual += float(((given - result) ** 2 * weight).sum())
        best += float(errors.min(axis=1).sum())
    assert best <= 1.0001 * actual <= 1.05 * best


def likeness_and_points(y: np.ndarray, table: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Likeness of decoded groups y to s times points, s, and the points: y was s times points of one table."""
    norms = np.maximum(np.sqrt((table * table).sum(axis=1)), 1)
    likeness = y @ table.T / norms
    signed = likeness[np.arange(len(y)), np.abs(likeness).argmax(axis=1)]
    points = table[np.abs(likeness).argmax(axis=1)]
    return float((signed**2).sum()), float((y * points).sum() / (points * points).sum()), table


def test_the_same_on_another_cpu():
    """The index and the search are integers, but for products that are rounded one by one."""
    names = ["iq1_kt", "iq4_kt"]
    assert on_cpu.run("avx2", "encode", names) == on_cpu.digests("encode", names)
