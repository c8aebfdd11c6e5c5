"""Recurrent layers (archs.blocks.DeltaNet, KimiDelta, ShortConv) on a GPU: `runtime/blocks/recurrent.py` and
`kimi_delta.py` with torch tensors.

One kernel computes the delta rule of all tokens.
"""

from __future__ import annotations

from typing import Any

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda.gpu_context import GpuContext


def delta_net(run: GpuContext, part: blocks.DeltaNet, layer: int, x: Any, spans: list[Span]) -> Any:
    """What a recurrent block adds to x float32[tokens, n_embd]; advances the states of the spans' caches on the GPU."""
    sizes, torch = part.sizes, run.gpu.torch
    y = run.norm(part.norm, x)
    entering, gates = _projected(run, part, y)
    g, beta = _rates(run, part, y)
    taps = run.vector(part.conv).view(sizes.channels, sizes.kernel)
    outputs = []
    for span in spans:
        rows = slice(span.start, span.stop)
        before, after = span.cache.advance(layer, span.stop - span.start)
        mixed = _mixed(part.sizes, convolved(entering[rows], before, after, taps, torch), torch)
        after.heads.copy_(before.heads)  # type: ignore[attr-defined]
        outputs.append(_attended(run, sizes, part.tiled, mixed, g[rows], beta[rows], after.heads))
    out = torch.cat(outputs)
    run.check(f"delta rule of blk.{layer}", out)
    normed = run.norm(part.out_norm, out.view(-1, sizes.head_dim_v)).reshape(len(x), -1)
    if part.gating == "sigmoid":
        return run.linear(part.out, normed * run.sigmoid(gates))
    return run.linear(part.out, run.activate(part.gating, gates, normed))


def kimi_delta(run: GpuContext, part: blocks.KimiDelta, layer: int, x: Any, spans: list[Span]) -> Any:
    """What Kimi Delta Attention adds to x float32[tokens, n_embd]; advances the states of the spans' caches."""
    from quantkit.runtime.kernels.cuda import delta

    sizes, torch = part.sizes, run.gpu.torch
    if sizes.head_dim_k > delta.MAX_KEYS:
        raise UnsupportedError(
            f"{part.out.weight}: heads of {sizes.head_dim_k} elements; kernels on a GPU take {delta.MAX_KEYS} at most. "
            "Keep the layer on the CPU (-ot)"
        )
    y = run.norm(part.norm, x)
    entering = torch.cat([run.linear(linear, y) for linear in (part.q, part.k, part.v)], dim=1)
    rates: Any = run.linear(part.f_b, run.linear(part.f_a, y)) + run.vector(part.dt)
    a = run.vector(part.a).repeat_interleave(sizes.head_dim_k)
    g, beta = a * torch.nn.functional.softplus(rates), run.sigmoid(run.linear(part.beta, y))
    taps = torch.cat([run.vector(name).view(sizes.inner, sizes.kernel) for name in part.convs])
    outputs = []
    for span in spans:
        rows = slice(span.start, span.stop)
        before, after = span.cache.advance(layer, span.stop - span.start)
        mixed = _mixed(sizes, convolved(entering[rows], before, after, taps, torch), torch)
        after.heads.copy_(before.heads)  # type: ignore[attr-defined]
        outputs.append(_attended(run, sizes, False, mixed, g[rows], beta[rows], after.heads))
    out = torch.cat(outputs)
    run.check(f"delta rule of blk.{layer}", out)
    normed = run.norm(part.out_norm, out.view(-1, sizes.head_dim_v)).reshape(len(x), -1)
    return run.linear(part.out, normed * run.sigmoid(run.linear(part.g_b, run.linear(part.g_a, y))))


def short_conv(run: GpuContext, part: blocks.ShortConv, layer: int, x: Any, spans: list[Span]) -> Any:
    """What a gated short convolution adds to x float32[tokens, n_embd]; advances the states of the spans' caches."""
    torch = run.gpu.torch
    projected: Any = run.linear(part.in_proj, run.norm(part.norm, x))
    b, gates, z = projected.split(part.sizes.channels, dim=1)
    entering, taps = b * z, run.vector(part.conv).view(part.sizes.channels, part.sizes.kernel)
    outputs = []
    for span in spans:
        before, after = span.cache.advance(layer, span.stop - span.start)
        outputs.append(convolved(entering[span.start : span.stop], before, after, taps, torch))
    out = torch.cat(outputs) * gates
    run.check(f"convolution of blk.{layer}", out)
    return run.linear(part.out, out)


def _projected(run: GpuContext, part: blocks.DeltaNet, y: Any) -> tuple[Any, Any]:
    """The input of the convolution, float32[tokens, channels], and the gates float32[tokens, inner]."""
    sizes, torch = part.sizes, run.gpu.torch
    projected: Any = run.linear(part.qkv, y)
    if part.gate is not None:
        return projected, run.linear(part.gate, y)
    each = sizes.inner // sizes.key_heads
    parts = projected.view(len(y), sizes.key_heads, -1).split([sizes.head_dim_k, sizes.head_dim_k, each, each], dim=2)
    *mixed, gates = (p.reshape(len(y), -1) for p in parts)
    return torch.cat(mixed, dim=1), gates


def _rates(run: GpuContext, part: blocks.DeltaNet, y: Any) -> tuple[Any, Any]:
    """g and beta, float32[tokens, value_heads]."""
    if part.ba is not None:
        rates: Any = run.linear(part.ba, y).reshape(len(y), part.sizes.key_heads, 2, -1)
        b, a = (rates[:, :, i].reshape(len(y), -1) for i in range(2))
    else:
        assert part.beta is not None
        assert part.alpha is not None
        b, a = run.linear(part.beta, y), run.linear(part.alpha, y)
    return run.vector(part.a) * run.gpu.torch.nn.functional.softplus(a + run.vector(part.dt)), run.sigmoid(b)


def convolved(x: Any, before: Any, after: Any, taps: Any, torch: Any) -> Any:
    """The convolution of x float32[tokens, channels] with taps [channels, kernel]; the last inputs are kept."""
    tokens, inputs = len(x), torch.cat([before.inputs, x])
    after.inputs.copy_(inputs[tokens:])
    return sum(taps[:, j] * inputs[j : j + tokens] for j in range(taps.shape[1]))


def _mixed(sizes: blocks.Recurrence, convolved: Any, torch: Any) -> Any:
    """Queries, keys and values of a convolution's output float32[tokens, channels], with queries and keys normed."""
    tokens = len(convolved)
    mixed = torch.nn.functional.silu(convolved)
    heads = mixed[:, : 2 * sizes.keys].view(tokens, 2, sizes.key_heads, sizes.head_dim_k)
    heads = heads * (heads.square().sum(dim=3, keepdim=True) + 1e-6).rsqrt()
    heads[:, 0] *= sizes.head_dim_k**-0.5
    return torch.cat([heads.reshape(tokens, -1), mixed[:, 2 * sizes.keys :]], dim=1)


def _attended(run: GpuContext, sizes: blocks.Recurrence, tiled: bool, x: Any, g: Any, beta: Any, state: Any) -> Any:
    """The delta rule: float32[tokens, inner] of x float32[tokens, channels]; the state is updated.

    g is float32[tokens, value_heads], or [tokens, value_heads * head_dim_k] where rows decay by themselves.
    """
    from quantkit.runtime.kernels.cuda import delta

    torch, tokens = run.gpu.torch, len(x)
    heads = torch.arange(sizes.value_heads, device=run.gpu.torch_device)
    key_of = heads % sizes.key_heads if tiled else heads * sizes.key_heads // sizes.value_heads
    q, k = (x[:, i * sizes.keys :][:, : sizes.keys].view(tokens, sizes.key_heads, -1) for i in range(2))
    q, k = q[:, key_of].contiguous(), k[:, key_of].contiguous()
    v, out = x[:, 2 * sizes.keys :].contiguous(), run.gpu.empty(tokens, sizes.inner)
    blocks_of_columns = -(-sizes.head_dim_v // delta.THREADS)
    run.gpu.launch(
        delta.step(g.shape[1] > sizes.value_heads), (blocks_of_columns, sizes.value_heads), delta.THREADS, q, k, v,
        g.contiguous(), beta.contiguous(), sizes.value_heads, sizes.head_dim_k, sizes.head_dim_v, tokens, state, out,
    )  # fmt: skip
    return out
