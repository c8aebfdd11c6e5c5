"""The experts plan: the routed experts of single layers as operation lists, for layers whose other parts are elsewhere.

    one token    quantize x, gate, up, activation | down, weighted sum |
    batch        group the tokens by expert | gather | gate, up, activation | down, weighted sum |

The operations are those of the decode plan and of the prefill plan after routing. Each layer has lists of its own; all
of them share their working memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import BATCH_TOKENS
from quantkit.runtime.compiled import decode_plan, prefill_plan
from quantkit.runtime.compiled.decode_plan import DecodeOps
from quantkit.runtime.compiled.plan_base import Activations, Array, GivenExperts, ModelParts, PlanOps
from quantkit.runtime.compiled.prefill_plan import PrefillOps
from quantkit.runtime.kernels.cpu import prefill_norms
from quantkit.runtime.kernels.cpu.op_list import Buffers


class ExpertsPlan:
    """`plan(part, x, chosen, weights)`: what the chosen experts of a block make of x, weighted and added up.

    model     what the lists are built from; its blocks are not read
    buffers   working memory, shared with other lists that do not run at the same time
    """

    def __init__(self, model: ModelParts, buffers: Buffers):
        self._model, self._buffers = model, buffers
        self._given = GivenExperts(model, 0)
        self._state, self._position = prefill_plan.new_state(0), np.zeros(1, np.int64)
        self._token_ops: dict[str, PlanOps] = {}  # by the name of `down`
        self._batch_ops: dict[str, PlanOps] = {}
        self._arrays: dict[tuple[str, tuple[int, ...]], Array] = {}

    def __call__(self, part: blocks.Experts, x: Array, chosen: Array, weights: Array) -> Array:
        """A fresh array like x float32[tokens, n_embd] or latents.

        chosen int[tokens, used] are the numbers of experts with matrices, -1 where there are fewer; weights
        float32[tokens, used].
        """
        assert chosen.max(initial=-1) < part.stacked, f"{part.router.weight}: an expert that is none of {part.stacked}"
        if len(x) == 1:
            return self._of_token(part, x, chosen[0], weights[0])
        out = np.empty(x.shape, np.float32)
        for start in range(0, len(x), BATCH_TOKENS):
            rows = slice(start, start + BATCH_TOKENS)
            out[rows] = self._of_batch(part, x[rows], chosen[rows], weights[rows])
        return out

    def prepared(self, part: blocks.Experts, x: Array, chosen: Array, weights: Array, out: Array) -> Callable[[], int]:
        """A call for one token whose arrays are the same each time; it reads them when it is called, and writes `out`.

        x and out float32[1, n_embd] or latents, whole; chosen int32 or int64[1, used] are all numbers of experts, also
        of those that give x. The call returns how many have matrices.
        """
        assert all(a.dtype == np.float32 and a.flags.c_contiguous for a in (x, out))
        selected = np.zeros(1 + 2 * part.used, np.int64)
        numbers = selected[1 : 1 + part.used]
        shares, (row,), (given,) = selected[1 + part.used :].view(np.float32)[: part.used], chosen, weights
        run = self._build_token(part, x, selected, out).run

        def call() -> int:
            experts = row.tolist()
            known = min(experts) >= 0 and max(experts) < part.count
            assert known, f"{part.router.weight}: an expert that is none of {part.count}"
            numbers[:], shares[:] = row, given
            if max(experts) < part.stacked:
                selected[0] = part.used
                run()
                return part.used
            stacked = row < part.stacked
            selected[0] = count = int(np.count_nonzero(stacked))
            numbers[:count], shares[:count] = row[stacked], given[stacked]
            run()
            out[:] += (given * ~stacked).sum() * x
            return count

        return call

    def _of_token(self, part: blocks.Experts, x: Array, chosen: Array, weights: Array) -> Array:
        selected, numbers = self._selected(part.used), np.flatnonzero(chosen >= 0)
        selected[0], count = len(numbers), part.used
        selected[1 : 1 + len(numbers)] = chosen[numbers]
        selected[1 + count :].view(np.float32)[: len(numbers)] = weights[numbers]
        entering, out = self._rows(x.shape[1], 1)
        entering[:] = x
        if part.down.weight not in self._token_ops:
            self._token_ops[part.down.weight] = self._build_token(part, entering, selected, out)
        self._token_ops[part.down.weight].run()
        return out.copy()

    def _of_batch(self, part: blocks.Experts, x: Array, chosen: Array, weights: Array) -> Array:
        count, (entering, out) = len(x), self._rows(x.shape[1], BATCH_TOKENS)
        numbers = self._array("experts", (BATCH_TOKENS, part.used), np.int64)
        shares = self._array("weights", (BATCH_TOKENS, part.used), np.float32)
        entering[:count], numbers[:count], shares[:count] = x, chosen, weights
        prefill_plan.write_state(self._state, count, (), ())
        if part.down.weight not in self._batch_ops:
            self._batch_ops[part.down.weight] = self._build_batch(part, entering, numbers, shares, out)
        self._batch_ops[part.down.weight].run()
        return out[:count]

    def _build_token(self, part: blocks.Experts, x: Array, selected: Array, out: Array) -> PlanOps:
        part = _with_matrices(part)
        ops = DecodeOps(self._model, self._given, out, self._position, self._buffers)
        entering = Activations(ops.keep(x).ctypes.data, 0)
        quantized = ops.norm_of(None, entering, x.shape[1], "quantized experts")
        found = decode_plan.Selected(ops.keep(selected).ctypes.data, 0)
        decode_plan.add_selected_experts(ops, part, quantized, found, ops.x, fresh=True)
        return ops

    def _build_batch(self, part: blocks.Experts, x: Array, numbers: Array, shares: Array, out: Array) -> PlanOps:
        part = _with_matrices(part)
        ops = PrefillOps(self._model, self._given, out, self._state, self._buffers)
        selected = prefill_plan.Selected(*(ops.keep(array).ctypes.data for array in (numbers, shares)))
        clear = prefill_norms.ClearParameters(state=ops.state, x=ops.x, n=x.shape[1])
        ops.add(prefill_norms.clear, clear)  # barriers follow before anything is added
        prefill_plan.add_selected_experts(ops, part, ops.keep(x).ctypes.data, selected, ops.x)
        return ops

    def _rows(self, n: int, tokens: int) -> tuple[Array, Array]:
        """What enters experts and what leaves them, float32[tokens, n]."""
        return self._array("entering", (tokens, n), np.float32), self._array("out", (tokens, n), np.float32)

    def _selected(self, used: int) -> Array:
        """The record of a token's experts: their number, int64[used] and float32[used]."""
        return self._array("selected", (1 + 2 * used,), np.int64)

    def _array(self, name: str, shape: tuple[int, ...], dtype: type) -> Array:
        """An array that the lists of all layers share."""
        key = name, shape
        if key not in self._arrays:
            self._arrays[key] = np.zeros(shape, dtype)
        return self._arrays[key]

    @property
    def array_bytes(self) -> int:
        """Bytes of what enters and leaves the lists, beside their buffers."""
        return sum(array.nbytes for array in self._arrays.values())


def _with_matrices(part: blocks.Experts) -> blocks.Experts:
    """The part without experts that give their input."""
    return replace(part, count=part.stacked, identity=0)
