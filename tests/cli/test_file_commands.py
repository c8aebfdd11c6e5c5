"""split, merge, metadata, diff and inspect --card, as typed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quantkit import types
from quantkit.cli import main
from quantkit.formats import gguf, imatrix
from quantkit.formats.gguf import Metadata, TensorSpec, Writer


def make(path, kind="q8_0", **keys):
    x = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    names = [f"blk.{i}.ffn_up.weight" for i in range(4)]
    specs = [TensorSpec(name, x.shape, types.get(kind)) for name in names] + [TensorSpec("n.weight", (64,), "f32")]
    about = {"general.architecture": "llama", "general.name": "Ünï | model", "llama.context_length": 512, **keys}
    with Writer(path, Metadata(about), specs) as writer:
        for i, name in enumerate(names):
            writer.write(name, types.get(kind).quantize(x * (i + 1)))
        writer.write("n.weight", x[0].view(np.uint8))
    return path


def run(capsys, *args, status=0):
    assert main([str(a) for a in args]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_split_and_merge(tmp_path, capsys):
    source = make(tmp_path / "m.gguf")
    assert "-of-00003.gguf" in run(capsys, "split", source, tmp_path / "s", "--split-max-tensors", 2, "--dry-run")
    assert list(tmp_path.iterdir()) == [source]
    found = json.loads(run(capsys, "split", source, tmp_path / "s", "--split-max-tensors", 2, "--json"))
    assert [(s["tensors"], s["bytes"]) for s in found["shards"]] == [(2, 544), (2, 544), (1, 256)]
    first = found["shards"][0]["path"]
    assert first == str(tmp_path / "s-00001-of-00003.gguf")
    assert "3 shards, 5 tensors" in run(capsys, "merge", first, tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()
    run(capsys, "split", source, tmp_path / "t", "--split-max-size", "0.0006M", "--no-tensor-first-split")
    assert gguf.open(tmp_path / "t-00001-of-00004.gguf").shards == [0, 2, 2, 1]
    run(capsys, "split", source, tmp_path / "u")  # 128 tensors a shard
    assert gguf.open(tmp_path / "u-00001-of-00001.gguf").metadata["split.count"] == 1
    (tmp_path / "s-00002-of-00003.gguf").unlink()
    assert "s-00002-of-00003.gguf: shard 2 of 3 is missing" in run(capsys, "merge", first, tmp_path / "x", status=1)
    assert "is not a size" in run(capsys, "split", source, tmp_path / "v", "--split-max-size", "4Q", status=2)
    before = sorted(tmp_path.iterdir())
    assert "write 30G" in run(capsys, "split", source, tmp_path / "w", "--split-max-size", "30", status=2)
    assert sorted(tmp_path.iterdir()) == before


def test_merge_overwrites_no_file(tmp_path, capsys):
    source = make(tmp_path / "m.gguf")
    run(capsys, "split", source, tmp_path / "s", "--split-max-tensors", 2)
    first, out, gone = tmp_path / "s-00001-of-00003.gguf", tmp_path / "thesis.txt", tmp_path / "gone"
    out.write_text("unrelated")
    (tmp_path / "link").symlink_to(gone)
    for there in (out, tmp_path / "link", first, tmp_path / "s-00002-of-00003.gguf"):
        assert "does not overwrite files; remove it" in run(capsys, "merge", first, there, status=1)
    assert out.read_text() == "unrelated"
    assert not gone.exists()
    run(capsys, "merge", first, tmp_path / "back.gguf")


def test_metadata(tmp_path, capfdbinary):
    path = make(tmp_path / "m.gguf")

    def out(*args, status=0):
        assert main(["metadata", *map(str, args)]) == status
        said = capfdbinary.readouterr()
        return said.out if status == 0 else said.err.decode()

    assert out("get", path, "general.name") == "Ünï | model\n".encode()
    assert b"llama.context_length=u32:512\n" in out(path)
    assert json.loads(out(path, "--json"))["metadata"]["general.name"] == {"kind": "str", "value": "Ünï | model"}
    assert b"changed in place" in out("set", path, "llama.context_length=int:4096")
    assert gguf.open(path).metadata.kind("llama.context_length") == "u32"
    template = tmp_path / "t.jinja"
    template.write_bytes(b"{{ x }}\n\xff")
    assert b"rewritten" in out("set", path, "--from-file", f"tokenizer.chat_template={template}", "a.b=i32[]:[1,2]")
    assert out("get", path, "tokenizer.chat_template", "a.b") == b"{{ x }}\n\xff\n[1, 2]\n"
    assert json.loads(out("get", path, "tokenizer.chat_template", "--json"))["metadata"] == {
        "tokenizer.chat_template": {"kind": "str", "value": "{{ x }}\n\udcff"}
    }
    before = path.read_bytes()
    assert b"nothing is written" in out("set", path, "a.b=3", "--dry-run")
    assert "llama.context_length is u32, not i32" in out("set", path, "llama.context_length=i32:1", status=1)
    assert "general.architecture describes the names, shapes or offsets of tensors" in out(
        "set", path, "general.architecture=str:x", status=1
    )
    assert "describes the names, shapes or offsets of tensors" in out("remove", path, "general.architecture", status=1)
    assert "a.b is set twice, to i32[]:[3] first" in out("set", path, "a.b=[3]", "a.b=[4]", status=2)
    assert "general.name is set twice" in out(
        "set", path, "general.name=x", "--from-file", f"general.name={template}", status=2
    )
    assert "did you mean general.name" in out("get", path, "general.nam", status=1)
    assert "no key general.nam" in out("remove", path, "general.nam", status=1)
    assert path.read_bytes() == before
    out("set", path, "general.architecture=qwen3", "llama.context_length=i32:1", "--force")
    out("remove", path, "a.b", "tokenizer.chat_template")
    found = gguf.open(path).metadata
    assert dict(found) == {"general.architecture": "qwen3", "general.name": "Ünï | model", "llama.context_length": 1}
    assert found.kind("llama.context_length") == "i32"


def test_metadata_of_a_set_is_that_of_its_first_shard(tmp_path, capsys):
    run(capsys, "split", make(tmp_path / "m.gguf"), tmp_path / "s", "--split-max-tensors", 3)
    second = tmp_path / "s-00002-of-00002.gguf"
    before = second.read_bytes()
    run(capsys, "metadata", "set", second, "general.name=str:other")
    assert second.read_bytes() == before
    assert gguf.open(second).metadata["general.name"] == "other"
    assert "split.count describes the names" in run(capsys, "metadata", "set", second, "split.count=1", status=1)


def test_diff_weighted_sorted_and_as_json(tmp_path, capsys):
    a, b = make(tmp_path / "a.gguf", "f32"), make(tmp_path / "b.gguf", "q4_0", extra=1)
    weights = np.linspace(0, 1, 64, dtype=np.float32)[None]
    matrix = imatrix.Imatrix({"blk.1.ffn_up.weight": imatrix.Entry(weights, np.array([9]), 3)})
    imatrix.write(tmp_path / "i.dat", matrix)
    found = json.loads(run(capsys, "diff", a, b, "--imatrix", tmp_path / "i.dat", "--json"))
    assert found["metadata"] == [{"key": "extra", "status": "added", "a": None, "b": "1", "kinds": [None, "u32"]}]
    (weighed,) = [t for t in found["tensors"] if t["weighted_error"] is not None]
    x, y = (gguf.open(p).tensors["blk.1.ffn_up.weight"].dequantize().astype(float) for p in (a, b))
    assert weighed["weighted_error"] == pytest.approx(np.sqrt((weights * (x - y) ** 2).sum() / (weights * x * x).sum()))
    assert weighed["largest"] == pytest.approx(np.abs(x - y).max())
    assert weighed["shapes"] == [[4, 64], [4, 64]]
    text = run(capsys, "diff", a, b, "--top", 2)
    assert "and 2 tensors with smaller differences" in text
    assert "1 key(s) and 4 of 5 tensors differ" in text
    run(capsys, "diff", a, b, "--exit-code", status=1)


def test_card(tmp_path, capsys):
    recipe = "# quantkit quantize Q4_0 --attn-q-type q8_0\n# ```\nffn_up=q8_0\n"
    path = make(tmp_path / "Foo-Q4.gguf", **{
        "quantkit.recipe": recipe, "quantkit.version": "9", "quantize.imatrix.file": "/home/me/i.dat",
        "quantize.imatrix.dataset": "C:\\texts\\wiki.txt", "quantize.imatrix.entries_count": 4,
        "quantize.imatrix.chunks_count": 7})  # fmt: skip
    text = run(capsys, "inspect", path, "--card")
    size = 4 * 272 + 256
    assert text.startswith(f"## Foo-Q4 {size / 2**30:.3f} GiB ({8 * size / (4 * 256 + 64):.3f} BPW)\n")
    assert r"- model: Ünï \| model" in text
    assert "- importance matrix: i.dat, of wiki.txt, 4 entries of 7 chunks" in text
    assert "| `blk.*.ffn_up.weight` | 0-3 | 4 x 64 | q8_0 | 4 | 0.000 | 8.500 |" in text
    assert "| all | 5 | 1088 | 0.000 |" in text
    assert f"<details>\n<summary>Recipe of this file</summary>\n\n````\n{recipe}````\n\n</details>" in text
    assert (
        "quantkit quantize MODEL-BF16.gguf OUT.gguf Q4_0 --attn-q-type q8_0 --recipe Foo-Q4.gguf --imatrix i.dat\n"
        in text
    )
    plain = run(capsys, "inspect", make(tmp_path / "b.gguf"), "--card")
    assert "Its types as a recipe" in plain
    assert r"^blk\.([0-3])\.ffn_up\.weight$=q8_0" in plain
    run(capsys, "inspect", path, "--card", "--json", status=2)
