"""How importance that is measured while a file is written reaches `quantize_with_plan`.

The encoder takes tensors in stages, each with an importance matrix. With a matrix that was measured before there is one
stage. A `Calibration` measures the matrix of a stage when the stages before it are written; `evaluate.imatrix.one_pass`
runs the model for that, which this package must not import.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from quantkit.formats.gguf import Tensor
from quantkit.formats.imatrix import Imatrix
from quantkit.recipe import PlannedTensor


class Stage(NamedTuple):
    """Tensors that are encoded together, and the importance matrix that has entries for them."""

    tensors: Sequence[PlannedTensor]
    imatrix: Imatrix | None


class Calibration(Protocol):
    """Measures importance while a file is written."""

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides the importance but the model, in hexadecimal."""

    @property
    def described(self) -> str:
        """The text and the settings, for the output's metadata."""

    def stages(
        self,
        tensors: Sequence[PlannedTensor],
        done: Collection[str],
        written: Callable[[], Mapping[str, Tensor]],
        describe: Callable[[str], None],
    ) -> Iterator[Stage]:
        """All tensors, in stages. When the next one is asked for, the tensors of the last one are written.

        `done` names tensors that an interrupted run wrote; `written` gives the tensors of the unfinished output;
        `describe` is told what is being measured.
        """
