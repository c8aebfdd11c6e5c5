"""Ten thousand mutants of each format: only our own errors, none slow, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = 10_000


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured through Linux's /proc")
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_mutated_headers(kind):
    command = [sys.executable, "-m", "tests.formats.fuzz", kind, str(COUNT)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["foreign"] == []
    assert found["opened"] + found["refused"] == COUNT
    assert found["refused"] > COUNT // 2  # the mutants reach deep: some still open, most do not
    assert found["opened"] > COUNT // 100
    assert found["slowest"] < 1.0
    assert found["peak_kib"] < 300 << 10
