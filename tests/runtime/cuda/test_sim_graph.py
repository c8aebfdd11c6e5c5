"""Layers shared by GPUs (-sm graph) give the logits of one CPU: in the simulator, or where there are two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import DataError
from quantkit.formats import gguf
from quantkit.placement import budget
from quantkit.placement.devices import parse_devices
from quantkit.placement.offload import Offload
from quantkit.placement.rules import Flags
from quantkit.runtime.cuda.gpu_rank import CudaRank
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs import checkpoints
from tests.runtime.cuda.conftest import SIMULATED
from tests.runtime.cuda.simulated import by_torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TOKENS = np.random.default_rng(2).integers(0, 320, 6)
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each architecture, in float32, with something of each layer for two devices."""
    from quantkit.pipelines.conversion.convert import convert_checkpoint

    result = {}
    for arch in ("llama", "qwen3moe", "deepseek2", "qwen35moe"):
        directory = tmp_path_factory.mktemp(arch)
        checkpoints.tiny(directory / "hf", "float32", arch, **(SMALL if arch in ("llama", "qwen3moe") else {}))
        convert_checkpoint(directory / "hf", directory / "model.gguf", "f32")
        result[arch] = directory / "model.gguf"
    return result


@pytest.fixture
def two(gpus: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments that load a model over two GPUs; the simulator runs only kernels that torch has no function for."""
    if gpus < 2:
        pytest.skip(f"-sm graph shares layers among 2 GPUs, there are {gpus}")
    if SIMULATED:
        by_torch(monkeypatch)
    return {"devices": "cuda:0,cuda:1", "split_mode": "graph"}


def check(path: Path, tolerance: float = 1e-4, tokens: np.ndarray = TOKENS, **how: Any) -> Model:
    """A model run so gives the logits of the CPU: a prompt at once, then token by token."""
    same = ("mla", "cache_type", "numerics", "expert_reduction")
    expected = load(path, **{key: how[key] for key in same if key in how}).logits(tokens)
    model = load(path, **how)
    cache = model.new_cache(len(tokens))
    result = [model.forward(tokens[:-2], cache), *(model.forward(tokens[i:][:1], cache) for i in (-2, -1))]
    error = float(np.abs(np.concatenate(result) - expected).max())
    print(f"{path.parent.name} {how}: {error:.2e}")
    assert error < tolerance * max(1.0, float(np.std(expected)))
    return model


CASES = [("llama", {}), ("qwen3moe", {}), ("qwen35moe", {}), *(("deepseek2", {"mla": mla}) for mla in range(4))]


@pytest.mark.parametrize(("arch", "how"), CASES, ids=str)
def test_layers_shared_by_gpus(arch: str, how: dict[str, Any], two: dict[str, Any], models: dict[str, Path]) -> None:
    model = check(models[arch], tokens=TOKENS[: 4 if arch == "qwen3moe" else 6], **two, **how)
    assert model.split is not None
    message = model.split.describe()
    assert set(message["gpus"]) == {"CUDA0", "CUDA1"}
    assert (message["reduce"], message["shares"]) == ("f32", [0.5, 0.5])
    ledger = model.split.ledger
    assert ledger.weights["CUDA0"] > 0 < ledger.weights["CUDA1"]
    assert "waiting" in ledger.seconds["CUDA1"]
    cache: Any = model.new_cache(64)
    one = load(models[arch], **how).new_cache(64)
    both = {name: part.nbytes for name, part in cache.parts.items() if part.nbytes}
    assert both == dict.fromkeys(("CUDA0", "CUDA1"), one.nbytes if how.get("mla") else one.nbytes // 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "how"),
    [
        ("llama", {"tensor_split": (3, 1), "numerics": "fast"}),
        ("llama", {"devices": "cuda:0,cpu:0"}),
        ("llama", {"devices": "cpu:0,cuda:1"}),
        ("llama", {"reduce_type": "bf16"}),
        ("llama", {"cache_type": "f16"}),
        ("llama", {"max_gpus": 1}),
        ("qwen3moe", {"gpu_layers": 2}),
        ("qwen3moe", {"experts_by": "columns", "profile": True}),
        ("qwen3moe", {"numerics": "fast"}),
        ("qwen3moe", {"expert_reduction": (1, 0.5)}),
        ("qwen3moe", {"n_cpu_moe": 1}),
        ("qwen3moe", {"override_tensor": "blk.1.*_exps=CUDA1"}),
        ("qwen3moe", {"override_tensor": "_exps=CPU", "offload": Offload(threshold=1)}),
        ("qwen35moe", {"override_tensor": "_exps=CPU", "tripwire": "full"}),
        ("qwen35moe", {"experts_by": "columns"}),
        ("deepseek2", {"override_tensor": "_exps=CPU"}),
    ],
    ids=str,
)
def test_tensors_that_can_and_cannot_be_sharded(
    arch: str, how: dict[str, Any], two: dict[str, Any], models: dict[str, Path]
) -> None:
    rough = {"numerics": 0.05, "reduce_type": 0.1, "cache_type": 0.02}
    model = check(models[arch], max((rough[key] for key in how if key in rough), default=1e-4), **two | how)
    assert model.split is not None
    if "profile" in how:
        assert {"products", "attention", "waiting"} <= model.split.ledger.seconds["CUDA1"].keys()
    if "offload" in how:
        assert model.split.ledger.bytes["CPU", "CUDA0"] > 3 * model.weights["blk.0.ffn_up_exps.weight"].nbytes


def test_prompts_and_sequences_on_shared_layers(two: dict[str, Any], models: dict[str, Path]) -> None:
    """More tokens than a product from packed weights takes, experts left out by each GPU, and caches that go back."""
    tokens = np.random.default_rng(5).integers(0, 320, 20)
    model, plain = load(models["qwen3moe"], **two), load(models["qwen3moe"])
    result = []
    for each in (plain, model):
        cache = each.new_cache(24)
        first = each.forward(tokens, cache)
        cache.truncate(10)
        result.append(np.concatenate([first, each.forward(tokens[10:12], cache)]))
        result[-1] = np.concatenate([result[-1], each.forward_sequences(tokens.reshape(2, 10), slice(-2, None))[1]])
    assert np.abs(result[0] - result[1]).max() < 1e-4


@pytest.mark.parametrize("arch", ["llama", "qwen35moe"])
def test_states_are_saved_and_restored_when_sliced(arch: str, two: dict[str, Any], models: dict[str, Path]) -> None:
    expected, model = load(models[arch]).logits(TOKENS[:3]), load(models[arch], **two)
    cache, other = model.new_cache(8), model.new_cache(8)
    model.forward(TOKENS[:2], cache)
    saved: Any = cache.save()
    assert {name for name, part in saved.parts.items() if part.nbytes} == {"CUDA0", "CUDA1"}
    model.forward(TOKENS[3:4], cache)
    other.restore(saved)
    assert np.abs(model.forward(TOKENS[2:3], other) - expected[2:]).max() < 1e-4


def test_a_bad_tensor_is_named_and_nobody_waits(two: dict[str, Any], models: dict[str, Path], tmp_path: Path) -> None:
    from tests.runtime.test_model import edited, put

    path = edited(models["llama"], tmp_path / "bad.gguf", "blk.1.ffn_up.weight", put(3, 5, np.nan))
    with pytest.raises(DataError, match=r"blk.1.ffn_up.weight made nan"):
        load(path, **two).logits(TOKENS[:1])


@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "qwen35moe", "deepseek2"])
def test_bytes_of_each_gpu_are_those_of_a_plan(arch: str, two: dict[str, Any], models: dict[str, Path]) -> None:
    how = {"tensor_split": (3, 1)} if arch == "llama" else {}
    model = load(models[arch], **two, **how)
    cache: Any = model.new_cache(16)
    model.forward(TOKENS[:1], cache)
    flags = Flags(devices=parse_devices(two["devices"]), split_mode="graph", **how)
    file = gguf.open(models[arch])
    planned = budget.budget(file.tensors, file.metadata, flags, budget.CacheSettings(16, "f32", "f32"))
    loads = {load.device: load for load in planned.loads}
    assert model.split is not None
    for rank in model.split.ranks:
        assert isinstance(rank, CudaRank)
        planned_here = loads[rank.device.name]
        assert cache.parts[rank.device.name].nbytes == planned_here.cache
        held_bytes = sum(m.data.numel() for m in rank._matrices.values()) + sum(
            v.nbytes for v in rank._vectors.values()
        )
        if arch in ("llama", "deepseek2"):  # no norm where no head is; k_b and v_b, not kv_b, which is theirs again
            assert 0.8 * planned_here.weights < held_bytes <= planned_here.weights
        else:
            assert held_bytes == planned_here.weights
