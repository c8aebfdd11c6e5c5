"""Logits of a real model against the reference's library and against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from quantkit.formats import gguf
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model

TOKENS = 512


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def compare(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Largest absolute difference of log-probabilities, and mean KL divergence."""
    a, b = log_softmax(theirs), log_softmax(ours)
    return float(np.abs(a - b).max()), float((np.exp(a) * (a - b)).sum(1).mean())


@pytest.fixture(scope="module")
def tokens(smollm2_q4_1: Path) -> list[int]:
    """Text that every Python brings along."""
    return load(smollm2_q4_1).tokenizer.encode(topics["debugger"])[:TOKENS]


def test_f16_agrees_with_the_reference_library(smollm2_f16: Path, tokens: list[int]) -> None:
    """With an f16 cache, the reference's default."""
    from tests.conformance.libllama import Llama

    ours = load(smollm2_f16, cache_type="f16").logits(tokens)
    with Llama(smollm2_f16) as llama:
        theirs = llama.logits(tokens)
    largest, kld = compare(ours, theirs)
    print(f"largest difference {largest:.5f}, mean KLD {kld:.2e}")
    assert largest < 0.05
    assert kld < 1e-5


@pytest.mark.parametrize(
    ("cache_types", "hadamard", "cost"),
    [(("q8_0", "q8_0"), (False, False), 0.002), (("q8_0", "q4_0"), (True, False), 0.02)],
)
def test_quantized_caches_cost_what_the_references_do(
    cache_types: tuple[str, str], hadamard: tuple[bool, bool], cost: float, smollm2_f16: Path, tokens: list[int]
) -> None:
    """KL divergence from the model with an exact cache; the reference also rounds queries to 8 bits."""
    from tests.conformance.libllama import Llama

    tokens = tokens[:128]
    model = load(smollm2_f16)
    exact = model.logits(tokens)
    kind = CacheType(*cache_types, *hadamard)
    ours = model.forward(tokens, model.new_cache(len(tokens), kind))
    with Llama(smollm2_f16, cache_types=cache_types, hadamard=hadamard) as llama:
        theirs = llama.logits(tokens)
    our_kld, reference_kld, kld_between = compare(ours, exact)[1], compare(theirs, exact)[1], compare(ours, theirs)[1]
    print(f"{kind}: KLD {our_kld:.5f}, the reference's {reference_kld:.5f}, between the two {kld_between:.5f}")
    assert 0 < our_kld < cost
    assert our_kld < 1.5 * reference_kld + 0.001
    assert kld_between < cost


def test_what_types_of_caches_cost(smollm2_q4_1: Path, tokens: list[int]) -> None:
    """More bits, less divergence; rotated, four bits lose much less."""
    model, tokens = load(smollm2_q4_1), tokens[:160]
    exact = model.logits(tokens)
    cost = {
        kind: compare(model.forward(tokens, model.new_cache(160, kind)), exact)[1]
        for kind in ("f16", "q8_0", "q4_0", "q4_0 khad vhad", "f32 khad vhad")
    }
    print(cost)
    assert cost["f32 khad vhad"] < 1e-6
    assert cost["f16"] < 1e-5
    assert cost["q8_0"] < 0.003
    assert 0.01 < cost["q4_0"] < 0.5
    assert cost["q4_0 khad vhad"] < 0.7 * cost["q4_0"]


def transformers_logits(model: Model, tokens: list[int]) -> np.ndarray:
    """float32[tokens, vocab] of transformers' Llama with the model's decoded weights, rows back in checkpoint order."""
    import torch
    import transformers

    from quantkit import archs

    hp, arch = model.hparams, archs.get("llama")
    config = arch.config(model.metadata, model.weights)
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval().to(torch.float32)
    shapes = {name: tensor.shape for name, tensor in model.weights.items()}
    state = {}
    for piece in arch.to_hf(hp, shapes):
        decoded = [model.weights[source].dequantize() for source in piece.sources]
        sources = [d.reshape(-1, d.shape[-1] if d.ndim > 1 else 1) for d in decoded]
        rows = piece.transform.rows([lambda a, b, s=s: s[a:b] for s in sources], 0, len(sources[0]))
        state[piece.name] = torch.from_numpy(np.ascontiguousarray(rows).reshape(piece.shape))
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        return net(torch.tensor([tokens])).logits[0].numpy()


def test_f32_agrees_with_transformers(smollm2_f32: Path, tokens: list[int]) -> None:
    model = load(smollm2_f32)
    largest, kld = compare(model.logits(tokens), transformers_logits(model, tokens))
    print(f"largest difference {largest:.6f}, mean KLD {kld:.2e}")
    assert largest < 0.002


def test_f16_file_is_the_decoded_wheel_file(smollm2_q4_1: Path, smollm2_f16: Path, tokens: list[int]) -> None:
    """Rounding Q4_1's values to halves changes next to nothing; the broken kernel of the reference gives a KLD of 1."""
    _, kld = compare(load(smollm2_q4_1).logits(tokens), load(smollm2_f16).logits(tokens))
    assert kld < 1e-5
    assert gguf.open(smollm2_q4_1).tensors["blk.0.attn_q.weight"].type.name == "q4_1"
