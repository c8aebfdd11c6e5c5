"""Mutants of small models through the commands: refused or finished, never crashed (tests/archs/fuzz.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured through Linux's /proc")
@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.full)])
def test_mutated_models(count: int) -> None:
    command = [sys.executable, "-m", "tests.archs.fuzz", str(count)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["failures"] == []
    outcomes = found["outcomes"]
    assert outcomes["generate: done"] + outcomes["generate: refused"] == count
    assert outcomes["perplexity: done"] + outcomes["perplexity: refused"] == count
    assert outcomes["generate: done"] > count // 50  # some mutations are harmless: what is mutated was a model
