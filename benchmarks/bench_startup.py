"""The start of commands before and after libraries took over what quantkit had written itself.

    python benchmarks/bench_startup.py [--before 1487c6a^] [--rounds 5]

Each round runs every command once with the sources of the commit `--before` and once with those of this tree, as new
processes that find their bytecode compiled. The figure is the median of CPU time, user and system, which other
processes on the machine change little. The last line is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import ROOT, Column, Table
from tests.documentation import make_world
from tests.recipe.configs import DEEPSEEK_V3

TABLE = Table(
    "libraries",
    "What did libraries replace, and what do they cost at the start?",
    (
        Column("library"),
        Column("replaced", "in place of"),
        Column("lines", "lines removed", "d"),
        Column("command", "a command that loads it"),
        Column("before", "CPU time before, s", ".2f"),
        Column("after", "now, s", ".2f"),
        Column("elapsed", "now, elapsed, s", ".2f"),
    ),
    "Lines are those of the package that the change deleted. `--help` has to take 0.3 s at most, `plan` of DeepSeek-V3 "
    "1.5 s.",
)
HELP, PLAN = ("--help",), ("plan", "deepseek-v3.json", "IQ2_K", "-ngl", "99", "-ot", "exps=CPU", "-c", "32768")
CONVERT, PLAN_DIRECTORY = ("convert", "HF_DIR", "out.gguf", "--dry-run"), ("plan", "HF_DIR", "Q4_0")
ROWS: tuple[tuple[str, str, int | None, Sequence[str]], ...] = (
    ("typer, rich, tqdm", "ETA lines and bars of each command", 243, HELP),
    ("huggingface_hub", "(new)", None, PLAN),
    ("safetensors", "a JSON scanner and checks of headers", 167, PLAN_DIRECTORY),
    ("gguf (Metadata), pyyaml", "keys of general.* by our own rules", 93, CONVERT),
    ("matplotlib", "SVG drawn by hand in HTML reports", 111, ("compare", "--help")),
    ("scipy", "(new) HiGHS; Student's t by a series", 37, ("recipe", "fit", "--help")),
)


def seconds(sources: Path, command: Sequence[str], folder: Path) -> tuple[float, float]:
    """CPU time and elapsed time of a command with the package in `sources`."""
    started = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "quantkit", *command], cwd=folder, env=os.environ | {"PYTHONPATH": str(sources)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{sources}: quantkit {' '.join(command)}: {done.stderr}")
    elapsed = time.perf_counter() - started
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed


def extract(commit: str, folder: Path) -> Path:
    """The sources of a commit, compiled."""
    data = subprocess.run(["git", "archive", commit, "quantkit", "recipes"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(data.stdout)) as archive:
        archive.extractall(folder, filter="data")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="1487c6a^", help="commit without the libraries")
    parser.add_argument("--rounds", type=int, default=5)
    records.add_option(parser)
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "world")
        folder.mkdir()
        make_world(folder)
        (folder / "deepseek-v3.json").write_text(json.dumps(DEEPSEEK_V3), encoding="utf-8")
        trees = {
            "before": extract(o.before, Path(temporary, "before")),
            "after": extract("HEAD", Path(temporary, "now")),
        }
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for turn in range(o.rounds + 1):
            for name, tree in trees.items():
                for i, (*_, command) in enumerate(ROWS):
                    if name == "before" and command[0] == "recipe":  # which is newer
                        continue
                    spent = seconds(tree, command, folder)
                    if turn:  # the first round fills caches
                        found.setdefault((name, i), []).append(spent)
    rows = []
    for i, (library, replaced, lines, command) in enumerate(ROWS):
        times: dict[str, float | None] = {
            name: statistics.median(cpu for cpu, _ in found[name, i]) if (name, i) in found else None for name in trees
        }
        times["elapsed"] = statistics.median(elapsed for _, elapsed in found["after", i])
        about = {"library": library, "replaced": replaced, "lines": lines, "command": f"`{' '.join(command)}`"}
        rows.append({**about, **times})
    records.save(TABLE, rows, o)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
