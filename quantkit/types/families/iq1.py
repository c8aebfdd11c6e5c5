"""Search of IQ1_S, IQ1_M, IQ1_S_R4 and IQ1_M_R4: groups of 8 ternary values from a grid of 2048 points.

    y = (d * m) * (g + delta)           g = -1, 0, 1 from the grid; delta = -1/8 or 1/8

            sub-block   multiplier m    delta of        d of
IQ1_S       32          1, 3 .. 15      a sub-block     a block of 256
IQ1_S_R4    32          1, 3 .. 15      a sub-block     a row
IQ1_M       16          1, 3 .. 15      a group of 8    a block of 256
IQ1_M_R4    16          0 .. 15         a group of 8    a row

The sum g + delta is exact; both products are rounded to float32. Here a group's values are the digits less one of its
*ternary number*, element 0 the last digit; the grid's points are numbered in ascending order of these. `POINT_MAP`
says which of the 6561 numbers are points.

Encode: minimise sum w (x - y)^2 over a *span*, the elements that share d, divided by a power of two.

Given a scale s and a delta, the best ternary values of a group are the nearest ones, and |w s (s - 2 |x - s delta|)| is
what it costs to move an element to its second nearest. `_nearest` tries the nearest values, every move and every pair
of moves, and takes the cheapest that is a point of the grid: its error is within a few thousandths of that of the best
of all 2048 points. Groups under both deltas are the lanes of SIMD code. Scales around its root mean square give each
sub-block a few encodings; from their P and R (see `super_scale`) the best of a range of d is estimated. Then, in
rounds: multipliers next to the best and the codes under them, chosen exactly; the least-squares d. The grid is not
symmetric: effort "best" tries negative d too.
"""

from __future__ import annotations

import base64

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST
from quantkit.types.families.super_scale import ODD, best_super_scale, nearest_multiplier
from quantkit.types.families.superblock import load_block, relative_importance, storable

DELTA = np.float32(0.125)

Lanes = tuple[np.ndarray, ...]  # x, w, scale, cost, code, flip, step, p, r, negative, roots: see `new_space`
Space = tuple[Lanes, np.ndarray, np.ndarray, np.ndarray]  # and P, R and gains by sub-block

# A bit for each ternary number, the least significant of each byte first, in base 85.
POINT_MAP = (
    "RV5UKpaMcs2t_fdh9HWf8VD*N6opU}f*?diB^3pr0)ilj7yt-@paUwPh`Xu^kg5v+A^-}ijDnyDKv4)qA&7ub6hcu5iZBS6pa_5}2t^?jg&;^mRR"
    "~1^EW)55iY5RmB&e#Q2;#2@2q-83paMcDswg0+fFKH+2)VkbAj+<ZqOPhseCz7EyMhk5BD%`c4w3>Q03sl$in<Dd0tf&qO5mb9A|NZG0D(Y(s){H"
    "GA^{YIP!)n82}L1Pg`fxmBd9tcgn}ScLQx2!APALE6ap#;xTu1FphyBB2!f($q5>$ZDhP!j2!b#OML+;WAryt6076j!MFA;-0E&Vt2%#_(1yB@%C"
    "<sL%6onuH0wAg?03Z^vimoWAx}mD5Z~%e|2m&Y~0)zm907!tK>aZ%R!XS&fBI??wi;HfklCUbOa*K*Y3@RW<gg_{YDhR3|$jqW5qOY2u=%@k!0st"
    "zghyWmfpo^lSD7v74f-(xazPP&n>!P45q6mr#DC(jBp)vvt`lRaK?<=S-jlO>C`uBgo=6$-}Y5OPtzb5(;>EVhZ5URcogsKR#s0)Iw|GFgUgMb8L"
    "ENJqm3ZyFl0xAdy;;Iq=0)i?ErXb0JiI9RQ0HOelfD-_M2nYadimIx+0;ax-pvnS(YnLw2vgr_l5H70TC>7DA1ON(x0E&Vj2mzrWf~q;XA~J-a34"
    "j;?ilSlyffPhh07W6Jf>0DfQ3$FaD5{4F5-JEqAru9m2trW^MFAiJpg^J`0Ehqxq6lh=Zn&zdfB+y0g5t;`AqYfJ6hcu6iXat*P!xs=2&yV7fB*_"
    "YQ3ypLr~ptDLQx3fAc%qr7=kJYs-miju!{l;DykqTf`F<DC<rJ3sfYq1puP(zxCn~6OR}#2x}^B7svuG*Xttm*=70(UC<r2IVt^nD0;;Mjs_LStp"
    "rQx}5Fnt6A^?I807W4bg`f&RQ3ypLsRjT_ssae501ypC6oM!SMIjUg00@GDtnwfL0062AC<?kD>Y@Swf=CG{=@bAFOGQxtMFFS+P!vK@2#6#Ih$s"
    "p`2mnO^6a}CHKv4)q0R"
)

_IS_POINT = np.unpackbits(np.frombuffer(base64.b85decode(POINT_MAP), np.uint8), bitorder="little")[:6561].astype(bool)
POINTS = np.flatnonzero(_IS_POINT)  # the ternary numbers of the grid
NUMBER = (np.cumsum(_IS_POINT) - 1).astype(np.uint16)  # of the point that a ternary number is
_DIGITS = np.arange(6561)[:, None] // 3 ** np.arange(8) % 3
LEVELS = (_DIGITS[POINTS] - 1).astype(np.float32)  # float32[2048, 8]
_PACKED = np.zeros(8192, np.uint32)  # the digits of a number, two bits each
_PACKED[:6561] = (_DIGITS << 2 * np.arange(8)).sum(axis=1)
_PENALTY = np.full(8192, 1e30, np.float32)
_PENALTY[POINTS] = 0
_BITS = np.uint32(8191)  # mask of an index into these; with it LLVM knows that 32 bits hold the index
_POWERS = (3 ** np.arange(8)).astype(np.uint32)
_NEGATED_POWERS = np.uint32(0) - _POWERS  # steps down wrap around
_ZERO = np.uint32(3280)  # the ternary number of eight zeros, a point of the grid

CHUNK = 32  # groups searched at a time
LANES = 64  # each of them under both deltas: lanes 32 on have the negative one

# For effort fast, normal, best: scales of the profile, super-scales, multipliers tried in a round, rounds.
_PROFILE = np.array([3, 4, 8])
_SUPER = np.array([12, 20, 64])
_TRIES = np.array([1, 3, 5])
_ROUNDS = np.array([1, 1, 3])
_MIN_RATIO, _MAX_RATIO = np.float32(0.8), np.float32(1.7)  # the profile's scales, in root mean squares of a sub-block

_LANE_DELTA = np.repeat(np.array([DELTA, -DELTA]), CHUNK)  # delta of each lane
_LOWEST_LEVEL = _LANE_DELTA - np.float32(1)


@kernel
def _nearest(
    x: np.ndarray,
    w: np.ndarray,
    scale: np.ndarray,
    cost: np.ndarray,
    code: np.ndarray,
    flip: np.ndarray,
    step: np.ndarray,
) -> None:
    """The best points found for every lane: their ternary numbers in `code`.

    x, w float32[8, LANES]; scale float32[LANES]; scratch: cost float32[1, LANES], code uint32[2, LANES],
    flip float32[11, LANES], step uint32[11, LANES].
    """
    for lane in range(LANES):
        cost[0, lane], code[1, lane] = np.float32(0), _ZERO
    for i in range(8):
        up, down = _POWERS[i], _NEGATED_POWERS[i]
        for lane in range(LANES):
            s = scale[lane]
            residual = x[i, lane] - s * _LANE_DELTA[lane]
            change = w[i, lane] * s * (s - np.float32(2) * abs(residual))  # from 0 to the level on the side of x
            unit = up if residual >= np.float32(0) else down
            back = down if residual >= np.float32(0) else up
            moved_from_zero = change < np.float32(0)
            cost[0, lane] -= min(change, np.float32(0))
            code[1, lane] = np.uint32(code[1, lane] + (unit if moved_from_zero else np.uint32(0)))
            step[i, lane] = back if moved_from_zero else unit
            flip[i, lane] = abs(change)
    for lane in range(LANES):
        zero, number = cost[0, lane], code[1, lane]
        bare = _PENALTY[number & _BITS]
        cost[0, lane] = bare if bare < zero else zero
        code[0, lane] = number if bare < zero else _ZERO
    for i in range(3):
        for lane in range(LANES):
            flip[8 + i, lane], step[8 + i, lane] = flip[i, lane], step[i, lane]
    for i in range(8):
        for lane in range(LANES):
            best, choice = cost[0, lane], code[0, lane]
            moved = np.uint32(code[1, lane] + step[i, lane])
            price = flip[i, lane]
            total = price + _PENALTY[moved & _BITS]
            choice = moved if total < best else choice
            best = total if total < best else best
            for k in range(1, 4):  # pairs of neighbours in a ring; at a distance of four each would come twice
                number = np.uint32(moved + step[i + k, lane])
                total = price + flip[i + k, lane] + _PENALTY[number & _BITS]
                choice = number if total < best else choice
                best = total if total < best else best
            cost[0, lane], code[0, lane] = best, choice
    for lane in range(LANES):
        best, choice = cost[0, lane], code[0, lane]
        for i in range(4):
            number = np.uint32(code[1, lane] + step[i, lane] + step[i + 4, lane])
            total = flip[i, lane] + flip[i + 4, lane] + _PENALTY[number & _BITS]
            choice = number if total < best else choice
            best = total if total < best else best
        code[0, lane] = choice


@kernel
def _fit(x: np.ndarray, w: np.ndarray, code: np.ndarray, p: np.ndarray, r: np.ndarray) -> None:
    """P and R of each lane's codes."""
    for lane in range(LANES):
        packed = _PACKED[code[0, lane] & _BITS]
        sum_p = sum_r = np.float32(0)
        for i in range(8):
            digit = np.uint32((packed >> np.uint32(2 * i)) & np.uint32(3))
            level = np.float32(np.int32(digit)) + _LOWEST_LEVEL[lane]
            weighted = w[i, lane] * level
            sum_p += weighted * x[i, lane]
            sum_r += weighted * level
        p[lane], r[lane] = sum_p, sum_r


@kernel
def _load_lanes(xs: np.ndarray, w: np.ndarray, first: int, lanes_x: np.ndarray, lanes_w: np.ndarray) -> int:
    """Copy the groups from `first` on to [element, lane], zeros past the last one; returns their number."""
    count = min(CHUNK, len(xs) // 8 - first)
    for g in range(CHUNK):
        start = 8 * (first + min(g, count - 1))
        valid = np.float32(1 if g < count else 0)
        for i in range(8):
            lanes_x[i, g] = lanes_x[i, g + CHUNK] = xs[start + i] * valid
            lanes_w[i, g] = lanes_w[i, g + CHUNK] = w[start + i] * valid
    return count


@kernel
def _combine_groups(
    s: np.float32, g: int, per: int, p: np.ndarray, r: np.ndarray, negative: np.ndarray
) -> tuple[np.float32, np.float32]:
    """P and R of a sub-block of `per` groups from `g` on under scale s, with the better of both deltas.

    `negative` bool[CHUNK] says which groups take the negative one. A sub-block of four groups has one delta, else each
    group has its own.
    """
    best_p = best_r = np.float32(0)
    if per == 4:
        p0 = p[g] + p[g + 1] + p[g + 2] + p[g + 3]
        r0 = r[g] + r[g + 1] + r[g + 2] + r[g + 3]
        h = g + CHUNK
        p1 = p[h] + p[h + 1] + p[h + 2] + p[h + 3]
        r1 = r[h] + r[h + 1] + r[h + 2] + r[h + 3]
        minus = p1 + p1 - s * r1 > p0 + p0 - s * r0
        for k in range(g, g + 4):
            negative[k] = minus
        return (p1, r1) if minus else (p0, r0)
    for k in range(g, g + per):
        h = k + CHUNK
        minus = p[h] + p[h] - s * r[h] > p[k] + p[k] - s * r[k]
        negative[k] = minus
        best_p += p[h] if minus else p[k]
        best_r += r[h] if minus else r[k]
    return best_p, best_r


@kernel
def _root_mean_squares(x: np.ndarray, w: np.ndarray, per: int, groups: int, roots: np.ndarray) -> None:
    """The weighted root mean square of each sub-block, at all of its groups."""
    for g in range(0, groups, per):
        squares = weights = np.float32(0)
        for j in range(g, g + per):
            for i in range(8):
                squares += w[i, j] * (x[i, j] * x[i, j])
                weights += w[i, j]
        root = np.sqrt(squares / weights)
        for j in range(g, g + per):
            roots[j] = root


@kernel
def _profile(
    xs: np.ndarray, w: np.ndarray, per: int, count: int, subs_p: np.ndarray, subs_r: np.ndarray, space: Lanes
) -> None:
    """P and R, float32[scale, sub-block], of the best codes under `count` scales around each root mean square."""
    x, weight, scale, cost, code, flip, step, p, r, negative, roots = space
    for first in range(0, len(xs) // 8, CHUNK):
        groups = _load_lanes(xs, w, first, x, weight)
        _root_mean_squares(x, weight, per, groups, roots)
        for k in range(count):
            factor = _MIN_RATIO + (_MAX_RATIO - _MIN_RATIO) * np.float32(k) / np.float32(count - 1)
            for g in range(groups):
                scale[g] = scale[g + CHUNK] = factor * roots[g]
            _nearest(x, weight, scale, cost, code, flip, step)
            _fit(x, weight, code, p, r)
            for g in range(0, groups, per):
                sub = (first + g) // per
                subs_p[k, sub], subs_r[k, sub] = _combine_groups(scale[g], g, per, p, r, negative)


@kernel
def _choose(
    xs: np.ndarray,
    w: np.ndarray,
    per: int,
    rule: int,
    tries: int,
    d: np.float32,
    initial: np.ndarray,
    codes: np.ndarray,
    negatives: np.ndarray,
    multipliers: np.ndarray,
    space: Lanes,
) -> tuple[np.float32, np.float32]:
    """Choose multipliers near `initial`, deltas and points by their exact error under d.

    Fills `multipliers`, `negatives` and `codes`; returns sum m P and sum m^2 R.
    """
    x, weight, scale, cost, code, flip, step, p, r, negative, _ = space
    sum_p = sum_r = np.float32(0)
    gap = np.float32(2) if rule == ODD else np.float32(1)
    best = np.empty((3, CHUNK), np.float32)
    for first in range(0, len(xs) // 8, CHUNK):
        groups = len(xs) // 8
        if groups > CHUNK:  # else `_profile` has loaded all there is
            groups = _load_lanes(xs, w, first, x, weight)
        for k in range(tries):
            offset = gap * np.float32((k + 1) // 2 * (1 - k % 2 * 2))
            for g in range(groups):
                m = nearest_multiplier(initial[(first + g) // per] + offset, rule)
                scale[g] = scale[g + CHUNK] = d * m
            _nearest(x, weight, scale, cost, code, flip, step)
            _fit(x, weight, code, p, r)
            for g in range(0, groups, per):
                sub_p, sub_r = _combine_groups(scale[g], g, per, p, r, negative)
                gain = scale[g] * (sub_p + sub_p - scale[g] * sub_r)
                if k == 0 or gain > best[0, g]:
                    best[0, g], best[1, g], best[2, g] = gain, sub_p, sub_r
                    multipliers[(first + g) // per] = nearest_multiplier(initial[(first + g) // per] + offset, rule)
                    for j in range(g, g + per):
                        negatives[first + j] = negative[j]
                        codes[first + j] = code[0, j + CHUNK if negative[j] else j]
        for g in range(0, groups, per):
            m = multipliers[(first + g) // per]
            sum_p += m * best[1, g]
            sum_r += m * m * best[2, g]
    return sum_p, sum_r


@kernel
def _copy_best(codes: np.ndarray, negatives: np.ndarray, multipliers: np.ndarray) -> None:
    """Copy row 1 of each to row 0."""
    for g in range(codes.shape[1]):
        codes[0, g], negatives[0, g] = codes[1, g], negatives[1, g]
    for s in range(multipliers.shape[1]):
        multipliers[0, s] = multipliers[1, s]


@kernel
def search_span(
    xs: np.ndarray,
    w: np.ndarray,
    unit: np.float32,
    per: int,
    rule: int,
    effort: int,
    codes: np.ndarray,
    negatives: np.ndarray,
    multipliers: np.ndarray,
    space: Space,
) -> np.float32:
    """Choose everything for a span; returns d.

    xs, w float32[n]: the elements in units of `unit` and their weights; `per` groups share a multiplier, and the delta
    too if they are four; `rule` says which multipliers there are. Outputs, in row 0: codes uint32[2, n / 8] ternary
    numbers, negatives bool[2, n / 8] deltas, multipliers float32[3, n / (8 per)]. `space` is `new_space(n, per)`.
    """
    lanes, p, r, gains = space
    count, tries = _PROFILE[effort], _TRIES[effort]
    initial = multipliers[2]
    best_gain, best_d = np.float32(-1), np.float32(0)
    for side in range(2 if effort == BEST else 1):
        if side == 1:
            for i in range(len(xs)):
                xs[i] = -xs[i]
        _profile(xs, w, per, count, p, r, lanes)
        d = best_super_scale(unit, rule, _SUPER[effort], p[:count], r[:count], gains, initial)
        for _ in range(_ROUNDS[effort]):
            sum_p, sum_r = _choose(xs, w, per, rule, tries, d, initial, codes[1], negatives[1], multipliers[1], lanes)
            refitted = storable(sum_p / sum_r, unit) if sum_p > np.float32(0) else d
            gain = refitted * (sum_p + sum_p - refitted * sum_r)
            if gain > best_gain:
                best_gain, best_d = gain, -refitted if side == 1 else refitted
                _copy_best(codes, negatives, multipliers)
            if refitted == d:
                break
            d = refitted
            for s in range(len(initial)):
                initial[s] = multipliers[1, s]
    return storable(best_d, unit)


@kernel
def new_space(n: int, per: int) -> Space:
    """Allocate the work space of `search_span` for spans of n elements."""
    groups = n // 8
    lanes = (
        np.zeros((8, LANES), np.float32),
        np.zeros((8, LANES), np.float32),
        np.zeros(LANES, np.float32),
        np.empty((1, LANES), np.float32),
        np.empty((2, LANES), np.uint32),
        np.empty((11, LANES), np.float32),
        np.empty((11, LANES), np.uint32),
        np.empty(LANES, np.float32),
        np.empty(LANES, np.float32),
        np.empty(CHUNK, np.bool_),
        np.empty(CHUNK, np.float32),
    )
    p, r = np.empty((8, groups // per), np.float32), np.empty((8, groups // per), np.float32)
    return lanes, p, r, np.empty(groups // per, np.float32)


@kernel
def set_weights(xs: np.ndarray, mean: np.float32, importance: np.ndarray, first: int, w: np.ndarray) -> None:
    """Fill w with the weights of a span: its importance or, without one, sqrt(2 v + x^2), v being the mean of x^2.

    So larger elements count somewhat more, nearly as in ik_llama.cpp.
    """
    if not relative_importance(importance, first, w):
        for i in range(len(xs)):
            w[i] = np.sqrt(np.float32(2) * mean + xs[i] * xs[i])


@kernel
def search_row(
    x: np.ndarray,
    importance: np.ndarray,
    xs: np.ndarray,
    w: np.ndarray,
    per: int,
    rule: int,
    effort: int,
    codes: np.ndarray,
    negatives: np.ndarray,
    multipliers: np.ndarray,
    space: Space,
) -> np.float32:
    """`search_span` of a whole row, which is loaded into xs and w; d in units of x, 0 where none can be stored."""
    unit, mean = load_block(x, xs, np.float32(2.0**-25))
    if unit == np.float32(0):
        codes[0], negatives[0], multipliers[0] = _ZERO, False, np.float32(1 if rule == ODD else 0)
        return np.float32(0)
    set_weights(xs, mean, importance, 0, w)
    return search_span(xs, w, unit, per, rule, effort, codes, negatives, multipliers, space) * unit
