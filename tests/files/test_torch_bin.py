"""Checkpoints that torch saved are read like those of safetensors; what cannot be read is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.convert import convert
from quantkit.errors import FormatError, QuantkitError, UnsupportedError
from quantkit.files.torch_bin import is_bin, open_bin
from tests.archs.checkpoints import tiny


def shards(directory: Path, model: Any, count: int) -> None:
    """A model as save_pretrained wrote it before safetensors."""
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    state = list(model.state_dict().items())
    weight_map = {}
    for i in range(count):
        name = "pytorch_model.bin" if count == 1 else f"pytorch_model-{i + 1:05d}-of-{count:05d}.bin"
        torch.save(dict(state[i::count]), directory / name)
        weight_map |= dict.fromkeys(dict(state[i::count]), name)
    if count > 1:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("count", [1, 3])
def test_the_same_file_as_from_safetensors(tmp_path: Path, count: int) -> None:
    model = tiny(tmp_path / "model", "bfloat16", tie_word_embeddings=count == 1)
    convert(tmp_path / "model", tmp_path / "a.gguf")
    shards(tmp_path / "model", model, count)
    done = convert(tmp_path / "model", tmp_path / "b.gguf")
    assert len(done.paths) == count
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_dtypes_and_views(tmp_path: Path) -> None:
    """Tensors of one storage, parts of one, 8-bit floats, a scalar."""
    x = torch.randn(10, 6)
    state = {"whole": x, "part": x[3:7], "f8": x.to(torch.float8_e4m3fn), "half": x.half(), "one": x[2, 3].clone()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    found = open_bin(tmp_path).tensors
    for name, tensor in state.items():
        assert found[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(found[name].dequantize(), tensor.float().numpy())


@pytest.mark.parametrize(
    ("state", "options", "error", "message"),
    [
        ({"x": torch.ones(3, 4).t()}, {}, UnsupportedError, r"'x' .* strides \(1, 4\)"),
        ({"x": torch.ones(3, dtype=torch.complex64)}, {}, UnsupportedError, "complex64"),
        ({"x": torch.ones(3)}, {"_use_new_zipfile_serialization": False}, UnsupportedError, "before 1.6"),
        ([torch.ones(3)], {}, FormatError, "holds a list"),
        ({"model": {"x": torch.ones(3)}}, {}, FormatError, "'model' is a dict"),
        ({"x": Path("x")}, {}, FormatError, "torch cannot read it"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, state: Any, options: Any, error: type[QuantkitError], message: str
) -> None:
    torch.save(state, tmp_path / "pytorch_model.bin", **options)
    with pytest.raises(error, match=message):
        open_bin(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shards(tmp_path, torch.nn.Linear(3, 4), 2)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(FormatError, match=r"1 tensors are in pytorch_model-00002-of-00002.bin, which is missing"):
        open_bin(tmp_path)


def test_only_where_there_is_nothing_better(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"")
    assert not is_bin(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert is_bin(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not is_bin(tmp_path)


def test_without_torch(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    code = (
        "import sys; sys.modules['torch'] = None\nfrom pathlib import Path\nfrom quantkit.files.torch_bin import *\n"
        f"open_bin(Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UnsupportedError" in done.stderr
    assert "install quantkit[torch]" in done.stderr
