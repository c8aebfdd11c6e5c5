"""Weights times a batch of vectors, in integers: y[token, row] for T tokens by P * 16 rows at a time.

Weights are read as formats.py describes them and laid out, P panels of 16 rows at a time, in the thread's own scratch;
so each type has its unpacking, and all share the product. A panel holds for each unit of 32 columns one record:

    0       8 x 16 x 4 u8     codes: four columns of each of 16 rows, then the next four
    512     16 x f32          scale of each row; for formats with two scales a unit, of its first half, then of its
                              second; for formats with a floor, then the floor, or both

Activations are quantized once, in tiles of T tokens; per tile and unit one record:

    0       2 x T x 32 i8     high bytes, then low ones, of a; x = scale * a, wide as in activations.py
         or T x 32 i16        a, of each four columns the first, third, second and fourth: without VNNI
    64 T    T x f32           scale
    68 T    2 x T x i32       minus the sum of a of each half
    76 T    3 x T x f32       scale * sum, of all and of each half

A tile's last tokens may be missing: their records are zero and their results are not stored. The inner loop takes
four columns of 16 rows from a panel, four of one token from a tile, and has 64 products summed by one instruction
(VNNI): for the high bytes of a unit, then, added to what they gave, shifted, for the low ones. Other CPUs take two of
the four columns at a time as 16-bit integers and have pmaddwd sum pairs of products, twice as many as float32 has in a
vector. The integers are the same, and the plain formula is that of matvec.py.
"""

from __future__ import annotations

import functools

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, I8, I16, I32, IrBuilder, Value, load_int, simd_intrinsic, vector
from quantkit.placement.kernel_sizes import LANES, PANELS, RECORD, TILE_TOKENS, panels_bytes
from quantkit.runtime.kernels.cpu.activations import wide_block, wide_sums
from quantkit.runtime.kernels.cpu.decode_ops import SIGNATURE, split
from quantkit.runtime.kernels.cpu.float_gemm import add_bias, copy_tile
from quantkit.runtime.kernels.cpu.formats.base import Format, LaneUnit
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS

_CODES = 512  # bytes of a record's codes
_LOW, _SCALES, _SUMS, _FLOORS = 32, 64, 68, 76  # where its parts begin, times T

_INTS32, _INTS16, _FLOATS16, _BYTES64 = vector(16, I32), vector(32, I16), vector(16, F32), vector(64, I8)


def record_bytes(f: Format) -> int:
    return _CODES + 4 * LANES * _halves(f) * (1 + f.floor)


def _halves(f: Format) -> int:
    """Scales, and floors, that a row has in a unit."""
    return 32 // f.group


def scratch_bytes(f: Format, n: int) -> int:
    """Of each thread: the panels, then a tile of results."""
    return panels_bytes(n, record_bytes(f))


# ---------------------------------------------------------------------------------------------------------- activations


@kernel
def token_share(count, thread, threads):
    """First and last + 1 of a thread's tokens: whole tiles."""
    tiles = -(-count // TILE_TOKENS)
    first, last = split(tiles, 1, thread, threads), split(tiles, 1, thread + 1, threads)
    return min(count, first * TILE_TOKENS), min(count, last * TILE_TOKENS)


QUANTIZE = ("x", "n", "tokens", "tiles")  # tokens points to an int64


def token_as_records(ir: IrBuilder, x: Value, n: Value | int, tile: Value, token: Value) -> None:
    """One token's part of the records of its tile."""
    tokens = TILE_TOKENS
    with ir.loop(0, n, 32) as i:
        record = tile + (i >> 5) * (RECORD * tokens)
        high, low, scale = wide_block(ir, ir.load(vector(32, F32), x + i * 4))
        sums = wide_sums(ir, high, low)
        halves = [ir.sum(ir.part(sums, first, 4)) for first in (0, 4)]
        if _by_bytes(ir):
            ir.store(high, record + token * 32)
            ir.store(low, record + _LOW * tokens + token * 32)
        else:
            a = (high.signed(I16) << 8) + low.signed(I16)
            ir.store(ir.shuffle(a, None, [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(32)]), record + token * 64)
        ir.store(scale, record + _SCALES * tokens + token * 4)
        for half, total in enumerate(halves):
            ir.store(total * -1, record + (_SUMS + 4 * half) * tokens + token * 4)
        for place, total in enumerate((halves[0] + halves[1], *halves)):
            ir.store(total.real() * scale, record + (_FLOORS + 4 * place) * tokens + token * 4)


quantize_token = simd_intrinsic("void")(token_as_records)


@simd_intrinsic("void")
def _clear(ir, address, nbytes):
    with ir.loop(0, nbytes, 16) as i:
        ir.store(ir.zero(vector(4, I32)), address + i)


@callback(SIGNATURE)
def quantize_tiles(p, thread, threads):
    """Tiles of x float32[tokens, n], n a multiple of 32."""
    x, n, count, tiles = load_int(p), load_int(p + 8), load_int(load_int(p + 16)), load_int(p + 24)
    tokens = TILE_TOKENS
    size = RECORD * tokens * (n // 32)
    total = -(-count // tokens)
    for tile in range(split(total, 1, thread, threads), split(total, 1, thread + 1, threads)):
        address = tiles + tile * size
        if (tile + 1) * tokens > count:
            _clear(address, size)
        for token in range(min(tokens, count - tile * tokens)):
            quantize_token(x + (tile * tokens + token) * n * 4, n, address, token)


# --------------------------------------------------------------------------------------------------------------- panels


def unpack(ir: IrBuilder, ggml_type: int, weights: Value, n: Value, rows: Value | int, panel: Value) -> None:
    """Lay `rows` (at most 16) rows out as a panel. Rows that are missing keep what was there; nobody reads them.

    Block by block, so that what is written stays in the first level of cache: codes first row by row, 32 bytes each,
    then transposed where they stand.
    """
    f = FORMATS[ggml_type]
    blocks, size, units = n >> (f.columns.bit_length() - 1), record_bytes(f), f.columns // 32
    with ir.loop(0, blocks) as b:
        records = panel + b * (units * size)
        with ir.loop(0, rows, f.rows) as row:
            group = weights + f.group_bytes(blocks) * (row >> (f.rows.bit_length() - 1))
            for i, unit in enumerate(f.units(ir, group, b)):
                record = records + i * size
                if isinstance(unit, LaneUnit):
                    _place_lanes(ir, f, unit, record + row * 4)
                    continue
                ir.store(unit.codes, record + row * 32)
                numbers = [unit.scale, unit.floor] if f.floor else [unit.scale]
                for j, number in enumerate(numbers):
                    for half in range(_halves(f)):
                        place = record + row * 4 + _CODES + 64 * (_halves(f) * j + half)
                        ir.store(number.lane(4 * half), place)
        if f.rows == 1:
            with ir.loop(0, units) as u:
                _transpose_codes(ir, records + u * size)


def _transpose_codes(ir: IrBuilder, record: Value) -> None:
    """16 rows of 8 words become 8 rows of 16, in place.

    A word's place is a vector's number and a lane: row / 2, and row % 2 * 8 + word. Three rounds exchange a bit of the
    one for a bit of the other, so that the vectors are the words' numbers; the last puts the lanes in order of rows.
    """
    vectors = [ir.load(_INTS32, record + 64 * i) for i in range(8)]
    rows = [[(2 * i + lane // 8, lane % 8) for lane in range(16)] for i in range(8)]
    for bit in (1, 2, 4):
        for i in (i for i in range(8) if not i & bit):
            both, where = (vectors[i], vectors[i | bit]), rows[i] + rows[i | bit]
            for j, wanted in ((i, 0), (i | bit, bit)):
                lanes = sorted((k for k in range(32) if where[k][1] & bit == wanted), key=lambda k: where[k])
                vectors[j], rows[j] = ir.shuffle(*both, lanes), [where[k] for k in lanes]
    for i, words in enumerate(vectors):
        ir.store(words, record + 64 * i)


_unpack = simd_intrinsic("void")(unpack)


def _place_lanes(ir: IrBuilder, f: Format, unit: LaneUnit, record: Value) -> None:
    """The same for rows that are interleaved already: lanes 0 .. 3 and 4 .. 7 are rows or halves."""
    for codes, low, high in unit.steps:
        words = codes.view(vector(8, I32))
        if f.rows == 8:
            ir.store(words, record + 16 * low)
        else:
            ir.store(ir.part(words, 0, 4), record + 16 * low)
            ir.store(ir.part(words, 4, 4), record + 16 * high)
    for j, number in enumerate([unit.scale, unit.floor] if unit.floor else [unit.scale]):
        place = record + _CODES + 64 * _halves(f) * j
        if f.rows == 8:
            ir.store(number, place)
            continue
        for half in range(_halves(f)):
            ir.store(ir.part(number, 4 * half, 4), place + 64 * half)


# -------------------------------------------------------------------------------------------------------------- product


def panels_times_tile(
    ir: IrBuilder, ggml_type: int, panels: Value, n: Value, tile: Value, out: Value, stride: Value | int, add: int
) -> None:
    """out[t, 16 p + lane] (+)= the product of P panels and a tile; rows of out are `stride` bytes apart."""
    f, tokens = FORMATS[ggml_type], TILE_TOKENS
    units, size = n >> 5, record_bytes(f)
    places = [(p, t) for p in range(PANELS) for t in range(tokens)]
    totals = {place: ir.variable(ir.zero(_FLOATS16)) for place in places}
    with ir.loop(0, units) as u:
        records = [panels + (units * p + u) * size for p in range(PANELS)]
        given = tile + u * (RECORD * tokens)
        groups = _halves(f)
        for group in range(groups):
            products = _products(ir, f, records, given, range(group * 8 // groups, (group + 1) * 8 // groups))
            for p, record in enumerate(records):
                scale = ir.load(_FLOATS16, record + _CODES + 64 * group)
                for t in range(tokens):
                    both = scale * ir.splat(ir.load(F32, given + _SCALES * tokens + 4 * t), LANES)
                    totals[p, t].set(ir.fma(products[p, t].real(), both, totals[p, t].get()))
        for group in range(groups if f.floor else 0):
            which = _FLOORS if groups == 1 else _FLOORS + 4 + 4 * group
            for p, t in places:
                floor = ir.load(_FLOATS16, records[p] + _CODES + 64 * (groups + group))
                total = ir.splat(ir.load(F32, given + which * tokens + 4 * t), LANES)
                totals[p, t].set(ir.fma(floor, total, totals[p, t].get()))
    for p, t in places:
        address = out + stride * t + 64 * p
        result = totals[p, t].get()
        ir.store(ir.load(_FLOATS16, address) + result if add else result, address)


_multiply = simd_intrinsic("void")(panels_times_tile)


def _by_bytes(ir: IrBuilder) -> bool:
    """Whether activations are two planes of bytes."""
    return ir.isa == "avx512vnni"


def _products(
    ir: IrBuilder, f: Format, records: list[Value], given: Value, steps: range
) -> dict[tuple[int, int], Value]:
    """int32 x 16 of each panel and token: the sum of (code - offset) * a over some steps of a unit."""
    starts = [_start(ir, f, given, t, steps) for t in range(TILE_TOKENS)]
    if not _by_bytes(ir):
        return {
            (p, t): total
            for p, record in enumerate(records)
            for t, total in enumerate(_by_words(ir, record, given, steps, list(starts)))
        }
    places = [(p, t) for p in range(len(records)) for t in range(TILE_TOKENS)]
    found = _plane(ir, f, records, given, steps, {place: ir.zero(_INTS32) for place in places})
    shifted = {(p, t): (found[p, t] << 8) + starts[t] for p, t in places}
    return _plane(ir, f, records, given + _LOW * TILE_TOKENS, steps, shifted)


def _plane(
    ir: IrBuilder, f: Format, records: list[Value], given: Value, steps: range, found: dict[tuple[int, int], Value]
) -> dict[tuple[int, int], Value]:
    """`found` plus the sum of code * byte, of one plane of the activations."""
    for step in steps:
        weights = [ir.load(_BYTES64, record + 64 * step) for record in records]
        for t in range(TILE_TOKENS):
            four = ir.splat(ir.load(I32, given + 32 * t + 4 * step), LANES).view(_BYTES64)
            for p, weight in enumerate(weights):
                found[p, t] = ir.dot4(found[p, t], weight, four, f.largest)
    return found


def _by_words(ir: IrBuilder, record: Value, given: Value, steps: range, totals: list[Value]) -> list[Value]:
    """`totals`, one a token, plus the sum of code * a of one panel."""
    for step in steps:
        weights = ir.load(_INTS32, record + 64 * step)
        for odd in (0, 1):
            codes = ((weights >> 8 * odd) & 0xFF00FF).view(_INTS16)
            for t in range(TILE_TOKENS):
                two = ir.splat(ir.load(I32, given + 64 * t + 8 * step + 4 * odd), LANES).view(_INTS16)
                totals[t] = totals[t] + ir.multiply_pairs(codes, two)
    return totals


def _start(ir: IrBuilder, f: Format, given: Value, t: int, steps: range) -> Value:
    """-offset times the sum of the token's a in these steps."""
    if not f.offset:
        return ir.zero(_INTS32)
    tokens = TILE_TOKENS
    halves = [ir.load(I32, given + (_SUMS + 4 * half) * tokens + 4 * t) for half in (0, 1) if half * 4 in steps]
    total = halves[0] if len(halves) == 1 else halves[0] + halves[1]
    return ir.splat(total * f.offset, LANES)


MULTIPLY = ("weights", "n", "rows", "tokens", "x", "out", "bias", "scratch", "private_stride")


@functools.cache
def multiply(ggml_type: int, add: int) -> Callback:
    """The operation out[token, row] (+)= W x (+ bias) for a type of FORMATS; `tokens` points to an int64."""
    f = FORMATS[ggml_type]
    step, block_bytes, head = PANELS * LANES, f.nbytes // f.rows, f.head // f.rows
    unit_bytes, columns = record_bytes(f), f.columns

    @callback(SIGNATURE)
    def run(p, thread, threads):
        weights, n, rows = load_int(p), load_int(p + 8), load_int(p + 16)
        count, tiles = load_int(load_int(p + 24)), load_int(p + 32)
        tokens = TILE_TOKENS
        tile_bytes = RECORD * tokens * (n // 32)
        panels = load_int(p + 56) + thread * load_int(p + 64)
        panel_bytes = n // 32 * unit_bytes
        results = panels + PANELS * panel_bytes
        for first in range(split(rows, step, thread, threads), split(rows, step, thread + 1, threads), step):
            for panel in range(PANELS):
                here = min(LANES, rows - first - panel * LANES)
                start = weights + (first + panel * LANES) * (n // columns * block_bytes + head)
                _unpack(ggml_type, start, n, here, panels + panel * panel_bytes)
            for tile in range(-(-count // tokens)):
                out = load_int(p + 40) + (tile * tokens * rows + first) * 4
                given = tiles + tile * tile_bytes
                if first + step <= rows and (tile + 1) * tokens <= count:
                    _multiply(ggml_type, panels, n, given, out, rows * 4, add)
                else:
                    _multiply(ggml_type, panels, n, given, results, step * 4, 0)
                    many = min(tokens, count - tile * tokens)
                    copy_tile(results, step, out, rows, many, min(step, rows - first), add)
            if load_int(p + 48) != 0:
                add_bias(load_int(p + 48), load_int(p + 40), first, min(rows, first + step), rows, count)

    return run
