"""Running CUDA kernels: in numba's simulator, or on a GPU where there is one."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
collect_ignore_glob = [] if (sys.platform, platform.machine()) == ("linux", "x86_64") else ["test_*.py"]
Run = Callable[..., None]


if SIMULATED:
    from tests.runtime.cuda import simulator

    simulator.install()


@pytest.fixture
def run() -> Run:
    """`run(kernel, blocks, threads, *arguments)`, arrays being numpy's, which hold the results afterwards."""
    if SIMULATED:
        return lambda kernel, blocks, threads, *arguments: kernel.simulate(blocks, threads, *arguments)
    from quantkit.errors import UnsupportedError
    from quantkit.runtime.kernels.cuda.device import Gpu

    try:
        gpu = Gpu()
    except UnsupportedError as error:
        pytest.skip(f"runs in the simulator, by test_simulator.py, or on a GPU: {error}")

    def on_gpu(kernel: Any, blocks: Any, threads: int, *arguments: Any) -> None:
        there = [gpu.array(a) if isinstance(a, np.ndarray) else a for a in arguments]
        gpu.launch(kernel, blocks, threads, *there)
        for here, result in zip(arguments, there):
            if isinstance(here, np.ndarray):
                here[...] = result.cpu().numpy().view(here.dtype).reshape(here.shape)

    return on_gpu


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many GPUs there are: simulated ones, or one that is there."""
    from quantkit.errors import UnsupportedError
    from quantkit.runtime.cuda import gpu_worker

    if SIMULATED:
        from tests.runtime.cuda.simulated import play

        play(monkeypatch)
        return 2
    try:
        return int(gpu_worker.gpu(0).torch.cuda.device_count())
    except UnsupportedError as error:
        pytest.skip(f"runs in the simulator, by test_simulator.py, or on a GPU: {error}")
