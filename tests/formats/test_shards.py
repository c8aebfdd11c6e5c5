"""Splitting and merging: shards as gguf-split cuts them, the same bytes back, sets that do not belong together."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.errors import DataError, FormatError, QuantkitError
from quantkit.formats import gguf
from quantkit.formats.gguf import Metadata, TensorSpec, Writer, shards
from tests.formats import raw

TYPES = ("f32", "q4_0", "iq4_k_r4", "iq4_ks", "bf16", "iq2_kt")


def make(path, count=9, seed=0, width=256, **keys):
    """A file of `count` small tensors of several types, random bytes."""
    rng = np.random.default_rng(seed)
    specs = [TensorSpec(f"blk.{i}.w", (4 * (1 + i % 3), 256), TYPES[i % len(TYPES)]) for i in range(count - 1)]
    specs.append(TensorSpec("blk.0.attn_norm.weight", (width,), "f32"))
    about = {"general.architecture": "llama", "llama.embedding_length": 256, "tokens": ["日本", "a"], **keys}
    with Writer(path, Metadata(about), specs) as writer:
        for spec in specs:
            writer.write(spec.name, rng.integers(0, 256, spec.nbytes, np.uint8))
    return path


@pytest.mark.parametrize(
    "limits", [{"max_tensors": 2}, {"max_bytes": 5000}, {"max_tensors": 4, "bare_first": True}, {}]
)
def test_merging_what_was_split_gives_the_file_again(tmp_path, limits):
    source = make(tmp_path / "m.gguf")
    file = gguf.open(source)
    counts = shards.split_counts(file, **limits)
    paths = shards.split(file, tmp_path / "s" / "out.gguf", counts)
    assert [p.name for p in paths] == [f"out-{i:05d}-of-{len(counts):05d}.gguf" for i in range(1, len(counts) + 1)]
    for number, path in enumerate(paths):
        found = gguf.Shard(path)
        assert len(found.tensors) == counts[number]
        assert [found.metadata[f"split.{k}"] for k in ("no", "count", "tensors.count")] == [number, len(counts), 9]
        assert [found.metadata.kind(f"split.{k}") for k in ("no", "count", "tensors.count")] == ["u16", "u16", "i32"]
        assert len(found.metadata) == (6 if number == 0 else 3)
    merged = shards.merge(gguf.open(paths[-1]), tmp_path / "merged.gguf", threads=2)
    assert merged.read_bytes() == source.read_bytes()


def test_shards_are_cut_where_gguf_split_cuts_them(tmp_path):
    file = gguf.open(make(tmp_path / "m.gguf"))
    sizes = [-(-t.nbytes // 32) * 32 for t in file.tensors.values()]
    assert shards.split_counts(file, max_tensors=4) == [4, 4, 1]
    assert shards.split_counts(file, max_tensors=9) == [9]
    assert shards.split_counts(file, max_tensors=4, bare_first=True) == [0, 4, 4, 1]
    assert shards.split_counts(file, max_bytes=sizes[0] + sizes[1])[0] == 2
    assert shards.split_counts(file, max_bytes=sizes[0] + sizes[1] - 1)[0] == 1
    assert shards.split_counts(file, max_bytes=1) == [1] * 9  # each above the limit has a shard of its own
    with pytest.raises(DataError, match="at least one, not 0"):
        shards.split_counts(file, max_tensors=0)


def test_the_python_package_of_llama_cpp_reads_the_shards(tmp_path):
    import gguf as reader

    source = gguf.open(make(tmp_path / "m.gguf"))
    names = []
    for path in shards.split(source, tmp_path / "s.gguf", [4, 5]):
        if any(t.type.name not in ("f32", "q4_0", "bf16") for t in gguf.Shard(path).tensors.values()):
            continue  # that package does not know the types of ik_llama.cpp
        names += [t.name for t in reader.GGUFReader(path).tensors]
    plain = gguf.open(make(tmp_path / "p.gguf", count=3))
    for path in shards.split(plain, tmp_path / "t.gguf", [1, 2]):
        found = reader.GGUFReader(path)
        names += [t.name for t in found.tensors]
        assert found.fields["split.count"].parts[-1][0] == 2
    assert names == list(plain.tensors)


def put_together(tmp_path, *parts):
    """A directory with a shard each of several files, which are (file, counts, number of the shard)."""
    home = tmp_path / "set"
    home.mkdir()
    for at, (source, counts, number) in enumerate(parts, 1):
        paths = shards.split(gguf.open(source), tmp_path / f"from{at}" / "m.gguf", counts)
        (home / f"m-{at:05d}-of-{len(parts):05d}.gguf").write_bytes(paths[number].read_bytes())
    return home / f"m-00001-of-{len(parts):05d}.gguf"


def test_sets_that_do_not_belong_together_are_refused_and_both_named(tmp_path):
    a, b = make(tmp_path / "a.gguf"), make(tmp_path / "b.gguf", count=7)
    both = put_together(tmp_path, (a, [4, 5], 0), (b, [4, 3], 1))
    with pytest.raises(FormatError, match=r"m-00002-of-00002.*tensors.count is 7, by name and m-00001.* must be 9"):
        gguf.open(both)


def test_a_shard_of_another_cut_is_named(tmp_path):
    a = make(tmp_path / "a.gguf")
    first = put_together(tmp_path, (a, [4, 5], 0), (a, [3, 6], 1))
    with pytest.raises(FormatError, match=r"m-00002-of-00002.*10 tensors.*9.*m-00001-of-00002.*not of one file"):
        gguf.open(first)


def test_a_shard_of_another_model_is_named(tmp_path):
    a, b = make(tmp_path / "a.gguf"), make(tmp_path / "b.gguf", width=128)
    first = put_together(tmp_path, (a, [4, 5], 0), (b, [4, 5], 1))
    with pytest.raises(FormatError, match=r"m-00002.*shape \(128,\), m-00001.*embedding_length 256"):
        shards.merge(gguf.open(first), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_missing_shards_are_all_named(tmp_path):
    paths = shards.split(gguf.open(make(tmp_path / "m.gguf")), tmp_path / "s.gguf", [3, 2, 2, 2])
    paths[1].unlink()
    paths[3].unlink()
    with pytest.raises(FormatError, match=r"s-00002-of-00004\.gguf: shard 2 of 4 is missing, .* 1 more: 4; s-00001-of"):
        gguf.open(paths[0])


def test_inputs_are_not_overwritten(tmp_path):
    paths = shards.split(gguf.open(make(tmp_path / "m.gguf")), tmp_path / "m.gguf", [4, 5])
    before = [p.read_bytes() for p in paths]
    with pytest.raises(QuantkitError, match="this is the input"):
        shards.split(gguf.open(paths[0]), tmp_path / "m", [5, 4])
    with pytest.raises(QuantkitError, match="this is the input"):
        shards.merge(gguf.open(paths[0]), paths[1])
    assert [p.read_bytes() for p in paths] == before


def test_a_file_of_another_alignment_gets_the_one_that_all_readers_take(tmp_path):
    pairs = [raw.pair("general.alignment", "u32", 128), raw.pair("name", "str", b"\xff\xfeodd")]
    infos = [raw.info("a", (8,), 0, 0), raw.info("b", (4,), 0, 128)]
    data = bytes(range(32)) + bytes(96) + bytes(range(16))
    source = raw.put(tmp_path / "m.gguf", raw.gguf(pairs, infos, data, alignment=128))
    paths = shards.split(gguf.open(source), tmp_path / "s.gguf", [1, 1])
    found = gguf.open(shards.merge(gguf.open(paths[0]), tmp_path / "out.gguf"))
    assert "general.alignment" not in found.metadata
    assert found.metadata["name"] == "\udcff\udcfeodd"
    assert [bytes(t.stored) for t in found.tensors.values()] == [bytes(range(32)), bytes(range(16))]


def test_an_exception_leaves_nothing(tmp_path, monkeypatch):
    file = gguf.open(make(tmp_path / "m.gguf"))
    calls = []

    def fail(view):
        calls.append(view)
        if len(calls) == 5:
            raise OSError("disk on fire")

    monkeypatch.setattr(shards, "release", fail)
    with pytest.raises(OSError, match="on fire"):
        shards.split(file, tmp_path / "s.gguf", [4, 5])
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
