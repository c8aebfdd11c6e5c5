"""What each form of second moments gains on a mixture of experts and on latent attention.

    python benchmarks/bench_second_moments_moe.py --train TEXT --calibrate TEXT --text TEXT TEXT
        [--forms full,blocks:128,blocks:64] [--types IQ4_K,IQ3_K] [--shapes qwen3moe,deepseek2]
        [--folder DIR] [--save]

Trains the small models of benchmarks/trained.py on --train, some minutes each; --folder keeps them, so that a second
run begins with quantizing. For each form there is an importance matrix over --calibrate. All matrices of the blocks get
one type (the embedding stays f16, routers f32). `llama-quantize` and our encoder without second moments have the same
importance. --text is not among the other two. KL divergence from the f16 model over the second half of each chunk of
512 tokens, in exact numerics. A model that has learned nothing would show nothing, so its perplexity on --text is set
beside that of the untrained model and of token frequencies.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records, trained
from benchmarks.bench_second_moments import CONTEXT, SCORED, Logits, cached, divergence, log_softmax, write
from benchmarks.records import Column, Table
from quantkit.evaluate.text import Chunks, chunked
from quantkit.formats import imatrix as matrices

TABLE = Table(
    "second_moments_moe",
    "What does each form of second moments gain on experts and on latent attention?",
    (
        Column("model"),
        Column("type"),
        Column("reference", "ik_llama.cpp", ".5f"),
        Column("plain", "ours, importance", ".5f"),
    ),
    "Mean KL divergence from the f16 model over texts that were used neither for training nor for calibration, exact "
    "numerics; all block matrices of one type, all encoders with the same importance. The models are small and learned "
    "for minutes.",
)


def table(forms: list[str], models: list[dict[str, Any]]) -> Table:
    """The table with a column for each form, and what the models are."""
    about = [TABLE.about]
    for model in models:
        sizes = ", ".join(f"{form} {bytes_ / 1e6:.2f} MB" for form, bytes_ in model["bytes"].items())
        about.append(
            f"{model['model']}: perplexity {model['trained']:.0f} (untrained {model['untrained']:.0f}, by token "
            f"frequencies {model['unigram']:.0f}); second moments of {model['calibration']:,} tokens, {sizes}."
        )
    columns = (*TABLE.columns, *(Column(form, f"ours, {form}", ".5f") for form in forms))
    if "full" in forms:
        columns += (Column("ratio", "full / ik_llama.cpp", ".3f"),)
    return replace(TABLE, columns=columns, about=" ".join(about))


def prepare(shape: str, options: argparse.Namespace) -> tuple[Path, dict[str, Path]]:
    """The trained model as a GGUF file, and an importance matrix for each form; what exists is kept."""
    folder: Path = options.folder / f"{shape}.{options.train.stem}"
    model, _ = trained.as_gguf(shape, options.train, folder)
    measured = {}
    for form in options.forms.split(","):
        path = measured[form] = (
            folder / f"imatrix.{options.calibrate.stem}.{options.calibrate_chunks}.{form.replace(':', '-')}.gguf"
        )
        if not path.exists():
            wanted = quantkit.ImatrixOptions(second_moments=form, no_ppl=True, chunks=options.calibrate_chunks)
            quantkit.imatrix(model, options.calibrate, path, wanted)
            matrices.write(path.with_suffix(".dat"), replace(matrices.read(path), second_moments={}))
    return model, measured


def moments_bytes(matrix: Path) -> int:
    """Bytes of the second moments of a file; weights that share an input share them."""
    return sum({id(m): m.nbytes for m in matrices.read(matrix).second_moments.values()}.values())


def perplexity(texts: list[Chunks], logits: Logits) -> float:
    """Over the scored tokens of all texts."""
    scores = [
        log_softmax(logits(tokens)[SCORED])[np.arange(CONTEXT // 2 - 1), tokens[CONTEXT // 2 + 1 :]]
        for text in texts
        for tokens in text.inputs
    ]
    return float(np.exp(-np.mean(scores)))


def untrained(shape: str) -> Logits:
    """Logits of the model before training."""
    import torch

    model = trained.build(shape).eval()

    def logits(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
        return found

    return logits


def unigram(ids: list[int]) -> Logits:
    """Log shares of tokens in a text, for every position; tokens that are not in it count as one."""
    counts = np.maximum(np.bincount(ids, minlength=trained.VOCABULARY), 1)
    shares = np.log(counts / counts.sum())
    return lambda tokens: np.tile(shares, (len(tokens), 1))


def compare(shape: str, kind: str, model: Path, measured: dict[str, Path], base: Logits, texts: list[Chunks],
            options: argparse.Namespace) -> dict[str, Any]:  # fmt: skip
    """A row: divergences of files of a type, of ik_llama.cpp's tool, ours without second moments and with each form."""
    row: dict[str, Any] = {"model": shape, "type": kind, "texts": {}}
    first = next(iter(measured.values()))
    for side, matrix in {"reference": first, "plain": first, **measured}.items():
        out = model.with_name(f"{kind}.gguf")
        write(side, model, matrix, kind, out, options)
        row["texts"][side] = divergence(texts, base, quantkit.load(str(out)).logits)
        row[side] = float(np.mean(row["texts"][side]))
        out.unlink()
    if "full" in measured:
        row["ratio"] = row["full"] / row["reference"]
    print(f"{shape} {kind}: " + "  ".join(f"{side} {row[side]:.5f}" for side in row["texts"]), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--forms", default="full,blocks:128,blocks:64")
    parser.add_argument("--types", default="IQ4_K,Q4_K,IQ3_K,IQ3_KT,IQ2_K")
    parser.add_argument("--shapes", default=",".join(trained.SHAPES))
    parser.add_argument("--calibrate-chunks", type=int, default=128, help="chunks of 512 tokens")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of each text")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-second-moments-moe"))
    records.add_option(parser)
    options = parser.parse_args()
    options.mixes = False  # for `write`
    models: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        model, measured = prepare(shape, options)
        original = quantkit.load(str(model))
        base = cached(original.logits)
        texts = [chunked(original.tokenizer, text, CONTEXT, options.chunks) for text in options.text]
        ids = original.tokenizer.encode(options.train.read_text(encoding="utf-8"), bos=False)
        found = matrices.read(next(iter(measured.values())))
        models.append({
            "model": shape, "trained": perplexity(texts, base), "untrained": perplexity(texts, untrained(shape)),
            "unigram": perplexity(texts, unigram(ids)), "calibration": found.chunks * found.chunk_size,
            "bytes": {form: moments_bytes(path) for form, path in measured.items()},
        })  # fmt: skip
        print(models[-1], flush=True)
        if models[-1]["trained"] > models[-1]["unigram"] / 2:
            sys.exit(f"{shape}: perplexity {models[-1]['trained']:.0f}, by token frequencies "
                     f"{models[-1]['unigram']:.0f}: too little was learned; change its schedule")  # fmt: skip
        rows += [compare(shape, kind, model, measured, base, texts, options) for kind in options.types.split(",")]
    records.save(table(options.forms.split(","), models), rows, options, models)
    print(json.dumps({"bench": TABLE.name, "models": models, "rows": rows}))


if __name__ == "__main__":
    main()
