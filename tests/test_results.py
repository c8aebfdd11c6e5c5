"""Results of benchmarks: docs/results.md is what its files say, and a benchmark's `save` gives a page."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_gpu, records, results_page
from benchmarks.records import Column, Table

TABLE = Table("speed", "How fast?", (Column("type"), Column("ratio", "our ratio", ".2f")), "Read it so.")


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", type=Path, default=Path("/home/me/eval.txt"))
    records.add_option(parser)
    return parser.parse_args(arguments)


def test_the_page_is_fresh() -> None:
    command = [sys.executable, str(records.ROOT / "benchmarks" / "results_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_page_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(sys, "argv", ["results_page.py", "--check"])
    assert results_page.main() == 1
    monkeypatch.setattr(sys, "argv", ["results_page.py"])
    assert results_page.main() == 0
    monkeypatch.setattr(sys, "argv", ["results_page.py", "--check"])
    assert results_page.main() == 0


def test_figures_are_saved_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file names the machine, the commit and the options; the page shows the columns of the table."""
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["/x/bench_speed.py", "--threads", "3", "--save", "mine"])
    rows = [{"type": "q4_0", "ratio": np.float32(1.5), "hidden": 3}, {"type": "iq4_k"}]
    assert records.save(TABLE, rows, options("--threads", "3", "--save", "mine")) == tmp_path / "mine.json"
    found = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert found["schema"] == records.SCHEMA
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_bytes"] > 1 << 28
    assert found["versions"]["numpy"] == np.__version__
    assert found["command"] == "python benchmarks/bench_speed.py --threads 3"
    assert found["conditions"]["threads"] == 3
    assert found["conditions"]["text"] == "eval.txt"  # not the path of this machine
    text = results_page.page(tmp_path)
    assert "## Others\n\n### How fast?\n\nRead it so.\n\n| type | our ratio |\n| --- | ---: |" in text
    assert "| q4_0 | 1.50 |\n| iq4_k |  |\n" in text
    assert str(found["machine"]["cpu"]) in text


def test_nothing_is_written_without_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    assert records.save(TABLE, [{"type": "q4_0"}], options()) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other/1"}, "schema other/1"),
        ({"name": "b"}, "name b; .* a expected"),
        ({"rows": [{}]}, "row 0 has no 'x'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    document = {"schema": records.SCHEMA, "name": "a", "columns": [{"key": "x"}], "rows": [{"x": 1}]}
    (tmp_path / "a.json").write_text(json.dumps(document | change))
    with pytest.raises(ValueError, match=message):
        results_page.load(tmp_path / "a.json")


def test_commands_name_stages_that_exist() -> None:
    """The command under a table of the GPU's benchmark can be run."""
    commands = [results_page.load(path).get("command") or "" for path in records.FOLDER.glob("*.json")]
    of_stages = [command.split() for command in commands if "bench_gpu.py" in command]
    assert len(of_stages) >= 2
    for _, script, *arguments in of_stages:
        assert (records.ROOT / script).exists()
        bench_gpu.parsed(arguments)  # which refuses unknown stages


def test_files_hold_what_their_columns_promise() -> None:
    """Each stored file has a question and rows, says where its figures come from, and no starred cell."""
    paths = sorted(records.FOLDER.glob("*.json"))
    assert len(paths) > 10
    for path in paths:
        found = results_page.load(path)
        assert found["question"].endswith("?"), path
        assert found["rows"], path
        assert found["origin"] in ("bench", "transcribed"), path
        assert "date" in found or "recorded" in found, path
        keys = {column["key"] for column in found["columns"]}
        for row in found["rows"]:
            assert not any(isinstance(row.get(key), str) and row[key].endswith("*") for key in keys), path
