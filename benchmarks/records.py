"""Save the figures of a benchmark as `benchmarks/results/NAME.json`, and read them back.

A benchmark declares its table once and saves its rows at the end of `main`:

    TABLE = Table("repack", "How fast is repacking?", (Column("type"), Column("ratio", "ratio", ".2f")))
    records.add_option(parser)              # --save [NAME]
    records.save(TABLE, rows, options)      # writes only with --save

The file names the machine, the commit, the versions, the date and the options of the run. `benchmarks/results_page.py`
(`make results`) generates `docs/results.md` from these files, one table per file. A new run replaces the file, so the
page shows the newest figures only.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

SCHEMA = "quantkit.results/1"
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results"
_PACKAGES = ("quantkit", "numpy", "numba", "torch", "transformers", "lm_eval", "ik-llama-cpp-python")


@dataclass(frozen=True)
class Column:
    """A column of a table: the key of its value in a row, its heading, and a format specification such as ".2f"."""

    key: str
    title: str = ""
    form: str = ""


@dataclass(frozen=True)
class Table:
    """What a benchmark answers: the name of its file, the question, the columns, and how to read them."""

    name: str
    question: str
    columns: tuple[Column, ...]
    about: str = ""


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--save [NAME]` to the options of a benchmark."""
    text = "write the figures to benchmarks/results/NAME.json; the default name is the benchmark's"
    parser.add_argument("--save", nargs="?", const="", metavar="NAME", help=text)


def save(
    table: Table, rows: Iterable[Mapping[str, object]], options: argparse.Namespace, details: object = None
) -> Path | None:
    """Write the rows of a run to its file if `--save` was given. Returns the path.

    `rows` have a value for each column; further keys are stored and not shown. `details` is stored as it is.
    """
    if options.save is None:
        return None
    name = options.save or table.name
    conditions = {key: value for key, value in vars(options).items() if key not in ("save", "folder", "directory")}
    document = {
        "schema": SCHEMA,
        "name": name,
        "question": table.question,
        "about": table.about,
        "origin": "bench",
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_without_save(sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "conditions": conditions | {"load": round(os.getloadavg()[0], 1)},
        "columns": [asdict(column) for column in table.columns],
        "rows": list(rows),
    }
    if details is not None:
        document["details"] = details
    path = FOLDER / f"{name}.json"
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False, default=_plain) + "\n", encoding="utf-8")
    print(f"saved {path}; `make results` updates docs/results.md", file=sys.stderr)
    return path


def machine() -> dict[str, object]:
    """The CPU model, the CPUs that this process may use, the instruction set of its kernels and the memory in bytes."""
    from quantkit.codegen import cpu_target, thread_pool

    return {"cpu": _cpu(), "cores": thread_pool.available_cpus(), "isa": cpu_target.isa(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}  # fmt: skip


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide speed; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout, with `+changes` if files differ from it; None outside a checkout."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _without_save(arguments: list[str]) -> list[str]:
    """The arguments of a run without `--save` and its name."""
    found, skip = [], False
    for argument in arguments:
        if argument == "--save":
            skip = True
            continue
        if not (skip and not argument.startswith("-")) and not argument.startswith("--save="):
            found.append(argument)
        skip = False
    return found


def _plain(value: object) -> object:
    """Paths by name only, numpy's numbers as Python's."""
    if isinstance(value, Path):
        return value.name
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
