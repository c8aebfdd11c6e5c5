"""Measure the error that each tensor of a quantized model adds, relative to a reference model.

The reference model runs over some tokens, one block at a time. For each block with output y, one tensor after another
is replaced by the other model's; y' is the output with the replaced tensor:

    error = sqrt(mean over tokens of (|y' - y| / |y|)²)

So each error is that of one tensor, without the accumulated errors of earlier tensors. It is relative per token: a few
tokens have activations hundreds of times as large as all others. Embedding and output are measured in the same
way, by their outputs. `share` is a tensor's share of the sum of all squared errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quantkit import types
from quantkit.codegen import jit
from quantkit.errors import DataError
from quantkit.evaluate.layers.parts import parts
from quantkit.formats.gguf import GGUF, Tensor, scales

if TYPE_CHECKING:
    from quantkit.runtime.model import Model


class TensorError(NamedTuple):
    """The error that a tensor adds; `layer` is None for embedding and output."""

    name: str
    layer: int | None
    type: str
    error: float
    share: float


def tensor_errors(reference: Model, file: GGUF, tokens: np.ndarray) -> list[TensorError]:
    """The error that each tensor of a file adds to a model, over new sequences int[n_seq, len], in the model's order.

    The file's tensors replace those of the reference, so the file is not opened as a model. Tensors that are equal byte
    for byte are skipped. The scales of an NVFP4 tensor count as part of it.
    """
    errors: list[tuple[str, int | None, str, float]] = []
    applied = scales.all_companions({name: tensor.type for name, tensor in reference.weights.items()})
    for part in parts(reference, tokens):
        y = part.run({})
        for name in (name for name in part.weights if name not in applied):
            ours, theirs = reference.weights[name], file.tensors.get(name)
            if theirs is None or theirs.shape != ours.shape:
                raise DataError(
                    f"{file.path}: tensor {name} {'is missing' if theirs is None else f'has shape {theirs.shape}'}; "
                    f"{reference.path} has it with shape {ours.shape}; compare files of the same model"
                )
            if not _same(ours, theirs):
                is_tied = any(name == before for before, *_ in errors)  # a tied embedding is also the output matrix
                errors.append(
                    (
                        f"{name} as output" if is_tied else name,
                        part.layer,
                        theirs.type.name,
                        _distance(part.run({name: _in_place_of(ours, theirs)}), y),
                    )
                )
    total = sum(error**2 for *_, error in errors) or 1.0
    return [TensorError(name, layer, kind, error, error**2 / total) for name, layer, kind, error in errors]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.type is b.type and np.array_equal(a.data, b.data) and _same_scales(a, b)


def _same_scales(a: Tensor, b: Tensor) -> bool:
    x, y = a.scales, b.scales
    return x is y or (x is not None and y is not None and np.array_equal(x, y))


class _Values(Tensor):
    """A tensor of float32 in memory, in place of another."""

    __slots__ = ()

    def __init__(self, replaced: Tensor, values: np.ndarray):
        super().__init__(replaced.name, replaced.shape, types.get("f32"), values.nbytes, 0, replaced.path)
        self._file = jit.readonly(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _in_place_of(ours: Tensor, theirs: Tensor) -> Tensor:
    """A tensor with the values of `theirs`, for a model that multiplies products with it by the scales of `ours`."""
    if _same_scales(ours, theirs):
        return theirs
    values, factors = theirs.dequantize(), ours.scales
    if factors is not None:
        values = values / factors.reshape(*ours.shape[:-2], 1, 1)
    return _Values(ours, values)


def _distance(y: np.ndarray, reference: np.ndarray) -> float:
    """Root mean square over tokens of the relative distance of float32[tokens, n]."""
    difference = np.linalg.norm(y.astype(np.float64) - reference, axis=1)
    size = np.linalg.norm(reference.astype(np.float64), axis=1)
    return float(np.sqrt(np.mean((difference / np.maximum(size, 1e-30)) ** 2)))
