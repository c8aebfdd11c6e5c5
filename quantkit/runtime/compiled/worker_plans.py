"""The plans of a CPU worker of a model on several devices: neighbouring blocks, experts of single blocks, the head."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from quantkit.archs.common import blocks
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.compiled import unsupported
from quantkit.runtime.compiled.blocks_plan import BlocksPlan
from quantkit.runtime.compiled.decode_plan import HeadPlan
from quantkit.runtime.compiled.experts_plan import ExpertsPlan
from quantkit.runtime.compiled.plan_base import Array, ModelParts
from quantkit.runtime.kernels.cpu.op_list import Buffers


class WorkerPlans:
    """Plans that share their working memory: one of them runs at a time.

    model     what they are built from, without blocks
    experts   the ExpertsPlan
    """

    def __init__(self, model: ModelParts):
        self._model = model
        self._buffers: Buffers = {}
        self._runs: dict[tuple[int, ...], BlocksPlan] = {}  # by layers
        self._reasons: dict[str, str | None] = {}  # why experts are not supported, by the name of `down`
        self.experts = ExpertsPlan(model, self._buffers)

    def run_blocks(self, run: Sequence[blocks.Block], x: Array, spans: Sequence[Span]) -> Array:
        """What leaves neighbouring blocks; see `BlocksPlan`."""
        layers = tuple(block.layer for block in run)
        if layers not in self._runs:
            self._runs[layers] = BlocksPlan(replace(self._model, block_list=run), self._buffers)
        return self._runs[layers](x, spans)

    def project(self, x: Array) -> Array:
        """float32[1, vocab]: the logits of x float32[1, n_embd], before the head's soft cap."""
        return self._head(x[0])[None]

    @functools.cached_property
    def _head(self) -> HeadPlan:
        return HeadPlan(replace(self._model, head=replace(self._model.head, softcap=None)), self._buffers)

    @functools.cached_property
    def unsupported_head(self) -> str | None:
        """What in the head has no operation; None if nothing."""
        return unsupported.unsupported_in_head(self._model.weights, self._model.head)

    def unsupported(self, block: blocks.Block) -> str | None:
        """What in a block has no operation, or needs the tokens' numbers; None where nothing has to be left out."""
        if block.hyper or block.altup is not None:
            return f"blk.{block.layer} reads residual streams, which a part of a model does not get"
        if tables := [part.table for part in block.parts if isinstance(part, (blocks.LayerInput, blocks.NGrams))]:
            return f"embeddings by tokens ({tables[0]}), which a part of a model does not know"
        tables = [part.table for part in block.parts if isinstance(part, blocks.Experts) and part.table]
        if tables:
            return f"experts by tokens ({tables[0]}), which a part of a model does not know"
        return unsupported.unsupported_in_blocks(self._model.weights, [block])

    def unsupported_experts(self, part: blocks.Experts) -> str | None:
        """What in the routed experts of a block has no operation; None if nothing."""
        name = part.down.weight
        if name not in self._reasons:
            self._reasons[name] = unsupported.unsupported_in_experts(self._model.weights, part)
        return self._reasons[name]

    @property
    def work_bytes(self) -> int:
        """Bytes of working memory so far, beside weights and caches."""
        own = self.experts.array_bytes + sum(plan.own_bytes for plan in self._runs.values())
        own += self._head.own_bytes if "_head" in vars(self) else 0
        return own + sum(buffer.nbytes for buffer in self._buffers.values())
