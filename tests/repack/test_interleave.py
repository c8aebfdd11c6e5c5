"""Interleaving is where the spec says, loses nothing, and is what the reference does."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from quantkit import repack, types
from quantkit.errors import DataError, UnsupportedError
from quantkit.types.interleave import Field, Interleaved, Lines, Permutation, Slots, packed
from tests.repack.layouts import LAYOUTS, Layout, move_bits, spec_tensor

CRCS = {"iq4_k_r4": "45589912", "q8_0_r8": "7d0b11c0"} | {name: layout.crc for name, layout in LAYOUTS.items()}
INTERLEAVED = [t for t in types.all() if isinstance(t, Interleaved)]
by_type = pytest.mark.parametrize("t", INTERLEAVED, ids=lambda t: t.name)


def layout_of(t: Interleaved) -> Layout:
    return Layout(t.interleave, t.block_bytes, t.row_meta_bytes, t.block_size, CRCS[t.name], tuple(t.fields))


ALL = LAYOUTS | {t.name: layout_of(t) for t in INTERLEAVED}
by_layout = pytest.mark.parametrize("name", sorted(ALL))


def random_rows(layout: Layout, rng: np.random.Generator, groups: int, blocks: int) -> np.ndarray:
    shape = (groups * layout.rows, layout.head + blocks * layout.block_bytes)
    return rng.integers(0, 256, shape, dtype=np.uint8)


@by_layout
def test_the_specs_vectors(name):
    """Section 12 of the spec: checksum of a tensor of two groups by 512 columns."""
    layout = ALL[name]
    data = spec_tensor(2 * layout.rows, layout.head + 512 // layout.columns * layout.block_bytes)
    out = np.empty_like(data)
    Permutation(layout.fields, layout.rows, layout.block_bytes, layout.head).forward(data, out)
    assert f"{zlib.crc32(out):08x}" == layout.crc


@by_layout
def test_the_formula_and_its_inverse(name, rng):
    """Any bytes; batches of blocks that fill the lanes and that do not; one group and several."""
    layout = ALL[name]
    permutation = Permutation(layout.fields, layout.rows, layout.block_bytes, layout.head)
    for groups, blocks in ((1, 1), (3, 1), (1, 16), (2, 17), (5, 3)):
        data = random_rows(layout, rng, groups, blocks)
        there, back = np.empty_like(data), np.empty_like(data)
        permutation.forward(data, there)
        np.testing.assert_array_equal(
            there, move_bits(data, layout.rows, layout.block_bytes, layout.head, layout.fields)
        )
        permutation.backward(there, back)
        np.testing.assert_array_equal(back, data)


@pytest.mark.parametrize(
    "fields",
    [
        (Field(8, packed(8, 4), Slots(0, 0)), Field(8, packed(8, 3, 4), Slots(0, 16))),  # a byte left out
        (Field(8, packed(8, 4), Slots(0, 0)), Field(8, packed(8, 4, 4), Slots(0, 12))),  # two in one place
        (Field(8, packed(8, 4), Slots(0, 0)), Field(8, packed(8, 4, 3), Slots(0, 16))),  # one twice
    ],
)
def test_a_description_that_loses_bits_is_refused(fields):
    with pytest.raises(TypeError, match="exactly once"):
        Permutation(fields, 4, 8)


def test_lines_must_hold_every_column():
    with pytest.raises(KeyError):
        Lines(((0, 8),), 0).addresses(4, 4, 32)


# ----------------------------------------------------------------------------------------------------- the reference


@by_type
@pytest.mark.parametrize("weighted", [False, True], ids=["none", "importance"])
def test_quantizing_gives_the_references_layout(t, weighted, rng):
    """The reference's direct encoding is its base encoding interleaved as here (these types have no guard)."""
    from tests.conformance import ggml

    n = 1024
    x = rng.standard_normal((4 * t.interleave, n)).astype(np.float32)
    weights = rng.chisquare(1, n).astype(np.float32) if weighted else None
    base = ggml.quantize(t.base, x, weights)
    np.testing.assert_array_equal(t.interleave_rows(base), ggml.quantize(t.name, x, weights))


@by_type
def test_decoding_the_references_groups(t, rng):
    from tests.conformance import ggml

    data = random_rows(ALL[t.name], rng, 3, 1024 // t.block_size)
    ours, theirs = t.dequantize(data, 1024), ggml.dequantize(t.name, data, 1024)
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all()


# ------------------------------------------------------------------------------------------------------------- arrays


@by_type
def test_repack_and_unpack_arrays(t, rng):
    n = 512
    base = types.get(t.base)
    data = rng.integers(0, 256, (3, 2 * t.interleave, base.row_bytes(n)), dtype=np.uint8)
    packed_data, name = repack.repack(data, t.base.upper(), n)
    assert (name, packed_data.shape) == (t.name.upper(), data.shape)
    for expert in range(3):  # each matrix of a stack by itself
        np.testing.assert_array_equal(packed_data[expert], repack.repack(data[expert], t.base, n)[0])
    back, name = repack.unpack(packed_data, name, n)
    assert name == t.base.upper()
    np.testing.assert_array_equal(back, data)
    np.testing.assert_array_equal(t.interleave_rows(data[0], threads=2), t.interleave_rows(data[0], threads=1))


@by_type
def test_values_and_encodings_are_those_of_the_base(t, rng):
    n = 512
    base = types.get(t.base)
    x = rng.standard_normal((4 * t.interleave, n)).astype(np.float32)
    weights = rng.chisquare(1, n).astype(np.float32)
    data = t.quantize(x, weights)
    np.testing.assert_array_equal(data, t.interleave_rows(base.quantize(x, weights)))
    np.testing.assert_array_equal(t.dequantize(data, n), base.dequantize(t.deinterleave_rows(data), n))


def test_what_cannot_be_repacked_is_named():
    data = np.zeros((6, 144), np.uint8)
    with pytest.raises(DataError, match="6 rows are not a multiple of the 4"):
        repack.repack(data, "IQ4_K", 256)
    with pytest.raises(DataError, match=r"expected uint8\[…, rows, 288\] for n=512"):
        repack.repack(data, "IQ4_K", 512)
    with pytest.raises(UnsupportedError, match="f32 has no row-interleaved form"):
        repack.repack(data, "F32", 36)
    with pytest.raises(UnsupportedError, match="iq4_k is not row-interleaved"):
        repack.unpack(data, "IQ4_K", 256)
    with pytest.raises(DataError, match="multiple of 144 bytes"):
        types.get("iq4_k_r4").interleave_rows(np.zeros((4, 100), np.uint8))
    # Three matrices of two rows are six rows, but no matrix has a whole group.
    with pytest.raises(DataError, match="2 rows are not a multiple of the 4"):
        repack.repack(data.reshape(3, 2, 144), "IQ4_K", 256)
