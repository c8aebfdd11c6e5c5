"""The innermost loops of the trellis search, as SIMD intrinsics: sums of points, scores, distances of boxes.

Points are stored 16 at a time with their coordinates in pairs, int8[count, pairs, 16, 2]. Weights are 16-bit integers,
so sums are exact and the same on every CPU.
"""

from __future__ import annotations

from quantkit.codegen.simd import F32, I8, I16, I32, I64, IrBuilder, Value, simd_intrinsic, vector

_F = vector(16, F32)
_ROW = 64  # bytes of 16 float32
_LOWEST = float("-inf")


def _lanes(ir):
    """Number of points that one vector holds."""
    return 16 if ir.isa.startswith("avx512") else 8


def _pairs_of(ir, address, pairs):
    """Pairs of neighbouring int16 at an address, each pair in all lanes."""
    wide = vector(2 * _lanes(ir), I16)
    return [ir.splat(ir.load(I32, address + 4 * p), _lanes(ir)).view(wide) for p in range(pairs)]


def _bytes(ir, address):
    return ir.load(vector(2 * _lanes(ir), I8), address).signed(I16)


def _sums(ir, pairs, points, us, ts, a, b):
    """A and B of 16 points."""
    lanes = _lanes(ir)
    for half in range(16 // lanes):
        sum_a = sum_b = ir.zero(vector(lanes, I32))
        for p in range(pairs):
            v = _bytes(ir, points + (32 * p + 2 * lanes * half))
            sum_a = sum_a + ir.multiply_pairs(v * v, us[p])
            sum_b = sum_b + ir.multiply_pairs(v, ts[p])
        ir.store(sum_a.real(), a + 4 * lanes * half)
        ir.store(sum_b.real(), b + 4 * lanes * half)


@simd_intrinsic("void")
def point_sums(ir: IrBuilder, pairs: int, points: Value, count: Value, u: Value, t: Value, a: Value, b: Value) -> None:
    """A and B, float32[16 * count], of 16 * count points under weights u and t, int16[2 * pairs].

    Points are int8[count, pairs, 16, 2].
    """
    us, ts = _pairs_of(ir, u, pairs), _pairs_of(ir, t, pairs)
    with ir.loop(0, count) as i:
        _sums(ir, pairs, points + i * (32 * pairs), us, ts, a + i * _ROW, b + i * _ROW)


@simd_intrinsic("void")
def leaf_sums(ir, points, leaves, count, u, t, a, b):
    """The same of `count` chunks of 16 points of 4 coordinates, whose numbers are int64[count, 2] at `leaves`."""
    us, ts = _pairs_of(ir, u, 2), _pairs_of(ir, t, 2)
    with ir.loop(0, count) as i:
        _sums(ir, 2, points + ir.load(I64, leaves + i * 16) * _ROW, us, ts, a + i * _ROW, b + i * _ROW)


@simd_intrinsic("void")
def box_distances(ir, low, high, count, z, r, out):
    """Minus the weighted squared distances, float32[16 * count], of z from 16 * count boxes of 4 coordinates.

    z and r, the weights' roots, are int16[4]; low and high int8[count, 2, 16, 2].
    """
    lanes = _lanes(ir)
    zs, rs = _pairs_of(ir, z, 2), _pairs_of(ir, r, 2)

    def larger(a, b):
        return ir.choose(ir.less(b, a), a, b)

    with ir.loop(0, count) as i:
        for half in range(16 // lanes):
            total = ir.zero(vector(lanes, I32))
            for p in range(2):
                offset = i * _ROW + (32 * p + 2 * lanes * half)
                gap = larger(_bytes(ir, low + offset) - zs[p], zs[p] - _bytes(ir, high + offset))
                gap = larger(gap, ir.zero(gap.type)) * rs[p]
                total = total - ir.multiply_pairs(gap, gap)
            ir.store(total.real(), out + (i * _ROW + 4 * lanes * half))


def _ranked(ir, m, rank):
    """The rank-th largest of 16 lanes."""
    larger = ir.zero(vector(16, I32))
    for k in range(16):
        is_larger = Value(ir, ir.builder.fcmp_ordered(">", ir.splat(m.lane(k), 16).ir, m.ir))
        larger = larger + is_larger.unsigned(I32)
    first = ir.less(larger, ir.splat(rank.narrow(I32), 16))
    return ir._fold(ir.choose(first, m, ir.constant(_F, -_LOWEST)), ir.min)


def _gain(ir, a, b, i, doubled, square):
    return ir.load(_F, b + i * _ROW) * doubled - ir.load(_F, a + i * _ROW) * square


@simd_intrinsic("float32")
def score(
    ir: IrBuilder, a: Value, b: Value, count: Value, doubled: float, square: float, rank: Value, out: Value
) -> Value:
    """Store twice B - square A of 16 * count points; return the `rank`-th largest of the lanes' largest.

    `count` is a multiple of 4.
    """
    doubled, square = ir.splat(doubled, 16), ir.splat(square, 16)  # type: ignore[arg-type,assignment]  # the annotation `float` makes it a float32 value
    maxima = [ir.variable(ir.constant(_F, _LOWEST)) for _ in range(4)]
    with ir.loop(0, count, 4) as i:
        for k, so_far in enumerate(maxima):
            s = _gain(ir, a, b, i + k, doubled, square)
            ir.store(s, out + (i + k) * _ROW)
            so_far.set(ir.max(so_far.get(), s))
    return _ranked(ir, ir.max(ir.max(maxima[0].get(), maxima[1].get()), ir.max(maxima[2].get(), maxima[3].get())), rank)


@simd_intrinsic("float32")
def ranked(ir, scores, count, rank):
    """The `rank`-th largest of the lanes' largest of 16 * count scores."""
    maxima = ir.variable(ir.constant(_F, _LOWEST))
    with ir.loop(0, count) as i:
        maxima.set(ir.max(maxima.get(), ir.load(_F, scores + i * _ROW)))
    return _ranked(ir, maxima.get(), rank)


@simd_intrinsic("void")
def add_largest(ir, a, b, count, factors, gains):
    """Add to gains, float32[8], the largest twice B - square A of 16 * count points under each of 8 scales.

    `factors`, float32[2, 8], are twice and square of each.
    """
    doubled, square = ([ir.splat(ir.load(F32, factors + 4 * (8 * row + k)), 16) for k in range(8)] for row in (0, 1))
    maxima = [ir.variable(ir.constant(_F, _LOWEST)) for _ in range(8)]
    with ir.loop(0, count) as i:
        for k, so_far in enumerate(maxima):
            so_far.set(ir.max(so_far.get(), _gain(ir, a, b, i, doubled[k], square[k])))
    for k, so_far in enumerate(maxima):
        ir.store(ir.load(F32, gains + 4 * k) + ir.largest(so_far.get()), gains + 4 * k)


@simd_intrinsic("int64")
def at_least(ir: IrBuilder, scores: Value, threshold: float) -> Value:
    """Bit i: whether scores[i] >= least, of 64."""
    bound, mask = ir.splat(threshold, 16), ir.integer(0)  # type: ignore[arg-type]
    for i in range(4):
        reached = ir.builder.fcmp_ordered(">=", ir.load(_F, scores + i * _ROW).ir, bound.ir)
        mask = mask | Value(ir, ir.builder.bitcast(reached, I16)).unsigned(I64) << 16 * i
    return mask


@simd_intrinsic("int64")
def lowest(ir, mask):
    """Number of the lowest bit that is set."""
    return ir.call("llvm.cttz.i64", I64, mask, ir.constant(type(I64)(1), 0))


@simd_intrinsic("void")
def fill(ir, scores, count):
    """Write 16 * count scores of -Inf."""
    with ir.loop(0, count) as i:
        ir.store(ir.constant(_F, _LOWEST), scores + i * _ROW)
