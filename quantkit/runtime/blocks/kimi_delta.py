"""Kimi Delta Attention (archs.blocks.KimiDelta), layer by layer: a delta rule whose state decays row by row.

A head changes its state once per token, `reference.delta_rule`, so that any split of a prompt gives the same bits.
Chunks of tokens, as `recurrent` has them, take as long here: the decays of a pair of tokens differ between the elements
of a key, so that the weights of pairs are no product of matrices. Heads are independent of each other, so threads split
the heads.
"""

from __future__ import annotations

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import thread_pool
from quantkit.runtime.blocks import float_ops
from quantkit.runtime.blocks.recurrent import SERIAL_ELEMENTS, RecurrentRun, mixed
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import reference
from quantkit.runtime.kv.saved_state import LayerState


def kimi_delta(run: RecurrentRun, part: blocks.KimiDelta, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
    """What the block adds to x float32[tokens, n_embd]; advances the states of the spans' caches."""
    sizes = part.sizes
    y = run.norm(part.norm, x)
    entering = np.concatenate([run.linear(linear, y) for linear in (part.q, part.k, part.v)], axis=1)
    decay, beta = _rates(run, part, y)
    taps = np.concatenate([run.vector(name).reshape(sizes.inner, sizes.kernel) for name in part.convs]).T.copy()
    out = np.empty((len(x), sizes.inner), np.float32)
    for span in spans:
        rows = slice(span.start, span.stop)
        before, after = span.cache.advance(layer, span.stop - span.start)
        heads = mixed(sizes, entering[rows], before, after, taps, run.threads)
        _attend(sizes, heads, decay[rows], beta[rows], before, after, out[rows], run.threads)
    run.check(f"delta rule of blk.{layer}", out)
    normed = run.norm(part.out_norm, out.reshape(-1, sizes.head_dim_v)).reshape(out.shape)
    gates = run.linear(part.g_b, run.linear(part.g_a, y))
    return run.linear(part.out, float_ops.activate("sigmoid", gates, normed, run.threads))


def _rates(run: RecurrentRun, part: blocks.KimiDelta, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e^g float32[tokens, inner] and beta float32[tokens, heads]."""
    rates = run.linear(part.f_b, run.linear(part.f_a, y))
    with float_ops.ignore_nonfinite():
        g = np.repeat(run.vector(part.a), part.sizes.head_dim_k) * np.logaddexp(
            np.float32(0), rates + run.vector(part.dt)
        )
        decay: np.ndarray = np.exp(g)
    return decay, float_ops.sigmoid(run.linear(part.beta, y))


def _attend(
    sizes: blocks.Recurrence,
    x: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    before: LayerState,
    after: LayerState,
    out: np.ndarray,
    threads: int,
) -> None:
    """The delta rule of one sequence: out float32[tokens, inner] of queries, keys and values [tokens, channels]."""
    dim, betas = sizes.head_dim_k, beta.T.copy()

    def heads(start: int, stop: int) -> None:
        for head in range(start, stop):
            at = head * dim
            own_decay = np.ascontiguousarray(decay[:, at : at + dim])
            starts = at, sizes.keys + at, 2 * sizes.keys + at
            reference.delta_rule(x, *starts, own_decay, betas[head], before.heads[head], after.heads[head], out, at)

    busy = len(x) * sizes.inner > SERIAL_ELEMENTS
    thread_pool.over_rows(heads, sizes.value_heads, threads=threads if busy else 1)
