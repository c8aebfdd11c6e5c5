"""Several models against one reference over the same tokens: size, perplexity, divergence, throughput; one line each.

The reference's distributions go to a temporary base file (16 bits a logit, the rounding adds less than 1e-8 to a mean
KLD), so only one model is open at a time. All statistics are paired by token.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quantkit.errors import DataError
from quantkit.evaluate import kld
from quantkit.evaluate.bench import Case, bench
from quantkit.evaluate.kld import Divergence, Estimate, percentile
from quantkit.evaluate.perplexity import perplexity
from quantkit.evaluate.text import DEFAULT_BATCH, DEFAULT_CONTEXT, chunked
from quantkit.files import gguf
from quantkit.files.kld import BaseReader, BaseWriter

Opener = Callable[[Path], Any]
Say = Callable[[str], None]


class Throughput(NamedTuple):
    """Tokens a second."""

    prompt: float
    generation: float


@dataclass(frozen=True)
class Candidate:
    """What was measured of one model. The reference itself has no divergence."""

    path: Path
    size_bytes: int  # of all its files
    bits_per_weight: float
    ppl: Estimate
    divergence: Divergence | None = None
    throughput: Throughput | None = None

    def record(self) -> dict[str, Any]:
        """The figures by name, for JSON."""
        found: dict[str, Any] = {"file": self.path.name, "path": str(self.path), "size_bytes": self.size_bytes,
                                 "bits_per_weight": self.bits_per_weight}  # fmt: skip
        found |= {"ppl": self.ppl.value, "ppl_error": self.ppl.error}
        if self.divergence is not None:
            found |= kld.summary(self.divergence)
        if self.throughput is not None:
            found |= {"prompt_tokens_per_second": self.throughput.prompt,
                      "generation_tokens_per_second": self.throughput.generation}  # fmt: skip
        return found


@dataclass(frozen=True)
class Comparison:
    """The reference first, then the models in the order given."""

    candidates: list[Candidate]
    n_ctx: int
    chunks: int
    positions: int


def compare(
    reference: str | os.PathLike[str],
    models: Sequence[str | os.PathLike[str]],
    text: str | os.PathLike[str],
    *,
    open_model: Opener,
    open_fast: Opener | None = None,
    n_ctx: int = DEFAULT_CONTEXT,
    limit: int | None = None,
    n_batch: int = DEFAULT_BATCH,
    say: Say = lambda line: None,
) -> Comparison:
    """Measure every model against the reference.

    open_model(path) gives the models whose quality is measured; open_fast(path), if given, those whose throughput is.
    `say` is told what is being done.
    """
    first = Path(reference)
    model = open_model(first)
    for other in map(Path, models):  # before the hours of work that they would end
        if (found_vocab := open_model(other).vocab_size) != model.vocab_size:
            raise DataError(
                f"{other}: a vocabulary of {found_vocab}, {first} has {model.vocab_size}; models are compared token by "
                "token, so they must share a tokenizer"
            )
    chunks = chunked(model.tokenizer, text, n_ctx, limit)
    with tempfile.TemporaryDirectory(prefix="quantkit-compare-") as folder:
        path = Path(folder) / "base.kld"
        say(f"{first.name}: perplexity over {len(chunks)} chunks of {n_ctx} tokens")
        with BaseWriter(path, chunks.tokens, model.vocab_size) as writer:
            found = perplexity(model, chunks, n_batch=n_batch, base=writer)
        base = BaseReader(path)
        candidates = [_candidate(first, Estimate(found.value, found.error), None, open_fast, say)]
        for other in map(Path, models):
            say(f"{other.name}: KL divergence from {first.name}")
            divergence = kld.divergence(open_model(other), base, n_batch=n_batch)
            candidates.append(_candidate(other, divergence.ppl, divergence, open_fast, say))
    return Comparison(candidates, n_ctx, len(chunks), found.nll.size)


def _candidate(
    path: Path, ppl: Estimate, divergence: Divergence | None, open_fast: Opener | None, say: Say
) -> Candidate:
    speed = None
    if open_fast is not None:
        say(f"{path.name}: throughput")
        speed = throughput(open_fast(path))
    return Candidate(path, *size_of(path), ppl, divergence, speed)


def size_of(path: Path) -> tuple[int, float]:
    """Bytes of all files of a model, and bits per weight over all its tensors."""
    file = gguf.open(path)
    weights = sum(int(np.prod(t.shape, dtype=np.int64)) for t in file.tensors.values())
    return file.size, 8 * sum(t.nbytes for t in file.tensors.values()) / max(1, weights)


def throughput(model: Any, n_prompt: int = 512, n_generate: int = 64, repeat: int = 3) -> Throughput:
    """A prompt of random tokens and single tokens, each from an empty cache; medians."""
    prompt, generation = bench(model, [Case(min(n_prompt, model.n_ctx_train), 0), Case(0, n_generate)], repeat)
    return Throughput(prompt.tokens_per_second, generation.tokens_per_second)


# --------------------------------------------------------------------------------------------------------------- table


def table_header(comparison: Comparison) -> list[str]:
    timed = any(c.throughput for c in comparison.candidates)
    return ["file", "GiB", "bpw", "PPL", "ln(PPL/ref)", "KLD mean", "median", "p99", "max", "same top %", "RMS Δp %",
            *(["PP t/s", "TG t/s"] if timed else [])]  # fmt: skip


def table_rows(comparison: Comparison) -> list[list[str]]:
    """One row of text a candidate; `±` is one standard error."""
    timed = any(c.throughput for c in comparison.candidates)
    return [_row(c, timed) for c in comparison.candidates]


def _row(c: Candidate, timed: bool) -> list[str]:
    cells = [c.path.stem, f"{c.size_bytes / 2**30:.3f}", f"{c.bits_per_weight:.3f}", f"{c.ppl[0]:.4f} ± {c.ppl[1]:.4f}"]
    if (d := c.divergence) is None:
        cells += ["reference"] + ["-"] * 6
    else:
        ordered = d.sorted_kld()
        cells += [f"{d.ln_ratio.value:+.5f} ± {d.ln_ratio.error:.5f}",
                  f"{d.mean_kld.value:.6f} ± {d.mean_kld.error:.6f}"]  # fmt: skip
        cells += [f"{percentile(ordered, f):.6f}" for f in (0.5, 0.99, 1.0)]
        cells += [f"{100 * d.top_agreement.value:.2f} ± {100 * d.top_agreement.error:.2f}",
                  f"{100 * d.rms_dp.value:.3f} ± {100 * d.rms_dp.error:.3f}"]  # fmt: skip
    if timed:
        cells += [f"{c.throughput.prompt:.0f}", f"{c.throughput.generation:.1f}"] if c.throughput else ["-", "-"]
    return cells
