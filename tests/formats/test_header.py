"""Changing metadata: in place where it fits, anew where not, and nothing else changes."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from quantkit.errors import DataError, QuantkitError
from quantkit.formats import gguf
from quantkit.formats.gguf import header
from quantkit.formats.gguf.metadata import Metadata, assignment, holds_tensors
from tests.formats import raw


def change(path, **keys):
    """Set keys (dots as __), each a value or a (value, kind)."""
    changed = Metadata()
    for key, value in keys.items():
        changed.set(key.replace("__", "."), *(value if isinstance(value, tuple) else (value,)))
    return header.rewrite(path, changed)


def parts(path):
    """Metadata with kinds, tensors' bytes."""
    file = gguf.open(path)
    return ({k: (v, file.metadata.kind(k)) for k, v in file.metadata.items()},
            {n: bytes(t.stored) for n, t in file.tensors.items()})  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return raw.put(tmp_path / "m.gguf", raw.small_gguf())


def test_a_value_of_the_same_size_changes_its_bytes_only(path):
    before, inode = path.read_bytes(), path.stat().st_ino
    assert change(path, test__u32=(77, "u32"), general__architecture="qwen3") is True
    after = path.read_bytes()
    assert len(after) == len(before)
    assert path.stat().st_ino == inode
    expected = before.replace(b"llama", b"qwen3")
    place = expected.index(b"test.u32") + len(b"test.u32") + 4
    assert after == expected[:place] + struct.pack("<I", 77) + expected[place + 4 :]


def test_what_does_not_fit_is_written_anew(path):
    keys, tensors = parts(path)
    assert change(path, general__name="x" * 100, general__architecture="qwen35moe") is False
    new_keys, new_tensors = parts(path)
    assert new_tensors == tensors
    assert list(new_keys) == [*keys, "general.name"]
    assert new_keys["general.name"] == ("x" * 100, "str")
    assert {k: v for k, v in new_keys.items() if k in keys} == keys | {"general.architecture": ("qwen35moe", "str")}


def test_a_new_key_uses_the_padding(tmp_path):
    path = raw.put(tmp_path / "m.gguf", raw.gguf([raw.pair("a", "u32", 1)], [raw.info("w", (4,), 0, 0)], bytes(16)))
    size, inode = path.stat().st_size, path.stat().st_ino
    free = -(24 + len(raw.pair("a", "u32", 1)) + len(raw.info("w", (4,), 0, 0))) % 32
    fits = len(raw.pair("b", "u8", 1)) <= free
    assert change(path, b=(1, "u8")) is fits
    assert (path.stat().st_ino == inode) == fits
    assert (path.stat().st_size == size) == fits
    assert header.rewrite(path, Metadata(), ["b"]) is fits
    assert path.read_bytes() == raw.gguf([raw.pair("a", "u32", 1)], [raw.info("w", (4,), 0, 0)], bytes(16))


def test_lists_kinds_and_removal(path):
    change(path, test__u32s=([5, 6, 7, 8], "u32"), test__words=["ä", "日本語"], new__flags=([True], "bool"))
    header.rewrite(path, Metadata(), ["test.f64", "test.bool"])
    keys, _ = parts(path)
    assert keys["test.u32s"] == ([5, 6, 7, 8], "u32")
    assert keys["test.words"] == (["ä", "日本語"], "str")
    assert keys["new.flags"] == ([True], "bool")
    assert "test.f64" not in keys
    assert "test.bool" not in keys


def test_what_is_no_utf_8_and_odd_layouts_survive(tmp_path):
    nan = struct.pack("<I", 0x7FC12345)
    pairs = [raw.pair("general.alignment", "u32", 64), raw.pair("odd", "str", b"a\xff\xc3("),
             raw.pair("odds", "str[]", [b"\x80", "ok"]), raw.string("nan") + struct.pack("<I", 6) + nan,
             raw.pair("name", "str", "old")]  # fmt: skip
    infos = [raw.info("b", (4,), 0, 128), raw.info("a", (8,), 0, 0)]  # in another order than their data, with a gap
    data = bytes(range(100, 132)) + b"gap." * 24 + bytes(range(16)) + b"trailing"
    path = raw.put(tmp_path / "m.gguf", raw.gguf(pairs, infos, data, version=2, alignment=64))
    _, tensors = parts(path)
    assert change(path, name="a much longer name" * 5) is False
    found = path.read_bytes()
    pairs[-1] = raw.pair("name", "str", "a much longer name" * 5)
    assert found == raw.gguf(pairs, infos, data, version=2, alignment=64)
    assert parts(path)[1] == tensors
    assert change(path, odd=b"\xfe\xff\xc3(".decode("utf-8", "surrogateescape")) is True
    assert b"\xfe\xff\xc3(" in path.read_bytes()


def test_shards_mode_and_links_are_kept(tmp_path, path):
    path.chmod(0o640)
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert change(link, general__name="y" * 50) is False
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert gguf.open(path).metadata["general.name"] == "y" * 50


def test_nothing_is_left_when_it_fails(tmp_path, path, monkeypatch):
    before = path.read_bytes()

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(header, "_stream", fail)
    with pytest.raises(QuantkitError, match="No space left"):
        change(path, general__name="z" * 50)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_alignment_and_headers_that_no_reader_takes_are_refused(path):
    before = path.read_bytes()
    with pytest.raises(QuantkitError, match=r"general\.alignment is 32, and the offsets of the tensors depend on it"):
        change(path, general__alignment=(64, "u32"))
    with pytest.raises(QuantkitError, match="readers would refuse a header of"):
        change(path, long="x" * (41 << 20))
    with pytest.raises(QuantkitError, match="readers would refuse a key"):
        change(path, **{"k" * 70000: 1})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=u32:7", ("a.b", 7, "u32")),
        ("a=i8:-0x10", ("a", -16, "i8")),
        ("a=f32:1e-5", ("a", 1e-5, "f32")),
        ("a=bool:TRUE", ("a", True, "bool")),
        ("a=str:x:y=z", ("a", "x:y=z", "str")),
        ("a=str:", ("a", "", "str")),
        ("a=i32[]:[1, -2]", ("a", [1, -2], "i32")),
        ("a=f32[]:1,2.5", ("a", [1.0, 2.5], "f32")),
        ("a=u8[]:", ("a", [], "u8")),
        ('a=str[]:["x,y", "z"]', ("a", ["x,y", "z"], "str")),
        ("a=int:7", ("a", 7, None)),
        ("a=float:2", ("a", 2.0, "f32")),
        ("size=int:9", ("size", 9, "u16")),
        ("size=9", ("size", 9, "u16")),
        ("name=http://x", ("name", "http://x", "str")),
        ("list=3,4", ("list", [3, 4], "i32")),
        ("eps=float:1", ("eps", 1.0, "f64")),
    ],
)
def test_assignments(text, expected):
    existing = Metadata()
    for key, value, kind in (("size", 1, "u16"), ("name", "x", "str"), ("list", [1], "i32"), ("eps", 0.5, "f64")):
        existing.set(key, value, kind)
    key, value, kind = assignment(text, existing)
    assert (key, value, kind) == expected
    assert type(value) is type(expected[1])
    Metadata().set(key, value, kind)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "is not KEY=TYPE:VALUE"),
        ("=u32:1", "is not KEY=TYPE:VALUE"),
        ("a=5", "a is new: give its type"),
        ("a=u32:x", "'x' is not a value of kind u32"),
        ("a=bool:maybe", "'maybe' is not a value of kind bool"),
        ("a=i32[]:[1,", "is not a JSON list"),
    ],
)
def test_assignments_that_are_none(text, message):
    with pytest.raises(DataError, match=message):
        assignment(text, Metadata())


@pytest.mark.parametrize(
    ("text", "message"), [("a=u8:256", "256 is not a value of kind u8"), ('a=i32[]:[1,"x"]', "not a value of kind i32")]
)
def test_values_out_of_range_are_refused(text, message):
    with pytest.raises(DataError, match=message):
        Metadata().set(*assignment(text, Metadata()))


def test_keys_from_which_tensors_follow():
    for key in ("general.architecture", "split.count", "llama.block_count", "qwen3moe.expert_count",
                "deepseek2.attention.kv_lora_rank", "tokenizer.ggml.tokens"):  # fmt: skip
        assert holds_tensors(key), key
    for key in ("general.name", "llama.context_length", "llama.rope.freq_base", "tokenizer.chat_template",
                "general.block_count", "general.file_type"):  # fmt: skip
        assert not holds_tensors(key), key


def test_every_byte_of_a_real_file_but_the_key_s(tmp_path, smollm2_q4_1):
    path = tmp_path / "s.gguf"
    path.write_bytes(smollm2_q4_1.read_bytes())
    assert change(path, general__name="renamed") is False
    assert change(path, general__name="RENAMED") is True
    theirs, ours = gguf.Shard(smollm2_q4_1), gguf.Shard(path)
    assert ours.metadata["general.name"] == "RENAMED"
    assert np.array_equal(theirs.bytes[theirs.data_start :], ours.bytes[ours.data_start :])
    for key in theirs.metadata:
        if key != "general.name":
            assert bytes(theirs.bytes[slice(*theirs.spans[key])]) == bytes(ours.bytes[slice(*ours.spans[key])]), key
