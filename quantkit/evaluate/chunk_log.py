"""A run's chunks as JSON lines, written as they come, and taken up again after a kill.

    {"run": fingerprint, "n_ctx": …, "chunks": …, "positions": …, …}     first line
    {"chunk": 1, "ppl": …, "mean_nll": …, "nll": […]}                    one a chunk; `ppl` over all so far

nll is each scored token's, in nats, to the last bit: a run that goes on has the numbers of one that never stopped. For
that it goes on where a batch began, because how many chunks are multiplied together decides how sums round.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.files.atomic import os_errors, writing


class ChunkLog:
    """Opened with `with`. `.done` float64[chunks, positions]: what an earlier run of the same fingerprint left.

    together   chunks of a batch: of the earlier run's only whole batches are kept
    about      what the first line says besides
    A file of another run, or of something else, is a DataError or FormatError; it stays as it is.
    """

    def __init__(self, path: str | os.PathLike[str], run: str, positions: int, together: int, about: Mapping[str, Any]):
        self.path, self._positions = Path(path), positions
        self._head = {"run": run, "positions": positions, **about}
        lines = self._read(run) if self.path.exists() else []
        kept = len(lines) // together * together
        self.done = np.array([line["nll"] for line in lines[:kept]], np.float64).reshape(kept, positions)
        self._lines = lines[:kept]
        self._total, self._count = float(self.done.sum()), self.done.size

    def _read(self, run: str) -> list[dict[str, Any]]:
        with os_errors(self.path, "read"):
            data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1].splitlines()  # a line that a kill cut short is not one
        try:
            head, *lines = [json.loads(line) for line in whole] or [{}]
            if "run" not in head or any(line["chunk"] != i for i, line in enumerate(lines, 1)):
                raise ValueError("lines are missing")
            if any(len(line["nll"]) != self._positions for line in lines) and head["run"] == run:
                raise ValueError("a chunk of another length")
        except (ValueError, KeyError, TypeError) as error:
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
            self._stream: BinaryIO = open(self.path, "ab")
        return self

    def add(self, nll: np.ndarray) -> None:
        """Append a chunk's float64[positions]."""
        self._total, self._count = self._total + float(nll.sum()), self._count + nll.size
        record = {"chunk": self._count // self._positions, "ppl": math.exp(self._total / self._count),
                  "mean_nll": float(nll.mean()), "nll": nll.tolist()}  # fmt: skip
        with os_errors(self.path, "write"):
            self._stream.write(_line(record))
            self._stream.flush()

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, default=str).encode() + b"\n"
