"""How much text and how much shrinkage second moments need: KL divergence on calibration text and on other text.

    python benchmarks/bench_calibration.py --calibrate TEXT --text TEXT… [--tokens 8192,32768,131072] [--type Q5_0]
                                           [--shares 0,0.1,0.25,0.5] [--chunks 4] [--folder DIR] [--save]

The model is SmolLM2, padded with zeros to 768 columns (`bench_second_moments`). Correlations of n columns are
multiplied by (1 - n / (n + tokens)) (1 - share); quantkit's share is `second_moments.OF_THE_TEXT`. Divergence on
calibration text is over the first chunks of --calibrate, which all runs have seen.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records
from benchmarks.bench_second_moments import CONTEXT, cached, divergence, matrix_of, padded_model
from benchmarks.records import Column, Table
from quantkit.evaluate.text import chunked
from quantkit.formats.imatrix import second_moments

TABLE = Table(
    "calibration",
    "How much calibration text and how much shrinkage do second moments need?",
    (
        Column("tokens", "tokens", ",d"),
        Column("share", "share", ".2f"),
        Column("seen", "KLD, calibration text", ".4f"),
        Column("held_out", "KLD, other text", ".4f"),
    ),
    "SmolLM2-135M in its own axes, padded with zeros to 768 columns; all block matrices of one type, exact numerics. "
    "Correlations of n columns are multiplied by (1 - n / (n + tokens)) (1 - share). No share: importance alone.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", default="8192,32768,131072")
    parser.add_argument("--shares", default="0,0.1,0.25,0.5")
    parser.add_argument("--type", default="Q5_0")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-calibration"))
    records.add_option(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = padded_model(options.folder)
    original = quantkit.load(str(model))
    base = cached(original.logits)
    texts = [chunked(original.tokenizer, text, CONTEXT, options.chunks) for text in (options.calibrate, *options.text)]
    rows: list[dict[str, Any]] = []

    def measure(tokens: int, share: float | None, matrix: Path) -> None:
        second_moments.OF_THE_TEXT = share or 0.0
        out = options.folder / "candidate.gguf"
        chosen = quantkit.QuantizeOptions(
            imatrix=matrix, pure=True, token_embedding_type="f16", output_tensor_type="f16",
            no_second_moments=share is None,
        )  # fmt: skip
        quantkit.quantize(model, out, options.type, chosen)
        seen, *held_out = divergence(texts, base, quantkit.load(str(out)).logits)
        rows.append({"tokens": tokens, "share": share, "seen": seen, "held_out": float(np.mean(held_out))})
        print(rows[-1], flush=True)
        out.unlink()

    for tokens in map(int, options.tokens.split(",")):
        matrix = matrix_of(model, options.calibrate, tokens, options.folder)
        for share in (None, *map(float, options.shares.split(","))):
            measure(tokens, share, matrix)
    records.save(TABLE, rows, options, rows)


if __name__ == "__main__":
    main()
