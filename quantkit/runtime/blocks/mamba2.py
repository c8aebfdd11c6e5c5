"""Mamba-2 mixers (archs.blocks.Mamba2), layer by layer: a short convolution and a selective state space.

A head changes its state once per token, `reference.state_space`, so that any split of a prompt gives the same bits.
Heads are independent of each other, so threads split the heads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import thread_pool
from quantkit.runtime.blocks import float_ops
from quantkit.runtime.blocks.recurrent import SERIAL_ELEMENTS, RecurrentRun, convolved
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import reference
from quantkit.runtime.kv.saved_state import LayerState


def mamba2(run: RecurrentRun, part: blocks.Mamba2, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
    """What a Mamba-2 mixer adds to x float32[tokens, n_embd]; advances the states of the spans' caches."""
    sizes = part.sizes
    y = run.norm(part.norm, x)
    gates, entering, rates = (run.linear(linear, y) for linear in (part.gate, part.entering, part.rate))
    with float_ops.ignore_nonfinite():
        dt = np.logaddexp(np.float32(0), rates + run.vector(part.dt))
    taps = np.ascontiguousarray(run.vector(part.conv).reshape(sizes.channels, sizes.kernel).T)
    out = np.empty((len(x), sizes.inner), np.float32)
    for span in spans:
        rows = slice(span.start, span.stop)
        before, after = span.cache.advance(layer, span.stop - span.start)
        mixed = convolved(entering[rows], before, after, taps, run.vector(part.conv_bias), run.threads)
        _scan(run, part, mixed, dt[rows], before, after, out[rows])
    run.check(f"state space of blk.{layer}", out)
    hidden = float_ops.activate("swiglu", gates, out, run.threads)
    return run.linear(part.out, norm_groups(run, part, hidden))


def norm_groups(run: RecurrentRun, part: blocks.Mamba2, hidden: np.ndarray) -> np.ndarray:
    """RMS norm of the elements of each group, times the weight float32[inner]."""
    normed = run.norm(replace(part.out_norm, weight=""), hidden.reshape(-1, part.group))
    result: np.ndarray = normed.reshape(hidden.shape) * run.vector(part.out_norm.weight)
    return result


def _scan(
    run: RecurrentRun,
    part: blocks.Mamba2,
    x: np.ndarray,
    dt: np.ndarray,
    before: LayerState,
    after: LayerState,
    out: np.ndarray,
) -> None:
    """The state space of one sequence: out float32[tokens, inner] of x [tokens, channels] and dt [tokens, heads]."""
    sizes, skip = part.sizes, run.vector(part.skip)
    with float_ops.ignore_nonfinite():
        decay = np.exp(run.vector(part.a) * dt).T.copy()
    steps = dt.T.copy()

    def heads(start: int, stop: int) -> None:
        for head in range(start, stop):
            u = head * sizes.head_dim_v
            b = sizes.inner + head * sizes.key_heads // sizes.value_heads * sizes.head_dim_k
            reference.state_space(
                x, u, b, b + sizes.keys, decay[head], steps[head], skip[head], before.heads[head], after.heads[head],
                out, u,
            )  # fmt: skip

    busy = len(x) * sizes.inner > SERIAL_ELEMENTS
    thread_pool.over_rows(heads, sizes.value_heads, threads=run.threads if busy else 1)
