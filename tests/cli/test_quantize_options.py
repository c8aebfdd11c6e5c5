"""Options of quantize that shape the output's files and keys, as typed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quantkit.cli import main
from quantkit.formats import gguf, imatrix
from quantkit.formats.gguf import Metadata, TensorSpec, Writer


@pytest.fixture
def source(tmp_path, rng):
    metadata = Metadata({"general.architecture": "llama", "llama.block_count": 4})
    metadata.set("llama.context_length", 512, "u32")
    metadata.set("llama.rope.freq_base", 1e4, "f32")
    metadata.set("tokenizer.ggml.add_bos_token", True, "bool")
    metadata.set("general.name", "old", "str")
    specs = [TensorSpec(f"blk.{i}.ffn_up.weight", (64, 256), "f32") for i in range(4)]
    with Writer(tmp_path / "in.gguf", metadata, specs, split_max_tensors=2) as writer:
        for spec in specs:
            writer.write(spec.name, rng.standard_normal(spec.shape).astype(np.float32).view(np.uint8))
    return writer.paths[0]


@pytest.fixture
def quantize(source, tmp_path, capsys):
    def run(*options, kind="Q4_0", status=0):
        found = main(["quantize", str(source), str(tmp_path / "out.gguf"), kind, *map(str, options), "--json"])
        said = capsys.readouterr()
        assert found == status, said.err
        return [gguf.open(p) for p in json.loads(said.out)["paths"]] if status == 0 else said.err

    return run


def test_override_kv_keeps_the_kind_that_readers_expect(quantize):
    given = {"llama.context_length": "int:4096", "llama.rope.freq_base": "float:500000", "general.name": "str:a=b:ü",
             "tokenizer.ggml.add_bos_token": "bool:false", "llama.new": "int:-3"}  # fmt: skip
    (made,) = quantize(*(word for key, value in given.items() for word in ("--override-kv", f"{key}={value}")))
    found = {key: (made.metadata[key], made.metadata.kind(key)) for key in given}
    assert found == {
        "llama.context_length": (4096, "u32"), "llama.rope.freq_base": (500000.0, "f32"),
        "general.name": ("a=b:ü", "str"), "tokenizer.ggml.add_bos_token": (False, "bool"), "llama.new": (-3, "i32"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama.context_length=str:x", "the file's value is u32, the override is str"),
        ("llama.context_length=int:-1", "-1 is not a value of kind u32"),
        ("llama.context_length=int:x", "is not KEY=TYPE:VALUE"),
        ("llama.context_length=u32:1", "is not KEY=TYPE:VALUE"),
    ],
)
def test_overrides_that_readers_would_refuse(quantize, tmp_path, text, message):
    assert message in quantize("--override-kv", text, status=1)
    assert not list(tmp_path.glob("out*"))


def test_shards_of_the_output(quantize, tmp_path):
    (whole,) = quantize()
    assert len(whole.paths) == 1
    data = {name: tensor.data.copy() for name, tensor in whole.tensors.items()}
    size = next(iter(whole.tensors.values())).nbytes
    for options, shards in (
        (("--keep-split",), [2, 2]),
        (("--split-max-tensors", 3), [2, 2]),  # as few as can be, of like size
        (("--split-max-size", f"{2 * size / 1000}K"), [2, 2]),
        (("--split-max-size", f"{size / 1000}K"), [1, 1, 1, 1]),
    ):
        made = quantize(*options)
        count = len(shards)
        assert [f.path.name for f in made] == [f"out-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
        assert made[0].shards == shards
        assert all(np.array_equal(made[0].tensors[name].data, rows) for name, rows in data.items())
    assert "contradict each other" in quantize("--keep-split", "--split-max-tensors", 3, status=2)
    assert "is not a size" in quantize("--split-max-size", "lots", status=2)


def test_what_is_said_of_the_importance_matrix(quantize, tmp_path, rng):
    entries = {
        f"blk.{i}.ffn_up.weight": imatrix.Entry(rng.random((1, 256)).astype(np.float32), np.array([512]), 1)
        for i in range(4)
    }
    imatrix.write(tmp_path / "i.gguf", imatrix.Imatrix(entries, 1, "wiki.txt", 512))
    (plain,) = quantize()
    bytes_without = {name: t.data.copy() for name, t in plain.tensors.items()}
    use = ("--imatrix", tmp_path / "i.gguf")
    (made,) = quantize(*use)
    assert made.metadata["quantize.imatrix.dataset"] == "wiki.txt"
    assert made.metadata["quantize.imatrix.file"] == str(tmp_path / "i.gguf")[:127]
    assert made.metadata["quantize.imatrix.entries_count"] == 4
    assert not any(np.array_equal(t.data, bytes_without[name]) for name, t in made.tensors.items())
    (hidden,) = quantize(*use, "--hide-imatrix")
    assert hidden.metadata["quantize.imatrix.dataset"] == hidden.metadata["quantize.imatrix.file"] == "top_secret"
    assert str(tmp_path) not in "".join(str(v) for v in hidden.metadata.values())
    for option, kept in (("--include-weights", {1}), ("--exclude-weights", {0, 2, 3})):
        (some,) = quantize(*use, option, "blk.1.")
        assert some.metadata["quantize.imatrix.entries_count"] == len(kept)
        same = {
            i for i in range(4) if np.array_equal(some.tensors[n := f"blk.{i}.ffn_up.weight"].data, bytes_without[n])
        }
        assert same == {0, 1, 2, 3} - kept
    assert "filter an importance matrix" in quantize("--include-weights", "x", status=2)
