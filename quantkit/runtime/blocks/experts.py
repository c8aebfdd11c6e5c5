"""Mixture of experts, layer by layer in float32: top-k routing of tokens, and the weighted sum of the experts' outputs.

    chosen, weights = route(part, logits, reduction)      int64[tokens, used], -1 where left out; float32[tokens, used]
    y = run(part, tensors, x, chosen, weights, threads)   float32[tokens, n], n elements as of x

Tokens are gathered by expert, so that each matrix is decoded once for a batch. A reduction (K, t), `-ser K,t`, leaves
out experts of low probability: of those a token is routed to, ordered by probability, the first K are used, and of the
others those whose probability is above t times the first one's. t = 0 changes nothing, t = 1 uses exactly K experts.
Where weights are normalized, they are divided by the sum over the experts that are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import jit
from quantkit.errors import DataError
from quantkit.formats.gguf import Tensor
from quantkit.runtime.blocks import float_linear, float_ops
from quantkit.runtime.kernels import reference

Reduction = tuple[int, float]
Observe = Callable[[str, np.ndarray, int, int], None]
ObserveOutputs = Callable[[str, np.ndarray, np.ndarray, int, int], None]
Product = Callable[[np.ndarray], np.ndarray]


def reduction(parts: Sequence[blocks.Block], requested: Reduction | None, path: Path) -> Reduction | None:
    """The reduction `requested`, checked against the model; None for (K, 0), which leaves out none.

    DataError where the model has no experts, or K or t is out of range.
    """
    if requested is None:
        return None
    min_used, min_share = requested
    used = min((p.used for block in parts for p in block.parts if isinstance(p, blocks.Experts)), default=0)
    if not used:
        raise DataError(f"{path}: the model has no experts that -ser {min_used},{min_share:g} could leave out")
    option = f"-ser {min_used},{min_share:g}"
    if not 1 <= min_used < used:
        raise DataError(f"{path}: {option}: K must be at least 1 and below the {used} experts used")
    if not 0 <= min_share <= 1:
        raise DataError(f"{path}: {option}: the share t must be 0 to 1")
    return requested if min_share else None


def route(
    part: blocks.Experts,
    logits: np.ndarray,
    reduction: Reduction | None = None,
    bias: np.ndarray | None = None,
    given: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights of each token from router logits float32[tokens, count], which are overwritten.

    `bias` is what `part.choice_bias` names. `given` int64[tokens, used] are the experts, where a table has them.
    """
    min_used, min_share = reduction or (part.used, 0.0)
    bias = jit.readonly(np.zeros(0, np.float32)) if bias is None else bias
    given = np.zeros((len(logits), 0), np.int64) if given is None else given
    chosen = np.full((len(logits), part.used), -1, np.int64)
    weights = np.zeros((len(logits), part.used), np.float32)
    for token in range(len(logits)):
        if part.gating == "sqrtsoftplus":
            count = reference.route_softplus(
                logits[token], bias, given[token], part.used, min_used, np.float32(min_share), part.normalise,
                np.float32(part.scale), chosen[token], weights[token],
            )  # fmt: skip
            chosen[token, count:], weights[token, count:] = -1, 0
            continue
        reference.route(
            logits[token], bias, part.gating == "sigmoid", part.groups, part.groups_used, part.used, min_used,
            np.float32(min_share), part.normalise, np.float32(part.scale), chosen[token], weights[token],
        )  # fmt: skip
    return chosen, weights


def of_tokens(part: blocks.Experts, tensors: Mapping[str, Tensor], tokens: np.ndarray) -> np.ndarray:
    """int64[tokens, used]: the experts that the table gives int64[tokens]. DataError where it has wrong ones."""
    assert part.table
    tensor = tensors[part.table]
    table = np.ascontiguousarray(tensor.rows(0, tensor.n_rows)).view("<i4")
    found: np.ndarray = table[tokens].astype(np.int64)
    if ((found < 0) | (found >= part.count)).any():
        raise DataError(f"{tensor.path}: {part.table} has an expert that is none of 0 to {part.count - 1}")
    ordered = np.sort(found, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise DataError(f"{tensor.path}: {part.table} gives a token one expert twice")
    return found


def without_identity(part: blocks.Experts, chosen: Any, weights: Any) -> tuple[Any, Any]:
    """The chosen experts that have matrices, -1 in place of others, and the sum of the others' weights [tokens, 1].

    chosen int[tokens, used] and weights float32[tokens, used] are numpy's arrays or torch's tensors.
    """
    stacked = chosen < part.stacked
    return (chosen + 1) * stacked - 1, (weights * ~stacked).sum(1)[:, None]


def run(
    part: blocks.Experts,
    tensors: Mapping[str, Tensor],
    x: np.ndarray,
    chosen: np.ndarray,
    weights: np.ndarray,
    threads: int,
    observe: Observe | None = None,
    observe_outputs: ObserveOutputs | None = None,
    matrix: Callable[[blocks.Linear, int], Product] | None = None,
) -> np.ndarray:
    """The weighted sum of the chosen experts' outputs for x float32[tokens, n], added in order of their numbers.

    `observe` is called with the input of each matrix: name, float32[tokens, n], expert, number of experts.
    `observe_outputs` is called with what leaves each expert: name of down, float32[tokens, n], router weights
    float32[tokens], expert, number of experts. `matrix(linear, number)` gives the product with a matrix of an expert;
    by default `linear_of`.
    """
    matrix = matrix or functools.partial(linear_of, tensors, threads)
    out = np.zeros((len(x), tensors[part.down.weight].shape[1]), np.float32)
    for number in np.unique(chosen[chosen >= 0]):
        token, rank = np.nonzero(chosen == number)
        if number >= part.stacked:
            out[token] += x[token] * weights[token, rank][:, None]
            continue
        gate, up, down = (matrix(linear, int(number)) for linear in (part.gate, part.up, part.down))
        inputs, shares = np.ascontiguousarray(x[token]), weights[token, rank][:, None]
        if part.weighs_inputs:
            inputs *= shares
        entering = gate(inputs)
        both = entering if part.ungated else up(inputs)
        hidden = float_ops.activate(part.activation, entering, both, threads, part.limit)
        if observe is not None:
            for linear in part.matrices:
                observe(linear.weight, hidden if linear is part.down else inputs, int(number), part.stacked)
        outputs = down(hidden)
        if observe_outputs is not None:
            observe_outputs(part.down.weight, outputs, shares[:, 0], int(number), part.stacked)
        out[token] += outputs if part.weighs_inputs else outputs * shares
    return out


def linear_of(
    tensors: Mapping[str, Tensor], threads: int, linear: blocks.Linear, number: int
) -> float_linear.FloatLinear:
    """One expert's matrix, with its scale and bias."""
    bias = tensors[linear.bias].decode_rows(number, number + 1)[0] if linear.bias else None
    if bias is not None and linear.half is not None:
        bias = bias.reshape(2, -1)[linear.half]
    scale = float_linear.scale(tensors, linear, number)
    return float_linear.FloatLinear(_Matrix(tensors[linear.weight], number, linear.half), "exact", threads, bias, scale)


class _Matrix(Tensor):
    """One expert's matrix of a stacked tensor, or a half of its rows; its bytes stay where they are."""

    __slots__ = ("_first", "_stack")

    def __init__(self, stack: Tensor, number: int, half: int | None = None):
        count, rows, n = stack.shape
        parts = 1 if half is None else 2
        nbytes = stack.nbytes // count // parts
        super().__init__(stack.name, (rows // parts, n), stack.type, nbytes, stack.offset, stack.path)
        self._stack, self._first = stack, number * rows + (half or 0) * (rows // parts)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        return self._stack._rows(self._first + start, self._first + stop)
