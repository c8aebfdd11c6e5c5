"""A checkpoint as a file that a model can be made of: its tensors give the rows that `convert` would write.

Rows are computed each time they are asked for, of embeddings those of a batch's tokens. So a model that runs layer by
layer in large batches needs no memory for weights and no converted file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.formats.gguf import Metadata, Tensor
from quantkit.pipelines.conversion.plan import CheckpointView
from quantkit.pipelines.conversion.tensor import OutputTensor


class ComputedTensor(Tensor):
    """A tensor whose rows are computed on demand. `data` is kept until `release`."""

    __slots__ = ("_data", "_source")

    def __init__(self, source: OutputTensor):
        super().__init__(source.name, source.shape, source.type, source.nbytes, 0, source.path)
        self._source = source
        self._data: np.ndarray | None = None

    @property
    def data(self) -> np.ndarray:
        """uint8[n_rows, row_bytes]."""
        if self._data is None:
            self._data = self._rows(0, self.n_rows)
        return self._data

    @property
    def scales(self) -> np.ndarray | None:
        """float32[matrices], or None."""
        return self._source.scales

    @property
    def stored(self) -> np.ndarray:
        """uint8[nbytes]."""
        return self.data.reshape(-1)

    def groups(self, numbers: np.ndarray) -> np.ndarray:
        """As `Tensor.groups`: computes these rows alone, of a table that may be larger than all that a layer has."""
        if not len(numbers):
            return np.empty((0, self.type.interleave, self.row_bytes), np.uint8)
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
        group = self.type.interleave
        rows = [self._rows(int(run[0]) * group, (int(run[-1]) + 1) * group) for run in runs]
        return np.concatenate(rows).reshape(-1, group, self.row_bytes)

    def release(self) -> None:
        """Drop `data`."""
        self._data = None

    def _rows(self, start: int, stop: int) -> np.ndarray:
        return self._source.rows(start, stop).reshape(stop - start, self.row_bytes)


@dataclass(frozen=True)
class CheckpointModel:
    """What `runtime.loading.load` takes, of a checkpoint."""

    path: Path
    metadata: Metadata
    tensors: dict[str, Tensor]
    size: int

    @classmethod
    def of(cls, view: CheckpointView) -> CheckpointModel:
        """A model file of a checkpoint that is open."""
        made: dict[str, Tensor] = {name: ComputedTensor(source) for name, source in view.tensors.items()}
        return cls(view.paths[0].parent, _as_read(view.metadata), made, sum(tensor.nbytes for tensor in made.values()))


def _as_read(metadata: Metadata) -> Metadata:
    """Metadata as a file gives them back: its f32 values are rounded, and a model computes with them."""
    found = metadata.copy()
    for key in [key for key in found if found.kind(key) == "f32"]:
        found.set(key, np.asarray(found[key], np.float32).tolist(), "f32")
    return found
