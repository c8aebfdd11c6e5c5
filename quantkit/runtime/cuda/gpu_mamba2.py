"""Mamba-2 mixers (archs.blocks.Mamba2) on a GPU: `runtime/blocks/mamba2.py` with torch tensors.

One kernel computes all tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda.gpu_context import GpuContext


def mamba2(run: GpuContext, part: blocks.Mamba2, layer: int, x: Any, spans: list[Span]) -> Any:
    """What a Mamba-2 mixer adds to x float32[tokens, n_embd]; advances the states of the spans' caches on the GPU."""
    torch = run.gpu.torch
    y = run.norm(part.norm, x)
    gates: Any = run.linear(part.gate, y)
    entering: Any = run.linear(part.entering, y)
    rates: Any = run.linear(part.rate, y)
    steps = torch.nn.functional.softplus(rates + run.vector(part.dt))
    outputs = []
    for span in spans:
        rows = slice(span.start, span.stop)
        before, after = span.cache.advance(layer, span.stop - span.start)
        mixed = _convolved(run, part, entering[rows], before, after)
        after.heads.copy_(before.heads)  # type: ignore[attr-defined]
        outputs.append(_scanned(run, part, mixed, steps[rows], after.heads))
    out = torch.cat(outputs)
    run.check(f"state space of blk.{layer}", out)
    hidden = run.activate("swiglu", gates, out)
    normed = run.norm(replace(part.out_norm, weight=""), hidden.reshape(-1, part.group)).reshape(len(x), -1)
    return run.linear(part.out, normed * run.vector(part.out_norm.weight))


def _convolved(run: GpuContext, part: blocks.Mamba2, x: Any, before: Any, after: Any) -> Any:
    """The convolution of x float32[tokens, channels]: u, B and C."""
    sizes, torch, tokens = part.sizes, run.gpu.torch, len(x)
    taps = run.vector(part.conv).view(sizes.channels, sizes.kernel)
    inputs = torch.cat([before.inputs, x])
    after.inputs.copy_(inputs[tokens:])
    total = sum(taps[:, j] * inputs[j : j + tokens] for j in range(sizes.kernel))
    return torch.nn.functional.silu(total + run.vector(part.conv_bias))


def _scanned(run: GpuContext, part: blocks.Mamba2, x: Any, steps: Any, state: Any) -> Any:
    """The state space: float32[tokens, inner] of x float32[tokens, channels]; the state is updated."""
    from quantkit.runtime.kernels.cuda import mamba2 as kernels

    sizes, tokens = part.sizes, len(x)
    if sizes.head_dim_k > kernels.MAX_KEYS:
        raise UnsupportedError(
            f"{part.out.weight}: states of {sizes.head_dim_k} elements a column; kernels on a GPU take "
            f"{kernels.MAX_KEYS} at most. Keep the layer on the CPU (-ot)"
        )
    out = run.gpu.empty(tokens, sizes.inner)
    run.gpu.launch(
        kernels.step(), (-(-sizes.head_dim_v // kernels.THREADS), sizes.value_heads), kernels.THREADS, x.contiguous(),
        steps.contiguous(), run.vector(part.a), run.vector(part.skip), sizes.value_heads, sizes.key_heads,
        sizes.head_dim_k, sizes.head_dim_v, tokens, state, out,
    )  # fmt: skip
    return out
