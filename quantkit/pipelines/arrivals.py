"""When the tensors of an input are there: at once for files on the disk, one after another for a checkpoint on the Hub.

`quantize` and `verify` ask for tensors through this interface. `hub.stream` implements it for checkpoints on the Hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from quantkit.formats.safetensors import CheckpointTensor


class Arrivals(Protocol):
    """Brings the tensors of an input for one run of a job."""

    @property
    def identities(self) -> Sequence[Sequence[object]]:
        """What tells whether the input has changed: a list for each file."""

    @property
    def verified(self) -> Mapping[str, str]:
        """The hash of each file that was read and checked, by name."""

    def begin(self, out: Path, outputs: Mapping[str, Sequence[CheckpointTensor]]) -> list[str]:
        """Start to bring the tensors that the outputs, by name, are made from. Returns the outputs' names in the order
        in which they can be made."""

    def wait(self, output: str, on_wait: Callable[[str], None]) -> None:
        """Wait until the tensors of an output are there; `on_wait` is called with a text while they are not."""

    def release(self, output: str) -> None:
        """Say that an output needs its tensors no longer."""

    def when_verified(self, output: str, action: Callable[[], None]) -> None:
        """Call `action`, from any thread, when all that an output was made from was checked."""

    def finish(self) -> None:
        """Wait until everything was checked."""

    def close(self) -> None:
        """Stop, after an error too."""


class ReadByWorkers:
    """The arrivals of an input that the workers of a cluster read: here nothing is waited for.

    identities   of the input
    verified     what workers have checked; they check a file before they use it
    """

    def __init__(self, identities: Sequence[Sequence[object]]):
        self.identities = identities
        self.verified: dict[str, str] = {}

    def begin(self, out: Path, outputs: Mapping[str, Sequence[CheckpointTensor]]) -> list[str]:
        """The outputs in their order."""
        return list(outputs)

    def wait(self, output: str, on_wait: Callable[[str], None]) -> None:
        """Nothing."""

    def release(self, output: str) -> None:
        """Nothing."""

    def when_verified(self, output: str, action: Callable[[], None]) -> None:
        """Call `action` now."""
        action()

    def finish(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
