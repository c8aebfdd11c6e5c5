"""Prompt and generation speed beside the reference wheel's, in one process, by turns.

    python benchmarks/bench_runtime.py MODEL.gguf [MODEL.gguf …] [-t 2] [-p 512] [-n 32] [-r 7]

Every round times the reference's prompt, then the generation of -n tokens after it, then ours; so what else the machine
does meets both alike. Both keep a cache of halves; the reference runs with flash attention. The table gives medians
over the rounds, and the ratio ours / reference as the median of the rounds' own ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quantkit import jit
from quantkit.evaluate.bench import bytes_per_token
from quantkit.runtime.model import load

REST = 0.05  # seconds between the two, until the other's threads have gone to sleep


class Reference:
    """The wheel's libllama on one model."""

    def __init__(self, path: Path, threads: int, n_ctx: int, n_batch: int):
        from ik_llama_cpp import _ctypes_api as api

        self.api = api
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(os.fspath(path).encode(), parameters)
        context = api.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = n_ctx, n_batch, n_batch
        context.n_threads = context.n_threads_batch = threads
        context.flash_attn = True
        self.context = api.llama_init_from_model(self.model, context)

    def clear(self) -> None:
        self.api.llama_kv_cache_clear(self.context)

    def run(self, tokens: np.ndarray, position: int) -> None:
        """Decode tokens at a position; logits of the last only."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, int(i == len(tokens) - 1)
        status = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"the reference's llama_decode returned {status}")


class Ours:
    def __init__(self, path: Path, threads: int, n_ctx: int):
        self.model = load(path, numerics="fast", threads=threads)
        self.cache = self.model.new_cache(n_ctx)

    def clear(self) -> None:
        self.cache.length = 0

    def run(self, tokens: np.ndarray, position: int) -> None:
        self.model.forward(tokens, self.cache, logits="last")


def round_of(side: Any, prompt: np.ndarray, generated: np.ndarray) -> tuple[float, float]:
    """Seconds of the prompt and of the generated tokens after it."""
    side.clear()
    time.sleep(REST)
    begin = time.perf_counter()
    side.run(prompt, 0)
    middle = time.perf_counter()
    for i in range(len(generated)):
        side.run(generated[i : i + 1], len(prompt) + i)
    return middle - begin, time.perf_counter() - middle


def measure(path: Path, threads: int, n_prompt: int, n_generate: int, repeat: int) -> dict[str, Any]:
    n_ctx = n_prompt + n_generate
    ours, reference = Ours(path, threads, n_ctx), Reference(path, threads, n_ctx, n_prompt)
    tokens = np.random.default_rng(0).integers(0, ours.model.vocab_size, n_ctx)
    prompt, generated = tokens[:n_prompt], tokens[n_prompt:]
    rounds: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for _ in range(repeat + 1):
        theirs = round_of(reference, prompt, generated)
        rounds.append((round_of(ours, prompt, generated), theirs))
    found: dict[str, Any] = {"model": path.name, "slow_because": ours.model.slow_because}
    for i, (name, count) in enumerate((("pp", n_prompt), ("tg", n_generate))):
        mine, other = ([side[i] for side in sides] for sides in zip(*rounds[1:]))
        found[name] = count / statistics.median(mine)
        found[f"{name}_reference"] = count / statistics.median(other)
        found[f"{name}_ratio"] = statistics.median(b / a for a, b in zip(mine, other))
        found[f"{name}_best_ratio"] = min(other) / min(mine)
    read = bytes_per_token(ours.model, n_prompt + n_generate // 2)
    found["tg_gb_per_second"] = read * found["tg"] / 1e9
    found["tg_reference_gb_per_second"] = read * found["tg_reference"] / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=jit.default_threads())
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=32)
    parser.add_argument("-r", "--repeat", type=int, default=7)
    args = parser.parse_args()
    print(
        f"{args.threads} threads, {jit.isa()}, prompt {args.n_prompt}, then {args.n_gen} tokens, {args.repeat} rounds"
    )
    print(
        f"{'model':28} {'PP t/s':>9} {'ref':>9} {'ratio':>6} {'TG t/s':>9} {'ref':>9} {'ratio':>6} "
        f"{'GB/s':>6} {'ref':>6}"
    )
    rows = []
    for path in args.models:
        row = measure(path, args.threads, args.n_prompt, args.n_gen, args.repeat)
        rows.append(row)
        print(
            f"{row['model']:28} {row['pp']:9.1f} {row['pp_reference']:9.1f} {row['pp_ratio']:6.2f} "
            f"{row['tg']:9.1f} {row['tg_reference']:9.1f} {row['tg_ratio']:6.2f} "
            f"{row['tg_gb_per_second']:6.1f} {row['tg_reference_gb_per_second']:6.1f}",
            flush=True,
        )
    conditions = {"threads": args.threads, "isa": jit.isa(), "n_prompt": args.n_prompt, "n_gen": args.n_gen}
    print(json.dumps({**conditions, "repeat": args.repeat, "models": rows}))


if __name__ == "__main__":
    main()
