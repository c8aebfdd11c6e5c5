"""The time of perplexity compared with ik_llama.cpp, and the extra time of collecting an importance matrix.

    python benchmarks/bench_evaluation.py MODEL.gguf … -f TEXT [-c 512] [--chunks 4] [-t 2] [-r 5]

In each round, libllama of the wheel ik-llama-cpp-python runs the chunks one after another as new sequences, with logits
for the scored half; then quantkit runs them in fast numerics. Both use an f16 KV cache and flash attention. The same
kernel computes both negative log-likelihoods, which must agree to 0.01. Then perplexity alternates with perplexity plus
importance matrix, both in exact numerics, the default of the commands. Ratios are medians over rounds of ratios of
seconds and of user CPU time; the latter depends little on other processes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from quantkit.codegen import cpu_target
from quantkit.evaluate.imatrix.collect import collect
from quantkit.evaluate.nll import negative_log_likelihood
from quantkit.evaluate.perplexity import perplexity_of_chunks
from quantkit.evaluate.text import Chunks, chunked
from quantkit.formats.kld.scored_tokens import scored_rows
from quantkit.runtime.loading import load
from tests.conformance.libllama import C, Llama

TABLE = Table(
    "evaluation",
    "How fast are perplexity and importance matrices?",
    (
        Column("model"),
        Column("tokens_s", "perplexity, tokens/s", ".1f"),
        Column("tokens_s_reference", "ik_llama.cpp", ".1f"),
        Column("ratio", "ratio", ".2f"),
        Column("imatrix", "imatrix / perplexity, time", ".3f"),
        Column("imatrix_cpu", "the same, CPU time", ".3f"),
    ),
    "Perplexity in fast numerics; the importance matrix is collected in exact numerics and compared with perplexity "
    "alone in exact numerics.",
)
REST = 0.05  # seconds between two runs, until the threads of the first one sleep


def reference_nll(llama: Llama, chunks: Chunks) -> float:
    """Mean negative log-likelihood of the scored tokens."""
    rows, n_ctx = scored_rows(chunks.n_ctx), chunks.n_ctx
    batch, found = C.llama_batch_init(n_ctx, 0, 1), []
    for text, tokens in zip(chunks.tokens, chunks.inputs):
        C.llama_kv_cache_clear(llama._context)
        batch.n_tokens = n_ctx
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, int(i >= rows.start)
        if status := C.llama_decode(llama._context, batch):
            raise RuntimeError(f"ik_llama.cpp: llama_decode returned {status}")
        outputs = C.llama_get_logits_ith(llama._context, rows.start)
        logits = np.ctypeslib.as_array(outputs, (rows.stop - rows.start, llama.n_vocab))
        found.append(negative_log_likelihood(logits, text[rows.start + 1 :]))
    C.llama_batch_free(batch)
    return float(np.mean(found))


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, user CPU seconds, and the result."""
    time.sleep(REST)
    begin, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    found = run()
    return time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu, found


def alternate(first: Callable[[], Any], second: Callable[[], Any], repeat: int) -> dict[str, float]:
    """Run both alternately. Medians: seconds of each, and second / first by seconds and by user CPU time."""
    first(), second()
    rounds = [(timed(first), timed(second)) for _ in range(repeat)]
    return {
        "first": statistics.median(a[0] for a, _ in rounds),
        "second": statistics.median(b[0] for _, b in rounds),
        "ratio": statistics.median(b[0] / a[0] for a, b in rounds),
        "cpu_ratio": statistics.median(b[1] / a[1] for a, b in rounds),
    }


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    fast, exact = (load(path, numerics=numerics, threads=options.threads) for numerics in ("fast", "exact"))
    chunks = chunked(fast.tokenizer, options.file, options.ctx, options.chunks)
    tokens = len(chunks) * chunks.n_ctx
    with Llama(path, options.ctx, options.threads, cache_types=("f16", "f16")) as reference:
        theirs, ours = reference_nll(reference, chunks), float(perplexity_of_chunks(fast, chunks).nll.mean())
        if abs(theirs - ours) > 0.01 * ours:
            raise RuntimeError(f"{path}: mean nll {ours:.4f}, with ik_llama.cpp {theirs:.4f}")
        speed = alternate(
            lambda: perplexity_of_chunks(fast, chunks), lambda: reference_nll(reference, chunks), options.repeat
        )
    added = alternate(lambda: perplexity_of_chunks(exact, chunks), lambda: collect(exact, chunks), options.repeat)
    return {
        "model": path.stem, "nll": ours, "nll_reference": theirs, "tokens_s": tokens / speed["first"],
        "tokens_s_reference": tokens / speed["second"], "ratio": speed["ratio"], "cpu_ratio": speed["cpu_ratio"],
        "imatrix": added["ratio"], "imatrix_cpu": added["cpu_ratio"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("-f", "--file", type=Path, required=True)
    parser.add_argument("-c", "--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--repeat", type=int, default=5)
    records.add_option(parser)
    options = parser.parse_args()
    print(
        f"{options.threads} threads, {cpu_target.isa()}; tokens/s, reference / ours in seconds (user CPU), "
        "imatrix / plain"
    )
    rows = []
    for path in options.models:
        row = measure(path, options)
        rows.append(row)
        text = f"{row['model']:20s} {row['tokens_s']:8.1f} {row['tokens_s_reference']:8.1f}  {row['ratio']:5.2f} "
        print(f"{text}({row['cpu_ratio']:.2f})  imatrix {row['imatrix']:.3f} ({row['imatrix_cpu']:.3f})", flush=True)
    records.save(TABLE, rows, options)
    print(json.dumps({"bench": "evaluation", "isa": cpu_target.isa(), "threads": options.threads, "ctx": options.ctx,
                      "chunks": options.chunks, "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
