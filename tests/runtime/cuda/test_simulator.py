"""The other tests of this folder once more in a process whose kernels numba simulates.

Without a GPU, this is the only test of the results of kernels.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.cuda.conftest import SIMULATED

FILES = sorted(path.name for path in Path(__file__).parent.glob("test_sim_*.py"))


def simulate(name: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(Path(__file__).parent / name)],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}, cwd=Path(__file__).parents[3], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.skipif(SIMULATED, reason="this is such a process")
@pytest.mark.parametrize("name", FILES)
def test_in_the_simulator(name: str) -> None:
    last = simulate(name, "-m", "gpu and not full")
    assert re.search(r"\d+ passed", last)
    assert "skipped" not in last


@pytest.mark.full
@pytest.mark.skipif(SIMULATED, reason="this is such a process")
@pytest.mark.parametrize("fill", ["zeros", "bytes", "encoded"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_all_shapes_in_the_simulator(rows: int, fill: str) -> None:
    last = simulate("test_sim_weights.py", "-m", "gpu and full", "-k", f"{rows}-{fill}")
    assert re.search(r"\d+ passed", last)
