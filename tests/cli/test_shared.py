"""Sizes and tables."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quantkit.cli._shared import gib, parse_size, table
from quantkit.errors import QuantkitError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("50G", 50 * 10**9),
        ("800M", 8 * 10**8),
        ("1.5GiB", 3 << 29),
        ("4096", 4096),
        ("2 gb", 2 * 10**9),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "50X", "-3G", "0", "1e9", "5IB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(QuantkitError, match="is not a size"):
        parse_size(text)


def test_published_form() -> None:
    assert gib(226.003 * 2**30) == "226.003 GiB"


def test_table() -> None:
    assert table(("a", "number"), [("x", 1), ("long", 22)]) == "a     number\n----  ------\nx          1\nlong      22"


def test_numpy_without_threads_of_its_own() -> None:
    """What the environment says is left as it was, for this process and those it starts."""
    script = (
        "import os, sys; from quantkit.cli._shared import load_numpy_alone; before = dict(os.environ); "
        "load_numpy_alone(); assert 'numpy' in sys.modules and dict(os.environ) == before; "
        "print(len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 1)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
