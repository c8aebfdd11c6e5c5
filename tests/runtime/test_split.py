"""Models over several devices compute what they compute on one: layer split, graph split, tensors elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError, QuantkitError, UnknownNameError, UnsupportedError
from quantkit.files import gguf
from quantkit.runtime import placement
from quantkit.runtime.model import Model, load
from tests.archs import checkpoints
from tests.runtime.conftest import rewrite

TOKENS = np.random.default_rng(2).integers(0, 320, 40)
FOUR = "cpu:0,cpu:1,cpu:2,cpu:3"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each architecture, with four layers, converted to GGUF in float32."""
    from quantkit.convert import convert

    found = {}
    for arch, changes in {
        "llama": {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
        "qwen3moe": {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
        "deepseek2": {"num_hidden_layers": 4},
    }.items():
        directory = tmp_path_factory.mktemp(arch)
        checkpoints.tiny(directory / "hf", "float32", arch, **changes)
        convert(directory / "hf", directory / "model.gguf", "f32")
        found[arch] = directory / "model.gguf"
    return found


def difference(path: Path, numbers: np.ndarray, **how: Any) -> float:
    one = load(path, **{key: how[key] for key in ("mla", "cache_type", "flash_attention") if key in how})
    return float(np.abs(numbers - one.logits(TOKENS)).max())


def check(path: Path, **how: Any) -> Model:
    """A model run so gives the logits of one device: prompts at once, then token by token."""
    model = load(path, **how)
    assert difference(path, model.logits(TOKENS), **how) < 1e-4
    cache = model.new_cache(len(TOKENS))
    parts = [model.forward(TOKENS[:30], cache), *(model.forward([token], cache) for token in TOKENS[30:34])]
    assert difference(path, np.concatenate([*parts, model.forward(TOKENS[34:], cache)]), **how) < 1e-4
    return model


CASES = [("llama", {}), ("qwen3moe", {}), *(("deepseek2", {"mla": mla}) for mla in range(4))]
by_model = pytest.mark.parametrize(("arch", "how"), CASES, ids=[f"{a}{h.get('mla', '')}" for a, h in CASES])


@by_model
@pytest.mark.parametrize("count", [2, 3])
def test_layers_over_devices(arch: str, how: dict[str, Any], count: int, models: dict[str, Path]) -> None:
    model = check(models[arch], devices=",".join(FOUR.split(",")[:count]), **how)
    assert model.split is not None
    assert {device.name for device in model.placement.of_layer.values()} == {f"cpu:{i}" for i in range(count)}
    assert model.split.ledger.bytes["cpu:0", "cpu:1"] == 2 * len(TOKENS) * 4 * model.hparams.n_embd


@by_model
@pytest.mark.parametrize("count", [2, 4])
def test_layers_shared_by_devices(arch: str, how: dict[str, Any], count: int, models: dict[str, Path]) -> None:
    check(models[arch], devices=",".join(FOUR.split(",")[:count]), split_mode="graph", **how)


@by_model
def test_experts_on_another_device(arch: str, how: dict[str, Any], models: dict[str, Path]) -> None:
    for mode in ("layer", "graph"):
        rules = "exps=cpu:1" if arch != "llama" else "ffn=cpu:1" if mode == "layer" else ""
        check(models[arch], devices=FOUR, split_mode=mode, override_tensor=rules, **how)
