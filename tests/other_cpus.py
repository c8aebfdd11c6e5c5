"""Tests run once more in a process whose kernels are compiled for another CPU, as far as this one can run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.codegen import cpu_target

_AVX2 = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
CPUS = {  # code path -> LLVM's name of a CPU and its features
    "generic": ("x86-64", "+sse,+sse2"),
    "avx2": ("haswell", _AVX2),
    "avx512": ("skylake-avx512", f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"),
}
_ORDER = (*CPUS, "avx512vnni")


def environment_of(isa: str) -> dict[str, str]:
    """Of a process with a code path; skips the test when this CPU lacks its instructions."""
    if is_other_cpu():
        pytest.skip("this is such a process")
    if _ORDER.index(isa) >= _ORDER.index(cpu_target.isa()):
        pytest.skip(f"this CPU's own path is {cpu_target.isa()}")
    name, features = CPUS[isa]
    return os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "EXPECTED_ISA": isa}


def next_simpler() -> str:
    """The code path that tests run besides this CPU's own where all paths would take minutes to compile."""
    return "avx2" if _ORDER.index(cpu_target.isa()) > _ORDER.index("avx2") else "generic"


def run_tests(path: str, isa: str) -> None:
    """Run a file's tests for a code path."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", path], env=environment_of(isa), cwd=Path(__file__).parents[1],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]


def is_other_cpu() -> bool:
    """Whether this is such a process, in which each kind of kernel is tested for a few types only."""
    return "EXPECTED_ISA" in os.environ


def test_that_this_is_the_path() -> None:
    """For the processes started here: the environment has chosen the path that was meant."""
    assert cpu_target.isa() == os.environ.get("EXPECTED_ISA", cpu_target.isa())
