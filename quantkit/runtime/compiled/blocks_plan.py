"""The blocks plan: neighbouring blocks of a model on several devices, as operation lists.

The operations are those of the decode plan and of the prefill plan. The rest of the model is elsewhere: the plan takes
and gives hidden states, and the length of caches is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantkit.placement.kernel_sizes import BATCH_TOKENS
from quantkit.runtime.blocks.spans import Span, batches
from quantkit.runtime.compiled import decode_plan, prefill_plan
from quantkit.runtime.compiled.decode_plan import DecodeOps
from quantkit.runtime.compiled.layer_input import LayerRows
from quantkit.runtime.compiled.ngrams import NGramRows
from quantkit.runtime.compiled.plan_base import Array, CompiledPlan, GivenExperts, ModelParts, PlannedCaches, PlanOps
from quantkit.runtime.compiled.prefill_plan import PrefillOps
from quantkit.runtime.kernels.cpu.op_list import Buffers


class BlocksPlan:
    """`plan(x, spans)` is float32[tokens, n_embd], what leaves the blocks of `model`.

    The caches then hold the tokens in these blocks' layers; their `length` is as before. All caches have one type. The
    lists work in `buffers`, which other lists that do not run at the same time share.
    """

    def __init__(self, model: ModelParts, buffers: Buffers):
        self._token, self._batch = _TokenBlocks(model, buffers), _BatchBlocks(model, buffers)

    def __call__(self, x: Array, spans: Sequence[Span]) -> Array:
        """A fresh array; the caller makes sure that the caches have room."""
        return self._token(x, spans[0]) if len(x) == 1 else self._batch(x, spans)

    @property
    def own_bytes(self) -> int:
        """Bytes of working memory so far, beside `buffers`."""
        return self._token.own_bytes + self._batch.own_bytes


class _TokenBlocks(CompiledPlan):
    """One token."""

    def __init__(self, model: ModelParts, buffers: Buffers):
        super().__init__(model)
        self._buffers = buffers
        self._x, self._position = np.zeros((1, model.n_embd), np.float32), np.zeros(1, np.int64)

    def __call__(self, x: Array, span: Span) -> Array:
        ops = self._point_to([span.cache])
        self._x[:], self._position[0] = x, span.cache.length
        ops.run()
        span.cache.end_update(self._recurrent, 1)
        return self._x.copy()

    def _build(self, shape: PlannedCaches) -> PlanOps:
        ops = DecodeOps(self.model, GivenExperts(self.model, 1), self._x, self._position, self._buffers)
        decode_plan.add_blocks(ops, LayerRows(self.model, 1), NGramRows(self.model, 1), shape)
        return ops

    @property
    def own_bytes(self) -> int:
        """Bytes of working memory so far, beside the buffers."""
        return self.table_bytes + self._x.nbytes + self._position.nbytes


class _BatchBlocks(CompiledPlan):
    """Several tokens, in batches."""

    def __init__(self, model: ModelParts, buffers: Buffers):
        super().__init__(model)
        self._buffers = buffers
        self._x, self._state = np.zeros((0, model.n_embd), np.float32), prefill_plan.new_state(BATCH_TOKENS)

    def __call__(self, x: Array, spans: Sequence[Span]) -> Array:
        states = [span.cache.begin_update(self._recurrent) for span in spans]
        lengths, outputs = [span.cache.length for span in spans], []
        sequences = [(x[span.start : span.stop], span.cache) for span in spans]
        for rows, pieces, which in batches(sequences, BATCH_TOKENS):
            ops = self._point([piece.cache for piece in pieces], [state for i in which for state in states[i]])
            self._x[: len(rows)] = rows
            prefill_plan.write_state(self._state, len(rows), pieces, [lengths[i] for i in which])
            ops.run()
            outputs.append(self._x[: len(rows)].copy())
            for i, piece in zip(which, pieces):
                lengths[i] += piece.stop - piece.start
        for span in spans:
            span.cache.end_update(self._recurrent, span.stop - span.start)
        return np.concatenate(outputs)

    def _build(self, shape: PlannedCaches) -> PlanOps:
        self._x = np.zeros((BATCH_TOKENS, self.model.n_embd), np.float32)
        ops = PrefillOps(self.model, GivenExperts(self.model, BATCH_TOKENS), self._x, self._state, self._buffers)
        prefill_plan.add_blocks(ops, LayerRows(self.model, BATCH_TOKENS), NGramRows(self.model, BATCH_TOKENS), shape)
        return ops

    @property
    def own_bytes(self) -> int:
        """Bytes of working memory so far, beside the buffers."""
        return self.table_bytes + self._x.nbytes + self._state.nbytes
