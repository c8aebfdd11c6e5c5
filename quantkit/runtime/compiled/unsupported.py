"""Which features of a model have no operations (decode_plan.py, prefill_plan.py): such a model runs layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantkit.archs.common import blocks
from quantkit.formats.gguf import Tensor
from quantkit.placement.kernel_sizes import MIN_HEAD_DIM
from quantkit.runtime.compiled import delta_net
from quantkit.runtime.kernels import dispatch

Weights = Mapping[str, Tensor]


def unsupported_feature(weights: Weights, parts: Sequence[blocks.Block], head: blocks.Head) -> str | None:
    """The first feature of these blocks that has no operation; None if plans can be built."""
    reason = unsupported_in_blocks(weights, parts)
    return unsupported_in_head(weights, head) if reason is None else reason


def unsupported_in_head(weights: Weights, head: blocks.Head) -> str | None:
    """As `unsupported_feature`, of the head."""
    return _in_matrices(weights, [head.output, *(() if head.streams is None else head.streams.matrices)])


def unsupported_in_blocks(weights: Weights, parts: Sequence[blocks.Block]) -> str | None:
    """As `unsupported_feature`, of blocks without the head."""
    connections = [connection for block in parts for connection in block.hyper if connection is not None]
    linears = [linear for connection in connections for linear in connection.matrices]
    linears += [block.altup.router for block in parts if block.altup is not None]
    for part in (part for block in parts for part in block.parts):
        reason = _in_part(part)
        if reason is not None:
            return reason
        linears += _linears(part)
    return _in_matrices(weights, linears)


def unsupported_in_experts(weights: Weights, part: blocks.Experts) -> str | None:
    """As `unsupported_feature`, of the routed experts of a block: their matrices alone."""
    reason = _in_experts(part)
    return _in_matrices(weights, (part.gate, part.up, part.down)) if reason is None else reason


def _in_part(part: blocks.Part) -> str | None:
    """What has no operation in a part of a block, whatever the types of its matrices."""
    if isinstance(part, blocks.Attention):
        return _in_attention(part)
    if isinstance(part, blocks.LatentAttention):
        return _in_latent_attention(part)
    if isinstance(part, blocks.CompressedAttention):
        return _in_compressed_attention(part)
    if isinstance(part, blocks.LayerInput):
        return _in_layer_input(part)
    return _in_experts(part) if isinstance(part, blocks.Experts) else None


def _linears(part: blocks.Part) -> list[blocks.Linear]:
    """The matrices of a part of a block."""
    found: Sequence[blocks.Linear | None]
    if isinstance(part, blocks.Attention):
        found = part.q, part.k, part.v, part.out, part.head_gate
        if part.indexer is not None:
            found = *found, part.indexer.q, part.indexer.k
    elif isinstance(part, blocks.LatentAttention):
        found = part.q_a, part.q, part.kv_a, part.kv_b, part.k_b, part.v_b, part.out
        if part.indexer is not None:
            found = *found, part.indexer.q_b, part.indexer.k, part.indexer.weights
    elif isinstance(part, blocks.CompressedAttention):
        found = part.q_a, part.q_b, part.kv, *part.group_matrices, part.out_b
        found = *found, *(linear for each in part.compressors for linear in (each.kv, each.gate))
        if part.indexer is not None:
            found = *found, part.indexer.q_b, part.indexer.weights
    elif isinstance(part, blocks.DeltaNet):
        found = delta_net.matrices(part)
    elif isinstance(part, blocks.KimiDelta):
        found = part.matrices
    elif isinstance(part, blocks.Mamba2):
        found = part.gate, part.entering, part.rate, part.out
    elif isinstance(part, blocks.ShortConv):
        found = part.in_proj, part.out
    elif isinstance(part, blocks.LayerInput):
        found = part.project, part.gate, part.out
    elif isinstance(part, blocks.Laurel):
        found = part.left, part.right
    elif isinstance(part, blocks.NGrams):
        found = part.key, part.value
    elif isinstance(part, blocks.Experts):
        found = part.gate, part.up, part.down, part.router, part.latent_down, part.latent_up
        if part.shared is not None:
            found = *found, part.shared.gate, part.shared.up, part.shared.down
    else:
        assert isinstance(part, blocks.FeedForward)
        found = part.gate, part.up, part.down
    return [linear for linear in found if linear is not None]


def _in_matrices(weights: Weights, linears: Sequence[blocks.Linear]) -> str | None:
    return next((reason for linear in linears if (reason := _in_matrix(weights, linear)) is not None), None)


def _in_attention(part: blocks.Attention) -> str | None:
    if min(part.head_dim_k, part.head_dim_v) < MIN_HEAD_DIM:
        return f"heads of {part.head_dim_k} and {part.head_dim_v} elements: kernels need at least {MIN_HEAD_DIM}"
    if part.indexer is not None and part.indexer.dim % 32:
        return f"an indexer of {part.indexer.dim} elements, not a multiple of 32 ({part.indexer.k.weight})"
    return None


def _in_layer_input(part: blocks.LayerInput) -> str | None:
    if part.project.is_scaled and part.project.scale:
        return f"no operation scales the projections of single layers ({part.project.scale})"
    return None


def _in_latent_attention(part: blocks.LatentAttention) -> str | None:
    sizes = {"nope": part.nope, "kv_lora": part.kv_lora, "head_dim_v": part.head_dim_v}
    for name, size in sizes.items():
        if size % 32:
            return f"latent attention where {name} is {size}, not a multiple of 32 ({part.kv_a.weight})"
    if part.indexer is not None and part.indexer.dim % 32:
        return f"an indexer of {part.indexer.dim} elements, not a multiple of 32 ({part.indexer.k.weight})"
    for linear in (part.kv_b, part.k_b, part.v_b):
        if linear is not None and linear.is_scaled:
            return f"no operation scales matrices between latents and heads ({linear.weight})"
    if part.rope.dim % 16:
        return f"latent attention with RoPE of {part.rope.dim} elements, not a multiple of 16 ({part.kv_a.weight})"
    return None


def _in_compressed_attention(part: blocks.CompressedAttention) -> str | None:
    if part.dim % 32:
        return f"compressed attention with heads of {part.dim} elements, not a multiple of 32 ({part.kv.weight})"
    if part.indexer is not None and part.indexer.dim % 32:
        return f"an indexer of {part.indexer.dim} elements, not a multiple of 32 ({part.indexer.q_b.weight})"
    return None


def _in_experts(part: blocks.Experts) -> str | None:
    # Rows of experts are the columns of another matrix, so `_in_matrix` makes sure that they fill whole units of work.
    if isinstance(part.activation, blocks.Xielu):
        return f"no operation computes xIELU of experts ({part.up.weight})"
    if part.ungated and part.weighs_inputs:
        return f"no operation weights inputs of experts without a gate ({part.up.weight})"
    for linear in (part.gate, part.up, part.down):
        if linear.bias and part.weighs_inputs:
            return f"no operation adds biases of experts to products of weighted inputs ({linear.bias})"
        if linear.factor != 1:
            return f"no operation multiplies products and biases of experts ({linear.weight})"
    return None


def _in_matrix(weights: Weights, linear: blocks.Linear) -> str | None:
    tensor = weights[linear.weight]
    if dispatch.product(tensor.type) is None:
        return f"no kernel for {tensor.type.name} ({linear.weight})"
    if tensor.shape[-1] % 32:
        return f"rows of {tensor.shape[-1]} columns are not a multiple of 32 ({linear.weight})"
    if linear.rows is not None and any(row % tensor.type.interleave for row in linear.rows):
        return f"rows {linear.rows} of {linear.weight} are no whole groups of {tensor.type.interleave}"
    if tensor.shape[-2] % tensor.type.interleave:
        return f"{tensor.shape[-2]} rows are not a multiple of {tensor.type.interleave} ({linear.weight})"
    return None
