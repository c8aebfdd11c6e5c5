"""Rows of a KV cache: store floats, load floats, and rotate them before and after.

A row is one head's key or value. `store_row` writes the bytes that `kv_rounding.encode` gives; `row_floats` reads the
cache types through the format descriptions of the weights. Types are ggml type ids, constants at compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from quantkit.codegen.simd import F32, I8, I16, I32, IrBuilder, Value, simd_intrinsic, vector
from quantkit.placement.kernel_sizes import whole_vectors
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kernels.cpu.dequantize import FLOAT_TYPES, load_floats
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.operation import record_bytes
from quantkit.types import layout

NAMES = {layout(name).ggml_type: name for name in kv_rounding.FLOATS + kv_rounding.QUANTIZED}
_FLOATS16, _FLOATS32 = vector(16, F32), vector(32, F32)


class LayerCache(NamedTuple):
    """Where one layer's rows of one KV cache are."""

    k: int  # [kv_heads, n_ctx] rows
    v: int
    n_ctx: int  # rows per head


CACHE_BYTES = record_bytes(LayerCache)


class LayerView(NamedTuple):
    """What attention of one layer reads besides its inputs; set when a plan runs with other caches."""

    cos: int  # float32[positions, rope_dim / 2]
    sin: int
    caches: int  # LayerCache of each sequence
    window: int  # positions that a token sees, its own included
    query_factors: int = 0  # float32[positions]: queries are multiplied by their position's, or 0
    chunk: int = 0  # a token sees its own chunk of so many positions; 0: the window


class KernelHeads(NamedTuple):
    """The shape that attention kernels are compiled for: `group` query heads share a key/value head.

    Dimensions are at least 16; multiples of 32 for quantized cache types. Vectors of 16 floats hold them, the last one
    padded with zeros.
    """

    group: int
    dim_k: int
    dim_v: int
    k_type: int  # ggml type ids
    v_type: int
    rotate_k: int  # elements rotated together; 0: not rotated
    rotate_v: int

    @property
    def padded_k(self) -> int:
        """Elements of a key in whole vectors."""
        return whole_vectors(self.dim_k)

    @property
    def padded_v(self) -> int:
        """Elements of a value in whole vectors."""
        return whole_vectors(self.dim_v)

    @property
    def k_bytes(self) -> int:
        """Bytes of a row of keys."""
        return layout(NAMES[self.k_type]).row_bytes(self.dim_k)

    @property
    def v_bytes(self) -> int:
        """Bytes of a row of values."""
        return layout(NAMES[self.v_type]).row_bytes(self.dim_v)


# ----------------------------------------------------------------------------------------------------------- loading


def row_floats(ir: IrBuilder, ggml_type: int, row: Value, first: int, stop: int) -> Iterator[tuple[int, Value]]:
    """Yield (column, 16 floats from there on) of columns first .. stop - 1.

    `first` is a multiple of 16, or of 32 if quantized; so is `stop`, unless it is the end of a row of floats, of at
    least 16: then zeros follow in the last vector.
    """
    if ggml_type in FLOAT_TYPES:
        width, rest = layout(NAMES[ggml_type]).row_bytes(1), stop % 16
        for c in range(first, stop - rest, 16):
            yield c, load_floats(ir, ggml_type, row + c * width)
        if rest:  # the last 16 floats, moved down: reading beyond the row could leave the cache
            last = load_floats(ir, ggml_type, row + (stop - 16) * width)
            yield (
                stop - rest,
                ir.shuffle(last, ir.zero(_FLOATS16), [16 - rest + i if i < rest else 16 for i in range(16)]),
            )
        return
    f = FORMATS[ggml_type]
    for c in range(first, stop, 32):
        (sub_block,) = f.sub_blocks(ir, row, ir.integer(c // 32))
        lanes = [j // 4 for j in range(32)]
        codes = (sub_block.codes - f.offset).signed(I32)  # subtracted as bytes: in all cache types the difference fits
        values = codes.real() * ir.shuffle(sub_block.scale, None, lanes)
        if sub_block.minimum:
            values = values + ir.shuffle(sub_block.minimum, None, lanes)
        yield c, ir.part(values, 0, 16)
        yield c + 16, ir.part(values, 16, 16)


# ----------------------------------------------------------------------------------------------------------- storing


def _inverse(ir: IrBuilder, d: Value) -> Value:
    """1 / d, or 0 for scales too small to divide by."""
    is_zero = ir.builder.fcmp_ordered("<", ir.absolute(d).ir, ir.constant(F32, float(kv_rounding.MIN_SCALE)).ir)
    return Value(ir, ir.builder.select(is_zero, ir.zero(F32).ir, (ir.constant(F32, 1.0) / d).ir))


def _bounds(ir: IrBuilder, x: Value) -> tuple[Value, Value]:
    """Smallest and largest of the lanes; NaN if any lane is not finite."""
    not_finite = ir.sum(x - x)  # 0, or NaN
    return ir.largest(x * -1.0) * -1.0 + not_finite, ir.largest(x) + not_finite


def _extreme(ir: IrBuilder, x: Value) -> Value:
    """The lane of the largest magnitude, with its sign."""
    low, high = _bounds(ir, x)
    is_high = ir.builder.fcmp_unordered(">=", high.ir, (low * -1.0).ir)
    return Value(ir, ir.builder.select(is_high, high.ir, low.ir))


def _codes(ir: IrBuilder, x: Value, inverse: Value, offset: int, largest: int) -> Value:
    """min(round(x * inverse) + offset, largest), as bytes."""
    y = ir.nearest(x * ir.splat(inverse, 32)) + offset
    over = ir.builder.icmp_signed(">", y.ir, ir.constant(y.type, largest).ir)
    return ir.choose(Value(ir, over), ir.constant(y.type, largest), y).narrow(I8)


def _store_half(ir: IrBuilder, x: Value, address: Value) -> None:
    ir.store(ir.float_to_half(ir.splat(x, 8)).lane(0), address)


def _pack_nibbles(ir: IrBuilder, codes: Value, address: Value) -> None:
    low = codes & 15
    ir.store(ir.part(low, 0, 16) | (ir.part(low, 16, 16) << 4), address)


def _pack_five_bits(ir: IrBuilder, codes: Value, address: Value) -> None:
    ir.store(ir.integer_of(codes, 16), address)
    _pack_nibbles(ir, codes, address + 4)


def _pack_six_bits(ir: IrBuilder, codes: Value, address: Value) -> None:
    high = codes >> 4
    a, b, c, d = (ir.part(high, first, 8) for first in (0, 16, 8, 24))
    ir.store(a | (b << 2) | (c << 4) | (d << 6), address)
    _pack_nibbles(ir, codes, address + 8)


def _store_q8_0(ir: IrBuilder, x: Value, block: Value) -> None:
    d = ir.absolute(_extreme(ir, x)) * (1 / 127)
    _store_half(ir, d, block)
    ir.store(_codes(ir, x, _inverse(ir, d), 0, 127), block + 2)


def _store_symmetric(ir: IrBuilder, x: Value, block: Value, bits: int, pack: Callable) -> None:
    offset = 1 << bits - 1
    d = _extreme(ir, x) * (-1 / offset)
    _store_half(ir, d, block)
    pack(ir, _codes(ir, x, _inverse(ir, d), offset, 2 * offset - 1), block + 2)


def _store_affine(ir: IrBuilder, x: Value, block: Value, bits: int, pack: Callable) -> None:
    levels = (1 << bits) - 1
    low, high = _bounds(ir, x)
    d = (high - low) * (1 / levels)
    _store_half(ir, d, block)
    _store_half(ir, low, block + 2)
    pack(ir, _codes(ir, x - ir.splat(low, 32), _inverse(ir, d), 0, levels), block + 4)


def _store_nonlinear(ir: IrBuilder, x: Value, block: Value) -> None:
    y = x * ir.splat(_inverse(ir, _extreme(ir, x) * (-1 / 127)), 32)
    code, entry = ir.zero(vector(32, I32)), ir.constant(y.type, float(kv_rounding.CODEBOOK[0]))
    for midpoint, value in zip(kv_rounding.MIDPOINTS, kv_rounding.CODEBOOK[1:]):
        above = Value(ir, ir.builder.fcmp_ordered(">", y.ir, ir.constant(y.type, float(midpoint)).ir))
        code = code + above.unsigned(I32)
        entry = ir.choose(above, ir.constant(y.type, float(value)), entry)
    weighted = x * x * entry
    size = ir.sum(weighted * entry)
    is_zero = ir.builder.fcmp_ordered("==", size.ir, ir.zero(F32).ir)
    d = Value(ir, ir.builder.select(is_zero, ir.zero(F32).ir, (ir.sum(weighted * x) / size).ir))
    _store_half(ir, d, block)
    _pack_nibbles(ir, code.narrow(I8), block + 2)


_STORE_BLOCK: dict[str, Callable[[IrBuilder, Value, Value], None]] = {
    "q8_0": _store_q8_0,
    "q6_0": lambda ir, x, block: _store_symmetric(ir, x, block, 6, _pack_six_bits),
    "q5_0": lambda ir, x, block: _store_symmetric(ir, x, block, 5, _pack_five_bits),
    "q5_1": lambda ir, x, block: _store_affine(ir, x, block, 5, _pack_five_bits),
    "q4_0": lambda ir, x, block: _store_symmetric(ir, x, block, 4, _pack_nibbles),
    "q4_1": lambda ir, x, block: _store_affine(ir, x, block, 4, _pack_nibbles),
    "iq4_nl": _store_nonlinear,
}


def _store_q8_kv(ir: IrBuilder, x: Value, dim: int, row: Value) -> None:
    """Encode a row as Q8_KV: one scale and the sum of the codes, then the codes."""
    vectors = [ir.load(_FLOATS32, x + 4 * c) for c in range(0, dim, 32)]
    largest = ir.absolute(_extreme(ir, vectors[0]))
    for v in vectors[1:]:  # NaN stays: `max` keeps its first operand, and what is first may be either
        magnitude = ir.absolute(_extreme(ir, v))
        largest = ir.max(largest, magnitude) + (magnitude - magnitude)
    d = largest * (1 / 127)
    inverse = _inverse(ir, d)
    total = ir.zero(vector(8, I32))
    for i, v in enumerate(vectors):
        codes = _codes(ir, v, inverse, 0, 127)
        total = ir.dot4(total, ir.constant(codes.type, 1), codes, 1)
        ir.store(codes, row + 8 + 32 * i)
    ir.store(d, row)
    ir.store(ir.sum(total), row + 4)


def _to_bfloat(ir: IrBuilder, x: Value) -> Value:
    bits = x.view(vector(x.lanes, I32))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = ir.builder.fcmp_unordered("uno", x.ir, x.ir)
    return ir.choose(Value(ir, is_nan), ir.constant(bits.type, 0x7FC0), rounded).narrow(I16)


@simd_intrinsic("void")
def store_row(ir: IrBuilder, ggml_type: int, x: Value, dim: int, row: Value) -> None:
    """Encode `dim` floats to a row of the cache; dim is at least 16, and a multiple of 32 for quantized types."""
    name = NAMES[ggml_type]
    if name in kv_rounding.FLOATS:
        rounded = {"f32": lambda v: v, "f16": ir.float_to_half, "bf16": lambda v: _to_bfloat(ir, v)}[name]
        for c in sorted({*range(0, dim - 15, 16), dim - 16}):  # the last 16 overlap others if dim is no multiple of 16
            ir.store(rounded(ir.load(_FLOATS16, x + 4 * c)), row + c * (4 if name == "f32" else 2))
    elif name == "q8_KV":
        _store_q8_kv(ir, x, dim, row)
    else:
        nbytes = FORMATS[ggml_type].nbytes
        for c in range(0, dim, 32):
            _STORE_BLOCK[name](ir, ir.load(_FLOATS32, x + 4 * c), row + c // 32 * nbytes)


# ---------------------------------------------------------------------------------------------------------- rotating


@simd_intrinsic("void")
def rotate(ir: IrBuilder, x: Value, dim: Value, block: int) -> None:
    """Multiply every `block` (16, 32, … 512; 0: none) of `dim` floats by `kv_rounding.rotation(block)`, in place."""
    if not block:
        return
    with ir.loop(0, dim, block) as first:
        v = [ir.load(_FLOATS16, x + (first + c) * 4) for c in range(0, block, 16)]
        for w in (1, 2, 4, 8):
            signs = ir.constant(_FLOATS16, [-1.0 if lane & w else 1.0 for lane in range(16)])
            v = [ir.fma(a, signs, ir.shuffle(a, None, [lane ^ w for lane in range(16)])) for a in v]
        step = 1
        while step < len(v):
            for i in (i for i in range(len(v)) if not i & step):
                v[i], v[i + step] = v[i] + v[i + step], v[i] - v[i + step]
            step *= 2
        for i, a in enumerate(v):
            ir.store(a * block**-0.5, x + (first + 16 * i) * 4)
