"""Collect an importance matrix: for every weight, the mean square of the activations that enter each column.

Every token vector x that enters a weight adds x_j² to the sum of column j, in float64, and 1 to the weight's count.
Each of several stacked experts has its own columns and its own count, and only vectors routed to it count. All
positions of a chunk count, also those whose logits are not scored. The matrices of the blocks (`blk.`) are recorded,
and on request the output matrix. `token_embd.weight` is only looked up, so no vector enters it unless it is also the
output.

A run can be saved at the end of a batch of chunks and resumed there (`Progress`). Sums are stored exactly, so the
result has the same bytes as that of an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError, FormatError
from quantkit.evaluate.perplexity import Perplexity, evaluate_chunks, negative_log_likelihood
from quantkit.evaluate.text import DEFAULT_BATCH, Chunks
from quantkit.formats.atomic import writing
from quantkit.formats.imatrix import Entry, Imatrix, merge
from quantkit.formats.kld.base_file import rows_per_chunk, scored_rows
from quantkit.formats.owned import read_own
from quantkit.inputs import json_input

OUTPUT_NAMES = ("output.weight", "token_embd.weight")
_PROGRESS_VERSION = 1
_READ_WHOLE, _PLACES, _AT_EACH = 64 << 20, 1024, 16 << 10  # fingerprint of a file: see `fingerprint`


@kernel
def _add_squares(x, sums, start, stop):
    """sums float64[n] += column sums of squares of float32[tokens, n], of the columns from `start` to `stop`."""
    for t in range(x.shape[0]):
        for j in range(start, stop):
            sums[j] += np.float64(x[t, j]) * np.float64(x[t, j])


class Collector:
    """Sums of squares by weight; set `observe` as the model's observer."""

    def __init__(self, process_output: bool = False):
        self.process_output = process_output
        self.chunks = 0
        self.sums: dict[str, np.ndarray] = {}  # float64[matrices, n]
        self.counts: dict[str, np.ndarray] = {}  # int64[matrices]

    def observe(self, name: str, x: np.ndarray, number: int = 0, matrices: int = 1) -> None:
        """Add float32[tokens, n] that enters the weight `name`: matrix `number` of a stack of `matrices`."""
        if not (name.startswith("blk.") or (self.process_output and name in OUTPUT_NAMES)):
            return
        x = x.reshape(-1, x.shape[-1])
        if name not in self.sums:
            self.sums[name] = np.zeros((matrices, x.shape[1]))
            self.counts[name] = np.zeros(matrices, np.int64)
        sums = self.sums[name][number]
        frozen = jit.readonly(np.ascontiguousarray(x))
        thread_pool.over_rows(lambda a, b: _add_squares(frozen, sums, a, b), x.shape[1], multiple=64, pieces=1)
        self.counts[name][number] += len(x)

    def result(self, dataset: str, chunk_size: int = 0) -> Imatrix:
        """The importance matrix so far. Raises DataError that names the first weight that NaN or Inf entered.

        A chunk counts as one call, as in ik_llama.cpp when the batch is the context. An expert that no token was routed
        to has a count of 0 and zeros.
        """
        entries = {}
        for name, sums in self.sums.items():
            if not np.isfinite(sums).all():
                raise DataError(f"{name}: NaN or Inf entered it within {self.chunks} chunks")
            counts = self.counts[name]
            values = np.asarray(sums / np.maximum(counts, 1)[:, None], np.float32)
            entries[name] = Entry(values, counts.copy(), max(1, self.chunks))
        return Imatrix(entries, self.chunks, dataset, chunk_size)


@dataclass
class Progress:
    """The state of a run over one text: its sums, and the negative log-likelihoods of the scored tokens so far."""

    collector: Collector
    nll: np.ndarray | None = (
        None  # float64[n_chunk, rows_per_chunk]; None before the first batch, or without perplexity
    )
    done: int = 0  # chunks


def collect(
    model: Any,
    chunks: Chunks,
    *,
    process_output: bool = False,
    with_perplexity: bool = True,
    n_batch: int = DEFAULT_BATCH,
    on_chunk: Callable[[int, Perplexity | None, Collector], None] | None = None,
    on_batch: Callable[[Progress], None] | None = None,
    progress: Progress | None = None,
) -> tuple[Imatrix, Perplexity | None]:
    """Run a model over chunks; return the importance matrix of its weights, and the perplexity if requested.

    `on_chunk(chunks done, perplexity so far or None, collector)` is called after each chunk, `on_batch(progress)` after
    each batch, when the sums cover whole chunks and may be saved. With `progress` the run resumes after the chunks that
    are done, and updates it.
    """
    state = progress or Progress(Collector(process_output))
    collector = state.collector
    scored = scored_rows(chunks.n_ctx)
    # Every position passes through the blocks; only these positions pass through the output matrix.
    asked = slice(0, chunks.n_ctx) if process_output else scored if with_perplexity else slice(0, 0)
    if with_perplexity and state.nll is None:
        state.nll = np.zeros((len(chunks), rows_per_chunk(chunks.n_ctx)))
    together, first = max(1, n_batch // chunks.n_ctx), state.done
    before, model.observer = model.observer, collector.observe
    try:
        for behind, logits in evaluate_chunks(model, chunks.inputs[first:], n_batch, asked):
            index = first + behind
            collector.chunks = state.done = index + 1
            so_far = None
            if with_perplexity and state.nll is not None:
                rows = logits[scored] if process_output else logits
                state.nll[index] = negative_log_likelihood(rows, chunks.tokens[index, scored.start + 1 :])
                so_far = Perplexity(state.nll[: index + 1], chunks.n_ctx)
            if on_chunk is not None:
                on_chunk(index + 1, so_far, collector)
            if on_batch is not None and (state.done % together == 0 or state.done == len(chunks)):
                on_batch(state)
    finally:
        model.observer = before
    found = Perplexity(state.nll, chunks.n_ctx) if with_perplexity and state.nll is not None else None
    return collector.result(chunks.source, chunks.n_ctx), found


# -------------------------------------------------------------------------------------------------------- several texts


def pooled(parts: Sequence[Imatrix], shares: Sequence[float] | None = None) -> Imatrix:
    """Merge the importance matrices of several texts: every vector counts the same, or with `shares` each text has the
    given weight, whatever its length."""
    if shares is None:
        return merge(parts)
    if len(shares) != len(parts):
        raise DataError(f"{len(shares)} shares for {len(parts)} texts; give each text one")
    return merge(parts, [share / max(1, part.chunks) for share, part in zip(shares, parts)])


# ------------------------------------------------------------------------------------------------------------ resuming


def fingerprint(paths: Sequence[Path], settings: dict[str, Any]) -> str:
    """A hash of the settings and of each file's name, size and contents; a run resumes only if it is equal.

    Of a file above 64 MiB (a model), 16 KiB at each of 1024 offsets are hashed, the first and the last among them. So a
    change of a tensor that takes a thousandth of the file or more is always detected.
    """
    made = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in paths:
        size = path.stat().st_size
        made.update(os.fsencode(f"{path.name} {size}"))
        with path.open("rb") as file:
            if size <= _READ_WHOLE:
                made.update(file.read())
                continue
            for place in range(_PLACES):
                file.seek((size - _AT_EACH) * place // (_PLACES - 1))
                made.update(file.read(_AT_EACH))
    return made.hexdigest()


@dataclass
class Saved:
    """A resumable run over several texts: its fingerprint, and the state of each text."""

    run: str
    texts: list[Progress] = field(default_factory=list)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run; an existing file stays until the new one is complete."""
        arrays: dict[str, np.ndarray] = {}
        about: dict[str, Any] = {"version": _PROGRESS_VERSION, "run": self.run, "texts": []}
        for i, text in enumerate(self.texts):
            names = list(text.collector.sums)
            output = text.collector.process_output
            about["texts"].append({"done": text.done, "names": names, "process_output": output})
            for j, name in enumerate(names):
                arrays[f"sums.{i}.{j}"] = text.collector.sums[name]
                arrays[f"counts.{i}.{j}"] = text.collector.counts[name]
            if text.nll is not None:
                arrays[f"nll.{i}"] = text.nll
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        with writing(path, own=True) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Saved:
        """Read a run that `save` wrote; FormatError for any other file."""
        try:
            with np.load(_stored(read_own(Path(path))), allow_pickle=False) as file:
                about = json_input.parse(file["about"].tobytes(), f"{path}: not a saved run of quantkit imatrix")
                if about["version"] != _PROGRESS_VERSION:
                    raise FormatError(
                        f"{path}: a saved run of version {about['version']}, not {_PROGRESS_VERSION}; remove it"
                    )
                texts = [_restored(file, i, text) for i, text in enumerate(about["texts"])]
                return cls(about["run"], texts)
        except (ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile) as error:
            raise FormatError(f"{path}: not a saved run of quantkit imatrix ({error!r:.200}); remove it") from None


def _stored(data: bytes) -> io.BytesIO:
    """Check a file that `np.savez` wrote. ValueError for a compressed member, which could inflate without limit."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        if any(part.compress_type != zipfile.ZIP_STORED or part.file_size > len(data) for part in file.infolist()):
            raise ValueError("a member is compressed")
    return io.BytesIO(data)


def _restored(file: Any, index: int, about: dict[str, Any]) -> Progress:
    collector = Collector(bool(about["process_output"]))
    collector.chunks = int(about["done"])
    for j, name in enumerate(about["names"]):
        collector.sums[name] = file[f"sums.{index}.{j}"]
        collector.counts[name] = file[f"counts.{index}.{j}"]
    nll = file[f"nll.{index}"] if f"nll.{index}" in file.files else None
    return Progress(collector, nll, int(about["done"]))
