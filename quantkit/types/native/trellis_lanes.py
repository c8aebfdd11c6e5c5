"""Points of the trellis types measured in SIMD lanes: the innermost loops of `types/native/trellis_search.py`.

Points are 16 side by side, their coordinates in pairs, int8[count, pairs, 16, 2]; weights are 16-bit integers, so sums
are exact and the same on every CPU.
"""

from __future__ import annotations

from quantkit.codegen.simd import F32, I8, I16, I32, I64, Emit, Value, emitted, vector

_F = vector(16, F32)
_ROW = 64  # bytes of 16 float32
_LOWEST = float("-inf")


def _lanes(e):
    """How many points are measured at once."""
    return 16 if e.isa.startswith("avx512") else 8


def _pairs_of(e, address, pairs):
    """Neighbouring int16 at an address, each pair in every lane."""
    wide = vector(2 * _lanes(e), I16)
    return [e.splat(e.load(I32, address + 4 * p), _lanes(e)).view(wide) for p in range(pairs)]


def _bytes(e, address):
    return e.load(vector(2 * _lanes(e), I8), address).signed(I16)


def _sums(e, pairs, points, us, ts, a, b):
    """A and B of 16 points."""
    lanes = _lanes(e)
    for half in range(16 // lanes):
        sum_a = sum_b = e.zero(vector(lanes, I32))
        for p in range(pairs):
            v = _bytes(e, points + (32 * p + 2 * lanes * half))
            sum_a = sum_a + e.multiply_pairs(v * v, us[p])
            sum_b = sum_b + e.multiply_pairs(v, ts[p])
        e.store(sum_a.real(), a + 4 * lanes * half)
        e.store(sum_b.real(), b + 4 * lanes * half)


@emitted("void")
def measure(e: Emit, pairs: int, points: Value, count: Value, u: Value, t: Value, a: Value, b: Value) -> None:
    """A and B, float32[16 * count], of 16 * count points under weights u and t, int16[2 * pairs].

    Points are int8[count, pairs, 16, 2].
    """
    us, ts = _pairs_of(e, u, pairs), _pairs_of(e, t, pairs)
    with e.loop(0, count) as i:
        _sums(e, pairs, points + i * (32 * pairs), us, ts, a + i * _ROW, b + i * _ROW)


@emitted("void")
def measure_leaves(e, points, leaves, count, u, t, a, b):
    """The same of `count` chunks of 16 points of 4 coordinates, whose numbers are int64[count, 2] at `leaves`."""
    us, ts = _pairs_of(e, u, 2), _pairs_of(e, t, 2)
    with e.loop(0, count) as i:
        _sums(e, 2, points + e.load(I64, leaves + i * 16) * _ROW, us, ts, a + i * _ROW, b + i * _ROW)


@emitted("void")
def measure_boxes(e, low, high, count, z, r, out):
    """Minus the weighted squared distances, float32[16 * count], of z from 16 * count boxes of 4 coordinates.

    z and r, the weights' roots, are int16[4]; low and high int8[count, 2, 16, 2].
    """
    lanes = _lanes(e)
    zs, rs = _pairs_of(e, z, 2), _pairs_of(e, r, 2)

    def larger(a, b):
        return e.choose(e.less(b, a), a, b)

    with e.loop(0, count) as i:
        for half in range(16 // lanes):
            total = e.zero(vector(lanes, I32))
            for p in range(2):
                at = i * _ROW + (32 * p + 2 * lanes * half)
                gap = larger(_bytes(e, low + at) - zs[p], zs[p] - _bytes(e, high + at))
                gap = larger(gap, e.zero(gap.type)) * rs[p]
                total = total - e.multiply_pairs(gap, gap)
            e.store(total.real(), out + (i * _ROW + 4 * lanes * half))


def _ranked(e, m, rank):
    """The rank-th largest of 16 lanes."""
    larger = e.zero(vector(16, I32))
    for k in range(16):
        here = Value(e, e.builder.fcmp_ordered(">", e.splat(m.lane(k), 16).ir, m.ir))
        larger = larger + here.unsigned(I32)
    first = e.less(larger, e.splat(rank.narrow(I32), 16))
    return e._fold(e.choose(first, m, e.constant(_F, -_LOWEST)), e.min)


def _gain(e, a, b, i, twice, square):
    return e.load(_F, b + i * _ROW) * twice - e.load(_F, a + i * _ROW) * square


@emitted("float32")
def score(e: Emit, a: Value, b: Value, count: Value, twice: float, square: float, rank: Value, out: Value) -> Value:
    """Store twice B - square A of 16 * count points; return the `rank`-th largest of the lanes' largest.

    `count` is a multiple of 4.
    """
    twice, square = e.splat(twice, 16), e.splat(square, 16)  # type: ignore[arg-type,assignment]  # `float` tells `emitted` the kind; a Value comes
    most = [e.variable(e.constant(_F, _LOWEST)) for _ in range(4)]
    with e.loop(0, count, 4) as i:
        for k, so_far in enumerate(most):
            s = _gain(e, a, b, i + k, twice, square)
            e.store(s, out + (i + k) * _ROW)
            so_far.set(e.max(so_far.get(), s))
    return _ranked(e, e.max(e.max(most[0].get(), most[1].get()), e.max(most[2].get(), most[3].get())), rank)


@emitted("float32")
def ranked(e, scores, count, rank):
    """The `rank`-th largest of the lanes' largest of 16 * count scores."""
    most = e.variable(e.constant(_F, _LOWEST))
    with e.loop(0, count) as i:
        most.set(e.max(most.get(), e.load(_F, scores + i * _ROW)))
    return _ranked(e, most.get(), rank)


@emitted("void")
def add_largest(e, a, b, count, factors, gains):
    """Add to gains, float32[8], the largest twice B - square A of 16 * count points under each of 8 scales.

    `factors`, float32[2, 8], are twice and square of each.
    """
    twice, square = ([e.splat(e.load(F32, factors + 4 * (8 * row + k)), 16) for k in range(8)] for row in (0, 1))
    most = [e.variable(e.constant(_F, _LOWEST)) for _ in range(8)]
    with e.loop(0, count) as i:
        for k, so_far in enumerate(most):
            so_far.set(e.max(so_far.get(), _gain(e, a, b, i, twice[k], square[k])))
    for k, so_far in enumerate(most):
        e.store(e.load(F32, gains + 4 * k) + e.largest(so_far.get()), gains + 4 * k)


@emitted("int64")
def at_least(e: Emit, scores: Value, least: float) -> Value:
    """Bit i: whether scores[i] >= least, of 64."""
    bound, mask = e.splat(least, 16), e.integer(0)  # type: ignore[arg-type]
    for i in range(4):
        where = e.builder.fcmp_ordered(">=", e.load(_F, scores + i * _ROW).ir, bound.ir)
        mask = mask | Value(e, e.builder.bitcast(where, I16)).unsigned(I64) << 16 * i
    return mask


@emitted("int64")
def lowest(e, mask):
    """Number of the lowest bit that is set."""
    return e.call("llvm.cttz.i64", I64, mask, e.constant(type(I64)(1), 0))


@emitted("void")
def fill(e, scores, count):
    """Write 16 * count scores that nothing is below."""
    with e.loop(0, count) as i:
        e.store(e.constant(_F, _LOWEST), scores + i * _ROW)
