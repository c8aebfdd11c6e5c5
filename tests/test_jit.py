"""Kernels: a disk cache that neither goes stale nor is thrown away, CPU features, threads.

The cache is tested on a small package of its own: a copy of jit.py in a package that is also called quantkit, with one
kernel that calls another from a second file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit.codegen import jit

HELPER = "from quantkit.codegen.jit import kernel\n\n\n@kernel\ndef twice(x):\n    return {} * x\n"
USER = """
import numpy as np
from quantkit.helper import twice
from quantkit.codegen.jit import callback, kernel


@kernel
def f(x):
    return twice(x) + len(np.empty(1))


@callback("int64(int64)")
def g(x):
    return twice(x) + 1
"""
SCRIPT = """
import ctypes, json, sys
from quantkit import user
from quantkit.codegen import jit
jit.NOTICE_AFTER_SECONDS = 0.0
value = user.f(5)
stats = user.f.dispatcher.stats
called = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(user.g.address)(5)
print(json.dumps({
    "value": value, "called": called, "callback_hits": user.g._compiled.cache_hits,
    "hits": sum(stats.cache_hits.values()), "misses": sum(stats.cache_misses.values()),
    "learned": "numba.np.arraymath" in sys.modules,
}))
"""


def small_package(folder: Path, *names: str) -> Path:
    """A package in a folder that is also called quantkit, with copies of some modules."""
    package = folder / "quantkit"
    for name in names:
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((Path(quantkit.__file__).parent / name).read_text(encoding="utf-8"), encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    return package


@pytest.fixture
def small(tmp_path: Path) -> Path:
    package = small_package(tmp_path, "errors.py", "codegen/__init__.py", "codegen/disk_cache.py", "codegen/jit.py")
    (package / "helper.py").write_text(HELPER.format(2), encoding="utf-8")
    (package / "user.py").write_text(USER, encoding="utf-8")
    (package / "unrelated.py").write_text("a = 1\n", encoding="utf-8")
    return tmp_path


def run(small: Path, cache: str | None = None) -> tuple[dict, str]:
    environment = os.environ | {"PYTHONPATH": str(small), "QUANTKIT_CACHE_DIR": cache or str(small / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, cwd=small
    )
    return json.loads(done.stdout), done.stderr


def test_the_second_process_compiles_nothing(small: Path) -> None:
    """Nor does numba's compiler learn what it would have to know, which takes longer than loading kernels."""
    first, said = run(small)
    assert first == {"value": 11, "called": 11, "hits": 0, "misses": 1, "callback_hits": 0, "learned": True}
    assert said.count("quantkit: compiling kernels for this CPU") == 1
    second, said = run(small)
    assert second == {"value": 11, "called": 11, "hits": 1, "misses": 0, "callback_hits": 1, "learned": False}
    assert said == ""


def test_an_edit_recompiles_what_depends_on_it_and_nothing_else(small: Path) -> None:
    run(small)
    (small / "quantkit" / "unrelated.py").write_text("a = 2\n", encoding="utf-8")
    assert run(small)[0]["hits"] == 1
    (small / "quantkit" / "helper.py").write_text(HELPER.format(3), encoding="utf-8")
    found = run(small)[0]
    assert (found["value"], found["called"]) == (16, 16)
    assert found["misses"] == 1
    assert run(small)[0]["hits"] == 1


def test_a_cache_that_cannot_be_written_is_told_and_done_without(small: Path) -> None:
    (small / "file").write_text("", encoding="utf-8")
    found, said = run(small, cache=str(small / "file"))
    assert found["value"] == found["called"] == 11
    assert said.count("cannot be written") == 1
    assert "QUANTKIT_CACHE_DIR" in said


@pytest.mark.parametrize(
    ("environment", "isa"),
    [
        ({"NUMBA_CPU_NAME": "icelake-server"}, "avx512vnni"),
        ({"NUMBA_CPU_NAME": "skylake-avx512"}, "avx512"),
        ({"NUMBA_CPU_NAME": "haswell"}, "avx2"),
        ({"NUMBA_CPU_NAME": "generic"}, "generic"),
        ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}, "generic"),
        ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,-avx512f"}, "avx2"),
    ],
)
def test_numba_is_told_which_cpu_to_work_for(environment: dict[str, str], isa: str) -> None:
    code = (
        "from quantkit.codegen import jit; print(jit.isa(), jit.cache_directory().name.endswith(jit.target_cpu()[0]))"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [isa, "True"]


def test_numba_configured_for_another_cpu_is_refused() -> None:
    """As a .numba_config.yaml does it: kernels would be compiled for another CPU than `isa` chooses code for."""
    code = """
import numba
from quantkit.codegen import jit
numba.config.CPU_NAME = "haswell"
try: jit.cache_directory()
except jit.QuantkitError as error: print(error)
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert "numba is configured for the CPU haswell, NUMBA_CPU_NAME says nothing" in done.stdout


def test_threads_by_environment() -> None:
    code = "from quantkit.codegen import jit; print(jit.default_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"QUANTKIT_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "3\n"
    assert jit.default_threads() >= 1


@pytest.mark.parametrize("text", ["many", "0", "-2", "1.5"])
def test_threads_by_environment_must_be_a_number(text: str) -> None:
    code = (
        "from quantkit.codegen import jit\ntry: jit.default_threads()\nexcept jit.QuantkitError as error: print(error)"
    )
    environment = os.environ | {"QUANTKIT_THREADS": text}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"QUANTKIT_THREADS is '{text}'; it must be a number of threads, at least 1\n"


FORK = """
import os
from quantkit.codegen import jit

jit.over_rows(lambda a, b: None, 8, threads=2)
child = os.fork()
if child == 0:
    rows = []
    jit.over_rows(lambda a, b: rows.append(b - a), 8, threads=2)
    print(sum(rows), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@jit.part
def doubled(x):
    return x + x


@jit.inner
def quadrupled(x):
    return doubled(doubled(x))


@jit.kernel
def both(x):
    return doubled(x) + quadrupled(x)


def test_parts_are_compiled_in_their_callers_and_inner_kernels_kept() -> None:
    assert both(3) == 18
    assert both(1.5) == 9
    assert not list(jit.cache_directory().glob("*.doubled-*"))
    assert list(jit.cache_directory().glob("*.quadrupled-*"))
    for kernel in (doubled, quadrupled):
        with pytest.raises(TypeError, match=f"{kernel.__name__} is called by kernels only"):
            kernel(3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_kept_arrays_are_made_once_and_again_where_their_file_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE_DIR", str(tmp_path))
    x, made = np.arange(6, dtype=np.int8).reshape(2, 3), []

    def make(x: np.ndarray, by: int) -> tuple[np.ndarray, ...]:
        made.append(by)
        return x * np.int8(by), np.arange(by)

    def check(*expected: int) -> None:
        for by in (3, 4):
            product, numbers = jit.kept(make, x, by)
            np.testing.assert_array_equal(product, x * np.int8(by), strict=True)
            np.testing.assert_array_equal(numbers, np.arange(by), strict=True)
        assert made == list(expected)
        made.clear()

    check(3, 4)
    check()
    files = list((tmp_path / "arrays").iterdir())
    whole = files[0].read_bytes()
    for broken in (b"", whole[:40], whole[:-60], b"x" * len(whole), whole[:90] + b"x" + whole[91:]):
        for file in files:
            file.write_bytes(broken)
        check(3, 4)
    check()


def test_over_rows_works_in_a_forked_child() -> None:
    """A child has none of its parent's threads, so what it submits to the parent's pool would wait for ever."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        try:
            assert parent.communicate(timeout=30)[0] == "8\n"
        except subprocess.TimeoutExpired:
            os.killpg(parent.pid, signal.SIGKILL)
            raise


@pytest.mark.parametrize(("rows", "multiple", "threads"), [(100, 1, 3), (100, 8, 2), (7, 8, 4), (1, 1, 4), (64, 4, 1)])
def test_over_rows_covers_every_row_once(rows: int, multiple: int, threads: int) -> None:
    seen: list[tuple[int, int]] = []
    jit.over_rows(lambda a, b: seen.append((a, b)), rows, multiple=multiple, threads=threads)
    seen.sort()
    assert [row for a, b in seen for row in range(a, b)] == list(range(rows))
    assert all(a % multiple == 0 for a, _ in seen)


def test_over_rows_uses_threads_and_raises_what_they_raise() -> None:
    names: set[str] = set()

    def task(start: int, stop: int) -> None:
        time.sleep(0.002 * (stop - start))
        names.add(threading.current_thread().name)

    jit.over_rows(task, 64, threads=2)
    assert len(names) == 2
    assert threading.current_thread().name in names

    def fails(start: int, stop: int) -> None:
        raise ValueError(f"at {start}")

    with pytest.raises(ValueError, match="at 0"):
        jit.over_rows(fails, 8, threads=2)


def test_over_rows_raises_what_the_first_rows_that_fail_raise() -> None:
    """Whichever thread is faster: an error names the first bad row of a tensor, every time."""
    failed: list[int] = []

    def task(start: int, stop: int) -> None:
        time.sleep(0.1 if start == 8 else 0.01)
        if start >= 8:
            failed.append(start)
            raise ValueError(f"at {start}")

    with pytest.raises(ValueError, match=r"at 8$"):
        jit.over_rows(task, 64, threads=2)
    assert failed[-1] == 8  # the other thread failed at 16 before


def test_over_rows_keeps_small_work_here() -> None:
    names: list[str] = []
    jit.over_rows(lambda a, b: names.append(threading.current_thread().name), 640, threads=2)
    assert set(names) == {threading.current_thread().name}
