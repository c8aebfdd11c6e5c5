"""N-grams, streams mixed by gates of low rank and pooled blocks of positions on a GPU: against numpy, and in models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.runtime.blocks import hyper_connections, ngrams, pooled_indexer
from quantkit.runtime.blocks.indexer import largest_of_first
from quantkit.runtime.cuda import gpu_indexer, gpu_ngrams, gpu_pooled_indexer, gpu_streams
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.runtime.cuda.simulated import by_torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TOKENS = np.random.default_rng(3).integers(2, 320, 20)


@pytest.fixture(scope="session")
def qwen4exp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokens select two blocks of 4 positions."""
    return written(tmp_path_factory.mktemp("qwen4exp") / "m.gguf", "qwen4exp", indexer_budget=8)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"devices": "cuda:0", "override_tensor": "exps=CPU", "cache_type": "f16"}, id="hybrid"),
        pytest.param({"devices": "cuda:0,cuda:1"}, id="two", marks=pytest.mark.full),
        pytest.param({"devices": "cuda:0", "gpu_layers": 2}, id="two layers", marks=pytest.mark.full),
        pytest.param({"devices": "cuda:0", "kv_on_cpu": True, "override_tensor": "ple_|hc_ffn=CPU"}, id="nkvo",
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_models(gpus: int, qwen4exp: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    """A prompt, tokens that complete a block, and a saved sequence that goes on."""
    by_torch(monkeypatch)
    expected = load(qwen4exp, cache_type=how.get("cache_type", "f32")).logits(TOKENS)
    model = load(qwen4exp, **how)
    cache, found = model.new_cache(24), []
    for start, stop in ((0, 14), (14, 15), (15, 16), (16, 20)):
        if start == 16:
            state = cache.save()
            model.forward(TOKENS[:5], cache)
            cache.restore(state)
        found.append(model.forward(TOKENS[start:stop], cache))
    tolerance = 1e-3 if "cache_type" in how else 1e-4  # rows that are rounded to f16 the other way
    assert np.abs(np.concatenate(found) - expected).max() < tolerance * np.std(expected)


def test_streams_and_ngrams(gpus: int, qwen4exp: Path) -> None:
    """What a part reads and writes of streams, what enters the output matrix, and v of the n-grams."""
    host, on_gpu = load(qwen4exp), load(qwen4exp, devices="cuda:0")
    assert on_gpu.split is not None
    worker: Any = on_gpu.split._workers["CUDA0"]
    block = next(block for block in host.blocks if isinstance(block.parts[0], blocks.NGrams))
    part, mixer, head = block.parts[0], block.hyper[1], host.head.streams
    assert isinstance(part, blocks.NGrams)
    assert isinstance(mixer, blocks.StreamMixer)
    assert isinstance(head, blocks.StreamMixer)
    rng, n = np.random.default_rng(6), host.hparams.n_embd
    x, made, embedded = (
        rng.standard_normal((3, width)).astype(np.float32) for width in (mixer.streams * n, n, host.weights[
            part.key.weight].shape[1])
    )  # fmt: skip
    on = worker.gpu.array
    entering, shares = hyper_connections.read(host, mixer, x)
    of_gpu, shares_of_gpu = gpu_streams.read(worker, mixer, on(x))
    for found, wanted in (
        (of_gpu, entering),
        (gpu_streams.write(worker, on(x), on(made), shares_of_gpu), hyper_connections.write(x, made, shares)),
        (gpu_streams.collapse(worker, head, on(x)), hyper_connections.collapse(host, head, x)),
        (gpu_ngrams.gated(worker, part, on(embedded), on(x)), ngrams._gated(host, part, embedded, x)),
    ):
        np.testing.assert_allclose(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rate", "top"), [(4, 2), (1, 3), (3, 5)])
def test_positions_of_blocks(rate: int, top: int) -> None:
    """Those that the plain form selects, for tokens that see fewer whole blocks, as many, and more."""
    part: Any = SimpleNamespace(rate=rate, top_blocks=top)
    worker: Any = SimpleNamespace(gpu=SimpleNamespace(torch=torch, torch_device=torch.device("cpu")))
    positions, rng = np.arange(rate * (top + 3)), np.random.default_rng(5)
    visible = (positions + 1) // rate
    scored = rng.integers(0, 4, (len(positions), len(positions) // rate)).astype(np.float32)
    found = gpu_pooled_indexer.positions_of(worker, part, torch.from_numpy(scored), torch.from_numpy(positions))
    counts = np.minimum(visible, top) * rate + positions + 1 - visible * rate
    wanted = (positions >= (visible * rate)[:, None]) & (positions <= positions[:, None])
    wanted[:, : scored.shape[1] * rate] |= np.repeat(largest_of_first(scored, visible, top), rate, axis=1)
    mask = gpu_indexer.to_mask(found.numpy(), counts, found.max() + 1)[:, : len(positions)]
    np.testing.assert_array_equal(mask, wanted)


def test_keys_and_scores_of_blocks(gpus: int, qwen4exp: Path) -> None:
    host, on_gpu = load(qwen4exp), load(qwen4exp, devices="cuda:0")
    assert on_gpu.split is not None
    worker: Any = on_gpu.split._workers["CUDA0"]
    attention = host.blocks[3].parts[-2]
    assert isinstance(attention, blocks.Attention)
    part = attention.indexer
    assert isinstance(part, blocks.PooledIndexer)
    rng = np.random.default_rng(7)
    kept = rng.standard_normal((5 * part.rate, part.dim)).astype(np.float32)
    q = rng.standard_normal((3, part.heads, part.dim)).astype(np.float32)
    span: Any = SimpleNamespace(cache=on_gpu.new_cache(40), start=0, stop=40)
    wanted = pooled_indexer.block_keys(host, part, kept, 40)
    later = gpu_pooled_indexer.block_keys(worker, part, worker.gpu.array(kept[2 * part.rate :]), 2, [span])
    np.testing.assert_allclose(later.cpu(), wanted[2:], rtol=1e-4, atol=1e-5)
    found = gpu_pooled_indexer.scores(worker.gpu.array(q), worker.gpu.array(wanted))
    np.testing.assert_allclose(found.cpu(), pooled_indexer.scores(q, wanted), rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedError, match="take -ctv f16"):
        load(qwen4exp, devices="cuda:0", cache_type="q8_0")
