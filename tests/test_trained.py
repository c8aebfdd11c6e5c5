"""The models that benches train: they learn, convert, and run as transformers runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import quantkit
from benchmarks import records, trained, trained_mtp
from quantkit.evaluate.nll import negative_log_likelihood
from quantkit.runtime.mtp import MtpHead


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch on one thread: on a busy machine, threads that wait for each other train hundreds of times as slowly."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trained, "CONTEXT", 32)
    path = tmp_path / "text.txt"
    pages = sorted((records.ROOT / "docs").rglob("*.md"))
    path.write_text("\n".join(page.read_text(encoding="utf-8") for page in pages)[:200_000], encoding="utf-8")
    return path


@pytest.mark.parametrize("shape", trained.SHAPES)
def test_a_model_learns_and_converts(tmp_path: Path, text: Path, shape: str) -> None:
    import torch
    import transformers

    schedule = trained.Schedule(30, 4, 2e-3)
    found = trained.train(shape, text, tmp_path / "hf", schedule)
    assert found.loss < np.log(trained.VOCABULARY) - 0.2
    assert 4 < found.unigram < np.log(trained.VOCABULARY)
    assert trained.train(shape, text, tmp_path / "hf", schedule) == found  # kept: the seconds are the same
    quantkit.convert(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    tokens = np.random.default_rng(0).integers(0, trained.VOCABULARY, 64)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert np.abs(quantkit.load(tmp_path / "m.gguf").logits(tokens) - wanted).max() < 1e-3


def test_a_trained_mtp_layer_converts(tmp_path: Path, text: Path) -> None:
    """The loss that is trained in torch is that of the logits here."""
    import torch

    trained_mtp.train(text, tmp_path / "hf", trained.Schedule(2, 2, 2e-3))
    quantkit.convert(tmp_path / "hf", tmp_path / "m.gguf", "f32", quantkit.ConvertOptions(mtp="keep"))
    model = quantkit.load(tmp_path / "m.gguf", n_ctx=24)
    tokens = np.random.default_rng(0).integers(0, trained.VOCABULARY, (1, 24))
    head = MtpHead(model)
    states = head.states(tokens, model.hidden_sequences(tokens, slice(None)))[0][0, :-1]
    found = negative_log_likelihood(head.project(0, states), tokens[0, 2:])
    longer, around = trained_mtp.load(tmp_path / "hf")
    with torch.no_grad():
        losses = trained_mtp.losses(longer, around, torch.from_numpy(tokens))
    assert abs(float(losses[1]) - found.mean()) < 1e-4


def test_seeds_fix_the_weights() -> None:
    first, second = (trained.build("qwen3moe").state_dict() for _ in range(2))
    assert all((first[name] == second[name]).all() for name in first)


def test_unigram_entropy() -> None:
    assert trained.unigram_entropy(np.array([0, 1, 2, 3])) == pytest.approx(np.log(4))
    assert trained.unigram_entropy(np.array([5, 5, 5])) == 0
