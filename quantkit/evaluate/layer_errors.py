"""Where it hurts: which tensors of a model add how much error, the reference and it side by side.

The reference runs over some tokens, one block at a time. Of every block, with x what enters it in the reference and
y what leaves it, each of its tensors in turn is taken from the other model:

    error = sqrt(mean over tokens of (|y' - y| / |y|)²)

so that what is found is that tensor's own, not what errors before it have become. (By token: a few tokens have
activations hundreds of times as large as all others.) The embedding and the output are measured alike, by what leaves
them. `share` is a tensor's part of the sum of all squared errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from quantkit.errors import DataError
from quantkit.evaluate.blockwise import parts
from quantkit.formats.gguf import GGUF


class Added(NamedTuple):
    """What a tensor adds; `layer` is None for those that stand around the blocks."""

    name: str
    layer: int | None
    type: str
    error: float
    share: float


def compare_layers(reference: Any, file: GGUF, tokens: np.ndarray) -> list[Added]:
    """The error each tensor of a file adds to a model, over fresh sequences int[n_seq, len], in the model's order.

    The file's tensors take the places of the reference's, so it is not opened as a model. Tensors that are the same,
    byte for byte, are left out.
    """
    found: list[tuple[str, int | None, str, float]] = []
    for part in parts(reference, tokens):
        y = part.run({})
        for name in part.weights:
            ours, theirs = reference.weights[name], file.tensors.get(name)
            if theirs is None or theirs.shape != ours.shape:
                raise DataError(f"{file.path}: tensor {name}: not there as {ours.shape}, as {reference.path} has it")
            if not _same(ours, theirs):
                twice = any(name == before for before, *_ in found)  # a tied embedding is the output matrix, too
                found.append(
                    (
                        f"{name} as output" if twice else name,
                        part.layer,
                        theirs.type.name,
                        _distance(part.run({name: theirs}), y),
                    )
                )
    total = sum(error**2 for *_, error in found) or 1.0
    return [Added(name, layer, kind, error, error**2 / total) for name, layer, kind, error in found]


def _same(a: Any, b: Any) -> bool:
    return a.type is b.type and np.array_equal(a.data, b.data)


def _distance(y: np.ndarray, reference: np.ndarray) -> float:
    """Root mean square over tokens of the relative distance of float32[tokens, n]."""
    apart = np.linalg.norm(y.astype(np.float64) - reference, axis=1)
    size = np.linalg.norm(reference.astype(np.float64), axis=1)
    return float(np.sqrt(np.mean((apart / np.maximum(size, 1e-30)) ** 2)))
