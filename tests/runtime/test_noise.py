"""KL divergence of fast from exact numerics: with Q8_0 below .0005, and less than the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.runtime.conftest import rewrite
from tests.runtime.test_step import TOKENS, by_steps, changed


def divergence(expected: np.ndarray, result: np.ndarray) -> float:
    """Mean over tokens of the KL divergence, from logits."""
    p, q = (x - x.max(1, keepdims=True) for x in (expected.astype(np.float64), result.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(1).mean())


def both(path: Path) -> tuple[Model, Model]:
    fast = load(path, numerics="fast", threads=2)
    assert fast.fallback_reason is None
    return load(path, threads=2), fast


def test_fast_numerics_cost_less_than_q8_0(smollm2_q4_1: Path, golden: Path, tmp_path: Path) -> None:
    """SmolLM2 has columns that outgrow the others: one scale for 32 columns would cost .0032."""
    exact, fast = both(rewrite(smollm2_q4_1, tmp_path / "q8_0.gguf", "q8_0"))
    tokens = np.array(exact.tokenizer.encode((golden / "eval.txt").read_text()))
    chunks = [tokens[start : start + 64] for start in (0, 3000)]
    expected = [exact.logits(chunk) for chunk in chunks]
    prompts = [divergence(logits, fast.logits(chunk)) for logits, chunk in zip(expected, chunks)]
    assert np.mean(prompts) < 1e-5
    sequences = fast.forward_sequences(np.stack(chunks), slice(None))
    assert np.mean([divergence(logits, result) for logits, result in zip(expected, sequences)]) < 1e-5
    # Single tokens multiply by 8-bit activations: 3.4e-4 to 6.8e-4 over eight chunks of this text, 5.0e-4 in the mean.
    steps = [divergence(logits, by_steps(fast, chunk)) for logits, chunk in zip(expected, chunks)]
    assert np.mean(steps) < 7e-4


@pytest.mark.parametrize("kind", ["q4_0", "q4_K", "iq4_k"])
def test_a_third_of_the_references_noise(kind: str, tiny: Path, tmp_path: Path) -> None:
    libllama = pytest.importorskip("tests.conformance.libllama")
    named = changed(tiny, tmp_path / "named.gguf", {"tokenizer.ggml.model": ("no_vocab", "str")}, {})
    path = rewrite(named, tmp_path / "q.gguf", kind)
    exact, fast = both(path)
    expected = exact.logits(TOKENS)
    with libllama.Llama(path, n_ctx=128) as llama:
        theirs = divergence(expected, llama.logits(TOKENS))
    ours = divergence(expected, fast.logits(TOKENS)), divergence(expected, by_steps(fast, TOKENS))
    assert max(ours) < theirs / 3, (ours, theirs)
