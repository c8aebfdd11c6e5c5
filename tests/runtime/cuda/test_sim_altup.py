"""Per-layer embeddings, streams that AltUp mixes and keys of earlier layers on a GPU: against numpy, and in models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.archs.common import blocks
from quantkit.evaluate.layers.layer_by_layer import chunks_layer_by_layer
from quantkit.runtime.blocks import altup
from quantkit.runtime.cuda import gpu_altup
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.archs.test_gemma3n import GEMMA_E, SHARED
from tests.runtime.cuda.simulated import by_torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TOKENS = np.random.default_rng(3).integers(2, 320, 16)


@pytest.fixture(scope="session")
def gemma3n(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of its layers attend to keys of earlier ones."""
    return written(tmp_path_factory.mktemp("gemma3n") / "m.gguf", "gemma3n", **SHARED)


@pytest.mark.parametrize(
    "how",
    [
        {"devices": "cuda:0,cuda:1"},
        pytest.param({"devices": "cuda:0", "gpu_layers": 2}, marks=pytest.mark.full),
        pytest.param({"devices": "cuda:0", "kv_on_cpu": True, "override_tensor": "altup|inp_gate=CPU"},
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", ["gemma3n", pytest.param("gemma4", marks=pytest.mark.full)])
def test_models(
    gpus: int, gemma3n: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, how: dict[str, Any]
) -> None:
    """A prompt and single tokens; layers on one device read keys that another has."""
    path = gemma3n if arch == "gemma3n" else written(tmp_path / "m.gguf", "gemma4", **GEMMA_E)
    by_torch(monkeypatch)
    expected = load(path).logits(TOKENS)
    model = load(path, **how)
    cache = model.new_cache(20)
    found = [model.forward(TOKENS[start:stop], cache) for start, stop in ((0, 10), (10, 11), (11, 12), (12, 16))]
    assert np.abs(np.concatenate(found) - expected).max() < 1e-3 * np.std(expected)
    ((_, by_layer),) = chunks_layer_by_layer(model, TOKENS[None], rows=slice(0, 16))
    assert np.abs(by_layer - expected).max() < 1e-3 * np.std(expected)


def test_streams(gpus: int, gemma3n: Path) -> None:
    """Each step of AltUp, and the gates that are far above their mean."""
    host, on_gpu = load(gemma3n), load(gemma3n, devices="cuda:0")
    assert on_gpu.split is not None
    worker: Any = on_gpu.split._workers["CUDA0"]
    part, head = host.blocks[1].altup, host.head.streams
    assert part is not None
    assert isinstance(head, blocks.AltUpHead)
    n, width = part.streams, host.hparams.n_embd
    rng = np.random.default_rng(6)
    x, z = (rng.standard_normal((3, m)).astype(np.float32) for m in (n * width, width))
    streams, on = x.reshape(3, n, width), worker.gpu.array
    for found, wanted in (
        (gpu_altup.predict(worker, part, on(streams)), altup.predict(host, part, streams)),
        (gpu_altup.correct(worker, part, on(streams), on(z)), altup.correct(host, part, streams, z)),
        (gpu_altup.spread(worker, head, on(z)), altup.spread(host, head, z)),
        (gpu_altup.merge(worker, head, on(x)), altup.merge(host, head, x)),
        (worker.largest_gates(on(x), 0.7), altup.largest_gates(x, 0.7)),
    ):
        np.testing.assert_allclose(found.cpu(), wanted, rtol=1e-4, atol=1e-4)
