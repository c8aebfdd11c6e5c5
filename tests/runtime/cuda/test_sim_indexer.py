"""Sparse attention on a GPU: what is selected, and attention to it, against the plain forms in numpy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quantkit import types
from quantkit.errors import UnsupportedError
from quantkit.runtime.blocks import block_indexer, indexer
from quantkit.runtime.cuda import gpu_attention, gpu_block_indexer, gpu_indexer
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kernels.cuda import indexer as index_kernels
from quantkit.runtime.loading import load
from quantkit.runtime.parallel.worker import Worker
from tests.archs.files import written
from tests.runtime.cuda.conftest import SIMULATED, Run
from tests.runtime.cuda.simulated import by_torch
from tests.runtime.test_step import TOKENS, spread

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def worker_of() -> Any:
    """What `gpu_indexer` needs of a worker: torch on the GPU, or on the CPU."""
    where = torch.device("cpu" if SIMULATED else "cuda:0")

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=where)

    return SimpleNamespace(gpu=SimpleNamespace(torch=torch, torch_device=where, empty=empty))


def on(worker: Any, x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(worker.gpu.torch_device)


@pytest.mark.parametrize(("n", "top_k"), [(2, 1), (33, 7), (100, 99), (517, 64)])
@pytest.mark.parametrize("levels", [4, 1 << 20])
def test_the_same_positions_as_on_the_cpu(n: int, top_k: int, levels: int, rng: np.random.Generator) -> None:
    """Equal scores, negative ones, zeros of both signs; tokens with fewer positions than are selected."""
    tokens, worker = min(n, 5), worker_of()
    scored = (rng.integers(0, levels, (tokens, n)) / 8 - 0.25).astype(np.float32)
    scored[scored == 0] *= rng.choice([-1, 1], np.count_nonzero(scored == 0))
    positions = np.sort(rng.choice(n, tokens, replace=False)).astype(np.int32)
    found = gpu_indexer.largest(worker, on(worker, scored), on(worker, positions), top_k)
    counts = np.minimum(positions + 1, top_k)
    wanted = indexer.largest_of_first(scored, positions + 1, top_k)
    np.testing.assert_array_equal(gpu_indexer.to_mask(found.cpu().numpy(), counts, n), wanted)
    again = gpu_indexer.of_mask(wanted)
    np.testing.assert_array_equal(again[1], counts)
    assert all(len(set(row)) == counts.max() for row in again[0].tolist())
    np.testing.assert_array_equal(gpu_indexer.to_mask(*again, n), wanted)


@pytest.mark.parametrize("elements", [1, 40, 1 << 20])
def test_the_same_scores_as_on_the_cpu(
    elements: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are made at a time."""
    monkeypatch.setattr(gpu_indexer, "INDEX_ELEMENTS", elements)
    q, w, k = (rng.standard_normal(shape, np.float32) for shape in ((5, 3, 32), (5, 3), (7, 32)))
    worker = worker_of()
    result = gpu_indexer.scores(worker, *(on(worker, x) for x in (q, w, k)))
    np.testing.assert_allclose(result.cpu(), indexer.scores(q, w, k), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "heads"), [("f16", 3), ("q8_0", 64), ("f32", 1)])
def test_scores_of_a_few_tokens_by_the_kernel(run: Run, kind: str, heads: int, rng: np.random.Generator) -> None:
    """Up to each token's own position, and zeros where all are selected; other numbers are not written."""
    n, dim, top_k, positions = 70, 64, 20, np.array([19, 20, 69], np.int32)
    q, w, k = (rng.standard_normal(shape, np.float32) for shape in ((3, heads, dim), (3, heads), (n, dim)))
    packed = kv_rounding.encode(kind, k)
    right = indexer.scores(q, w, types.get(kind).dequantize(packed, dim, threads=1))
    out, blocks = np.full((3, n), 7, np.float32), (-(-n // index_kernels.KEYS), 3)
    scale, flat = np.float32((heads * dim) ** -0.5), (q.reshape(-1), w.reshape(-1), packed.reshape(-1))
    run(index_kernels.scores(kind, dim), blocks, index_kernels.THREADS, *flat, packed.shape[1], heads, positions, top_k,
        scale, n, out.reshape(-1))  # fmt: skip
    right[0] = 0
    for i, position in enumerate(positions):
        np.testing.assert_allclose(out[i, : position + 1], right[i, : position + 1], rtol=1e-5, atol=1e-5)
        assert (out[i, position + 1 :] == 7).all()


TINY: dict[str, Any] = {
    "index_topk": 4, "index_n_heads": 2, "index_head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "kv_lora_rank": 32, "num_hidden_layers": 2, "first_k_dense_replace": 2,
}  # fmt: skip


SMALL: dict[str, dict[str, Any]] = {
    "glm-dsa": TINY | {"indexer_types": ["full", "shared"]},
    "minimax-m3": {
        "hidden_size": 32, "num_attention_heads": 4, "index_block_size": 2, "index_topk_blocks": 2,
        "num_hidden_layers": 1, "mlp_layer_types": ["sparse"], "layer_types": ["minimax_m3_sparse"],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "how"),
    [
        ("glm-dsa", {"numerics": "fast", "cache_type": "f16"}),
        pytest.param("glm-dsa", {"numerics": "fast", "cache_type": "q8_0"}, marks=pytest.mark.full),
        ("deepseek32", {}),
        pytest.param("mistral-large4", {"numerics": "fast"}, marks=pytest.mark.full),
        ("minimax-m3", {"numerics": "fast"}),
        pytest.param("minimax-m3", {"cache_type": "q8_0/f16"}, marks=pytest.mark.full),
        pytest.param("glm-dsa", {"override_tensor": "blk.1=CPU,indexer=CPU"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_long_texts(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, how: dict[str, Any]) -> None:
    """A prompt beyond what is selected, two more tokens, and single ones, the last of which are replayed."""
    if SIMULATED:
        by_torch(monkeypatch)
    path = written(tmp_path / "m.gguf", arch, **SMALL.get(arch, TINY))
    for module, name in ((gpu_attention, "GATHERED"), (gpu_indexer, "INDEX_ELEMENTS"),
                         (gpu_block_indexer, "INDEX_ELEMENTS")):  # fmt: skip
        monkeypatch.setattr(module, name, 300)  # some tokens at a time
    expected = load(path, **{key: how[key] for key in ("numerics", "cache_type") if key in how}).logits(TOKENS[:15])
    model = load(path, devices="cuda:0", **how)
    cache = model.new_cache(16)
    parts = np.split(TOKENS[:15], [9, 11, 12, 13, 14])
    result = np.concatenate([model.forward(part, cache) for part in parts])
    assert model.split is not None
    assert "numerics" not in how or [len(run) for worker, run in model.split.runs if worker] == [len(model.blocks)]
    assert spread(result, expected) < (2e-2 if {"cache_type", "numerics"} & how.keys() else 1e-4)


def test_blocks_for_each_kv_head(rng: np.random.Generator) -> None:
    """The same as on the CPU: also where a token has fewer blocks than are selected, and with equal scores."""
    part: Any = SimpleNamespace(rate=3, top_blocks=3, local_blocks=2, heads=2, dim=32)
    n, tokens, worker = 23, 20, worker_of()
    q, keys = (np.round(rng.standard_normal(shape, np.float32)) for shape in ((tokens, 2, 32), (n, 32)))
    positions = np.arange(n - tokens, n).astype(np.int32)
    wanted = block_indexer.selected(part, q, keys, n - tokens)
    found = gpu_block_indexer.positions_of_blocks(worker, part, *(on(worker, x) for x in (q, keys, positions))).cpu()
    counts = np.minimum(positions // 3, 2) * 3 + positions % 3 + 1
    for t in range(tokens):
        for head in range(2):
            assert found[t, head, : counts[t]].tolist() == np.flatnonzero(wanted[t, head]).tolist()


def test_a_graph_attends_to_what_the_graph_before_has_selected(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of the first layer are on the CPU, between two graphs. The second one begins with a layer that shares the
    selection of the first, and goes on with one that selects others."""
    if SIMULATED:
        by_torch(monkeypatch)
    monkeypatch.setattr(Worker, "compiles", False)  # which takes long
    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 0, "indexer_types": ["full", "shared", "full"]}
    small = {"n_routed_experts": 2, "num_experts_per_tok": 1}
    path = written(tmp_path / "m.gguf", "glm-dsa", **TINY | layers | small)
    expected = load(path).logits(TOKENS[:14])
    model = load(path, numerics="fast", devices="cuda:0", override_tensor=r"blk\.0\..*_exps=CPU")
    assert model.split is not None
    assert [len(run) for _, run in model.split.runs] == [3]
    cache = model.new_cache(14)
    result = np.concatenate([model.forward(part, cache) for part in np.split(TOKENS[:14], [12, 13])])
    assert spread(result, expected) < 3e-2


def test_a_selection_moves_to_another_gpu(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer attends there to what the first has selected."""
    if gpus < 2:
        pytest.skip("needs two GPUs")
    if SIMULATED:
        by_torch(monkeypatch)
    path = written(tmp_path / "m.gguf", "glm-dsa", **TINY, indexer_types=["full", "shared"])
    expected = load(path).logits(TOKENS[:6])
    model = load(path, devices="cuda:0,cuda:1", tensor_split=(1, 2))
    assert model.split is not None
    assert [model.placement.of_cache(layer).name for layer in (0, 1)] == ["CUDA0", "CUDA1"]
    assert spread(model.logits(TOKENS[:6]), expected) < 1e-4


def test_keys_that_no_kernel_reads(gpus: int, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "deepseek32")
    with pytest.raises(UnsupportedError, match=r"no CUDA kernel writes a cache of q4_0; use f32, f16, bf16 or q8_0"):
        load(path, devices="cuda:0", cache_type="f16/q4_0")
    with pytest.raises(UnsupportedError, match=r"CUDA0: an indexer's keys are not rotated .* leave -vhad out"):
        load(path, devices="cuda:0", cache_type="f16 vhad")
    path = written(tmp_path / "blocks.gguf", "minimax-m3")
    with pytest.raises(UnsupportedError, match=r"CUDA0: an indexer of blocks .* not in q8_0; take -ctv f16"):
        load(path, devices="cuda:0", cache_type="q8_0")
    path = written(tmp_path / "local.gguf", "minimax-m3", index_local_blocks=0)
    with pytest.raises(UnsupportedError, match=r"CUDA0: an indexer that may leave out a token's own block"):
        load(path, devices="cuda:0")
