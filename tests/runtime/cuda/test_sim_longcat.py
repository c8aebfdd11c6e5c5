"""LongCat-Flash on GPUs: experts that give their input, and that are added at the end of a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.placement.offload import Offload
from quantkit.runtime.cuda.cuda_graph import CapturedStep
from quantkit.runtime.cuda.gpu_decode import HostExperts
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.runtime.cuda.conftest import SIMULATED
from tests.runtime.cuda.simulated import by_torch
from tests.runtime.test_step import spread

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TOKENS = np.random.default_rng(3).integers(2, 320, 6)
TINY: dict[str, Any] = {
    "hidden_size": 32, "ffn_hidden_size": 32, "num_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "kv_lora_rank": 32, "n_routed_experts": 4, "zero_expert_num": 3, "moe_topk": 2,
}  # fmt: skip
CPU_EXPERTS = {"override_tensor": "_exps=CPU"}
ELSEWHERE = {"override_tensor": "down_exps=CPU", "profile": True}


@pytest.mark.parametrize(
    ("layers", "how"),
    [
        (1, {"numerics": "fast"}),
        (2, {"numerics": "fast", **CPU_EXPERTS}),
        (1, {"offload": Offload(threshold=1), **CPU_EXPERTS}),
        pytest.param(1, CPU_EXPERTS, marks=pytest.mark.full),
        pytest.param(1, {"kv_on_cpu": True}, marks=pytest.mark.full),
        pytest.param(1, {"gpu_layers": 2}, marks=pytest.mark.full),
        pytest.param(1, ELSEWHERE, marks=pytest.mark.full),
        pytest.param(1, {"expert_reduction": (1, 0.5)}, marks=pytest.mark.full),
        pytest.param(2, {"numerics": "fast", "tensor_split": (1, 2)}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_prompts_and_tokens(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, how: dict[str, Any]
) -> None:
    """A prompt, a token by launches, and two that are replayed where graphs are captured: with fast numerics."""
    if SIMULATED:
        by_torch(monkeypatch)
    path = written(tmp_path / "m.gguf", "longcat-flash", **TINY | {"num_layers": layers})
    expected = load(path, expert_reduction=how.get("expert_reduction")).logits(TOKENS)
    devices = "cuda:0,cuda:1" if "tensor_split" in how and gpus > 1 else "cuda:0"
    model = load(path, devices=devices, **how)
    cache = model.new_cache(len(TOKENS))
    result = np.concatenate([model.forward(part, cache) for part in np.split(TOKENS, [3, 4, 5])])
    fast = "numerics" in how
    assert spread(result, expected) < (3e-2 if fast else 1e-4)
    assert model.split is not None
    assert devices != "cuda:0" or [worker is not None for worker, _ in model.split.runs] == [fast]


def test_experts_of_the_cpu_beside_the_rest_of_their_block(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU gets what follows in the block before the CPU computes."""
    if SIMULATED:
        by_torch(monkeypatch)
    model = load(
        written(tmp_path / "m.gguf", "longcat-flash", **TINY), devices="cuda:0", numerics="fast", **CPU_EXPERTS
    )
    cache, order = model.new_cache(4), list[str]()
    model.forward(TOKENS[:1], cache)
    run, capture = HostExperts.run, CapturedStep._capture
    monkeypatch.setattr(HostExperts, "run", lambda experts: (order.append("experts"), run(experts))[1])
    monkeypatch.setattr(CapturedStep, "_capture", lambda self, step: (order.append("graph"), capture(self, step))[1])
    model.forward(TOKENS[1:2], cache)
    assert order == ["graph", "graph", "experts", "graph", "experts"]  # captured, then replayed
