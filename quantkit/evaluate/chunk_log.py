"""A run's chunks as JSON lines, written as they come, and taken up again after a kill.

    {"run": fingerprint, "n_ctx": …, "chunks": …, "positions": …, …}     first line
    {"chunk": 1, "ppl": …, "mean_nll": …, "nll": […], …}                 one a chunk; `ppl` over all so far

nll is each scored token's, in nats, to the last bit, and so are the other figures of a divergence: a run that goes on
has the numbers of one that never stopped. For that it goes on where a batch began, because how many chunks are
multiplied together decides how sums round. A run that writes a base notes its chunks' digests ("base").

This is no journal of formats/journal.py: the lines are results themselves, to be read by others. Nothing is synced, as
nothing else relies on a line: one that a loss of power took is computed again, and the chunk of a base that it says is
written counts only if it has the digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.evaluate.statistics import perplexity_of
from quantkit.formats.atomic import os_errors, writing
from quantkit.formats.owned import followed, open_own, read_own
from quantkit.inputs import json_input


class ChunkLog:
    """Opened with `with`. `.done` float64[chunks, positions]: the nll that an earlier run of the same fingerprint left.

    together   chunks of a batch: of the earlier run's only whole batches are kept
    about      what the first line says besides
    A file of another run, or of something else, is a DataError or FormatError; it stays as it is.
    """

    def __init__(self, path: str | os.PathLike[str], run: str, positions: int, together: int, about: Mapping[str, Any]):
        self.path, self._positions = followed(Path(path)), positions
        self._head = {"run": run, "positions": positions, **about}
        lines = self._read(run) if self.path.exists() else []
        self.together, self._lines = together, lines
        self.keep(len(lines) // together * together)

    def keep(self, chunks: int) -> None:
        """Go on after so many chunks, of which there may be more."""
        self._lines = self._lines[:chunks]
        self.done = self.noted("nll").reshape(-1, self._positions)
        self._total, self._count = sum(float(chunk.sum()) for chunk in self.done), self.done.size  # as `add` does

    def noted(self, name: str) -> np.ndarray:
        """What the kept lines say under a name, float64[chunks, …], or text[chunks]."""
        found = [line.get(name) for line in self._lines]
        return np.array(found, np.float64 if not found or isinstance(found[0], list) else str)

    def _read(self, run: str) -> list[dict[str, Any]]:
        with os_errors(self.path, "read"):
            data = read_own(self.path)
        whole = data[: data.rfind(b"\n") + 1].splitlines()  # a line that a kill cut short is not one
        try:
            head, *lines = [json_input.parse(line, "a line") for line in whole] or [{}]
            if "run" not in head or any(line["chunk"] != i for i, line in enumerate(lines, 1)):
                raise ValueError("lines are missing")
            if any(len(line["nll"]) != self._positions for line in lines) and head["run"] == run:
                raise ValueError("a chunk of another length")
        except (ValueError, KeyError, TypeError, FormatError) as error:
            raise FormatError(f"{self.path}: not the chunks of a run ({error}); name another file") from None
        if head["run"] != run:
            raise DataError(
                f"{self.path}: of another run: the model, the text or a setting differs; remove it or name another file"
            )
        return lines

    def __enter__(self) -> ChunkLog:
        with writing(self.path) as stream:  # without what was cut short
            stream.write(b"".join(_line(line) for line in (self._head, *self._lines)))
        with os_errors(self.path, "write"):
            self._stream: BinaryIO = os.fdopen(open_own(self.path, os.O_WRONLY | os.O_APPEND), "ab")
        return self

    def add(self, nll: np.ndarray, **more: np.ndarray | str) -> None:
        """Append a chunk's float64[positions], and what else is known of it, arrays or text."""
        self._total, self._count = self._total + float(nll.sum()), self._count + nll.size
        record = {"chunk": self._count // self._positions, "ppl": perplexity_of(self._total / self._count),
                  "mean_nll": float(nll.mean()), "nll": nll.tolist(),
                  **{name: x if isinstance(x, str) else x.tolist() for name, x in more.items()}}  # fmt: skip
        with os_errors(self.path, "write"):
            self._stream.write(_line(record))
            self._stream.flush()

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, default=str).encode() + b"\n"
