"""Checkpoints that torch saved are read like those of safetensors; what cannot be read is said."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.errors import FormatError, QuantkitError, UnsupportedError
from quantkit.formats.torch_bin import is_bin, open_bin
from quantkit.pipelines.conversion.convert import convert_checkpoint
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
    convert_checkpoint(tmp_path / "model", tmp_path / "a.gguf")
    shards(tmp_path / "model", model, count)
    done = convert_checkpoint(tmp_path / "model", tmp_path / "b.gguf")
    assert len(done.checkpoint.paths) == count
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
        ({"x": torch._neg_view(torch.ones(3, 4))}, {}, UnsupportedError, r"'x' .* strides \(4, 1\), and negated"),
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
        "import sys; sys.modules['torch'] = None\nfrom pathlib import Path\nfrom quantkit.formats.torch_bin import *\n"
        f"open_bin(Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UnsupportedError" in done.stderr
    assert "install quantkit[torch]" in done.stderr


# ------------------------------------------------------------------------------------------- directories that mislead


def rewritten(
    directory: Path, edit: Callable[[str, bytes], bytes | None] = lambda _, data: data, **compression: int
) -> Path:
    """A checkpoint of two tensors whose zip is written anew, each record as `edit` gives it; None leaves it out.

    Without .format_version, with which torch takes the records to be where it would have written them itself.
    `compression`: the method of a record by its name without a point.
    """
    path = directory / "pytorch_model.bin"
    torch.save({"x": torch.arange(64.0), "y": torch.ones(8)}, path)
    with zipfile.ZipFile(path) as file:
        found = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in found.items():
            kind = name.partition("/")[2]
            if kind != ".format_version" and (made := edit(kind, data)) is not None:
                file.writestr(name, made, compression.get(kind.replace(".", ""), zipfile.ZIP_STORED))
    return path


def test_a_zip_written_anew_is_read(tmp_path: Path) -> None:
    rewritten(tmp_path)
    np.testing.assert_array_equal(open_bin(tmp_path).tensors["x"].dequantize(), np.arange(64, dtype=np.float32))


def test_records_that_are_not_where_torch_takes_them_to_be_are_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(file.namelist()[0].partition("/")[0] + "/.format_version", b"1")
    with pytest.raises(FormatError, match="not in the zip directory: load and save it with torch"):
        open_bin(tmp_path)


@pytest.mark.parametrize("record", ["data/0", "datapkl", "byteorder", "version"])
def test_compressed_records_are_refused(tmp_path: Path, record: str) -> None:
    rewritten(tmp_path, **{record: zipfile.ZIP_DEFLATED})
    with pytest.raises(FormatError, match="compressed"):
        open_bin(tmp_path)


def test_a_record_that_would_inflate_is_not_inflated(tmp_path: Path) -> None:
    bomb = bytes(64 << 20)
    path = rewritten(tmp_path, lambda name, data: bomb if name == "data.pkl" else data, datapkl=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(FormatError, match="compressed"):
        open_bin(tmp_path)


@pytest.mark.parametrize("change", [-4, 4])
def test_records_have_the_size_of_their_storage(tmp_path: Path, change: int) -> None:
    rewritten(tmp_path, lambda name, data: (data + bytes(4))[: len(data) + change] if name == "data/0" else data)
    with pytest.raises(FormatError, match=f"storage of 256 bytes should be .* has {256 + change} bytes"):
        open_bin(tmp_path)


def test_a_storage_without_record_is_named(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda name, data: None if name == "data/0" else data)
    with pytest.raises(FormatError, match=r"torch cannot read it|not in the zip directory"):
        open_bin(tmp_path)


def test_numbers_in_big_endian_order_are_refused(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda name, data: b"big" if name == "byteorder" else data)
    with pytest.raises(UnsupportedError, match="byte order is b'big'"):
        open_bin(tmp_path)


def test_files_from_before_the_byte_order_was_noted_are_read(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda name, data: None if name == "byteorder" else data)
    assert set(open_bin(tmp_path).tensors) == {"x", "y"}


def patched(path: Path, name: str, offset: int, value: bytes) -> None:
    """Change the directory's entry of a record at a byte of it."""
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\1\2", 0, data.rfind(b"/" + name.encode()))
    data[at + offset : at + offset + len(value)] = value
    path.write_bytes(data)


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path)
    with zipfile.ZipFile(path) as file:
        first = next(entry for entry in file.infolist() if entry.filename.endswith("data/0"))
    patched(path, "data/1", 42, struct.pack("<I", first.header_offset))
    with pytest.raises(FormatError, match="overlap"):
        open_bin(tmp_path)


@pytest.mark.parametrize(("offset", "value"), [(42, 0x7FFFFFFF), (42, 5)])
def test_records_begin_with_their_header(tmp_path: Path, offset: int, value: int) -> None:
    patched(rewritten(tmp_path), "data/0", offset, struct.pack("<I", value))
    with pytest.raises(FormatError, match=r"corrupt|overlap"):
        open_bin(tmp_path)


def test_a_record_beyond_the_file_is_refused(tmp_path: Path) -> None:
    patched(rewritten(tmp_path), "version", 20, struct.pack("<II", 1 << 20, 1 << 20))
    with pytest.raises(FormatError, match="truncated"):
        open_bin(tmp_path)


def test_a_record_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path)
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr(next(name for name in file.namelist() if name.endswith("data/0")), bytes(256))
    with pytest.raises(FormatError, match="twice"):
        open_bin(tmp_path)


def test_records_are_in_one_folder(tmp_path: Path) -> None:
    path = rewritten(tmp_path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("other/data/0", bytes(256))
    with pytest.raises(FormatError, match="one folder"):
        open_bin(tmp_path)


@pytest.mark.parametrize("cut", [1, 30, 300])
def test_truncated_files_are_errors(tmp_path: Path, cut: int) -> None:
    path = rewritten(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(QuantkitError, match=r"truncated|cannot be read|no record"):
        open_bin(tmp_path)


def test_mutants_of_the_directory_are_errors_of_ours(tmp_path: Path, rng: np.random.Generator) -> None:
    path = rewritten(tmp_path)
    whole = path.read_bytes()
    wanted = {name: t.dequantize() for name, t in open_bin(tmp_path).tensors.items()}
    begin = whole.find(b"PK\1\2")
    for _ in range(150):
        data = bytearray(whole)
        data[rng.integers(begin, len(data))] = rng.integers(256)
        path.write_bytes(data)
        try:
            found = {name: t.dequantize() for name, t in open_bin(tmp_path).tensors.items()}
        except QuantkitError:
            continue
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
