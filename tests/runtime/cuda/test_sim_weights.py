"""Kernels over packed weights against the plain decoders of `quantkit/types`, on small odd shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.runtime.kernels.cuda import activations, floats, kernels, weights
from quantkit.runtime.kernels.cuda.dispatch import FLOAT_IDS
from tests.runtime.cuda.conftest import Run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
OF_TYPES = list(kernels.of_types())


def shape_of(kind: types.QuantType, place: int) -> tuple[int, int]:
    """Rows 1, 3, 5, or groups of interleaved ones; 1 to 3 blocks."""
    if kind.block_size == 1:
        return (1, 3, 5)[place % 3] * kind.interleave, (6, 34, 66)[place % 3]
    rows = (1, 3, 5)[place % 3] if kind.interleave == 1 else kind.interleave * (1 + place % 2) * 4 // kind.interleave
    blocks = 1 + place % 3 if kind.block_size < 256 else 1 + place % 2
    return max(rows, kind.interleave), blocks * kind.block_size


def packed(kind: types.QuantType, rows: int, n: int, fill: str) -> np.ndarray:
    """uint8[rows, row bytes]: zeros, any bytes, or rows that were encoded."""
    rng = np.random.default_rng(rows + n)
    if fill == "zeros":
        return np.zeros((rows, kind.row_bytes(n)), np.uint8)
    if fill == "bytes":
        return rng.integers(0, 256, (rows, kind.row_bytes(n)), np.uint8)
    x = (rng.standard_normal((rows, n)) / 10).astype(np.float32)
    return np.array(kind.quantize(x, rng.random(n, np.float32) if kind.requires_imatrix else None))


def plain(kind: types.QuantType, data: np.ndarray, n: int) -> np.ndarray:
    """float32[rows, n]: the values that products use."""
    out = np.empty((len(data), n), np.float32)
    (kind.product_rows or kind.decode_rows)(data, out)
    return out


def decoded(run: Run, kind: types.QuantType, data: np.ndarray, n: int, output: str) -> np.ndarray:
    rows = len(data)
    width = np.uint32 if output == "f32" else np.uint16
    if kind.ggml_type in FLOAT_IDS:
        out = np.full((rows, n), 7, width)
        source = data.reshape(-1).view(np.float32 if kind.name == "f32" else np.uint16)
        blocks = (-(-n // floats.THREADS), min(rows, 2))
        run(floats.dequantize(kind.ggml_type, output), blocks, floats.THREADS, source, 0, rows, n, out.reshape(-1))
        return out
    out = np.full((rows, n), 7, width)
    blocks = -(-rows * n // 32 // weights.THREADS)
    kernel = weights.dequantize(kind.ggml_type, output)
    run(kernel, blocks, weights.THREADS, data.reshape(-1), 0, data.shape[1], rows, n, out.reshape(-1).view(np.uint32))
    return out


@pytest.mark.parametrize("place", range(len(OF_TYPES)), ids=OF_TYPES)
def test_decoding_is_exact(run: Run, place: int) -> None:
    kind = types.get(OF_TYPES[place])
    rows, n = shape_of(kind, place)
    data = packed(kind, rows, n, "bytes")
    np.testing.assert_array_equal(decoded(run, kind, data, n, "f32").view(np.float32), plain(kind, data, n))


@pytest.mark.full
@pytest.mark.parametrize("fill", ["zeros", "bytes", "encoded"])
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("name", OF_TYPES)
def test_decoding_is_exact_of_all_shapes(run: Run, name: str, rows: int, fill: str) -> None:
    kind = types.get(name)
    if fill == "encoded" and kind.encode_rows is None:
        pytest.skip(f"{name} has no encoder")
    for blocks in (1, 2, 3):
        n = blocks * max(kind.block_size, 2)
        data = packed(kind, rows * kind.interleave, n, fill)
        np.testing.assert_array_equal(decoded(run, kind, data, n, "f32").view(np.float32), plain(kind, data, n))


@pytest.mark.parametrize("output", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["q8_0", "q4_K", "iq4_k_r4", "f32"])
def test_outputs_of_half_the_width(run: Run, name: str, output: str) -> None:
    """Rounded to nearest, ties to even."""
    import torch

    kind = types.get(name)
    n = 256
    data = packed(kind, 4, n, "encoded")
    right = torch.from_numpy(plain(kind, data, n)).to(torch.float16 if output == "f16" else torch.bfloat16)
    np.testing.assert_array_equal(decoded(run, kind, data, n, output), right.view(torch.uint16).numpy())


def quantized(run: Run, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and sums of float32[vectors, n]."""
    codes, scales, sums = (
        np.zeros(x.size, np.int8),
        np.zeros(x.size // 32, np.float32),
        np.zeros(x.size // 16, np.float32),
    )
    blocks = -(-x.size // activations.THREADS)
    run(activations.quantize(), blocks, activations.THREADS, x.reshape(-1), x.size, codes, scales, sums)
    return codes, scales, sums


def by_formula(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, as `activations` states it."""
    runs = x.reshape(-1, 32)
    scales = np.abs(runs).max(axis=1) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    sizes = np.floor(np.abs(runs) * inverse[:, None] + np.float32(0.5))
    codes = np.where(runs < 0, -sizes, sizes)
    sums = scales.repeat(2) * codes.reshape(-1, 16).sum(axis=1, dtype=np.float32)
    return codes.astype(np.int8).reshape(-1), scales, sums.astype(np.float32)


def test_activations(run: Run) -> None:
    x = np.random.default_rng(5).standard_normal((3, 96)).astype(np.float32)
    x[1, 32:64] = 0
    for result, right in zip(quantized(run, x), by_formula(x)):
        np.testing.assert_array_equal(result, right)


def multiplied(run: Run, kind: types.QuantType, data: np.ndarray, ids: np.ndarray, x: np.ndarray, share: int,
               tokens: int) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Products of matrices uint8[matrices, rows, row bytes], float32[slots, tokens, rows], and the x they are of."""
    _, rows, row_bytes = data.shape
    n = x.shape[-1]
    out, slots = np.full((len(ids), tokens, rows), 7, np.float32), (len(ids) // share, share)
    if kind.ggml_type in FLOAT_IDS:
        source = data.reshape(-1).view(np.float32 if kind.name == "f32" else np.uint16)
        kernel, block = floats.matvec(kind.ggml_type, tokens), floats.ROWS_OF_BLOCK
        run(kernel, (-(-rows // block), *slots), floats.THREADS, source, rows * n, ids, rows, n, x.reshape(-1),
            out.reshape(-1))  # fmt: skip
        return out, x
    codes, scales, sums = by_formula(x)
    kernel = weights.matvec(kind.ggml_type, tokens)
    split = weights.split_of(kind.ggml_type, tokens)
    blocks = (-(-rows // weights.rows_of_block(n, split)), *slots)
    run(kernel, blocks, weights.THREADS, data.reshape(-1), rows * row_bytes, ids, row_bytes, rows, n,
        codes.view(np.int32), scales, sums, weights.lanes_of_row(n, split.pairs), out.reshape(-1))  # fmt: skip
    return out, (codes.reshape(-1, 32) * scales[:, None]).reshape(x.shape)


def check_product(result: np.ndarray, matrix: np.ndarray, x: np.ndarray) -> None:
    """float32[rows] against the sum in float64: within the rounding of as many additions."""
    fine = np.isfinite(matrix).all(axis=1)
    matrix, x = matrix[fine].astype(np.float64), x.astype(np.float64)
    largest = np.abs(x).sum() * np.abs(matrix).max(axis=1)
    close = np.abs(result[fine] - matrix @ x) <= 1e-6 * largest
    assert fine.any()
    assert (close | (largest > 1e36)).all()  # where float32 may overflow on the way


@pytest.mark.parametrize("place", range(len(OF_TYPES)), ids=OF_TYPES)
def test_products_with_vectors(run: Run, place: int) -> None:
    kind = types.get(OF_TYPES[place])
    rows, n = shape_of(kind, place + 1)
    if kind.block_size == 1:
        n = 64
    x = np.random.default_rng(place).standard_normal((1, n)).astype(np.float32)
    data = packed(kind, rows, n, "bytes" if kind.block_size > 1 else "encoded")
    out, x = multiplied(run, kind, data[None], np.zeros(1, np.int32), x, 1, 1)
    check_product(out[0, 0], plain(kind, data, n), x[0])


@pytest.mark.parametrize(
    ("name", "tokens", "share"), [("q4_K", 2, 1), ("iq4_ks_r4", 1, 2), ("bf16", 4, 1), ("q8_0", 8, 1)]
)
def test_products_of_experts_and_of_several_vectors(run: Run, name: str, tokens: int, share: int) -> None:
    """Slots s and s + 1 share their vectors where `share` is 2; each slot has a matrix of its own, or none."""
    kind, n, rows = types.get(name), 256, 4
    rng = np.random.default_rng(3)
    data = np.stack([packed(kind, rows, n, "encoded") ^ np.uint8(i) for i in range(3)])
    ids = np.array([2, 0] + [-1] * share, np.int32)
    x = rng.standard_normal((len(ids) // share * tokens, n)).astype(np.float32)
    out, x = multiplied(run, kind, data, ids, x, share, tokens)
    assert not out[2:].any()
    for slot, number in enumerate(ids[:2]):
        matrix = plain(kind, data[number], n)
        for t in range(tokens):
            check_product(out[slot, t], matrix, x[slot // share * tokens + t])


def test_linear_addresses_are_checked() -> None:
    from quantkit.runtime.kernels.cuda.fields import linear_addresses

    with pytest.raises(TypeError, match="not linear"):
        linear_addresses(4, [0, 4, 8, 13])
    result: Any = linear_addresses(2, 8 * (np.arange(128) % 32) + 6 - 2 * (np.arange(128) // 32))
    assert (result.first, result.columns) == (6, (8, 16, 32, 64, 128, -2, -4))
