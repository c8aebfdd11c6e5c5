"""Which features of a model have no operations (runtime/compiled/plans.py): it then runs layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantkit.archs.common import blocks
from quantkit.formats.gguf import Tensor
from quantkit.runtime.kernels import dispatch
from quantkit.runtime.kernels.cpu import expert_ops

Weights = Mapping[str, Tensor]


def unsupported_feature(weights: Weights, parts: Sequence[blocks.Block], head: blocks.Head) -> str | None:
    """The first feature of these blocks that has no operation; None where an operation list can be built."""
    linears = [head.output]
    if head.embedding_scale != 1:
        return "no operation scales embeddings"
    for part in (part for block in parts for part in block.parts):
        if isinstance(part, blocks.Attention):
            linears += [part.q, part.k, part.v, part.out]
            if part.sinks or part.post_norm is not None:
                return "attention with sinks, or whose result is normed"
            if part.gated:
                return "attention whose result is gated"
            if part.norms_together or part.norms_after_rope:
                return "queries and keys are normed all heads together, or after rope"
            if part.sub_norm is not None:
                return "what heads attended to is normed"
            if part.temperature is not None:
                return "queries depend on their position beyond rope"
            if part.head_dim_k % 16 or part.head_dim_v % 16:
                return f"heads of {part.head_dim_k} and {part.head_dim_v} dimensions are not multiples of 16"
        elif isinstance(part, blocks.LatentAttention):
            return "latent attention runs layer by layer"
        elif isinstance(part, blocks.DeltaNet):
            return "recurrent layers run layer by layer"
        else:
            linears += [part.gate, part.up, part.down]
            if isinstance(part, blocks.Experts):
                linears.append(part.router)
                if part.shared is not None:
                    linears += [part.shared.gate, part.shared.up, part.shared.down]
                for linear in (part.gate, part.down):
                    if weights[linear.weight].shape[1] % expert_ops.ROWS:
                        rows = weights[linear.weight].shape[1]
                        return f"{rows} rows of an expert are not a multiple of {expert_ops.ROWS} ({linear.weight})"
            if isinstance(part, blocks.Experts) and part.shared_gate is not None:
                return f"a shared expert with a gate ({part.shared_gate})"
            if isinstance(part, blocks.Experts) and (part.gate.bias or part.up.bias or part.down.bias):
                return f"experts with biases ({part.gate.bias})"
            if part.activation != "swiglu":
                return f"no kernel for the activation {part.activation}"
    for linear in linears:
        if linear.scale:
            return f"no operation scales a product ({linear.scale})"
        tensor = weights[linear.weight]
        if dispatch.product(tensor.type) is None:
            return f"no kernel for {tensor.type.name} ({linear.weight})"
        if tensor.shape[-1] % 32:
            return f"rows of {tensor.shape[-1]} columns are not a multiple of 32 ({linear.weight})"
        if tensor.shape[-2] % tensor.type.interleave:
            return f"{tensor.shape[-2]} rows are not whole groups of {tensor.type.interleave} ({linear.weight})"
    return None
