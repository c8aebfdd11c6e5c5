"""Conversion of float formats, and codes times scales, against numpy: every value of 8 and 16 bits, many of 32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.types.floats import FLOATS, is_finite
from quantkit.types.native import recode
from tests.other_cpus import run_tests

WORDS = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}
ALL = np.arange(1 << 16, dtype=np.uint16)


def values(kind: str, data: np.ndarray) -> np.ndarray:
    """float32 of uint8 bytes."""
    if kind == "bf16":
        return (data.reshape(-1).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.reshape(-1).view(np.float16 if kind == "f16" else np.float32).astype(np.float32)


def nearest(kind: str, x: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers in a format, ties to even; of NaN anything."""
    with np.errstate(over="ignore", invalid="ignore"):
        if kind != "bf16":
            return x.astype(np.float16 if kind == "f16" else np.float32).view(WORDS[kind])
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


OVERFLOW = {kind: types.get(kind).overflow for kind in FLOATS}


def agree(kind: str, made: np.ndarray, fits: bool, x: np.ndarray) -> None:
    """Elements that fit, and whether all do."""
    fit = np.abs(x) < OVERFLOW[kind]
    np.testing.assert_array_equal(made.reshape(-1).view(WORDS[kind])[fit], nearest(kind, x)[fit])
    assert fits == fit.all()


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_floats(source: str, target: str, rng: np.random.Generator) -> None:
    """Ties of bf16 and halves, subnormals, too large values, NaN payloads that rounding could carry into Inf."""
    stored = ALL
    if source == "f32":
        near = (
            ALL.astype(np.uint32)[:, None] << 16 | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        ).ravel()
        halves = values("f16", ALL.view(np.uint8)).view(np.uint32)[:, None] + np.array([0, 0xFFF, 0x1000], np.uint32)
        stored = np.concatenate([near, halves.ravel(), rng.integers(0, 1 << 32, 1 << 16, np.uint32)])
    data = stored.view(np.uint8).reshape(16, -1)
    x = values(source, data)
    agree(target, *recode.recode(source, target, data), x)


@pytest.mark.parametrize("target", FLOATS)
def test_what_does_not_fit(target: str) -> None:
    """The largest that fits, and one bad value anywhere: the smallest that does not fit, Inf, NaN, either sign."""
    limit = np.float32(OVERFLOW[target])
    for x in (np.nextafter(limit, np.float32(0)), limit, np.float32(np.inf), np.float32(np.nan)):
        for place in (0, 17, 47):
            row = np.ones((1, 48), np.float32)
            row[0, place] = np.copysign(x, (-1) ** place)
            agree(target, *recode.recode("f32", target, row.view(np.uint8)), row[0])


@pytest.mark.parametrize("source", ["f8_e4m3", "f8_e5m2"])
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize(("high", "begin"), [(1, 0), (16, 5), (100, 60)])
def test_codes_times_scales(source: str, target: str, high: int, begin: int, rng: np.random.Generator) -> None:
    """Scales of any size; the last block is cut off, and so is the first."""
    import torch

    codes = np.tile(np.arange(256, dtype=np.uint8), (40, 1))[:, :240]
    codes = np.ascontiguousarray(codes + rng.integers(0, 256, (40, 1), np.uint8))
    scales = np.exp(20 * rng.standard_normal((-(-(begin + 40) // high), 4))).astype(np.float32)
    scales[:, 3] = 1
    scales[0, :3] = np.float32(1e-42), np.float32(1e36), np.nan
    code_of = torch.float8_e4m3fn if source == "f8_e4m3" else torch.float8_e5m2
    grid = scales.repeat(high, 0)[begin : begin + 40].repeat(64, 1)[:, :240]
    with np.errstate(over="ignore", invalid="ignore"):
        x = torch.from_numpy(codes).view(code_of).float().numpy() * grid
    out = np.empty((40, 240 * recode.ITEM_BYTES[target]), np.uint8)
    fits = recode.rescale(source, target, codes, scales, (high, 64), begin, out)
    agree(target, out, fits, x.reshape(-1))
    few = codes & 0x87 | 0x30  # from 1/8 to 1
    huge = np.full_like(scales, 3e38)  # 256 times this is Inf: reported as too large, though some would fit
    assert not (source == "f8_e4m3" and recode.rescale(source, target, few, huge, (high, 64), begin, out))
    fits = recode.rescale(source, target, few, np.ones_like(scales), (high, 64), begin, out)
    agree(target, out, fits, torch.from_numpy(few).view(code_of).float().numpy().reshape(-1))


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_floats_written_to_a_file(source: str, target: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Several slices and a rest; the bytes around stay unchanged; one bad value in the rest is reported."""
    count = 2 * recode.SLICE + 3 * recode.LANES
    data = recode.recode("f32", source, rng.standard_normal((1, count), np.float32).view(np.uint8))[0].reshape(-1)
    expected, _ = recode.recode(source, target, data[None])
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(expected.size + 2000)
        assert recode.write_recoded(source, target, data, file.fileno(), 1000)
        file.seek(0)
        assert file.read() == bytes(1000) + expected.tobytes() + bytes(1000)
        data.view(WORDS[source])[-1] = nearest(source, np.array([np.inf], np.float32))[0]
        assert not recode.write_recoded(source, target, data, file.fileno(), 0)


@pytest.mark.parametrize(("rows", "n", "begin"), [(1, 16, 0), (300, 4096, 5), (1000, 1040, 127), (3, 1 << 19, 0)])
def test_codes_times_scales_written_to_a_file(
    rows: int, n: int, begin: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    codes = rng.integers(0, 0x7F, (rows, n), np.uint8)
    scales = rng.random((-(-(begin + rows) // 128), -(-n // 128)), np.float32)
    given = codes, scales, (128, 128), begin
    expected = np.empty((rows, 2 * n), np.uint8)
    assert recode.rescale("f8_e4m3", "bf16", *given, expected)
    with open(tmp_path / "file", "w+b") as file:
        assert recode.write_rescaled("f8_e4m3", "bf16", *given, file.fileno(), 64)
        file.seek(64)
        assert file.read() == expected.tobytes()
    codes[-1, -1] = 0x7F  # NaN
    with open(tmp_path / "file", "w+b") as file:
        assert not recode.write_rescaled("f8_e4m3", "bf16", *given, file.fileno(), 64)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_failed_write_is_reported() -> None:
    data = np.zeros(64 * recode.LANES, np.uint8)
    with open("/dev/full", "r+b", buffering=0) as file:
        assert not recode.write_recoded("bf16", "bf16", data, file.fileno(), 0)
        scales = np.ones((1, 1), np.float32)
        assert not recode.write_rescaled("f8_e4m3", "bf16", data[None], scales, (1, 1024), 0, file.fileno(), 0)


@pytest.mark.parametrize("isa", [pytest.param("generic", marks=pytest.mark.full), "avx2"])
def test_the_same_on_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


@pytest.mark.parametrize("kind", FLOATS)
def test_is_finite(kind: str, rng: np.random.Generator) -> None:
    """One value that is not finite anywhere, of either sign; negative numbers and zeros are finite."""
    inf = (
        int(np.array([np.inf], np.float32).view(np.uint32)[0])
        if kind == "f32"
        else {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    )
    sign = 1 << (8 * WORDS[kind]().itemsize - 1)
    bits = rng.integers(0, inf, 200_000, WORDS[kind]) | WORDS[kind](sign) * rng.integers(0, 2, 200_000, WORDS[kind])
    bits[:3] = 0, sign, inf - 1
    assert is_finite(types.get(kind), bits.view(np.uint8))
    assert is_finite(types.get(kind), bits[:1].view(np.uint8))
    for odd in (inf, inf | sign, inf + 1, (inf + 1) | sign, sign - 1, 2 * sign - 1):
        for place in (0, 150_000, 199_999):
            other = bits.copy()
            other[place] = odd
            assert not is_finite(types.get(kind), other.view(np.uint8))
