"""Every architecture on tiny random checkpoints, float32: logits of transformers, and of the reference.

Each has a second configuration of other ratios beside its EXAMPLE, and what its config.json can switch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs, recipe
from quantkit.convert import convert, prepare
from quantkit.errors import DataError
from quantkit.files import gguf
from quantkit.quantize import quantize
from tests.archs.checkpoints import tiny

TOKENS = np.random.default_rng(3).integers(2, 320, (2, 256))
OTHERS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3},
    "qwen2": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "intermediate_size": 160, "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3moe": {
        "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 3, "head_dim": 64,
        "num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "intermediate_size": 160,
    },
}  # fmt: skip


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("other", [False, True], ids=["example", "other"])
@pytest.mark.parametrize("arch", [arch.name for arch in archs.all()])
def test_logits_of_transformers_and_the_reference(tmp_path: Path, arch: str, other: bool) -> None:
    torch = pytest.importorskip("torch")
    model = tiny(tmp_path / "hf", arch=arch, **(OTHERS[arch] if other else {}))
    convert(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    with torch.no_grad():
        wanted = log_probabilities(model(torch.tensor(TOKENS)).logits.numpy())
    ours = quantkit.load(tmp_path / "m.gguf")
    for sequence, expected in zip(TOKENS, wanted):
        assert np.abs(log_probabilities(ours.logits(sequence)) - expected).max() < 2e-3
    cache = ours.new_cache(256)
    single = np.concatenate([ours.forward([token], cache) for token in TOKENS[0]])
    assert np.abs(log_probabilities(single) - wanted[0]).max() < 2e-3
    together = ours.forward_sequences(TOKENS, slice(None))
    assert np.abs(log_probabilities(together) - wanted).max() < 2e-3
    libllama = pytest.importorskip("tests.conformance.libllama")
    with libllama.Llama(tmp_path / "m.gguf", n_ctx=256, threads=1) as llama:
        theirs = log_probabilities(llama.logits(TOKENS[0]))
    assert np.abs(theirs - wanted[0]).max() < 0.05  # its cache is f16


@pytest.mark.parametrize(
    ("arch", "change"), [("qwen3", {"attention_bias": True}), ("qwen3moe", {"norm_topk_prob": False})]
)
def test_what_the_reference_does_not_know(tmp_path: Path, arch: str, change: dict[str, Any]) -> None:
    """Wheel 0.1.5 does not load qwen3 with biases, and always divides the weights of qwen3moe by their sum."""
    torch = pytest.importorskip("torch")
    model = tiny(tmp_path / "hf", arch=arch, **change)
    convert(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    with torch.no_grad():
        wanted = log_probabilities(model(torch.tensor(TOKENS[:1])).logits.numpy()[0])
    assert np.abs(log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(TOKENS[0])) - wanted).max() < 2e-3


@pytest.mark.parametrize("kind", ["Q8_0", "IQ4_K", "Q4_K_M"])
def test_quantized_experts_run_in_the_reference(tmp_path: Path, kind: str) -> None:
    """Converted, quantized, and run by both: only the reference's own rounding of activations is between them."""
    pytest.importorskip("torch")
    libllama = pytest.importorskip("tests.conformance.libllama")
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 8}
    tiny(tmp_path / "hf", arch="qwen3moe", **wide)
    convert(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    source = gguf.open(tmp_path / "m.gguf")
    plan = recipe.plan(source.tensors.values(), kind, metadata=source.metadata)
    quantize(source, tmp_path / "q.gguf", plan)
    ours = quantkit.load(tmp_path / "q.gguf")
    types = {name: tensor.type.name for name, tensor in ours.weights.items()}
    assert types["blk.0.ffn_up_exps.weight"].lower() == kind.lower().removesuffix("_m")
    wanted = log_probabilities(ours.logits(TOKENS[0][:64]))
    with libllama.Llama(tmp_path / "q.gguf", n_ctx=64, threads=1) as llama:
        theirs = log_probabilities(llama.logits(TOKENS[0][:64]))
    divergence = (np.exp(wanted) * (wanted - theirs)).sum(1).mean()
    assert divergence < 2e-3
    assert np.abs(theirs - wanted).max() < 0.5


def test_a_value_that_is_not_finite_is_named_by_its_expert(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = tiny(tmp_path / "hf", arch="qwen3moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 5, 7] = torch.nan
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(DataError, match=r"experts\.3\.down_proj\.weight: .*row 5, column 7 is nan"):
        convert(tmp_path / "hf", tmp_path / "m.gguf", "q8_0")
    assert not (tmp_path / "m.gguf").exists()


def test_experts_are_stacked_piece_by_piece(tmp_path: Path) -> None:
    """No job of a conversion makes more than an expert, whatever their number."""
    pytest.importorskip("torch")
    tiny(tmp_path / "hf", arch="qwen3moe", num_experts=24)
    jobs = [(name, make()) for name, make in prepare(tmp_path / "hf", "f32").jobs()]
    stacked = [data for name, data in jobs if name == "blk.1.ffn_up_exps.weight"]
    assert len(stacked) == 24
    assert {data.nbytes for data in stacked} == {32 * 64 * 4}
