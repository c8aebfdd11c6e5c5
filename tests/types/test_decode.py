"""Decoding is exact: the bits of the reference, of the gguf package and of plain Python, on any bytes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from quantkit import types
from tests.types import data, naive, on_cpu


def each(kinds: Iterable[types.QuantType]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("t", list(kinds), ids=lambda t: t.name)


by_type = each(types.all())


def gguf_decodes(t: types.QuantType) -> bool:
    """Whether the gguf package knows the type's id and decodes it."""
    import gguf

    if t.ggml_type not in {kind.value for kind in gguf.GGMLQuantizationType}:
        return False
    try:
        gguf.quants.dequantize(np.zeros((1, t.row_bytes(256)), np.uint8), gguf.GGMLQuantizationType(t.ggml_type))
    except NotImplementedError:
        return False
    return True


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal float32 arrays bit for bit; NaN equals any NaN, whose payload nothing defines."""
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    nan = np.isnan(a)
    np.testing.assert_array_equal(nan, np.isnan(b))
    np.testing.assert_array_equal(np.where(nan, 0, a.view(np.uint32)), np.where(nan, 0, b.view(np.uint32)))


def some_bytes(t: types.QuantType, rng: np.random.Generator, n: int) -> np.ndarray:
    return data.random_bytes(t, rng, 5 * t.interleave, n)


# f32 needs no decoder; interleaved types: tests/repack
@each(t for t in types.all() if not t.base and t.name != "f32" and data.reference_knows(t))
def test_against_the_reference(t, rng):
    from tests.conformance import ggml

    n = 4 * max(t.block_size, 32)
    encoded = some_bytes(t, rng, n)
    same_bits(t.dequantize(encoded, n), ggml.dequantize(t.name, encoded, n))


def test_what_the_gguf_package_decodes():
    decoded = {t.name for t in types.all() if gguf_decodes(t)}
    assert {"q4_0", "q4_K", "q6_K", "iq4_nl", "iq2_xxs", "mxfp4", "nvfp4", "tq1_0", "tq2_0"} <= decoded


@each(t for t in types.all() if gguf_decodes(t))
def test_against_the_gguf_package(t, rng):
    import gguf

    n = 4 * max(t.block_size, 32)
    encoded = some_bytes(t, rng, n)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType(t.ggml_type))
    same_bits(t.dequantize(encoded, n), expected)


@each(t for t in types.all() if t.name.lower() in naive.DECODERS)  # interleaved ones are checked against their base
def test_against_plain_python(t, rng):
    n = 3 * max(t.block_size, 32)
    encoded = some_bytes(t, rng, n)
    with np.errstate(all="ignore"):
        expected = [naive.DECODERS[t.name.lower()](bytes(row), n) for row in encoded]
    same_bits(t.dequantize(encoded, n), np.array(expected, np.float32))


@pytest.mark.parametrize("name", sorted(naive.DECODERS))
def test_every_scale(name):
    """All 65536 halves as the first field of a block, Inf, NaN and subnormals among them."""
    t = types.get(name)
    n = max(t.block_size, 2)
    encoded = np.full((65536, t.row_bytes(n)), 0x35, np.uint8)
    offset = {"q2_k": 80, "q3_k": 108, "q6_k": 208, "tq1_0": 52, "tq2_0": 64}.get(name, 0)
    encoded[:, offset : offset + 2] = np.arange(65536, dtype="<u2").view(np.uint8).reshape(-1, 2)
    sample = np.r_[0:1030, 0x3C00, 0x7BFF:0x7C03, 0x8000:0x8003, 0xFBFF:0xFC03]
    with np.errstate(all="ignore"):
        expected = [naive.DECODERS[name](bytes(row), n)[-1] for row in encoded[sample]]
    same_bits(t.dequantize(encoded, n)[sample, -1], np.array(expected, np.float32))


@by_type
def test_threads_slices_and_out(t, rng):
    n = 2 * max(t.block_size, 1024)
    encoded = data.random_bytes(t, rng, 9 * t.interleave, n)
    whole = t.dequantize(encoded, n, threads=1)
    same_bits(whole, t.dequantize(encoded, n, threads=2))
    same_bits(whole[t.interleave : 3 * t.interleave], t.dequantize(encoded[t.interleave : 3 * t.interleave], n))
    out = np.empty_like(whole)
    assert t.dequantize(encoded, n, out=out) is out
    same_bits(whole, out)
    assert t.dequantize(encoded[:0], n).shape == (0, n)


@by_type
def test_read_only_and_unaligned_bytes(t, rng):
    """Tensors are views of a mapping, at any address."""
    n = 2 * max(t.block_size, 32)
    encoded = some_bytes(t, rng, n)
    buffer = np.empty(encoded.size + 1, np.uint8)
    moved = buffer[1:].reshape(encoded.shape)
    moved[...] = encoded
    moved.flags.writeable = False
    same_bits(t.dequantize(moved, n), t.dequantize(encoded, n))


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_the_same_on_another_cpu(isa):
    names = ["q4_0", "q5_1", "q6_0", "iq4_nl", "q4_K", "iq4_k"]
    assert on_cpu.run(isa, "decode", names) == on_cpu.digests("decode", names)
