"""`NAME.scale` of tensors that are encoded to NVFP4 (`--scale-nvfp4`): they are not in the input.

Block scales of NVFP4 have steps of their own size from 2^-6 on: those of elements up to 0.09, as most weights of large
models are, have few values to choose from. So values are divided by `scales.ENCODED`, a power of two, before they are
encoded, and NAME.scale holds it. The number is the same for all tensors and needs no pass over their values: elements
from 0.0008 to 21 have block scales of full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.formats.gguf import scales
from quantkit.pipelines.pieces import QuantizeSource, SourceTensor
from quantkit.recipe import Plan
from quantkit.types import QuantType


@dataclass(frozen=True)
class _NewScale:
    """NAME.scale of an encoded tensor, as a tensor of the input."""

    shape: tuple[int, ...]
    type: QuantType
    path: Path
    scales: None = None
    inputs: tuple[()] = ()

    def rows(self, start: int, stop: int) -> np.ndarray:
        """uint8[1, bytes]: the numbers, float32."""
        return np.full((1, *self.shape), scales.ENCODED, "<f4").view(np.uint8)[start:stop]


class WithNewScales:
    """The tensors of an input of `quantize`, and the scales of a plan that it has not, `new`."""

    def __init__(self, source: QuantizeSource, plan: Plan):
        path = Path(source.paths[0])
        made = {t.name: _NewScale(t.shape, t.source, path) for t in plan.tensors if t.name not in source.tensors}
        self.new = frozenset(made)
        self.tensors: Mapping[str, SourceTensor] = {**source.tensors, **made}
