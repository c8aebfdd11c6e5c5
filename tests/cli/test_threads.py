"""How many threads may be asked for: as many as there are CPUs, a few more with a warning, not a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.codegen import thread_pool
from quantkit.errors import QuantkitError
from quantkit.runtime.loading import load
from tests.cli.running import refused
from tests.runtime.conftest import tiny  # noqa: F401


@pytest.fixture(autouse=True)
def _cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "available_cpus", lambda: 2)


def test_a_thousand_threads_are_refused(capsys, tmp_path, tiny) -> None:  # noqa: F811
    needle = "-t 999: this process may use 2 CPU(s); take 1 to 64 threads, 2 are fastest"
    for args in (
        ("bench", tiny, "-t", 999), ("bench", tiny, "-t", "2,999"), ("sweep-bench", tiny, "-t", 999),
        ("quantize", tiny, tmp_path / "q.gguf", "Q8_0", "-t", 999), ("repack", tiny, tmp_path / "q.gguf", "-t", 999),
        ("quantize", tiny, tmp_path / "q.gguf", "Q8_0", 999),
    ):  # fmt: skip
        assert needle in refused(capsys, *args), args
    assert not (tmp_path / "q.gguf").exists()


def test_the_warning_has_both_numbers(capsys, tiny) -> None:  # noqa: F811
    from quantkit.cli import main

    assert main(["repack", str(tiny), "x.gguf", "--dry-run", "-t", "3"]) == 0
    assert "warning: -t 3: this process may use 2 CPU(s)" in capsys.readouterr().err
    assert main(["repack", str(tiny), "x.gguf", "--dry-run", "-t", "2"]) == 0
    assert "warning: -t" not in capsys.readouterr().err


def test_the_same_from_python_and_of_the_environment(tiny: Path, monkeypatch) -> None:  # noqa: F811
    with pytest.raises(QuantkitError, match=r"threads 999: this process may use 2 CPU\(s\); take 1 to 64"):
        load(tiny, threads=999)
    monkeypatch.setenv("QUANTKIT_THREADS", "999")
    with pytest.raises(QuantkitError, match="QUANTKIT_THREADS is 999"):
        thread_pool.default_threads.__wrapped__()  # it is cached in a process
    monkeypatch.setenv("QUANTKIT_THREADS", "64")
    assert thread_pool.default_threads.__wrapped__() == 64
