"""Log a run's chunks as JSON lines while it runs, and resume the run from them.

    {"run": fingerprint, "n_ctx": …, "chunks": …, "positions": …, …}     first line; positions: a list for --chat
    {"chunk": 1, "ppl": …, "mean_nll": …, "nll": […], …}                 one line per chunk; `ppl` over all so far

`nll` has a number per scored token, in nats, to the last bit. So have the other figures of a divergence, and a resumed
run has the same numbers as an uninterrupted one. It resumes at the start of a batch, because the number of chunks that
are multiplied together decides how sums round. A run that writes a base file logs the digests of its chunks ("base").

This is not a journal (`formats/journal.py`): the lines are results for other programs to read. They are not synced to
disk, as nothing else relies on them. A line lost in a power failure is computed again, and a logged chunk of a base
file counts only if its digest matches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.evaluate.conditions import Conditions, result_conditions
from quantkit.evaluate.fingerprint import fingerprint
from quantkit.evaluate.models import OnMessage
from quantkit.evaluate.statistics import perplexity_of
from quantkit.formats import gguf
from quantkit.formats.atomic import os_errors, writing
from quantkit.formats.owned import followed, open_own, read_own
from quantkit.inputs import json_input


class ChunkLog:
    """A context manager. `.done` are the chunks from an earlier run with the same fingerprint: their nll, float64[n].

    positions          number of scored tokens of each chunk, or of all alike
    chunks_per_batch   only whole batches of the earlier run are used
    fields             further fields of the first line

    Raises DataError for a file of another run and FormatError for any other file, which stays unchanged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run: str,
        positions: int | Sequence[int],
        chunks_per_batch: int,
        fields: Mapping[str, object],
    ):
        positions = positions if isinstance(positions, int) else [int(n) for n in positions]
        self.path, self._positions = followed(Path(path)), positions
        self._header = {"run": run, "positions": positions, **fields}
        lines = self._read(run) if self.path.exists() else []
        self.chunks_per_batch, self._lines = chunks_per_batch, lines
        self.truncate(len(lines) // chunks_per_batch * chunks_per_batch)

    def truncate(self, chunks: int) -> None:
        """Resume after the first `chunks` chunks and drop the others."""
        self._lines = self._lines[:chunks]
        self.done = [np.array(line["nll"], np.float64) for line in self._lines]
        self._total, self._count = sum(float(chunk.sum()) for chunk in self.done), sum(map(len, self.done))  # as `add`
        self._chunks = len(self._lines)

    def numbers(self, name: str) -> np.ndarray:
        """float64[scored tokens, …] of a field in the lines of the earlier run. FormatError if it has other values."""
        try:
            parts = [_numbers(line.get(name), len(nll)) for line, nll in zip(self._lines, self.done)]
            return np.concatenate(parts) if parts else np.empty(0)
        except (ValueError, TypeError, OverflowError) as error:
            raise self._wrong(f'"{name}" of a chunk: {error}') from None

    def texts(self, name: str) -> list[str]:
        """A field in the lines of the earlier run, as text; "None" for a chunk that lacks it."""
        return [str(line.get(name)) for line in self._lines]

    def _wrong(self, why: object) -> FormatError:
        return FormatError(f"{self.path}: not a chunk log ({why}); name another file")

    def _read(self, run: str) -> list[dict[str, Any]]:
        with os_errors(self.path, "read"):
            data = read_own(self.path)
        complete = data[: data.rfind(b"\n") + 1].splitlines()  # without an incomplete last line
        try:
            header, *lines = [json_input.parse(line, "a line") for line in complete] or [{}]
            if "run" not in header or any(line["chunk"] != i for i, line in enumerate(lines, 1)):
                raise ValueError("lines are missing")
            wanted = [self._positions] * len(lines) if isinstance(self._positions, int) else self._positions
            if header["run"] == run:
                if len(lines) > len(wanted):
                    raise ValueError(f"{len(lines)} chunks of a text of {len(wanted)}")
                for line, n in zip(lines, wanted):
                    if _numbers(line["nll"], n).ndim != 1:
                        raise ValueError("nll has several numbers per token")
        except (ValueError, KeyError, TypeError, OverflowError, FormatError) as error:
            raise self._wrong(error) from None
        if header["run"] != run:
            raise DataError(
                f"{self.path}: belongs to another run: the model, the text or a setting differs; remove it or name "
                "another file"
            )
        return lines

    def __enter__(self) -> ChunkLog:
        with writing(self.path) as stream:  # without truncated lines
            stream.write(b"".join(_line(line) for line in (self._header, *self._lines)))
        with os_errors(self.path, "write"):
            self._stream: BinaryIO = os.fdopen(open_own(self.path, os.O_WRONLY | os.O_APPEND), "ab")
        return self

    def resumed(self, on_message: OnMessage) -> list[np.ndarray]:
        """`done`; `on_message` gets a line that counts the chunks of an earlier run."""
        if len(self.done):
            on_message(f"{len(self.done)} chunks are already in {self.path}")
        return self.done

    def add(self, nll: np.ndarray, **more: np.ndarray | str) -> None:
        """Append a chunk: its nll float64[positions], and further fields (arrays or text)."""
        self._total, self._count, self._chunks = (
            self._total + float(nll.sum()),
            self._count + nll.size,
            self._chunks + 1,
        )
        record = {"chunk": self._chunks, "ppl": perplexity_of(self._total / self._count),
                  "mean_nll": float(nll.mean()), "nll": nll.tolist(),
                  **{name: x if isinstance(x, str) else x.tolist() for name, x in more.items()}}  # fmt: skip
        with os_errors(self.path, "write"):
            self._stream.write(_line(record))
            self._stream.flush()

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def run_log(
    path: str | os.PathLike[str],
    model: Path,
    text: Path,
    positions: int | Sequence[int],
    n_batch: int,
    conditions: Conditions,
    settings: Mapping[str, object],
) -> ChunkLog:
    """The log of a model's run over a text or a base file.

    An earlier run's lines are used if model, text, `settings`, batch size and the conditions that change results are
    the same.
    """
    settings = result_conditions(conditions) | {"n_batch": n_batch, **settings}
    run = fingerprint([*gguf.open(model).paths, text], settings)
    n_ctx = conditions["n_ctx"]
    assert isinstance(n_ctx, int)
    return ChunkLog(path, run, positions, max(1, n_batch // n_ctx), conditions)


def _numbers(values: object, count: int) -> np.ndarray:
    """float64[count, …] of a logged list. ValueError, TypeError or OverflowError for anything else."""
    found = np.array(values, np.float64)
    if found.shape[:1] != (count,):
        raise ValueError(f"an array of shape {found.shape} for {count} scored tokens")
    return found


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, default=str).encode() + b"\n"
