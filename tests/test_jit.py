"""Kernels: what is compiled again and what is loaded from disk, and for which CPU.

The cache is tested on a small package of its own: a copy of `codegen` in a package that is also called quantkit, with
one kernel that calls another from a second file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit.codegen import array_cache, jit, numba_internals

HELPER = "from quantkit.codegen.jit import kernel\n\n\n@kernel\ndef twice(x):\n    return {} * x\n"
USER = """
import numpy as np
from quantkit.helper import twice
from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel


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
from quantkit.codegen import compile_notice
compile_notice.NOTICE_AFTER_SECONDS = 0.0
value = user.f(5)
stats = user.f.dispatcher.stats
called = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(user.g.address)(5)
print(json.dumps({
    "value": value, "called": called, "callback_hits": user.g._compiled.cache_hits,
    "hits": sum(stats.cache_hits.values()), "misses": sum(stats.cache_misses.values()),
    "loads_compiler": "numba.np.arraymath" in sys.modules,
}))
"""


def small_package(folder: Path) -> Path:
    """A package in a folder that is also called quantkit, with copies of `errors` and `codegen`."""
    source, package = Path(quantkit.__file__).parent, folder / "quantkit"
    shutil.copytree(source / "codegen", package / "codegen", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(source / "errors.py", package / "errors.py")
    (package / "__init__.py").write_text("", encoding="utf-8")
    return package


@pytest.fixture
def small(tmp_path: Path) -> Path:
    package = small_package(tmp_path)
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
    """Nor does it load the type inference of numba's compiler, which takes longer than loading the kernels."""
    first, message = run(small)
    assert first == {"value": 11, "called": 11, "hits": 0, "misses": 1, "callback_hits": 0, "loads_compiler": True}
    assert message.count("quantkit: compiling kernels for this CPU") == 1
    second, message = run(small)
    assert second == {"value": 11, "called": 11, "hits": 1, "misses": 0, "callback_hits": 1, "loads_compiler": False}
    assert message == ""


def test_an_edit_recompiles_what_depends_on_it_and_nothing_else(small: Path) -> None:
    run(small)
    (small / "quantkit" / "unrelated.py").write_text("a = 2\n", encoding="utf-8")
    assert run(small)[0]["hits"] == 1
    (small / "quantkit" / "helper.py").write_text(HELPER.format(3), encoding="utf-8")
    result = run(small)[0]
    assert (result["value"], result["called"]) == (16, 16)
    assert result["misses"] == 1
    assert run(small)[0]["hits"] == 1


def test_a_cache_that_cannot_be_written_is_told_and_done_without(small: Path) -> None:
    (small / "file").write_text("", encoding="utf-8")
    result, message = run(small, cache=str(small / "file"))
    assert result["value"] == result["called"] == 11
    assert message.count("cannot be written") == 1
    assert "QUANTKIT_CACHE_DIR" in message


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
    code = """
from quantkit.codegen import array_cache, cpu_target, jit, numba_internals, numba_loader
print(cpu_target.isa(), numba_internals.cache_directory().name.endswith(cpu_target.target_cpu()[0]))
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [isa, "True"]


def test_numba_configured_for_another_cpu_is_refused() -> None:
    """As a .numba_config.yaml does it: kernels would be compiled for another CPU than `isa` chooses code for."""
    code = """
import numba
from quantkit.codegen import array_cache, cpu_target, jit, numba_internals, numba_loader
from quantkit.errors import QuantkitError
numba.config.CPU_NAME = "haswell"
try: numba_loader.load_numba()
except QuantkitError as error: print(error)
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert "numba is configured for the CPU haswell, NUMBA_CPU_NAME says nothing" in done.stdout


@jit.subkernel
def doubled(x):
    return x + x


@jit.shared_subkernel
def quadrupled(x):
    return doubled(doubled(x))


@jit.kernel
def both(x):
    return doubled(x) + quadrupled(x)


def test_subkernels_are_compiled_into_their_callers_and_shared_ones_cached() -> None:
    assert both(3) == 18
    assert both(1.5) == 9
    assert not list(numba_internals.cache_directory().glob("*.doubled-*"))
    assert list(numba_internals.cache_directory().glob("*.quadrupled-*"))
    for kernel in (doubled, quadrupled):
        with pytest.raises(TypeError, match=f"{kernel.__name__} is called by kernels only"):
            kernel(3)


def test_cached_arrays_are_computed_once_and_again_where_their_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE_DIR", str(tmp_path))
    x, made = np.arange(6, dtype=np.int8).reshape(2, 3), []

    def make(x: np.ndarray, by: int) -> tuple[np.ndarray, ...]:
        made.append(by)
        return x * np.int8(by), np.arange(by)

    def check(*expected: int) -> None:
        for by in (3, 4):
            product, numbers = array_cache.disk_cached(make, x, by)
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
