"""How long `sensitivity` takes, as a multiple of `imatrix` with second moments over the same text.

    python benchmarks/bench_sensitivity.py --text TEXT [--models smollm2,llama-1.2b] [--chunks 2] [--imatrix-chunks 4]
                                           [--tokens 83000] [--folder DIR] [--save]

smollm2 is SmolLM2-135M as it is; other names are models of random weights (SHAPES of benchmarks/synthetic.py) with its
tokenizer. The time of an importance matrix over --tokens is that of --imatrix-chunks chunks of 512 tokens, scaled.
Both commands run the model in exact numerics.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records, synthetic
from benchmarks.bench_fit import own_model
from benchmarks.records import Column, Table
from quantkit.evaluate.sensitivity.run import TYPES, SensitivityOptions, sensitivity
from quantkit.formats import gguf

TABLE = Table(
    "sensitivity",
    "How long does `sensitivity` take, beside an importance matrix?",
    (
        Column("model"),
        Column("parameters", "parameters", ",d"),
        Column("matrices"),
        Column("imatrix", "imatrix, s", ",.0f"),
        Column("sensitivity", "sensitivity, s", ",.0f"),
        Column("ratio", "sensitivity / imatrix", ".2f"),
    ),
    "`imatrix --second-moments full` over 83,000 tokens, scaled from a few chunks; `sensitivity` with its default "
    "types (for SmolLM2 five that fit its rows) and number of chunks. Both in exact numerics.",
)
OWN_TYPES = ("q4_0", "iq4_nl", "q5_0", "q6_0", "q8_0")  # of blocks that fit rows of 576 columns


def model_of(name: str, folder: Path) -> Path:
    """The file of a model in f16; what exists is kept."""
    smollm2, path = own_model(folder), folder / f"{name}.gguf"
    if name == "smollm2":
        return smollm2
    return path if path.exists() else synthetic.write(name, "f16", path, gguf.open(smollm2).metadata)


def seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row: the seconds of both commands."""
    model = model_of(name, options.folder)
    tensors = gguf.open(model).tensors.values()
    matrix, costs = options.folder / f"{name}.imatrix.gguf", options.folder / f"{name}.costs.json"
    costs.unlink(missing_ok=True)

    def collect(chunks: int) -> None:
        matrix.unlink(missing_ok=True)
        chosen = quantkit.ImatrixOptions(second_moments="full", no_ppl=True, chunks=chunks)
        quantkit.imatrix(model, options.text, matrix, chosen)

    collect(1)  # kernels are compiled, the file is in memory
    few = seconds(lambda: collect(options.imatrix_chunks))
    wanted = OWN_TYPES if name == "smollm2" else TYPES
    chosen = SensitivityOptions(imatrix=matrix, types=wanted, chunks=options.chunks, restart=True)
    taken = seconds(lambda: sensitivity(model, options.text, costs, chosen))
    row: dict[str, Any] = {
        "model": name, "parameters": sum(tensor.n_rows * tensor.shape[-1] for tensor in tensors),
        "matrices": len(json.loads(costs.read_text(encoding="utf-8"))["tensors"]),
        "imatrix": few * options.tokens / (512 * options.imatrix_chunks), "sensitivity": taken,
    }  # fmt: skip
    row["ratio"] = row["sensitivity"] / row["imatrix"]
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--models", default="smollm2,llama-1.2b")
    parser.add_argument("--chunks", type=int, default=SensitivityOptions.chunks)
    parser.add_argument("--imatrix-chunks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=83_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-sensitivity"))
    records.add_option(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = [measure(name, options) for name in options.models.split(",")]
    records.save(TABLE, rows, options)
    print(json.dumps({"bench": TABLE.name, "rows": rows}))


if __name__ == "__main__":
    main()
