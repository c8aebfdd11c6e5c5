"""A model as its two plans: what `runtime/model.py` calls for `fast` numerics."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.runtime.compiled.decode_plan import DecodePlan
from quantkit.runtime.compiled.plan_base import Array, ModelParts
from quantkit.runtime.compiled.prefill_plan import PrefillPlan
from quantkit.runtime.kv.cache import Cache


class CompiledModel:
    """The decode plan and the prefill plan of one model."""

    def __init__(self, model: ModelParts):
        self.decode = DecodePlan(model)
        self.prefill = PrefillPlan(model)

    @property
    def work_bytes(self) -> int:
        """Bytes of working memory so far, beside weights and caches: what `placement/workspace.py` predicts."""
        return self.decode.work_bytes + self.prefill.work_bytes

    def last_logits(self, ids: Array, cache: Cache) -> Array:
        """float32[1, vocab]: logits after the last of int64[tokens]; the cache then holds all of them."""
        if len(ids) == 1:
            return self.decode(int(ids[0]), cache)[None]
        for x in self.prefill.batches(ids, cache):
            last = x[-1]
        return self.decode.project(last)[None]

    def hidden_states(self, ids: Array, cache: Cache) -> Iterator[Array]:
        """float32[tokens, n_embd] before the output norm, in batches, each valid until the next."""
        return self.prefill.batches(ids, cache)
