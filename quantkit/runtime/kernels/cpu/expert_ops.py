"""Feed-forward with experts: which experts a token goes to, and products with the matrices of those only.

Matrices of all experts lie one after another: gate and up [experts, ff, n], down [experts, n, ff]; `bytes` is from one
expert's to the next. Both passes choose as `reference.route` does, and make an expert's activations, act(gate) * up, as
the product with `down` takes them: quantized where it does.

One token (`pick`, `up`, `down`): all rows of gate of the chosen experts, one expert after another, are cut between the
threads as if they were one matrix, so that each reads long runs; so are those of up, and the activation of a row is
made where both were. Which experts are chosen every thread finds for itself, in `picked`:

    int64 count, int64[used] experts, float32[used] weights, float32[experts] probabilities

Prompts (`choose`, `sort`, `gather`, `fused` or `multiply` and `activate`, `add`): tokens are sorted by expert. `plan`:

    int64   entries: tokens times their experts, each expert's filled up to whole tiles
    int64   number of experts with tokens
    int64   next unit of work of `fused` or `multiply` of gate, of `multiply` of up, of `add`
    int64[experts, 3]    of each expert with tokens: number, first entry, tokens
    int64[entries]       token, -1 where it only fills up
    int64[entries]       address of the token's float32 row
    float32[entries]     weight

A unit of work is 32 rows of one expert (of `add` 32 rows of all of them, so that no two threads add to the same place
and the sum has one order). A thread unpacks them into its scratch and multiplies them by the expert's tiles: in
integers as gemm.py does, or in float32 as floats.py does. The 32 rows of gate and up are the 32 columns of one unit of
what `down` reads, so `fused` writes them there, and nothing in between. Laying out and multiplying is a pair of C
functions of each type (`unit`), called by address: compiled once, whatever operations need them.

Laying out pays from four tokens on: it takes as long as three products with a vector. Experts with FEW tokens or fewer
are multiplied with each of them alone, by the kernels of single tokens; `vectors` are their activations, FEW places for
each expert in the list.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import (
    F32,
    I64,
    IrBuilder,
    Value,
    atomic_add,
    call3,
    call6,
    floats,
    integers,
    load_float,
    load_int,
    simd_intrinsic,
    store_int,
    vector,
)
from quantkit.placement.kernel_sizes import EXPERT_ROWS as ROWS
from quantkit.placement.kernel_sizes import FEW, LIST, unit_bytes
from quantkit.runtime.kernels.cpu import float_gemm as floating
from quantkit.runtime.kernels.cpu import gemm
from quantkit.runtime.kernels.cpu.activations import quantize_range
from quantkit.runtime.kernels.cpu.decode_ops import SIGNATURE, split, swiglu_range
from quantkit.runtime.kernels.cpu.dequantize import decoded
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.gemm import quantize_token, token_share
from quantkit.runtime.kernels.cpu.matvec import SIGNATURE as SIX
from quantkit.runtime.kernels.reference import route

_FLOATS16 = vector(16, F32)

# ----------------------------------------------------------------------------------------------------------- one token


PICK = ("logits", "experts", "used", "least", "share", "normalise", "scale", "picked", "private_stride", "bias",
        "sigmoid", "groups", "groups_used")  # fmt: skip
# share and scale point to a float32; bias: float32[experts], 0 for none


@callback(SIGNATURE)
def pick(p, thread, threads):
    """picked = the experts of the token with these router logits; by every thread for itself."""
    experts, used = load_int(p + 8), load_int(p + 16)
    picked = load_int(p + 56) + thread * load_int(p + 64)
    weights = floats(picked + 8 + 8 * used, used)
    logits = floats(picked + 8 + 12 * used, experts)
    logits[:] = floats(load_int(p), experts)
    share, scale = load_float(load_int(p + 32)), load_float(load_int(p + 48))
    bias = floats(load_int(p + 72), experts if load_int(p + 72) != 0 else 0)
    count = route(
        logits, bias, load_int(p + 80) != 0, load_int(p + 88), load_int(p + 96), used, load_int(p + 24), share,
        load_int(p + 40) != 0, scale, integers(picked + 8, used), weights,
    )  # fmt: skip
    store_int(count, picked)


GATE, UP, ACTIVATE = 1, 2, 4
STEPS = ("steps", "gate_kernel", "gate", "gate_bytes", "up_kernel", "up", "up_bytes", "n", "ff", "multiple", "picked",
         "stride", "x", "x_stride", "products", "hidden", "hidden_bytes")  # fmt: skip


@callback(SIGNATURE)
def up(p, thread, threads):
    """hidden[i] = act(gate x) * (up x) of the i-th expert picked, quantized; `steps`: which parts of it.

    products: float32[used, 2, ff].
    """
    steps, n, ff, multiple = load_int(p), load_int(p + 56), load_int(p + 64), load_int(p + 72)
    picked = load_int(p + 80) + thread * load_int(p + 88)
    x = load_int(p + 96) + thread * load_int(p + 104)
    rows = load_int(picked) * ff
    first, last = split(rows, multiple, thread, threads), split(rows, multiple, thread + 1, threads)
    while first < last:
        i = first // ff
        begin = first - i * ff
        end = min(ff, begin + last - first)
        expert = load_int(picked + 8 + 8 * i)
        gate = load_int(p + 112) + i * 2 * ff * 4
        hidden = load_int(p + 120) + i * load_int(p + 128)
        if steps & GATE:
            call6(load_int(p + 8), load_int(p + 16) + expert * load_int(p + 24), n, begin, end, x, gate)
        if steps & UP:
            call6(load_int(p + 32), load_int(p + 40) + expert * load_int(p + 48), n, begin, end, x, gate + ff * 4)
        if steps & ACTIVATE:
            swiglu_range(gate, gate + ff * 4, begin, end, hidden)
            quantize_range(hidden, ff, begin, end)
        first += end - begin


DOWN = ("kernel", "weights", "bytes", "n", "rows", "multiple", "picked", "stride", "used", "hidden", "hidden_bytes",
        "out", "residual")  # fmt: skip


@callback(SIGNATURE)
def down(p, thread, threads):
    """residual += the sum of weight * (down hidden) over the experts picked, for the thread's rows."""
    rows, multiple = load_int(p + 32), load_int(p + 40)
    picked, used = load_int(p + 48) + thread * load_int(p + 56), load_int(p + 64)
    weights = floats(picked + 8 + 8 * used, used)
    first, last = split(rows, multiple, thread, threads), split(rows, multiple, thread + 1, threads)
    out, residual = floats(load_int(p + 88), rows), floats(load_int(p + 96), rows)
    for i in range(load_int(picked)):
        matrix = load_int(p + 8) + load_int(picked + 8 + 8 * i) * load_int(p + 16)
        hidden = load_int(p + 72) + i * load_int(p + 80)
        call6(load_int(p), matrix, load_int(p + 24), first, last, hidden, load_int(p + 88))
        weight = weights[i]
        for row in range(first, last):
            residual[row] += weight * out[row]


# ---------------------------------------------------------------------------------------------------- tokens by expert

ENTRIES, ACTIVE, NEXT = 0, 8, 16  # byte offsets in plan; NEXT is of three counters


CHOOSE = ("tokens", "logits", "experts", "used", "least", "share", "normalise", "scale", "chosen", "weights", "bias",
          "sigmoid", "groups", "groups_used")  # fmt: skip


@callback(SIGNATURE)
def choose(p, thread, threads):
    """chosen int64[tokens, used], -1 where left out, and weights float32[tokens, used] of router logits.

    logits float32[tokens, experts] are overwritten; tokens points to an int64, share and scale to a float32.
    """
    experts, used, least = load_int(p + 16), load_int(p + 24), load_int(p + 32)
    share, normalise, scale = load_float(load_int(p + 40)), load_int(p + 48) != 0, load_float(load_int(p + 56))
    bias = floats(load_int(p + 80), experts if load_int(p + 80) != 0 else 0)
    sigmoid, groups, groups_used = load_int(p + 88) != 0, load_int(p + 96), load_int(p + 104)
    first, last = token_share(load_int(load_int(p)), thread, threads)
    for token in range(first, last):
        logits = floats(load_int(p + 8) + token * experts * 4, experts)
        chosen = integers(load_int(p + 64) + token * used * 8, used)
        weights = floats(load_int(p + 72) + token * used * 4, used)
        count = route(logits, bias, sigmoid, groups, groups_used, used, least, share, normalise, scale, chosen, weights)
        chosen[count:] = -1


SORT = ("tokens", "x", "n", "experts", "used", "chosen", "weights", "plan", "most", "multiple")


@callback(SIGNATURE)
def sort(p, thread, threads):
    """plan of the chosen experts; x float32[tokens, n]. One thread does it: some microseconds for a batch."""
    if thread != 0:
        return
    tokens, n, experts, used = load_int(load_int(p)), load_int(p + 16), load_int(p + 24), load_int(p + 32)
    chosen, weights = integers(load_int(p + 40), tokens * used), floats(load_int(p + 48), tokens * used)
    plan, most, multiple = load_int(p + 56), load_int(p + 64), load_int(p + 72)
    active = integers(plan + LIST, experts * 3)
    token_of = integers(plan + LIST + experts * 24, most)
    row_of = integers(plan + LIST + experts * 24 + most * 8, most)
    weight_of = floats(plan + LIST + experts * 24 + most * 16, most)
    active[:] = 0
    for i in range(tokens * used):
        if chosen[i] >= 0:
            active[3 * chosen[i] + 2] += 1
    entries = 0
    for e in range(experts):
        active[3 * e + 1] = entries
        entries += -(-active[3 * e + 2] // multiple) * multiple
    token_of[:entries] = -1
    row_of[:entries] = load_int(p + 8)  # a row that there is
    for i in range(tokens * used):
        e = chosen[i]
        if e >= 0:
            at = active[3 * e + 1]
            active[3 * e + 1] += 1
            token_of[at], row_of[at], weight_of[at] = i // used, load_int(p + 8) + i // used * n * 4, weights[i]
    count = 0
    for e in range(experts):
        many = active[3 * e + 2]
        if many > 0:
            active[3 * count], active[3 * count + 1], active[3 * count + 2] = e, active[3 * e + 1] - many, many
            count += 1
    store_int(entries, plan + ENTRIES)
    store_int(count, plan + ACTIVE)
    for i in range(3):
        store_int(0, plan + NEXT + 8 * i)


GATHER = ("plan", "experts", "most", "n", "tiles", "tokens", "vectors", "vector_bytes")


@callback(SIGNATURE)
def gather(p, thread, threads):
    """What experts read of n columns: `vectors`, or tiles of gemm.py of so many tokens (none for address 0)."""
    plan, experts, most, n = load_int(p), load_int(p + 8), load_int(p + 16), load_int(p + 24)
    active = integers(plan + LIST, experts * 3)
    row_of = integers(plan + LIST + experts * 24 + most * 8, most)
    tiles, tokens = load_int(p + 32), load_int(p + 40)
    size = gemm.RECORD * tokens * (n // 32)
    for i in range(load_int(plan + ACTIVE)):
        _, first, many = _list_entry(active, i)
        if many > FEW and tiles == 0:
            continue
        for at in range(first + thread, first + many, threads):
            if many <= FEW:
                vector_ = load_int(p + 48) + (i * FEW + at - first) * load_int(p + 56)
                floats(vector_, n)[:] = floats(row_of[at], n)
                quantize_range(vector_, n, 0, n)
            else:
                quantize_token(row_of[at], n, tiles + at // tokens * size, at % tokens)


@kernel(inline="always")
def _list_entry(active, i):
    return active[3 * i], active[3 * i + 1], active[3 * i + 2]


# ------------------------------------------------------------------------------------------------ products of one unit


class Unit(NamedTuple):
    """How 32 rows of a type are multiplied by a tile of `tokens` entries.

    lay_out   void(weights, n, panel): the rows as `product` reads them
    product   void(panel, n, x, out, stride, 0): out[t, 0 .. 31], rows of it `stride` bytes apart
    quantized     x is a tile of gemm.py, not the addresses of float32 rows
    panel_bytes   of 32 columns
    """

    lay_out: Callback
    product: Callback
    quantized: bool
    tokens: int
    panel_bytes: int

    def scratch_bytes(self, n: int) -> int:
        return unit_bytes(n, self.tokens, self.panel_bytes)


@functools.cache
def unit(ggml_type: int, quantized: bool) -> Unit:
    """For a type of FORMATS, and in float32 also for float types."""
    if quantized:
        size = ROWS // gemm.LANES * gemm.record_bytes(FORMATS[ggml_type])
        return Unit(_integer_panel(ggml_type), _integer_product(ggml_type), True, gemm.TILE_TOKENS, size)
    return Unit(_float_panel(ggml_type), _float_product, False, floating.ROWS, 8 * ROWS * 32)


@simd_intrinsic("void")
def _lay_out_integers(ir: IrBuilder, ggml_type: int, weights: Value, n: Value, panel: Value) -> None:
    f = FORMATS[ggml_type]
    row_bytes = (n >> (f.columns.bit_length() - 1)) * (f.nbytes // f.rows) + f.head // f.rows
    with ir.loop(0, ROWS // gemm.LANES) as i:
        size = (n >> 5) * gemm.record_bytes(f)
        gemm.unpack(ir, ggml_type, weights + row_bytes * gemm.LANES * i, n, gemm.LANES, panel + size * i)


@simd_intrinsic("void")
def _lay_out_floats(ir: IrBuilder, ggml_type: int, weights: Value, n: Value, panel: Value) -> None:
    """Panels of `lanes()` rows, transposed; behind them the rows as they were decoded."""
    wide = floating.lanes()
    rows = panel + n * 4 * ROWS
    decoded(ir, ggml_type, weights, n, ROWS, rows)
    with ir.loop(0, ROWS, 16) as i, ir.loop(0, n, 16) as j:
        place = panel + n * 4 * (i & -wide) + j * (4 * wide) + (i & (wide - 1)) * 4
        floating.transposed(ir, rows + (n * i + j) * 4, n * 4, place, 4 * wide)


@simd_intrinsic("void")
def _multiply_integers(
    ir: IrBuilder, ggml_type: int, panel: Value, n: Value, x: Value, out: Value, stride: Value
) -> None:
    gemm.panels_times_tile(ir, ggml_type, panel, n, x, out, stride, 0)


@simd_intrinsic("void")
def _multiply_floats(ir: IrBuilder, panel: Value, n: Value, x: Value, out: Value, stride: Value) -> None:
    wide = floating.lanes()
    rows = [ir.load(I64, x + 8 * i) for i in range(floating.ROWS)]
    for first in range(0, ROWS, wide):
        floating.tile_of_rows(ir, rows, panel + n * 4 * first, 4 * wide, n, out + 4 * first, stride, 0)


@functools.cache
def _integer_panel(ggml_type: int) -> Callback:
    @callback(SIGNATURE)
    def lay_out(weights, n, panel):
        _lay_out_integers(ggml_type, weights, n, panel)

    return lay_out


@functools.cache
def _integer_product(ggml_type: int) -> Callback:
    @callback(SIX)
    def product(panel, n, x, out, stride, unused):
        _multiply_integers(ggml_type, panel, n, x, out, stride)

    return product


@functools.cache
def _float_panel(ggml_type: int) -> Callback:
    @callback(SIGNATURE)
    def lay_out(weights, n, panel):
        _lay_out_floats(ggml_type, weights, n, panel)

    return lay_out


@callback(SIX)
def _float_product(panel, n, x, out, stride, unused):
    _multiply_floats(panel, n, x, out, stride)


# ------------------------------------------------------------------------------------------------------- all the units


@simd_intrinsic("void")
def _add_scaled(ir: Any, x: Value, weight: float, out: Value) -> None:
    """out[0 .. 31] += weight * x[0 .. 31]."""
    for i in range(0, ROWS, 16):
        scaled = ir.load(_FLOATS16, x + 4 * i) * ir.splat(weight, 16)
        ir.store(ir.load(_FLOATS16, out + 4 * i) + scaled, out + 4 * i)


@simd_intrinsic("void")
def _copy(ir: IrBuilder, x: Value, out: Value) -> None:
    """32 floats."""
    for i in range(0, ROWS, 16):
        ir.store(ir.load(_FLOATS16, x + 4 * i), out + 4 * i)


@kernel
def _keep(x, hidden, ff, entry, column, tokens):
    """Columns column .. column + 31 of an entry's activations: in tiles of so many tokens, or as floats for 0."""
    if tokens == 0:
        _copy(x, hidden + (entry * ff + column) * 4)
    else:
        record = hidden + (entry // tokens * (ff // 32) + column // 32) * gemm.RECORD * tokens
        quantize_token(x, ROWS, record, entry % tokens)


@kernel
def _few(kernel, matrix, n, row, many, vectors, vector_bytes, out, stride):
    """out[t, 0 .. 31] = a unit's rows of an expert's matrix times each of its few vectors; strides in bytes."""
    for t in range(many):
        call6(kernel, matrix, n, row, row + ROWS, vectors + t * vector_bytes, out + t * stride - row * 4)


PRODUCT = ("plan", "experts", "lay_out", "product", "tokens", "panel_bytes", "bytes", "n", "rows", "x", "entry_bytes",
           "scratch", "private_stride", "kernel", "vectors", "vector_bytes")  # fmt: skip
# What the three operations below have in common. x: tiles of gemm.py, or addresses of float32 rows; entry_bytes: of x;
# kernel: product with a vector.
FUSED = (*PRODUCT, "gate", "up", "hidden", "down_tokens", "down_vectors", "down_vector_bytes")


@callback(SIGNATURE)
def fused(p, thread, threads):
    """hidden, or down_vectors, = act(gate x) * (up x) for all entries, gate and up of one type, as `add` reads it."""
    plan, experts, lay_out, product = load_int(p), load_int(p + 8), load_int(p + 16), load_int(p + 24)
    tokens, nbytes, n, ff = load_int(p + 32), load_int(p + 48), load_int(p + 56), load_int(p + 64)
    active, blocks, size = integers(plan + LIST, experts * 3), ff // ROWS, n // 32 * load_int(p + 40)
    panels = load_int(p + 88) + thread * load_int(p + 96)
    results, result_bytes = panels + 2 * size, tokens * ROWS * 4
    units = load_int(plan + ACTIVE) * blocks
    while True:
        unit = atomic_add(1, plan + NEXT)
        if unit >= units:
            break
        i, row = unit // blocks, unit % blocks * ROWS
        expert, first, many = _list_entry(active, i)
        if many <= FEW:
            vectors, vector_bytes = load_int(p + 112) + i * FEW * load_int(p + 120), load_int(p + 120)
            for which in range(2):
                matrix, out = load_int(p + 128 + 8 * which) + expert * nbytes, results + which * result_bytes
                _few(load_int(p + 104), matrix, n, row, many, vectors, vector_bytes, out, ROWS * 4)
            for t in range(many):
                gate, target = results + t * ROWS * 4, load_int(p + 160) + (i * FEW + t) * load_int(p + 168)
                swiglu_range(gate, gate + result_bytes, 0, ROWS, target + row * 4)
                quantize_range(target, ff, row, row + ROWS)
            continue
        for which in range(2):
            start = load_int(p + 128 + 8 * which) + expert * nbytes + row * (nbytes // ff)
            call3(lay_out, start, n, panels + which * size)
        for at in range(first, first + many, tokens):
            x = load_int(p + 72) + at * load_int(p + 80)
            for which in range(2):
                call6(product, panels + which * size, n, x, results + which * result_bytes, ROWS * 4, 0)
            for t in range(min(tokens, first + many - at)):
                gate = results + t * ROWS * 4
                swiglu_range(gate, gate + result_bytes, 0, ROWS, gate)
                _keep(gate, load_int(p + 144), ff, at + t, row, load_int(p + 152))


MULTIPLY = (*PRODUCT, "weights", "out", "counter")


@callback(SIGNATURE)
def multiply(p, thread, threads):
    """out = W x for all entries, float32[entries, rows]; `counter`: which of plan's counts its units."""
    plan, experts, lay_out, product = load_int(p), load_int(p + 8), load_int(p + 16), load_int(p + 24)
    tokens, nbytes, n, rows = load_int(p + 32), load_int(p + 48), load_int(p + 56), load_int(p + 64)
    active, blocks = integers(plan + LIST, experts * 3), rows // ROWS
    panel = load_int(p + 88) + thread * load_int(p + 96)
    units = load_int(plan + ACTIVE) * blocks
    while True:
        unit = atomic_add(1, plan + NEXT + 8 * load_int(p + 144))
        if unit >= units:
            break
        i, row = unit // blocks, unit % blocks * ROWS
        expert, first, many = _list_entry(active, i)
        matrix, out = load_int(p + 128) + expert * nbytes, load_int(p + 136) + row * 4
        if many <= FEW:
            vectors, vector_bytes = load_int(p + 112) + i * FEW * load_int(p + 120), load_int(p + 120)
            _few(load_int(p + 104), matrix, n, row, many, vectors, vector_bytes, out + first * rows * 4, rows * 4)
            continue
        call3(lay_out, matrix + row * (nbytes // rows), n, panel)
        for at in range(first, first + many, tokens):
            call6(product, panel, n, load_int(p + 72) + at * load_int(p + 80), out + at * rows * 4, rows * 4, 0)


ACTIVATION = ("plan", "experts", "gate", "up", "ff", "hidden", "down_tokens", "down_vectors", "down_vector_bytes")


@callback(SIGNATURE)
def activate(p, thread, threads):
    """hidden, or down_vectors, = act(gate) * up of float32[entries, ff], as `add` reads it."""
    plan, experts, ff = load_int(p), load_int(p + 8), load_int(p + 32)
    active = integers(plan + LIST, experts * 3)
    for i in range(load_int(plan + ACTIVE)):
        _, first, many = _list_entry(active, i)
        for entry in range(first + thread, first + many, threads):
            gate, up = load_int(p + 16) + entry * ff * 4, load_int(p + 24) + entry * ff * 4
            if many <= FEW:
                target = load_int(p + 56) + (i * FEW + entry - first) * load_int(p + 64)
                swiglu_range(gate, up, 0, ff, target)
                quantize_range(target, ff, 0, ff)
                continue
            swiglu_range(gate, up, 0, ff, gate)
            for column in range(0, ff, ROWS):
                _keep(gate + column * 4, load_int(p + 40), ff, entry, column, load_int(p + 48))


ADD = (*PRODUCT, "weights", "out", "most", "quantized")


@callback(SIGNATURE)
def add(p, thread, threads):
    """out[token] += weight * (W x) for all entries, out float32[tokens, rows]; experts by number.

    x: tiles of gemm.py if `quantized`, else float32 rows one after another.
    """
    plan, experts, lay_out, product = load_int(p), load_int(p + 8), load_int(p + 16), load_int(p + 24)
    tokens, nbytes, n, rows = load_int(p + 32), load_int(p + 48), load_int(p + 56), load_int(p + 64)
    entry_bytes, out, most = load_int(p + 80), load_int(p + 136), load_int(p + 144)
    active, blocks = integers(plan + LIST, experts * 3), rows // ROWS
    token_of = integers(plan + LIST + experts * 24, most)
    weight_of = floats(plan + LIST + experts * 24 + most * 16, most)
    panel = load_int(p + 88) + thread * load_int(p + 96)
    results = panel + n // 32 * load_int(p + 40)
    address_of = integers(results + tokens * ROWS * 4, tokens)
    while True:
        row = atomic_add(1, plan + NEXT + 16) * ROWS
        if row >= blocks * ROWS:
            break
        for i in range(load_int(plan + ACTIVE)):
            expert, first, many = _list_entry(active, i)
            matrix = load_int(p + 128) + expert * nbytes
            if many > FEW:
                call3(lay_out, matrix + row * (nbytes // rows), n, panel)
            for at in range(first, first + many, tokens):
                x = load_int(p + 72) + at * entry_bytes
                if many <= FEW:
                    vectors, vector_bytes = load_int(p + 112) + i * FEW * load_int(p + 120), load_int(p + 120)
                    _few(load_int(p + 104), matrix, n, row, many, vectors, vector_bytes, results, ROWS * 4)
                else:
                    if load_int(p + 152) == 0:
                        for t in range(tokens):
                            address_of[t] = x + t * entry_bytes
                        x = results + tokens * ROWS * 4
                    call6(product, panel, n, x, results, ROWS * 4, 0)
                for t in range(min(tokens, first + many - at)):
                    place = out + (token_of[at + t] * rows + row) * 4
                    _add_scaled(results + t * ROWS * 4, weight_of[at + t], place)
