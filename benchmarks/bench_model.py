"""Prompt and generation speed compared with ik_llama.cpp, in one process and in alternation.

    python benchmarks/bench_model.py [MODEL.gguf …] [--synthetic llama-1.2b,gemma3 --types q4_K,iq4_k]
                                     [-t 2] [-p 512] [-n 64] [-d 512,4096] [-r 5] [-ctk f16,q8_0] [-ctv f16]
                                     [-khad] [-vhad] [--save NAME [--question TEXT]]

In each round, libllama of the wheel runs a prompt of -p tokens (-p 0: none) and generates -n tokens into an empty
cache, then quantkit does the same; so other load on the machine affects both alike. For each depth of -d, both then
fill their caches to it once, and further rounds time generation there; the generated tokens are removed after each.
Both have the same KV cache, f16 by default, and flash attention. The table has medians over rounds; the ratio ours /
ik_llama.cpp is the median of the ratios of the rounds. --synthetic writes models with random weights (synthetic.py) to
--folder, one at a time; with several types, a line with the geometric means of the ratios follows each. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
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
from benchmarks.synthetic import NAMES, write
from quantkit import types
from quantkit.codegen import cpu_target, thread_pool
from quantkit.evaluate.bench import bytes_per_token
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.loading import load

SPEEDS = (
    Column("pp", "prompt, t/s", ".1f"),
    Column("pp_reference", "ik_llama.cpp", ".1f"),
    Column("pp_ratio", "ratio", ".2f"),
    Column("tg", "generation, t/s", ".1f"),
    Column("tg_reference", "ik_llama.cpp", ".1f"),
    Column("tg_ratio", "ratio", ".2f"),
)
COLUMNS = (Column("model"), *SPEEDS, Column("tg_gb_per_second", "GB/s", ".1f"))
ABOUT = (
    "Tokens per second, medians over rounds in which both programs alternate; both use flash attention and the same KV "
    "cache. GB/s: weights and cache that generation reads. The models have random weights, rows as long as in real "
    "models, and fewer layers, experts and tokens of the vocabulary (`benchmarks/synthetic.py`). Rows of 2880 columns "
    "(gpt-oss) fit no block of 256: its matrices are Q8_0 whatever the type."
)
BATCH = 512  # tokens per batch of a prompt
REST = 0.05  # seconds between two runs, until the threads of the first one sleep


class Reference:
    """The wheel's libllama on one model."""

    def __init__(self, path: Path, threads: int, n_ctx: int, n_batch: int, cache: CacheType, recurrent: bool):
        from ik_llama_cpp import _ctypes_api as api

        self.api, self.recurrent = api, recurrent
        self.forget = api._lib.llama_kv_cache_seq_rm  # remove positions of a sequence
        self.forget.argtypes, self.forget.restype = [ctypes.c_void_p] + [ctypes.c_int32] * 3, ctypes.c_bool
        self.state_size, self.get_state, self.set_state = (  # of a sequence
            getattr(api._lib, f"llama_state_seq_{name}") for name in ("get_size", "get_data", "set_data")
        )
        self.state_size.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32]
        for function in (self.get_state, self.set_state):
            function.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_uint32]
        for function in (self.state_size, self.get_state, self.set_state):
            function.restype = ctypes.c_size_t
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(os.fspath(path).encode(), parameters)
        context = api.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = n_ctx, n_batch, n_batch
        context.n_threads = context.n_threads_batch = threads
        context.flash_attn = True
        context.type_k, context.type_v = (types.layout(name).ggml_type for name in (cache.k, cache.v))
        context.k_cache_hadamard, context.v_cache_hadamard = cache.khad, cache.vhad
        self.context = api.llama_init_from_model(self.model, context)

    def mark(self) -> None:
        """Copy the sequence of a recurrent model, so that `keep` can return to it."""
        if self.recurrent:
            self.saved = ctypes.create_string_buffer(self.state_size(self.context, 0, 0))
            self.get_state(self.context, self.saved, len(self.saved), 0, 0)

    def keep(self, tokens: int) -> None:
        """Remove all but the first tokens from the cache; in recurrent models all of them, or those after the mark."""
        if self.recurrent and tokens:
            self.set_state(self.context, self.saved, len(self.saved), 0, 0)
        else:
            self.forget(self.context, 0, tokens, -1)

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_free_model(self.model)

    def run(self, tokens: np.ndarray, position: int) -> None:
        """Decode tokens at a position, with logits of the last one only."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, int(i == len(tokens) - 1)
        status = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"ik_llama.cpp: llama_decode returned {status}")


class Ours:
    def __init__(self, path: Path, threads: int, n_ctx: int, cache: CacheType):
        self.model = load(path, numerics="fast", threads=threads, cache_type=cache)
        self.cache = self.model.new_cache(n_ctx)

    def mark(self) -> None:
        self.cache.mark()

    def keep(self, tokens: int) -> None:
        self.cache.truncate(tokens)

    def run(self, tokens: np.ndarray, position: int) -> None:
        self.model.forward(tokens, self.cache, logits="last")


Task = Callable[[Any, np.ndarray, argparse.Namespace], list[float]]


def generate(side: Any, tokens: np.ndarray, position: int) -> float:
    begin = time.perf_counter()
    for i in range(len(tokens)):
        side.run(tokens[i : i + 1], position + i)
    return time.perf_counter() - begin


def from_empty_cache(side: Any, tokens: np.ndarray, args: argparse.Namespace) -> list[float]:
    """Seconds of the prompt, unless -p is 0, and of generation, with an empty cache."""
    side.keep(0)
    time.sleep(REST)
    found = []
    if args.n_prompt:
        begin = time.perf_counter()
        side.run(tokens[: args.n_prompt], 0)
        found.append(time.perf_counter() - begin)
        side.keep(0)
    return [*found, generate(side, tokens[: args.n_gen], 0)]


def fill(side: Any, tokens: np.ndarray, depth: int) -> None:
    side.keep(0)
    for start in range(0, depth, BATCH):
        side.run(tokens[start : min(start + BATCH, depth)], start)
    side.mark()


def at_depth(depth: int) -> Task:
    def task(side: Any, tokens: np.ndarray, args: argparse.Namespace) -> list[float]:
        side.keep(depth)
        time.sleep(REST)
        return [generate(side, tokens[: args.n_gen], depth)]

    return task


def alternate(ours: Ours, reference: Reference, tokens: np.ndarray, args: argparse.Namespace) -> dict[str, list[Any]]:
    """For each timed step, the seconds of (ours, ik_llama.cpp) in each round but the first."""
    found: dict[str, list[Any]] = {}

    def rounds(names: list[str], task: Task) -> None:
        for turn in range(args.repeat + 1):
            theirs = task(reference, tokens, args)
            mine = task(ours, tokens, args)
            for name, pair in zip(names, zip(mine, theirs)):
                found.setdefault(name, []).extend([pair] if turn else [])

    rounds((["pp"] if args.n_prompt else []) + ["tg"], from_empty_cache)
    for depth in args.depth:
        for side in (reference, ours):
            fill(side, tokens, depth)
        rounds([f"tg{depth}"], at_depth(depth))
    return found


def measure(path: Path, kind_k: str, args: argparse.Namespace) -> dict[str, Any]:
    n_ctx = max([args.n_prompt, *args.depth]) + args.n_gen
    cache = CacheType(kind_k, args.ctv or kind_k, args.khad, args.vhad)
    ours = Ours(path, args.threads, n_ctx, cache)
    recurrent = bool(ours.model.hparams.recurrent)
    reference = Reference(path, args.threads, n_ctx, max(args.n_prompt, BATCH), cache, recurrent)
    tokens = np.random.default_rng(0).integers(0, ours.model.vocab_size, n_ctx)
    rounds = alternate(ours, reference, tokens, args)
    reference.close()
    found: dict[str, Any] = {"model": path.stem, "cache": str(cache), "fallback_reason": ours.model.fallback_reason}
    for name, pairs in rounds.items():
        count = args.n_prompt if name == "pp" else args.n_gen
        mine, theirs = zip(*pairs)
        found[name] = count / statistics.median(mine)
        found[f"{name}_reference"] = count / statistics.median(theirs)
        found[f"{name}_ratio"] = statistics.median(b / a for a, b in pairs)
        found[f"{name}_best_ratio"] = min(theirs) / min(mine)
    read = bytes_per_token(ours.model, args.n_gen // 2)
    found["tg_gb_per_second"] = read * found["tg"] / 1e9
    found["tg_reference_gb_per_second"] = read * found["tg_reference"] / 1e9
    return found


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['model']:28}"]
    for name in (key.removesuffix("_ratio") for key in row if key.endswith("_ratio") and "best" not in key):
        cells.append(f"{row[name]:9.1f} {row[f'{name}_reference']:9.1f} {row[f'{name}_ratio']:6.2f}")
    cells.append(f"{row['tg_gb_per_second']:6.1f} {row['tg_reference_gb_per_second']:6.1f}")
    return " ".join(cells) + (f"  layer by layer: {row['fallback_reason']}" if row["fallback_reason"] else "")


def of_file(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each type of keys in the cache."""
    rows = []
    for kind_k in args.ctk.split(","):
        rows.append(measure(path, kind_k, args))
        print(line(rows[-1]), flush=True)
    return rows


def of_synthetic(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each type, and one with the geometric means of the ratios."""
    args.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for kind in args.types.split(","):
        path = write(name, kind, args.folder / f"{name} {kind}.gguf")
        rows += of_file(path, args)
        path.unlink()
    if len(rows) > 1:
        ratios = [key for key in rows[0] if key.endswith("_ratio")]
        means = {key: statistics.geometric_mean(row[key] for row in rows) for key in ratios}
        rows.append({"model": f"{name}, geometric mean", **means})
        print(rows[-1]["model"], *(f"{key} {means[key]:.2f}" for key in ratios if "best" not in key), flush=True)
    return rows


def names(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(NAMES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    return text.split(",")


def depths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--synthetic", type=names, default=[], help=f"of {', '.join(NAMES)}; separated by commas")
    parser.add_argument("--types", default="q4_K")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-models"))
    parser.add_argument("-t", "--threads", type=int, default=thread_pool.default_threads())
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-d", "--depth", type=depths, default=[0], help="separated by commas")
    parser.add_argument("-r", "--repeat", type=int, default=5)
    parser.add_argument(
        "-ctk", default="f16", help="type of keys in the cache; several, separated by commas: a row each"
    )
    parser.add_argument("-ctv", help="of values; default: that of keys")
    parser.add_argument("-khad", action="store_true", help="rotate keys")
    parser.add_argument("-vhad", action="store_true", help="rotate values")
    parser.add_argument("--question", default="How fast do models run, beside ik_llama.cpp?", help="of the saved table")
    records.add_option(parser)
    args = parser.parse_args()
    args.depth = [depth for depth in args.depth if depth]
    kinds = [f"PP{args.n_prompt}"] if args.n_prompt else []
    kinds += [f"TG{args.n_gen}", *(f"@{depth}" for depth in args.depth)]
    print(f"{args.threads} threads, {cpu_target.isa()}, {args.repeat} rounds, tokens/s")
    print(" ".join([f"{'model':28}", *(f"{k:>9} {'ref':>9} {'ratio':>6}" for k in kinds), f"{'GB/s':>6} {'ref':>6}"]))
    at = [c for depth in args.depth for c in (Column(f"tg{depth}", f"at {depth:,}, t/s", ".1f"),
                                              Column(f"tg{depth}_ratio", "ratio", ".2f"))]  # fmt: skip
    columns = [column for column in COLUMNS if args.n_prompt or not column.key.startswith("pp")]
    columns += [Column("cache", "cache")] if "," in args.ctk else []
    rows: list[dict[str, Any]] = []
    for measured in itertools.chain(
        (of_file(path, args) for path in args.models), (of_synthetic(name, args) for name in args.synthetic)
    ):
        rows += measured
        records.save(Table("model", args.question, (*columns, *at), ABOUT), rows, args)  # each time: a run takes hours
    conditions = {"threads": args.threads, "isa": cpu_target.isa(), "n_prompt": args.n_prompt, "n_gen": args.n_gen}
    print(json.dumps({**conditions, "depth": args.depth, "repeat": args.repeat, "models": rows}))


if __name__ == "__main__":
    main()
