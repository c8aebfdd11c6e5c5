"""How much text second moments need: KL divergence on calibration text and on other text, by tokens of calibration.

    python benchmarks/bench_calibration.py --calibrate TEXT --text TEXT… [--tokens 8192,32768,131072] [--type IQ4_NL]
                                           [--chunks 4] [--folder DIR] [--save]

The model is SmolLM2, padded with zeros to 768 columns (`bench_second_moments`). For each number of tokens, second
moments are taken as they are (a number of tokens far above the columns is written into the file) and with shrinkage.
Divergence on calibration text is over the first chunks of --calibrate, which all runs have seen.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records
from benchmarks.bench_second_moments import CONTEXT, divergence, padded_model
from benchmarks.records import Column, Table
from quantkit.evaluate.text import chunked
from quantkit.formats import imatrix as matrices

TABLE = Table(
    "calibration",
    "How much calibration text do second moments need?",
    (
        Column("tokens", "tokens", ",d"),
        Column("shrinkage"),
        Column("seen", "KLD, calibration text", ".4f"),
        Column("held_out", "KLD, other text", ".4f"),
    ),
    "SmolLM2-135M in its own axes, padded with zeros to 768 columns; all block matrices of one type, exact numerics. "
    "0 tokens: importance of the largest number of tokens, without second moments.",
)
_ALL = 1 << 40  # tokens: shrinkage of nothing


def matrix_of(model: Path, calibrate: Path, tokens: int, folder: Path) -> Path:
    """The importance matrix with second moments of the first tokens of a text; what exists is kept."""
    path = folder / f"calibration-{tokens}.gguf"
    if not path.exists():
        options = quantkit.ImatrixOptions(second_moments="full", no_ppl=True, chunks=tokens // CONTEXT)
        quantkit.imatrix(model, calibrate, path, options)
    return path


def without_shrinkage(path: Path) -> Path:
    """A copy of an importance matrix whose second moments claim more tokens than shrinkage minds."""
    found = matrices.read(path)
    for name, moments in found.second_moments.items():
        found.second_moments[name] = replace(moments, tokens=np.full_like(moments.tokens, _ALL))
    out = path.with_suffix(".plain.gguf")
    matrices.write(out, found)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", default="8192,32768,131072")
    parser.add_argument("--type", default="IQ4_NL")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-calibration"))
    records.add_option(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = padded_model(options.folder)
    original = quantkit.load(str(model))
    texts = [chunked(original.tokenizer, text, CONTEXT, options.chunks) for text in (options.calibrate, *options.text)]

    rows: list[dict[str, Any]] = []

    def measure(tokens: int, shrinkage: str, matrix: Path, **chosen: Any) -> None:
        out = options.folder / "candidate.gguf"
        quantkit.quantize(model, out, options.type, quantkit.QuantizeOptions(
            imatrix=matrix, pure=True, token_embedding_type="f16", output_tensor_type="f16", **chosen
        ))  # fmt: skip
        seen, *held_out = divergence(texts, original.logits, quantkit.load(str(out)).logits)
        rows.append({"tokens": tokens, "shrinkage": shrinkage, "seen": seen, "held_out": float(np.mean(held_out))})
        print(rows[-1], flush=True)
        out.unlink()

    numbers = [int(number) for number in options.tokens.split(",")]
    for tokens in numbers:
        matrix = matrix_of(model, options.calibrate, tokens, options.folder)
        measure(tokens, "n / (n + tokens)", matrix)
        measure(tokens, "none", without_shrinkage(matrix))
    measure(0, "", matrix_of(model, options.calibrate, max(numbers), options.folder), no_second_moments=True)
    records.save(TABLE, rows, options, rows)


if __name__ == "__main__":
    main()
