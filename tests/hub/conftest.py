"""A fake Hub that huggingface_hub in this process, and in its children, takes for the real one; an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter, open_checkpoint
from tests.archs.checkpoints import tiny
from tests.hub.fake import FakeHub


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    from quantkit.hub import client

    home = tmp_path_factory.mktemp("hf-home")
    with FakeHub() as server:
        for name, value in {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)  # what was read from the environment on import
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
        yield server


def sharded(directory: Path, max_bytes: int) -> Path:
    """Split the weights of a directory into files of at most so many bytes of tensors."""
    opened = open_checkpoint(directory)
    specs = [CheckpointSpec(t.name, t.shape, t.dtype) for t in opened.tensors.values()]
    data = {t.name: t.raw().tobytes() for t in opened.tensors.values()}
    (directory / "model.safetensors").unlink()
    with CheckpointWriter(directory, specs, {"format": "pt"}, max_shard_bytes=max_bytes) as writer:
        for name, tensor in data.items():
            writer.write(name, tensor)
    return directory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in several files; its directory is named as its repository, Tiny-Llama."""
    directory = tmp_path_factory.mktemp("hub") / "Tiny-Llama"
    tiny(directory, "bfloat16", hidden_size=256, intermediate_size=512, num_hidden_layers=3, head_dim=64)
    return sharded(directory, 1_000_000)
