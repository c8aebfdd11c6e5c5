"""Exact numerics of every type: the logits of a model are those of one whose matrices are its decoded values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.formats import gguf
from quantkit.runtime.loading import load
from tests.runtime.conftest import rewrite
from tests.types.data import can_encode

TYPES = [t for t in types.all() if can_encode(t) and not t.whole_tensor]
SOME = {"q4_K", "iq6_k", "iq4_k_r4"}  # of one block, of values of products, interleaved
TOKENS = np.random.default_rng(8).integers(2, 320, 60)


def decoded(source: Path, target: Path) -> Path:
    """A copy in float32, of the values that products use."""
    file = gguf.open(source)
    specs = [gguf.TensorSpec(t.name, t.shape, types.get("f32")) for t in file.tensors.values()]
    with gguf.Writer(target, file.metadata, specs) as writer:
        for tensor in file.tensors.values():
            data = tensor.data.reshape(-1, tensor.type.row_bytes(tensor.shape[-1]))
            writer.write(tensor.name, tensor.type.dequantize(data, tensor.shape[-1], products=True).view(np.uint8))
    return target


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    "kind", [t.name if t.name in SOME else pytest.param(t.name, marks=pytest.mark.full) for t in TYPES]
)
def test_exact_logits_are_those_of_the_decoded_weights(kind: str, tiny: Path, tmp_path: Path) -> None:
    path = rewrite(tiny, tmp_path / "q.gguf", kind, token_embd="q8_0")
    assert kind in {tensor.type.name for tensor in gguf.open(path).tensors.values()}
    ours, expected = (log_probabilities(load(p).logits(TOKENS)) for p in (path, decoded(path, tmp_path / "f32.gguf")))
    assert np.isfinite(ours).all()
    assert np.abs(ours - expected).max() < 2e-3
