"""Codecs compiled for another CPU in a separate process, which prints digests of their results.

python -m tests.types.on_cpu decode|encode|encode-plain|encode-moments NAME…
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np

from quantkit import types
from tests.other_cpus import environment_of
from tests.types import data

N = 1024


def digests(what: str, names: list[str]) -> dict[str, str]:
    """A digest of each type's decoded values of random bytes, or encoded bytes of heavy-tailed rows.

    "encode-plain" is without importance, "encode-moments" with second moments at effort "best".
    """
    actual = {}
    for name in names:
        t = types.get(name)
        if what == "decode":
            encoded = data.random_bytes(t, np.random.default_rng(5), 4 * t.interleave, N)
            result = t.dequantize(encoded, N)
            result[np.isnan(result)] = 0
        elif what == "encode-moments":
            x = data.rows("student3", 5, 4 * t.interleave, N)
            result = t.quantize(x, second_moments=data.second_moments(5, N), effort="best")
        else:
            x = data.rows("student3", 5, 4 * t.interleave, N)
            importance = None if what == "encode-plain" else data.importance(5, N)
            result = t.quantize(x, importance)
        actual[name] = hashlib.sha256(result).hexdigest()
    return actual


def run(isa: str, what: str, names: list[str]) -> dict[str, str]:
    """`digests` from a process whose kernels are compiled for a code path; skips if it is this CPU's own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.types.on_cpu", what, *names],
        env=environment_of(isa), cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


if __name__ == "__main__":
    for name, digest in digests(sys.argv[1], sys.argv[2:]).items():
        print(name, digest)
