"""Numbers of layers: tensors of one element in a checkpoint, one list in a GGUF key with an entry for each layer.

    checkpoint    model.layers.0.mlp.act_fn.beta, model.layers.1.mlp.act_fn.beta, …    each of shape () or (1,)
    GGUF          xielu.beta = [0.5, 0.5, …]

The header of a GGUF file needs their values, so a conversion reads them when it is planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.archs.common.checked import EachLayer, Real, check_key
from quantkit.archs.common.tensors import LazyTensor, Shape, fill_name
from quantkit.errors import FormatError
from quantkit.formats.gguf.metadata import Entries


@dataclass(frozen=True)
class LayerScalar:
    """One number of each layer.

    key      the GGUF key, complete
    hf       the checkpoint's tensor; `N` stands for the layer
    shape    of that tensor
    initial  the number of a model that was not trained: what a plan from config.json alone takes
    bound    of the number
    """

    key: str
    hf: str
    shape: Shape
    initial: float
    bound: Real

    def names(self, layers: int) -> list[str]:
        """The checkpoint's tensors, by layer."""
        return [fill_name(self.hf, i) for i in range(layers)]

    def values(self, metadata: Mapping[str, object], layers: int) -> list[float]:
        """The numbers of a file, by layer. FormatError if the key is missing, invalid or of another length.

        As in llama.cpp, one number stands for all layers.
        """
        value = metadata.get(self.key)
        if value is None:
            raise FormatError(f"metadata key {self.key} is missing; each layer has a number of this name")
        check_key(self.key, value, EachLayer(self.bound))
        if not isinstance(value, (list, tuple, np.ndarray)):
            return [float(value)] * layers  # type: ignore[arg-type]  # checked
        if len(value) != layers:
            raise FormatError(
                f"metadata key {self.key} has {len(value)} entries, the model has {layers} layers; it has to have one "
                "for each layer"
            )
        return [float(number) for number in value]


def initial(scalars: Sequence[LayerScalar], layers: int) -> Entries:
    """The GGUF keys of a model that was not trained."""
    return {scalar.key: ([scalar.initial] * layers, "f32") for scalar in scalars}


def read(scalars: Sequence[LayerScalar], tensors: Mapping[str, LazyTensor], layers: int) -> Entries:
    """The GGUF keys of a checkpoint's tensors, by `canonical` name. FormatError for a missing or invalid one."""
    names = [name for scalar in scalars for name in scalar.names(layers)]
    if absent := [name for name in names if name not in tensors]:
        raise FormatError(
            f"this checkpoint of {layers} layers lacks {len(absent)} tensor(s): {', '.join(absent[:5])}"
            f"{', …' if len(absent) > 5 else ''}; a shard is missing or the file is incomplete"
        )
    return {
        scalar.key: ([_number(scalar, name, tensors[name]) for name in scalar.names(layers)], "f32")
        for scalar in scalars
    }


def _number(scalar: LayerScalar, name: str, tensor: LazyTensor) -> float:
    shape = tuple(tensor.shape)
    if math.prod(shape) != 1:
        raise FormatError(f"tensor {name} has shape {shape}; it has to have one element, which becomes {scalar.key}")
    number = float(tensor.dequantize().reshape(()))
    if not scalar.bound.holds(number):
        raise FormatError(f"tensor {name} is {number:g}; it has to be {scalar.bound}")
    return number


def written(scalars: Sequence[LayerScalar], metadata: Mapping[str, object], layers: int) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, float32 by name, of a file's keys."""
    return {
        name: np.full(scalar.shape, number, np.float32)
        for scalar in scalars
        for name, number in zip(scalar.names(layers), scalar.values(metadata, layers))
    }
