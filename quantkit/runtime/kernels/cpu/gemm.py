"""Integer products of a batch: out[token, row] = W x, for TILE_TOKENS tokens by PANELS * PANEL_ROWS rows at a time.

Weights are read through `formats` and unpacked to panels of PANEL_ROWS rows in the thread's own scratch, so each type
has its unpacking and all share the product. Per sub-block of 32 columns a panel has one record:

    offset   content
    0        8 x 16 x 4 u8   with VNNI: codes, four columns of each of the 16 rows, then the next four
             16 x 16 x 2 i16 without VNNI: code - offset, the first and third of four columns of each row, then the
                             second and fourth, then of the next four
    C        16 x f32        scale of each row; in formats with two scales per sub-block, of its first half, then of
                             its second half; in formats with minimums, then the minimum of each row, or both;
                             C is 512 or 1024

Activations are quantized once, to tiles of TILE_TOKENS = T tokens. Per tile and sub-block of 32 columns there is one
record. x = scale * a with 16-bit a, as the int16 form of activations.py:

    offset   content
    0        2 x T x 32 i8   with VNNI: high bytes of a, then low bytes
             T x 32 i16      without VNNI: a, of each four columns the first, third, second and fourth
    64 T     T x f32         scale
    68 T     2 x T x i32     minus the sum of a over each half
    76 T     3 x T x f32     scale * sum of a, over all and over each half

The last tile may have fewer tokens: the missing ones are zero and their results are not stored. With VNNI, the inner
loop takes four columns of 16 rows from a panel and four of one token from a tile, and one instruction sums 64 products:
for the high bytes of a sub-block, then, added to that sum shifted, for the low bytes. Other CPUs take two columns of as
many rows as fill two vectors, and pmaddwd sums pairs of products: twice as many products per vector as float32. The
integers are the same on all CPUs. The formula is that of matvec.py.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, I8, I16, I32, IrBuilder, Value, Variable, load_int, simd_intrinsic, vector
from quantkit.placement.kernel_sizes import (
    PANEL_ROWS,
    PANELS,
    RECORD_BYTES,
    TILE_TOKENS,
    panel_code_bytes,
    panels_bytes,
)
from quantkit.runtime.kernels.cpu.activations import has_vnni, int16_block, int16_sums, int16_words
from quantkit.runtime.kernels.cpu.float_gemm import MultiplyParameters, add_bias, copy_tile, scale_rows
from quantkit.runtime.kernels.cpu.formats.base import Format, InterleavedSubBlock
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.operation import OPERATION, claim_rows, load_record, row_share

_LOW, _SCALES, _SUMS, _SCALED_SUMS = 32, 64, 68, 76  # offsets in a tile's record, times TILE_TOKENS

_CHUNK = 8  # sub-blocks multiplied with some rows and tokens, before others

_INTS32, _INTS16, _BYTES64 = vector(16, I32), vector(32, I16), vector(64, I8)


def record_bytes(f: Format) -> int:
    """Bytes in a panel for 32 columns."""
    return panel_code_bytes() + 4 * PANEL_ROWS * _scales_per_row(f) * (1 + f.has_minimum)


def _scales_per_row(f: Format) -> int:
    """Scales, and minimums, that a row has in a sub-block of 32 columns: 1 or 2."""
    return 32 // f.scale_columns


def scratch_bytes(f: Format, n: int) -> int:
    """Per thread: the panels, then a tile of results."""
    return panels_bytes(n, record_bytes(f))


# ---------------------------------------------------------------------------------------------------------- activations


@kernel
def token_share(count, thread, threads):
    """First and last + 1 of a thread's tokens: whole tiles."""
    tiles = -(-count // TILE_TOKENS)
    first, last = row_share(tiles, 1, thread, threads)
    return min(count, first * TILE_TOKENS), min(count, last * TILE_TOKENS)


def quantize_token_into(ir: IrBuilder, x: Value, n: Value | int, tile: Value, token: Value) -> None:
    """Quantize float32[n] to the records of its tile, as the tile's token number `token`."""
    tokens = TILE_TOKENS
    with ir.loop(0, n, 32) as i:
        record = tile + (i >> 5) * (RECORD_BYTES * tokens)
        high, low, scale = int16_block(ir, ir.load(vector(32, F32), x + i * 4))
        sums = int16_sums(ir, high, low)
        halves = [ir.sum(ir.part(sums, first, 4)) for first in (0, 4)]
        if has_vnni(ir):
            ir.store(high, record + token * 32)
            ir.store(low, record + _LOW * tokens + token * 32)
        else:
            ir.store(int16_words(ir, high, low), record + token * 64)
        ir.store(scale, record + _SCALES * tokens + token * 4)
        for half, total in enumerate(halves):
            ir.store(total * -1, record + (_SUMS + 4 * half) * tokens + token * 4)
        for field, total in enumerate((halves[0] + halves[1], *halves)):
            ir.store(total.real() * scale, record + (_SCALED_SUMS + 4 * field) * tokens + token * 4)


quantize_token = simd_intrinsic("void")(quantize_token_into)


@simd_intrinsic("void")
def _clear(ir, address, nbytes):
    with ir.loop(0, nbytes, 16) as i:
        ir.store(ir.zero(vector(4, I32)), address + i)


class QuantizeParameters(NamedTuple):
    """Parameters of `quantize_tiles`."""

    x: int  # float32[tokens, n]
    n: int  # a multiple of 32
    tokens: int  # address of an int64
    tiles: int


@callback(OPERATION)
def quantize_tiles(parameters, thread, threads):
    """Quantize a batch to tiles."""
    p = load_record(QuantizeParameters, parameters)
    count, tokens = load_int(p.tokens), TILE_TOKENS
    tile_bytes = RECORD_BYTES * tokens * (p.n // 32)
    total = -(-count // tokens)
    first, last = row_share(total, 1, thread, threads)
    for tile in range(first, last):
        address = p.tiles + tile * tile_bytes
        if (tile + 1) * tokens > count:
            _clear(address, tile_bytes)
        for token in range(min(tokens, count - tile * tokens)):
            quantize_token(p.x + (tile * tokens + token) * p.n * 4, p.n, address, token)


# --------------------------------------------------------------------------------------------------------------- panels


def unpack_panel(ir: IrBuilder, ggml_type: int, weights: Value, n: Value, rows: Value | int, panel: Value) -> None:
    """Unpack `rows` rows (at most PANEL_ROWS) to a panel. The memory of missing rows is not written and not used.

    Block by block, so that what is written stays in the L1 cache: first the codes row by row, 32 bytes each, which are
    then transposed in place.
    """
    f = FORMATS[ggml_type]
    blocks, size, sub_blocks = n >> (f.columns.bit_length() - 1), record_bytes(f), f.columns // 32
    with ir.loop(0, blocks) as b:
        records = panel + b * (sub_blocks * size)
        with ir.loop(0, rows, f.rows) as row:
            group = weights + f.row_group_bytes(blocks) * (row >> (f.rows.bit_length() - 1))
            for i, sub_block in enumerate(f.sub_blocks(ir, group, b)):
                record = records + i * size
                if isinstance(sub_block, InterleavedSubBlock):
                    _store_interleaved(ir, f, sub_block, record + row * 4)
                    continue
                ir.store(sub_block.codes, record + row * 32)
                numbers = [sub_block.scale, sub_block.minimum] if f.has_minimum else [sub_block.scale]
                for j, number in enumerate(numbers):
                    for half in range(_scales_per_row(f)):
                        target = record + row * 4 + panel_code_bytes() + 64 * (_scales_per_row(f) * j + half)
                        ir.store(number.lane(4 * half), target)
        with ir.loop(0, sub_blocks) as s:
            record = records + s * size
            words = [ir.load(_INTS32, record + 64 * i) for i in range(8)]
            _store_codes(ir, f, _transposed_words(ir, words) if f.rows == 1 else words, record)


def _store_codes(ir: IrBuilder, f: Format, words: list[Value], record: Value) -> None:
    """Store the codes of a record, from 8 vectors with four columns of 16 rows each."""
    if has_vnni(ir):
        vectors = words
    else:
        pairs = [((four >> 8 * parity) & 0xFF00FF).view(_INTS16) for four in words for parity in (0, 1)]
        vectors = [pair - f.offset for pair in pairs] if f.offset else pairs
    for i, codes in enumerate(vectors):
        ir.store(codes, record + 64 * i)


def _transposed_words(ir: IrBuilder, vectors: list[Value]) -> list[Value]:
    """Transpose 16 rows of 8 words, two rows to a vector, to 8 rows of 16.

    At first, word w of row r is in vector r // 2, lane r % 2 * 8 + w. Each of three rounds exchanges a bit of the
    vector number with a bit of the lane number, until vector w holds word w of all rows; the last round also sorts the
    lanes by row.
    """
    vectors = list(vectors)
    rows = [[(2 * i + lane // 8, lane % 8) for lane in range(16)] for i in range(8)]
    for bit in (1, 2, 4):
        for i in (i for i in range(8) if not i & bit):
            pair, words_of = (vectors[i], vectors[i | bit]), rows[i] + rows[i | bit]
            for j, bit_value in ((i, 0), (i | bit, bit)):
                lanes = sorted((k for k in range(32) if words_of[k][1] & bit == bit_value), key=lambda k: words_of[k])
                vectors[j], rows[j] = ir.shuffle(*pair, lanes), [words_of[k] for k in lanes]
    return vectors


_unpack_panel = simd_intrinsic("void")(unpack_panel)


def _store_interleaved(ir: IrBuilder, f: Format, sub_block: InterleavedSubBlock, record: Value) -> None:
    """Store a sub-block of interleaved rows: lanes 0 .. 3 and 4 .. 7 are rows, or halves of the sub-block."""
    for codes, low, high in sub_block.steps:
        words = codes.view(vector(8, I32))
        if f.rows == 8:
            ir.store(words, record + 16 * low)
        else:
            ir.store(ir.part(words, 0, 4), record + 16 * low)
            ir.store(ir.part(words, 4, 4), record + 16 * high)
    for j, number in enumerate([sub_block.scale, sub_block.minimum] if sub_block.minimum else [sub_block.scale]):
        target = record + panel_code_bytes() + 64 * _scales_per_row(f) * j
        if f.rows == 8:
            ir.store(number, target)
            continue
        for half in range(_scales_per_row(f)):
            ir.store(ir.part(number, 4 * half, 4), target + 64 * half)


# -------------------------------------------------------------------------------------------------------------- product


def multiply_tile(
    ir: IrBuilder, ggml_type: int, panels: Value, n: Value, tile: Value, out: Value, stride: Value | int, add: int
) -> None:
    """out[t, 16 p + lane] (+)= the product of PANELS panels and a tile; rows of out are `stride` bytes apart."""
    f, width = FORMATS[ggml_type], _lanes(ir)
    kind = vector(width, F32)
    places = [(row, t) for row in range(0, PANELS * PANEL_ROWS, width) for t in range(TILE_TOKENS)]
    totals = {place: ir.variable(ir.zero(kind)) for place in places}
    add_sub_blocks = _add_bytes if has_vnni(ir) else _add_int16
    add_sub_blocks(ir, f, panels, n >> 5, tile, totals)
    for (row, t), total in totals.items():
        address = out + stride * t + 4 * row
        ir.store(ir.load(kind, address) + total.get() if add else total.get(), address)


_multiply_tile = simd_intrinsic("void")(multiply_tile)
_Totals = dict[tuple[int, int], Variable]  # float32 results by the first of their rows and the token


def _lanes(ir: IrBuilder) -> int:
    """32-bit lanes of the CPU's vectors."""
    return 16 if ir.isa.startswith("avx512") else 8 if ir.isa == "avx2" else 4


def _add_bytes(ir: IrBuilder, f: Format, panels: Value, sub_blocks: Value, tile: Value, totals: _Totals) -> None:
    """Add the products of all sub-blocks by VNNI: sums of all rows and tokens stay in registers."""
    groups, rows = _scales_per_row(f), [PANEL_ROWS * p for p in range(PANELS)]
    with ir.loop(0, sub_blocks) as s:
        tile_record = tile + s * (RECORD_BYTES * TILE_TOKENS)
        records = {row: panels + (sub_blocks * p + s) * record_bytes(f) for p, row in enumerate(rows)}
        for group in range(groups):
            steps = range(group * 8 // groups, (group + 1) * 8 // groups)
            high = _byte_products(ir, f, records, tile_record, steps, dict.fromkeys(totals, ir.zero(_INTS32)))
            starts = [_offset_sum(ir, f, tile_record, t, steps) for t in range(TILE_TOKENS)]
            shifted = {(row, t): (total << 8) + starts[t] for (row, t), total in high.items()}
            sums = _byte_products(ir, f, records, tile_record + _LOW * TILE_TOKENS, steps, shifted)
            _add_scaled(ir, records, tile_record, group, sums, totals)
        _add_minimums(ir, f, records, tile_record, totals)


def _byte_products(
    ir: IrBuilder, f: Format, records: dict[int, Value], activations: Value, steps: range,
    sums: dict[tuple[int, int], Value],
) -> dict[tuple[int, int], Value]:  # fmt: skip
    """`sums` plus the sum of code * byte over some steps of four columns, with the high or low bytes of activations."""
    for step in steps:
        weights = {row: ir.load(_BYTES64, record + 64 * step) for row, record in records.items()}
        for t in range(TILE_TOKENS):
            four = ir.splat(ir.load(I32, activations + 32 * t + 4 * step), PANEL_ROWS).view(_BYTES64)
            for row, weight in weights.items():
                sums[row, t] = ir.dot4(sums[row, t], weight, four, f.largest)
    return sums


def _offset_sum(ir: IrBuilder, f: Format, tile_record: Value, t: int, steps: range) -> Value:
    """-offset times the sum of the token's a in these steps."""
    if not f.offset:
        return ir.zero(_INTS32)
    tokens = TILE_TOKENS
    halves = [ir.load(I32, tile_record + (_SUMS + 4 * half) * tokens + 4 * t) for half in (0, 1) if half * 4 in steps]
    total = halves[0] if len(halves) == 1 else halves[0] + halves[1]
    return ir.splat(total * f.offset, PANEL_ROWS)


def _add_int16(ir: IrBuilder, f: Format, panels: Value, sub_blocks: Value, tile: Value, totals: _Totals) -> None:
    """Add the products of all sub-blocks by pmaddwd, for two vectors of rows and some tokens at a time.

    CHUNK sub-blocks of them, so that totals are loaded and stored less often, and the records stay in the L1 cache.
    """
    width, tokens = _lanes(ir), TILE_TOKENS if _lanes(ir) == 16 else TILE_TOKENS // 2
    with ir.loop(0, sub_blocks, _CHUNK, unroll=False) as first:
        end = first + _CHUNK
        last = ir.choose(ir.less(end, sub_blocks), end, sub_blocks)
        for row in range(0, PANELS * PANEL_ROWS, 2 * width):
            for t in range(0, TILE_TOKENS, tokens):
                some = {(r, u): totals[r, u] for u in range(t, t + tokens) for r in (row, row + width)}
                with ir.loop(first, last, unroll=False) as s:
                    tile_record = tile + s * (RECORD_BYTES * TILE_TOKENS)
                    records = {
                        r: panels + (sub_blocks * (r // PANEL_ROWS) + s) * record_bytes(f) + 4 * (r % PANEL_ROWS)
                        for r in (row, row + width)
                    }
                    for group in range(_scales_per_row(f)):
                        sums = _pair_products(ir, f, records, tile_record, group, some)
                        _add_scaled(ir, records, tile_record, group, sums, some)
                    _add_minimums(ir, f, records, tile_record, some)


def _pair_products(
    ir: IrBuilder, f: Format, records: dict[int, Value], tile_record: Value, group: int, totals: _Totals
) -> dict[tuple[int, int], Value]:
    """The sums of (code - offset) * a over the columns of a scale, for the places of `totals`.

    A loop that is not unrolled: LLVM would load all activations first, and spill them.
    """
    width, pairs = _lanes(ir), 16 // _scales_per_row(f)
    kind = vector(2 * width, I16)
    sums = {place: ir.variable(ir.zero(vector(width, I32))) for place in totals}
    with ir.loop(pairs * group, pairs * (group + 1), 2, unroll=False) as first:
        for pair in (first, first + 1):
            codes = {row: ir.load(kind, record + (pair << 6)) for row, record in records.items()}
            for t in dict.fromkeys(t for _, t in totals):
                two = ir.splat(ir.load(I32, tile_record + 64 * t + (pair << 2)), width).view(kind)
                for row, code in codes.items():
                    sums[row, t].set(sums[row, t].get() + ir.multiply_pairs(code, two))
    return {place: total.get() for place, total in sums.items()}


def _add_scaled(
    ir: IrBuilder, records: dict[int, Value], tile_record: Value, group: int, sums: dict[tuple[int, int], Value],
    totals: _Totals,
) -> None:  # fmt: skip
    """Add the integer sums of a group of columns, times the scales of rows and tokens."""
    kind = vector(_lanes(ir), F32)
    scales = {row: ir.load(kind, record + panel_code_bytes() + 64 * group) for row, record in records.items()}
    for (row, t), total in totals.items():
        scale = scales[row] * ir.splat(ir.load(F32, tile_record + _SCALES * TILE_TOKENS + 4 * t), kind.count)
        total.set(ir.fma(sums[row, t].real(), scale, total.get()))


def _add_minimums(ir: IrBuilder, f: Format, records: dict[int, Value], tile_record: Value, totals: _Totals) -> None:
    """Add the minimums of rows times the sums of the token's activations, in formats that have them."""
    groups, kind = _scales_per_row(f), vector(_lanes(ir), F32)
    for group in range(groups if f.has_minimum else 0):
        at, field = panel_code_bytes() + 64 * (groups + group), _SCALED_SUMS + (0 if groups == 1 else 4 + 4 * group)
        minimums = {row: ir.load(kind, record + at) for row, record in records.items()}
        for (row, t), total in totals.items():
            x = ir.splat(ir.load(F32, tile_record + field * TILE_TOKENS + 4 * t), kind.count)
            total.set(ir.fma(minimums[row], x, total.get()))


@functools.cache
def multiply(ggml_type: int, add: int) -> Callback:
    """The operation out[token, row] (+)= W x (* scale) (+ bias) for a type of FORMATS, with MultiplyParameters.

    x is tiles. There is no `scale` with `add`.
    """
    f = FORMATS[ggml_type]
    step, block_bytes, head = PANELS * PANEL_ROWS, f.nbytes // f.rows, f.head // f.rows
    sub_block_bytes, columns = record_bytes(f), f.columns

    @callback(OPERATION)
    def run(parameters, thread, threads):
        p = load_record(MultiplyParameters, parameters)
        n, rows, count, tokens = p.n, p.rows, load_int(p.tokens), TILE_TOKENS
        tile_bytes = RECORD_BYTES * tokens * (n // 32)
        panels = p.scratch + thread * p.private_stride
        panel_bytes = n // 32 * sub_block_bytes
        results = panels + PANELS * panel_bytes
        first = end = 0
        while True:
            if first == end:
                first, end = claim_rows(p.claims, rows, step, thread, threads)
                if first == end:
                    return
            for panel in range(PANELS):
                row_count = min(PANEL_ROWS, rows - first - panel * PANEL_ROWS)
                start = p.weights + (first + panel * PANEL_ROWS) * (n // columns * block_bytes + head)
                _unpack_panel(ggml_type, start, n, row_count, panels + panel * panel_bytes)
            for tile in range(-(-count // tokens)):
                out = p.out + (tile * tokens * rows + first) * 4
                tile_x = p.x + tile * tile_bytes
                if first + step <= rows and (tile + 1) * tokens <= count:
                    _multiply_tile(ggml_type, panels, n, tile_x, out, rows * 4, add)
                else:
                    _multiply_tile(ggml_type, panels, n, tile_x, results, step * 4, 0)
                    token_count = min(tokens, count - tile * tokens)
                    copy_tile(results, step, out, rows, token_count, min(step, rows - first), add)
            if p.scale != 0:
                scale_rows(p.scale, p.out, first, min(rows, first + step), rows, count)
            if p.bias != 0:
                add_bias(p.bias, p.out, first, min(rows, first + step), rows, count)
            first = min(end, first + step)

    return run
