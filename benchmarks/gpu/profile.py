"""Stage `profile`: where the time of one token and of one prompt goes, kernel by kernel, in a llama of 8B's shape.

token, prompt   wall, gpu, host: seconds of the run under torch's profiler (`trace.py`); kernels: name, launches,
                seconds, share of all kernels' seconds, the longest first
ncu             where NVIDIA's `ncu` is installed: for each kernel of a token the mean of METRICS; always the command

python -m benchmarks.gpu.profile MODEL.gguf [--device 0]      what ncu runs: one token, marked for it
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.gpu.run import Figures, Run
from benchmarks.gpu.running import generate, n_ctx, on_gpu, prompt, times, traced_prompt, traced_tokens
from benchmarks.gpu.trace import Trace
from benchmarks.records import ROOT, Column, Table

TABLE = Table(
    "gpu_profile",
    "Where does the time on a GPU go?",
    (
        Column("of"),
        Column("kernel"),
        Column("launches", "launches", "d"),
        Column("ms", "ms", ".3f"),
        Column("share", "share", ".2f"),
    ),
    "One token after 512 others, and one prompt of 2,048, of an 8B llama; from torch's profiler.",
)
MODEL_TYPES = ("q4_K",)
SHOWN = 20  # kernels
LAUNCHES = 120  # that ncu measures, about four layers
METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of DRAM",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of SM",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% occupancy",
}


def measure(run: Run) -> None:
    """A token and a prompt of each model, then what ncu says."""
    for kind in run.types_of_models(MODEL_TYPES):
        for what in ("token", "prompt"):
            run.item(f"{kind}, {what}", functools.partial(of_kernels, run, kind, what), line)
        run.item(f"{kind}, ncu", functools.partial(of_ncu, run, kind), line_of_ncu)


def rows(figures: Figures) -> list[Figures]:
    """One row for each kernel."""
    return [
        {"of": name, "kernel": kernel["name"], "launches": kernel["launches"], "ms": 1e3 * kernel["seconds"],
         "share": kernel["share"]}
        for name, got in figures.items() for kernel in got.get("kernels", ())[:SHOWN]
    ]  # fmt: skip


def line(got: Figures) -> str:
    """The table of kernels in words, a line for each."""
    table = [
        f"{1e3 * k['seconds']:10.3f} ms {100 * k['share']:5.1f} % {k['launches']:6d} x {k['name'][:80]}"
        for k in got["kernels"][:SHOWN]
    ]
    return "\n".join([f"{1e3 * got['wall']:.2f} ms, {times(got)}", *table])


def of_kernels(run: Run, kind: str, what: str, got: Figures) -> None:
    """The profile of a token or a prompt."""
    model = on_gpu(run, run.file(run.sizes.llama, kind))
    cache = model.new_cache(n_ctx(run.sizes))
    if what == "token":
        generate(model, run.sizes, cache)
        trace = traced_tokens(run, model, cache, 1)
    else:
        prompt(model, run.sizes, cache, 0)
        trace = traced_prompt(run, model, cache)
    got |= {"wall": trace.wall, **trace.figures(), "kernels": by_time(trace)}


def by_time(trace: Trace) -> list[Figures]:
    """The kernels of a trace, the longest first, with their shares of the time of all."""
    total = sum(spent for _, spent in trace.kernels.values())
    ordered = sorted(trace.kernels.items(), key=lambda item: -item[1][1])
    return [
        {"name": name, "launches": launches, "seconds": spent, "share": spent / total}
        for name, (launches, spent) in ordered
    ]


# ------------------------------------------------------------------------------------------------------------- ncu


def ncu_command(path: Path, device: int) -> list[str]:
    """Measures the first kernels of a token."""
    return [
        shutil.which("ncu") or "ncu", "--profile-from-start", "off", "--csv", "--launch-count", str(LAUNCHES),
        "--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks.gpu.profile", str(path), "--device",
        str(device),
    ]  # fmt: skip


def of_ncu(run: Run, kind: str, got: Figures) -> None:
    """Run ncu where it is installed. Its failure, where counters are forbidden, is a note and no failure."""
    command = ncu_command(run.file(run.sizes.llama, kind), run.options.device)
    got["command"] = shlex.join(command)
    if not shutil.which("ncu"):
        got["unavailable"] = "ncu is not installed"
        return
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(10.0, run.seconds_left),
            check=True,
        )  # fmt: skip
        got["kernels"] = of_csv(done.stdout)
    except (OSError, subprocess.SubprocessError) as failure:
        got["unavailable"] = f"{failure} {getattr(failure, 'stdout', '') or ''}"[-2000:]


def of_csv(text: str) -> list[Figures]:
    """The mean of each metric by kernel, and the launches, of what ncu prints: a line for each launch and metric."""
    begin = text.index('"ID"') if '"ID"' in text else len(text)
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(io.StringIO(text[begin:])):
        number = row["Metric Value"].replace(",", "")
        values[row["Kernel Name"]][METRICS[row["Metric Name"]]].append(float(number))
    return [
        {"name": name, "launches": max(map(len, metrics.values()))}
        | {metric: statistics.mean(numbers) for metric, numbers in metrics.items()}
        for name, metrics in values.items()
    ]


def line_of_ncu(got: Figures) -> str:
    """What ncu measured, or why not, and its command."""
    found = got.get("kernels", ())
    table = ["  ".join(f"{value:.4g} {key}" if key in METRICS.values() else f"{value}" for key, value in kernel.items())
             for kernel in found]  # fmt: skip
    return "\n".join([got.get("unavailable", f"{len(found)} kernels"), *table, f"command: {got['command']}"])


def one_token(arguments: list[str] | None = None) -> None:
    """Run a token between marks that `ncu --profile-from-start off` waits for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args(arguments, argparse.Namespace(tiny=False))
    run = Run(options, options.path.parent)
    run.open()
    model = on_gpu(run, options.path)
    cache = model.new_cache(n_ctx(run.sizes))
    generate(model, run.sizes, cache)
    run.gpu.torch.cuda.profiler.start()
    model.forward([1], cache, logits="last")
    run.gpu.synchronize()
    run.gpu.torch.cuda.profiler.stop()


if __name__ == "__main__":
    one_token()
