"""Per-layer embeddings (archs.blocks.LayerInput) in both plans; plain in `runtime/blocks/layer_input.py`.

one token   at the start: the projections of all layers |
            layer: gate, norm, add to the row, activation | out | norm, add to x |
batch       layer: quantize the embedding | project | quantize x | gate | norm, add to the rows, activation | out | …

The rows of the table are looked up by the plan, times 2^-1/2; the weight of the norm is multiplied by that here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import activation_bytes
from quantkit.runtime.blocks import float_linear
from quantkit.runtime.blocks.layer_input import FACTOR, table_rows
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, Array, BatchOps, ModelParts, PlanOps, TokenOps
from quantkit.runtime.kernels.cpu import decode_norms, decode_ops, prefill_norms, prefill_ops


def of_model(model: ModelParts) -> list[blocks.LayerInput]:
    """The per-layer embeddings of a model, in the order of its layers."""
    return [part for block in model.block_list for part in block.parts if isinstance(part, blocks.LayerInput)]


class LayerRows:
    """The rows of the table that a plan's operations read: float32[layers, tokens, width], filled before each run.

    x    float32[tokens, n_embd]: the embedding, as it is before the first layer
    """

    def __init__(self, model: ModelParts, tokens: int):
        self._weights, self._parts = model.weights, of_model(model)
        width = self._parts[0].width if self._parts else 0
        self.rows = np.zeros((len(self._parts), tokens, width), np.float32)
        self.x = np.zeros((tokens if self._parts else 0, model.n_embd), np.float32)

    def look_up(self, tokens: Array, x: Array) -> None:
        """Fill in what int64[tokens] name, whose embeddings are x float32[tokens, n_embd]."""
        if not self._parts:
            return
        count, width = len(tokens), self._parts[0].width
        self.x[:count] = x
        found = table_rows(self._weights, self._parts[0], tokens) * np.float32(FACTOR)
        for rows, part in zip(self.rows, self._parts):
            rows[:count] = found[:, part.first : part.first + width]

    def address(self, part: blocks.LayerInput) -> int:
        """Address of the rows of a layer."""
        return int(self.rows[self._parts.index(part)].ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.rows.nbytes + self.x.nbytes


def add_projections(ops: TokenOps, parts: Sequence[blocks.LayerInput]) -> None:
    """Append the products of the embedding, which x is, with the matrix of all layers."""
    if parts:
        whole = replace(parts[0].project, rows=None)
        ops.matvec(whole, ops.norm(None), _projected(ops, whole), barrier=True)


def add_decode(ops: TokenOps, part: blocks.LayerInput, rows: int) -> None:
    """Append what a layer has of one token; `rows` is the address of the layer's row float32[width]."""
    gate = ops.buffer("gate", 4 * part.width)
    ops.matvec(part.gate, ops.norm(None), gate)
    norm = decode_norms.NormRowsParameters(
        x=_projected(ops, replace(part.project, rows=None)) + 4 * part.first,
        weight=_weight(ops, part.project_norm),
        n=part.width,
        eps=ops.constant(part.project_norm.eps),
        multiple=SPLIT_ROWS,
        out=rows,
        add=1,
    )
    ops.add(decode_norms.norm_rows, norm)  # each thread norms, activates and multiplies the same share
    hidden = ops.buffer("hidden", activation_bytes(part.width))
    gated = decode_ops.GatedParameters(
        activation=ops.activation("geglu"), gate=gate, up=rows, n=part.width, multiple=SPLIT_ROWS, buffer=hidden,
        numbers=0,
    )  # fmt: skip
    ops.add(decode_ops.gated, gated, barrier=True)
    ops.add_to_residual(part.out, Activations(hidden, 0), part.post_norm)


def add_prefill(ops: BatchOps, part: blocks.LayerInput, embedded: int, rows: int) -> None:
    """Append what a layer has of a batch; the addresses of the embedding and of the layer's rows are given."""
    projected, gate = ops.floats("layer input", part.width), ops.floats("gate", part.width)
    ops.multiply(part.project, ops.quantize(embedded, ops.n_embd, (part.project,)), projected, barrier=True)
    ops.multiply(part.gate, ops.norm(None, (part.gate,)), gate, barrier=True)
    add = prefill_norms.AddParameters(
        state=ops.state, y=projected, weight=_weight(ops, part.project_norm), n=part.width,
        eps=ops.constant(part.project_norm.eps), x=rows,
    )  # fmt: skip
    ops.add(prefill_norms.add, add)  # of the thread's own tokens, as the next one
    gated = prefill_ops.GatedParameters(
        state=ops.state, activation=ops.activation("geglu"), gate=gate, up=rows, n=part.width, out=gate, numbers=0
    )
    ops.add(prefill_ops.gated, gated)
    ops.add_to_residual(part.out, ops.quantize(gate, part.width, (part.out,)), part.post_norm)


def _projected(ops: TokenOps, whole: blocks.Linear) -> int:
    """Address of the products of all layers, float32[layers * width]."""
    return ops.buffer("layer inputs", 4 * ops.rows(whole))


def _weight(ops: PlanOps, norm: blocks.Norm) -> int:
    """Address of the norm's weight, times 2^-1/2."""
    weight = float_linear.vector(ops.model.weights[norm.weight]) * np.float32(FACTOR)
    return int(ops.keep(weight).ctypes.data)
