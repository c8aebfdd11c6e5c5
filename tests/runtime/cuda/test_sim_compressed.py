"""Compressed attention and residual streams on a GPU, against the plain forms in numpy; models of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.runtime.blocks import compressed_attention, hyper_connections
from quantkit.runtime.cuda import gpu_compressed, gpu_streams
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.runtime.cuda.simulated import by_torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TOKENS = np.random.default_rng(3).integers(2, 320, 140)


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers without entries, with selected ones of 4 tokens, and with ones of 128."""
    return written(tmp_path_factory.mktemp("deepseek4") / "m.gguf", "deepseek4", index_topk=5, hc_sinkhorn_iters=3)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"devices": "cuda:0", "override_tensor": "exps=CPU", "cache_type": "f16"}, id="hybrid"),
        pytest.param({"devices": "cuda:0"}, id="one"),
        pytest.param({"devices": "cuda:0,cuda:1"}, id="two", marks=pytest.mark.full),
        pytest.param({"devices": "cuda:0", "kv_on_cpu": True}, id="nkvo", marks=pytest.mark.full),
        pytest.param({"devices": "cuda:0", "gpu_layers": 2}, id="two layers", marks=pytest.mark.full),
        pytest.param({"devices": "cuda:0", "override_tensor": "hc_|attn_output_a=CPU"}, id="apart",
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_models(gpus: int, model_file: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    """A prompt, single tokens that complete a window of each size, a batch after tokens that were taken back."""
    by_torch(monkeypatch)
    kind = how.get("cache_type", "f32")
    expected = load(model_file, cache_type=kind).logits(TOKENS)
    model = load(model_file, **how)
    cache, found = model.new_cache(160), []
    for start, stop in ((0, 126), (126, 127), (127, 128), (128, 129), (129, 140)):
        if start == 129:
            model.forward(TOKENS[:8], cache)
            cache.truncate(start)
            cache.restore(cache.save())  # all entries are made again, in pieces
            monkeypatch.setattr(gpu_compressed, "_TOKENS", 40)
        found.append(model.forward(TOKENS[start:stop], cache))
    tolerance = 1e-4 if kind == "f32" else 1e-3  # rows that are rounded to f16 the other way
    assert np.abs(np.concatenate(found) - expected).max() < tolerance * np.std(expected)


def test_entries(gpus: int, model_file: Path) -> None:
    """Those of all windows at once, and of some with the one before, are the plain ones."""
    host, on_gpu = load(model_file), load(model_file, devices="cuda:0")
    assert on_gpu.split is not None
    worker: Any = on_gpu.split._workers["CUDA0"]
    for block in host.blocks[1:3]:
        part = block.parts[0]
        assert isinstance(part, blocks.CompressedAttention)
        table = worker.rope_table(part.rope, [_span(on_gpu.new_cache(1100), 1100)])
        for compressor in part.compressors:
            rate, overlap = compressor.rate, int(compressor.overlapping)
            kept = np.random.default_rng(5).standard_normal((3 * rate, 2 * compressor.columns)).astype(np.float32)
            wanted = compressed_attention.entries(host, compressor, part.rope, kept)
            windows = kept.reshape(3, rate, -1)
            first = np.concatenate([np.full((overlap, *windows.shape[1:]), 7, np.float32), windows])
            for start, given in ((0, first), (1, windows[1 - overlap :])):
                made = gpu_compressed.entries(worker, compressor, table, worker.gpu.array(given), start)
                np.testing.assert_allclose(made.cpu(), wanted[start:], rtol=1e-4, atol=1e-5)


def _span(cache: Any, stop: int) -> Any:
    return type("Span", (), {"cache": cache, "start": 0, "stop": stop})()


def test_streams(gpus: int, model_file: Path) -> None:
    """What is read, written and left at the end."""
    host, on_gpu = load(model_file), load(model_file, devices="cuda:0")
    assert on_gpu.split is not None
    worker: Any = on_gpu.split._workers["CUDA0"]
    connection, head = host.blocks[1].hyper[0], host.head.streams
    assert isinstance(connection, blocks.HyperConnection)
    assert isinstance(head, blocks.StreamHead)
    x, made = (np.random.default_rng(6).standard_normal((3, n)).astype(np.float32) for n in (256, 64))
    wanted, shares = hyper_connections.read(host, connection, x)
    found, of_gpu = gpu_streams.read(worker, connection, worker.gpu.array(x))
    np.testing.assert_allclose(found.cpu(), wanted, rtol=1e-4, atol=1e-5)
    after = gpu_streams.write(worker, worker.gpu.array(x), worker.gpu.array(made), of_gpu)
    np.testing.assert_allclose(after.cpu(), hyper_connections.write(x, made, shares), rtol=1e-4, atol=1e-5)
    last = gpu_streams.collapse(worker, head, worker.gpu.array(x))
    np.testing.assert_allclose(last.cpu(), hyper_connections.collapse(host, head, x), rtol=1e-4, atol=1e-5)


def test_what_is_refused(gpus: int, model_file: Path) -> None:
    for kind in ("q8_0", "f16 khad"):
        with pytest.raises(UnsupportedError, match="take -ctk f16 -ctv f16"):
            load(model_file, devices="cuda:0", cache_type=kind)
    with pytest.raises(UnsupportedError, match="-sm graph cannot shard CompressedAttention"):
        load(model_file, devices="cuda:0,cuda:1", split_mode="graph")
