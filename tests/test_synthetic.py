"""The random models of benchmarks: what is the same in a real file is the same, what differs differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import synthetic
from quantkit.formats import gguf
from quantkit.runtime.blocks.latent import EXPAND
from quantkit.runtime.loading import load


@pytest.mark.parametrize("kind", ["q8_0", "q8_0_r8"])
def test_latents_have_the_same_numbers_in_both_forms(kind: str, tmp_path: Path) -> None:
    """Prompts take kv_b on a CPU; tokens, and prompts on a GPU, take k_b and v_b."""
    path = synthetic.write("deepseek2-dry", kind, tmp_path / "m.gguf")
    tokens, logits = np.random.default_rng(1).integers(0, 64, EXPAND), []
    for mla in (1, 3):
        model = load(path, mla=mla)
        logits.append(model.forward(tokens, model.new_cache(EXPAND)))
    error = np.sqrt(np.mean((logits[0] - logits[1]) ** 2) / np.mean(logits[0] ** 2))
    assert error < 0.02


def test_experts_differ(tmp_path: Path) -> None:
    """Another expert, or gate taken for up, gives other results."""
    tensors = gguf.open(synthetic.write("qwen3moe-tiny", "q4_0", tmp_path / "m.gguf")).tensors
    for i in range(2):
        gate, up, down = (tensors[f"blk.{i}.ffn_{name}_exps.weight"].dequantize() for name in ("gate", "up", "down"))
        assert not (gate == up).all(axis=(1, 2)).any()
        for stack in (gate, up, down):
            assert not (stack[1:] == stack[:-1]).all(axis=(1, 2)).any()
