"""Generate docs/results.md from benchmarks/results/*.json (`make results`).

    python benchmarks/results_page.py [--check]

One table per file, in the order of _SECTIONS; under each table the machine, the conditions and the command. --check
writes nothing and exits with 1 if the page is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.records import FOLDER, ROOT, SCHEMA

PAGE = ROOT / "docs" / "results.md"
_SECTIONS = {
    "Running a model": ("model", "bound", "kernels", "noise", "cache", "evaluation", "gpu"),
    "Quantizing": (
        "types", "types-fast", "types-best", "quantize", "files", "perplexity", "second_moments", "second_moments_moe",
    ),
    "Files": ("repack", "convert", "jobs", "deepseek"),
    "Checks": ("golden", "bounded-bases", "robustness", "startup"),
}  # fmt: skip
_HEAD = """<!-- made by `make results` from benchmarks/results/*.json; do not edit -->
# Results

Each table shows the newest run of one benchmark. The machine is named under it. A ratio compares with the wheel of
ik_llama.cpp (`ik-llama-cpp-python`) in the same run, by turns; ratios carry over to other machines better than figures
do. The [notes](notes/index.md) tell what was tried and why.
"""


def load(path: Path) -> dict[str, Any]:
    """One file of results. ValueError if it has another schema, or a row lacks the value of the first column."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found.get("schema") != SCHEMA or found["name"] != path.stem:
        raise ValueError(
            f"{path}: schema {found.get('schema')}, name {found.get('name')}; {SCHEMA}, {path.stem} expected"
        )
    first = found["columns"][0]["key"]
    for number, row in enumerate(found["rows"]):
        if first not in row:
            raise ValueError(f"{path}: row {number} has no '{first}'")
    return found


def page(folder: Path = FOLDER) -> str:
    """The text of docs/results.md. A file that no section lists comes last, under Others."""
    found = {path.stem: load(path) for path in sorted(folder.glob("*.json"))}
    listed = [name for names in _SECTIONS.values() for name in names]
    sections = {**_SECTIONS, "Others": tuple(name for name in found if name not in listed)}
    parts = [_HEAD]
    for title, names in sections.items():
        if present := [name for name in names if name in found]:
            parts += [f"## {title}\n", *(_block(found[name]) for name in present)]
    return "\n".join(parts)


def _block(result: Mapping[str, Any]) -> str:
    columns = result["columns"]
    heads = [column["title"] or column["key"] for column in columns]
    marks = ["---" if _is_text(result["rows"], column["key"]) else "---:" for column in columns]
    rows = [[_cell(row.get(column["key"]), column["form"]) for column in columns] for row in result["rows"]]
    lines = [_line(heads), _line(marks), *map(_line, rows)]
    about = [result["about"], ""] if result["about"] else []
    return "\n".join([f"### {result['question']}", "", *about, *lines, "", _conditions(result), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _is_text(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(isinstance(row.get(key), str) for row in rows)


def _cell(value: object, form: str) -> str:
    if value is None:
        return ""
    return (value if isinstance(value, str) else format(value, form)).replace("|", "\\|")


def _conditions(result: Mapping[str, Any]) -> str:
    """Machine, state, date, commit, versions and command, as far as they are stated."""
    machine, versions = result.get("machine") or {}, result.get("versions") or {}
    parts = [machine["cpu"]] if "cpu" in machine else []
    if "cores" in machine:
        parts.append(f"{machine['cores']} cores")
    if "isa" in machine:
        parts.append(str(machine["isa"]))
    if "memory_bytes" in machine:
        parts.append(f"{machine['memory_bytes'] / 2**30:.0f} GiB")
    said = [", ".join(parts)] if parts else []
    if state := result.get("state"):
        said.append(state)
    if "load" in result.get("conditions", {}):
        said.append(f"load {result['conditions']['load']}")
    said += [f"{name} {version}" for name, version in versions.items() if name in ("ik-llama-cpp-python", "torch")]
    if "date" in result:
        said.append(f"{result['date']}" + (f", commit {result['commit']}" if result.get("commit") else ""))
    elif "recorded" in result:
        said.append(f"written down {result['recorded']['date']} in commit {result['recorded']['commit']}")
    if command := result.get("command"):
        said.append(f"`{command}`")
    return f"<small>{'; '.join(said)}</small>"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if docs/results.md is stale")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is stale: run `make results`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
