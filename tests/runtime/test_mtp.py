"""MTP layers that draft: against torch, and files that have them apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.runtime.mtp import MtpHead
from tests.archs.mtp_checkpoints import mtp_checkpoint

TOKENS = np.random.default_rng(1).integers(3, 300, (2, 24))


def log_probabilities(x: np.ndarray) -> np.ndarray:
    return np.asarray(x - np.logaddexp.reduce(x.astype(np.float64), axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("arch", "layers", "shared"),
    [("deepseek2", 1, False), ("deepseek2", 2, True), ("glm4moe", 1, True), ("deepseek32", 1, True), ("qwen35", 1, True),
     ("qwen35moe", 1, True)],
)  # fmt: skip
def test_against_torch(tmp_path: Path, arch: str, layers: int, shared: bool) -> None:
    """Steps with a layer of their own, and steps that repeat the last layer."""
    made = mtp_checkpoint(tmp_path, arch, layers, shared)
    convert_checkpoint(made.directory, tmp_path / "m.gguf", "f32", mtp="keep")
    model = quantkit.load(tmp_path / "m.gguf", n_ctx=24)
    head = MtpHead(model)
    hidden = model.hidden_sequences(TOKENS, slice(None))
    found = head.states(TOKENS, hidden, 3, slice(2, None))
    assert [x.shape for x in found] == [(2, 24 - 3 - 2, 64)] * 3
    for sequence, start in ((0, 2), (1, 9), (1, 20)):
        for step, wanted in enumerate(made.draft(TOKENS[sequence], 3, start)):
            logits = head.project(step, found[step][sequence, start - 2][None])[0]
            assert np.abs(log_probabilities(logits) - log_probabilities(wanted)).max() < 2e-4, (step, start)
