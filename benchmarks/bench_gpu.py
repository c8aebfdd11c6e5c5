"""Check and time what runs on a GPU, in stages. One file of `benchmarks/gpu` describes each stage and its figures.

    python benchmarks/bench_gpu.py [--stage rates,kernels,models] [--types q4_K,iq4_k] [--models q8_0]
                                   [--device 0] [--folder /dev/shm] [--limit 170] [--json FILE]      (make bench-gpu)

    rates      what the machine and other libraries' products reach        hybrid     a token, experts on the CPU
    kernels    rates of the products of each type                          streamed   a prompt, experts on the CPU
    types      the results of each type beside the CPU's, and rates        threads    the CPU with 1 to 16 threads
    models     llamas of 8B's shape: prompts and generation                profile    time by kernel, of an 8B

Without a GPU it prints one line and exits with 1; `--stage threads` needs none. Each stage runs alone. After --limit
seconds it begins nothing new and names what it left out. `--json FILE` is written anew after every figure, so that a
run that is stopped leaves what it had. Times are medians of wall-clock times. A failure is printed in its line and
makes the exit status 1; the other parts still run. The last line is JSON. --tiny selects shapes so small that numba's
simulator can run everything: tests/runtime/cuda/test_sim_bench.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.gpu import hybrid, kernels, models, profile, rates, streamed, threads, types
from benchmarks.gpu.run import Run, Stage
from quantkit.errors import UnsupportedError

STAGES: dict[str, Stage] = {
    "rates": rates, "kernels": kernels, "types": types, "models": models, "hybrid": hybrid, "streamed": streamed,
    "threads": threads, "profile": profile,
}  # fmt: skip
WITHOUT_GPU = {"threads"}
LIMIT = 170.0  # seconds of a stage


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default=",".join(STAGES), help=f"a comma list of {', '.join(STAGES)}")
    parser.add_argument("--types", help="of kernels and types: a comma list; all by default")
    parser.add_argument("--models", help="types of the models' weights: a comma list; the stage's own by default")
    parser.add_argument("--json", type=Path, help="file for the figures, written anew after each")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for models, 36 GB at most; a temporary one by default")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a stage begins nothing new")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the bench itself")
    records.add_option(parser)
    options = parser.parse_args(arguments)
    stages = options.stage.split(",")
    if unknown := sorted(set(stages) - set(STAGES)):
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    if options.save and len(stages) > 1:
        parser.error("--save NAME is for one stage; --save alone gives each stage its own name")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    begin, stages = time.perf_counter(), options.stage.split(",")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = Run(options, Path(folder))
        if set(stages) - WITHOUT_GPU:
            try:
                run.open()
            except UnsupportedError as failure:
                print(f"bench-gpu: {failure}", file=sys.stderr)
                return 1
        for name in stages:
            run.begin(name)
            STAGES[name].measure(run)
            if rows := STAGES[name].rows(run.figures[name]):
                records.save(STAGES[name].TABLE, rows, options, run.figures[name])
    run.figures["seconds"] = time.perf_counter() - begin
    run.save()
    print(json.dumps(run.figures))
    return 1 if run.wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a time limit that ends the run leaves no models behind
    sys.exit(main())
