"""Operations for gates: of attention (blocks.Attention.gated) and of shared experts (blocks.Experts.shared_gate).

The query matrix of gated attention gives, for each head, the query and then its gate. Each is copied to a buffer of its
own, so that all other operations are those of attention without gates; the output of attention is multiplied by
sigmoid(gate) before the output matrix.

The head gates of an attention (blocks.Attention.head_gate) are one number per head.

The gate of a shared expert is one number per token, sigmoid(weight . y). It is multiplied into `up`, whose product with
the activated gate enters the matrix `down`: that is as good as multiplying the expert's output, and costs nothing more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import (
    F32,
    IrBuilder,
    Value,
    copy_floats,
    floats,
    load_float,
    load_int,
    simd_intrinsic,
    vector,
)
from quantkit.runtime.kernels.cpu.decode_ops import scale_range
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.reference import exp


@simd_intrinsic("void")
def multiply_sigmoid(ir: IrBuilder, x: Value, gates: Value, n: Value) -> None:
    """x[i] *= sigmoid(gates[i]), float32[n], n a multiple of 16."""
    kind = vector(16, F32)
    with ir.loop(0, n, 16) as i:
        sigmoid = ir.constant(kind, 1.0) / (ir.exp(ir.load(kind, gates + i * 4) * -1.0) + 1.0)
        ir.store(ir.load(kind, x + i * 4) * sigmoid, x + i * 4)


@simd_intrinsic("float32")
def dot(ir: IrBuilder, x: Value, y: Value, n: Value) -> Value:
    """Sum of x[i] y[i], in a fixed order on every CPU: 16 lanes, then the rest."""
    kind, vector_end = vector(16, F32), n & -16
    lanes, rest = ir.variable(ir.zero(kind)), ir.variable(ir.constant(F32, 0.0))
    with ir.loop(0, vector_end, 16) as i:
        lanes.set(ir.fma(ir.load(kind, x + i * 4), ir.load(kind, y + i * 4), lanes.get()))
    with ir.loop(vector_end, n) as i:
        rest.set(ir.fma(ir.load(F32, x + i * 4), ir.load(F32, y + i * 4), rest.get()))
    return ir.sum(lanes.get()) + rest.get()


# ------------------------------------------------------------------------------------------------------------ attention


@kernel
def _split_heads(projected, first, last, dim, q, gates):
    """Copy queries and gates of heads first .. last - 1 of all heads of all tokens."""
    for head in range(first, last):
        x = projected + head * 2 * dim * 4
        copy_floats(q + head * dim * 4, x, dim)
        copy_floats(gates + head * dim * 4, x + dim * 4, dim)


class SplitQueriesParameters(NamedTuple):
    """Parameters of `split_queries` and `split_batch_queries`."""

    tokens: int  # address of an int64; not read for one token
    projected: int  # float32[tokens, heads, 2, dim]
    heads: int
    dim: int
    multiple: int  # heads in a thread's share, for one token
    q: int  # float32[tokens, heads, dim]
    gates: int  # float32[tokens, heads, dim]


@callback(OPERATION)
def split_queries(parameters, thread, threads):
    """Copy the queries and gates of one token; each thread those of its heads."""
    p = load_record(SplitQueriesParameters, parameters)
    first, last = row_share(p.heads, p.multiple, thread, threads)
    _split_heads(p.projected, first, last, p.dim, p.q, p.gates)


@callback(OPERATION)
def split_batch_queries(parameters, thread, threads):
    """Copy the queries and gates of a batch; each thread those of its tokens."""
    p = load_record(SplitQueriesParameters, parameters)
    first, last = token_share(load_int(p.tokens), thread, threads)
    _split_heads(p.projected, first * p.heads, last * p.heads, p.dim, p.q, p.gates)


class ApplyGatesParameters(NamedTuple):
    """Parameters of `apply_gates`."""

    tokens: int  # address of an int64
    x: int  # float32[tokens, n]
    gates: int  # float32[tokens, n]
    n: int


@callback(OPERATION)
def apply_gates(parameters, thread, threads):
    """x *= sigmoid(gates); each thread its tokens."""
    p = load_record(ApplyGatesParameters, parameters)
    first, last = token_share(load_int(p.tokens), thread, threads)
    multiply_sigmoid(p.x + first * p.n * 4, p.gates + first * p.n * 4, (last - first) * p.n)


class ApplyHeadGatesParameters(NamedTuple):
    """Parameters of `apply_head_gates`."""

    tokens: int  # address of an int64
    x: int  # float32[tokens, heads, dim]
    gates: int  # float32[tokens, heads]
    heads: int
    dim: int


@callback(OPERATION)
def apply_head_gates(parameters, thread, threads):
    """x of each head *= sigmoid(gate of the head); each thread its tokens."""
    p = load_record(ApplyHeadGatesParameters, parameters)
    first, last = token_share(load_int(p.tokens), thread, threads)
    for head in range(first * p.heads, last * p.heads):
        factor = np.float32(1) / (np.float32(1) + exp(-load_float(p.gates + head * 4)))
        scale_range(p.x, head * p.dim, (head + 1) * p.dim, factor)


# ------------------------------------------------------------------------------------------------------- shared experts


@kernel
def _scale_by_gate(x, weight, n, up, first, last):
    """up[first : last] *= sigmoid(weight . x), x float32[n]."""
    gate = np.float32(1) / (np.float32(1) + exp(-dot(x, weight, n)))
    y = floats(up, last)
    for i in range(first, last):
        y[i] *= gate


class SharedGateParameters(NamedTuple):
    """Parameters of `gate_shared`."""

    x: int  # activation buffer
    stride: int
    weight: int  # float32[n]
    n: int
    up: int  # float32[rows]
    rows: int
    multiple: int


@callback(OPERATION)
def gate_shared(parameters, thread, threads):
    """up *= sigmoid(weight . x), for one token; each thread its rows."""
    p = load_record(SharedGateParameters, parameters)
    first, last = row_share(p.rows, p.multiple, thread, threads)
    _scale_by_gate(p.x + thread * p.stride, p.weight, p.n, p.up, first, last)


class BatchSharedGateParameters(NamedTuple):
    """Parameters of `gate_batch_shared`."""

    tokens: int  # address of an int64
    x: int  # float32[tokens, n]
    weight: int  # float32[n]
    n: int
    up: int  # float32[tokens, rows]
    rows: int


@callback(OPERATION)
def gate_batch_shared(parameters, thread, threads):
    """up[t] *= sigmoid(weight . x[t]); each thread its tokens."""
    p = load_record(BatchSharedGateParameters, parameters)
    first, last = token_share(load_int(p.tokens), thread, threads)
    for token in range(first, last):
        _scale_by_gate(p.x + token * p.n * 4, p.weight, p.n, p.up + token * p.rows * 4, 0, p.rows)
