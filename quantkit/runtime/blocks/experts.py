"""Feed-forward with experts, layer by layer: which experts a token goes to, and what they make of it, decoded exactly.

    chosen, weights = route(part, logits, reduction)      int64[tokens, used], -1 where left out; float32[tokens, used]
    y = run(part, tensors, x, chosen, weights, threads)   float32[tokens, n_embd]

Tokens are gathered by expert, so that each matrix is decoded once for all of a batch. A reduction (K, t), `-ser K,t`,
leaves out experts that matter little: of those a token is routed to, ordered by probability, the first K stay, and of
the others those whose probability is above t times the first one's. t = 0 is the model as it is, t = 1 exactly K
experts. Weights that are divided by their sum are divided by the sum over those that stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import jit
from quantkit.errors import DataError
from quantkit.formats.gguf import Tensor
from quantkit.runtime.blocks import float_linear, float_ops
from quantkit.runtime.kernels import reference

Reduction = tuple[int, float]
Observe = Callable[[str, np.ndarray, int, int], None]
Product = Callable[[np.ndarray], np.ndarray]


def reduction(parts: Sequence[blocks.Block], given: Reduction | None, path: Path) -> Reduction | None:
    """`given`, if the model has experts that it can leave out; DataError otherwise. None for (K, 0), which is none."""
    if given is None:
        return None
    min_used, min_share = given
    used = min((p.used for block in parts for p in block.parts if isinstance(p, blocks.Experts)), default=0)
    if not used:
        raise DataError(f"{path}: the model has no experts that -ser {min_used},{min_share:g} could leave out")
    option = f"-ser {min_used},{min_share:g}"
    if not 1 <= min_used < used:
        raise DataError(f"{path}: {option}: K must be at least 1 and below the {used} experts used")
    if not 0 <= min_share <= 1:
        raise DataError(f"{path}: {option}: the share t must be 0 to 1")
    return given if min_share else None


def route(
    part: blocks.Experts, logits: np.ndarray, given: Reduction | None = None, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights of each token from router logits float32[tokens, count], which are overwritten.

    `bias` is what `part.choice_bias` names.
    """
    min_used, min_share = given or (part.used, 0.0)
    bias = jit.readonly(np.zeros(0, np.float32)) if bias is None else bias
    chosen = np.full((len(logits), part.used), -1, np.int64)
    weights = np.zeros((len(logits), part.used), np.float32)
    for token in range(len(logits)):
        reference.route(
            logits[token], bias, part.gating == "sigmoid", part.groups, part.groups_used, part.used, min_used,
            np.float32(min_share), part.normalise, np.float32(part.scale), chosen[token], weights[token],
        )  # fmt: skip
    return chosen, weights


def run(
    part: blocks.Experts,
    tensors: Mapping[str, Tensor],
    x: np.ndarray,
    chosen: np.ndarray,
    weights: np.ndarray,
    threads: int,
    observe: Observe | None = None,
    matrix: Callable[[blocks.Linear, int], Product] | None = None,
) -> np.ndarray:
    """The weighted sum of what the chosen experts make of x float32[tokens, n_embd], experts added by number.

    `observe` is told what enters each expert's matrices: name, float32[tokens, n], the expert, how many there are.
    `matrix` gives an expert's product with one of the three; by default that of its tensor, here.
    """
    matrix = matrix or functools.partial(linear_of, tensors, threads)
    out = np.zeros((len(x), tensors[part.down.weight].shape[1]), np.float32)
    for number in np.unique(chosen[chosen >= 0]):
        token, rank = np.nonzero(chosen == number)
        gate, up, down = (matrix(linear, int(number)) for linear in (part.gate, part.up, part.down))
        given = np.ascontiguousarray(x[token])
        hidden = float_ops.activate(part.activation, gate(given), up(given), threads)
        if observe is not None:
            for linear, entering in ((part.gate, given), (part.up, given), (part.down, hidden)):
                observe(linear.weight, entering, int(number), part.count)
        out[token] += down(hidden) * weights[token, rank][:, None]
    return out


def linear_of(
    tensors: Mapping[str, Tensor], threads: int, linear: blocks.Linear, number: int
) -> float_linear.FloatLinear:
    """One expert's matrix, with its bias."""
    bias = tensors[linear.bias].decode_rows(number, number + 1)[0] if linear.bias else None
    return float_linear.FloatLinear(_Matrix(tensors[linear.weight], number), "exact", threads, bias)


class _Matrix(Tensor):
    """One expert's matrix of a stacked tensor; its bytes stay where they are."""

    __slots__ = ("_first", "_whole")

    def __init__(self, whole: Tensor, number: int):
        count, rows, n = whole.shape
        super().__init__(whole.name, (rows, n), whole.type, whole.nbytes // count, whole.offset, whole.path)
        self._whole, self._first = whole, number * rows

    def _rows(self, start: int, stop: int) -> np.ndarray:
        return self._whole._rows(self._first + start, self._first + stop)
