"""Corrupt and hostile files: a FormatError that names file, place and numbers, at once and in little memory."""

from __future__ import annotations

import json
import os
import struct

import pytest

from quantkit.errors import FormatError
from quantkit.formats import gguf
from quantkit.formats.gguf import reader
from quantkit.formats.safetensors import open_checkpoint
from quantkit.formats.safetensors import reader as checkpoint_reader
from tests.formats import raw
from tests.formats.raw import entry, info, pair, string

BIG = 2**63 + 5
ONE = info("a", (8,), 0, 0)
EIGHT = bytes(32)
ARRAY_OF = string("k") + struct.pack("<I", 9)  # kind of the elements and count follow

GGUF_CASES = {
    "empty": (b"", r"empty \(0 bytes\)"),
    "magic": (raw.gguf([], [], magic=b"GGML"), r"at byte 0: .*b'GGUF'.*b'GGML'"),
    "three bytes": (b"GGU", r"at byte 0: .*b'GGU'"),
    "magic only": (b"GGUF", "at byte 4: version takes 4 bytes, the file has 0 left"),
    "version 0": (raw.gguf([], [], version=0), "at byte 4: version 0 is not read"),
    "version 1": (raw.gguf([], [], version=1), "at byte 4: version 1 is not read"),
    "version huge": (raw.gguf([], [], version=2**31), "at byte 4: version 2147483648 is not read"),
    "big-endian": (raw.gguf([], [], version=3 << 24), "at byte 4: .* 3 byte-swapped: a big-endian file"),
    "header cut": (raw.gguf([], [])[:20], "at byte 16: number of metadata keys takes 8 bytes, the file has 4 left"),
    "tensor count": (raw.gguf([], [], n_tensors=BIG), f"at byte 8: number of tensors is {BIG}"),
    "tensor count over": (raw.gguf([], [ONE], EIGHT, n_tensors=2), "at byte .*: tensor '' has 0 dimensions"),
    "key count": (raw.gguf([], [], n_pairs=BIG), f"at byte 16: number of metadata keys is {BIG}"),
    "key count over": (raw.gguf([pair("a" * 20, "u8", 1)], [], n_pairs=2), "metadata key 2 of 2|keys is 2"),
    "key length": (raw.gguf([string("k", BIG) + bytes(20)], []), f"at byte 24: .* {BIG} bytes long, at most 65535"),
    "key length past": (
        raw.gguf([string("k", 60000) + bytes(20)], []),
        "at byte 32: .* takes 60000 bytes, the file has",
    ),
    "key not UTF-8": (raw.gguf([pair(b"ab\xff", "u8", 1)], []), "at byte 34: .* not UTF-8"),
    "string length": (raw.gguf([string("k") + struct.pack("<IQ", 8, BIG)], []), f"at byte 37: .* {BIG} bytes long"),
    "string past": (raw.gguf([string("k") + struct.pack("<IQ", 8, 10**6)], []), "takes 1000000 bytes, the file has"),
    "kind": (raw.gguf([string("k") + struct.pack("<I", 13) + bytes(32)], []), "at byte 33: .* kind 13, .* 0 to 12"),
    "nested array": (raw.gguf([ARRAY_OF + struct.pack("<IQ", 9, 1) + bytes(40)], []), "at byte 37: .* array of arrays"),
    "array kind": (raw.gguf([ARRAY_OF + struct.pack("<IQ", 77, 1) + bytes(40)], []), "at byte 37: .* kind 77"),
    "array count": (raw.gguf([ARRAY_OF + struct.pack("<IQ", 4, BIG) + bytes(40)], []), f"at byte 41: .* is {BIG}"),
    "array wraps": (raw.gguf([ARRAY_OF + struct.pack("<IQ", 10, 2**61) + bytes(40)], []), f"is {2**61}"),
    "array count over": (
        raw.gguf([ARRAY_OF + struct.pack("<IQ", 4, 12) + bytes(40)], []),
        "at byte 41: .* 48 bytes; 47 are",
    ),
    "strings past": (
        raw.gguf([ARRAY_OF + struct.pack("<IQ", 8, 3) + string("ab") + string("c", 9000) + bytes(20)], []),
        "element 1 of metadata value 'k' takes 9000 bytes",
    ),
    "strings length": (
        raw.gguf([ARRAY_OF + struct.pack("<IQ", 8, 3) + string("ab") + string("c", BIG) + bytes(20)], []),
        f"element 1 of metadata value 'k' is {BIG} bytes long",
    ),
    "strings end": (
        raw.gguf([ARRAY_OF + struct.pack("<IQ", 8, 2) + string("a" * 15)], [])[:75],
        "at byte 72: length of element 1 of metadata value 'k' takes 8 bytes, the file has 3 left",
    ),
    "bool": (raw.gguf([pair("k", "bool", 2)], []), "at byte 37: .* bool of value 2"),
    "bools": (raw.gguf([pair("k", "bool[]", [0, 1, 7])], []), "at byte 51: .* bool of value 7"),
    "key twice": (
        raw.gguf([pair("k", "u8", 1), pair("k", "u8", 1)], []),
        "at byte 38: metadata key 'k' occurs twice",
    ),
    "alignment 0": (raw.gguf([pair("general.alignment", "u32", 0)], []), "alignment is 0; it must be a power of two"),
    "alignment 48": (raw.gguf([pair("general.alignment", "u32", 48)], []), "alignment is 48"),
    "alignment 2^62": (
        raw.gguf([pair("general.alignment", "u64", 1 << 62)], []),
        f"alignment is {1 << 62}, quantkit reads up to {1 << 24}",
    ),
    "alignment str": (raw.gguf([pair("general.alignment", "str", "32")], []), "alignment is '32'"),
    "name length": (raw.gguf([], [string("a", BIG) + bytes(40)]), f"{BIG} bytes long, at most 1024"),
    "name not UTF-8": (
        raw.gguf([], [info(b"\xff", (8,), 0, 0)], EIGHT),
        "at byte 32: name of tensor 1 of 1 is not UTF-8",
    ),
    "name twice": (raw.gguf([], [ONE, ONE], EIGHT), "at byte 57: tensor 'a' occurs twice"),
    "dims 0": (raw.gguf([], [info("a", (), 0, 0)], EIGHT), "at byte 33: tensor 'a' has 0 dimensions"),
    "dims 5": (raw.gguf([], [info("a", (1,) * 5, 0, 0)], EIGHT), "at byte 33: tensor 'a' has 5 dimensions"),
    "dim 0": (raw.gguf([], [info("a", (8, 0), 0, 0)], EIGHT), r"at byte 37: .* \[8, 0\], 0 elements"),
    "dims wrap": (raw.gguf([], [info("a", (2**32, 2**32), 0, 0)], EIGHT), f"at byte 37: .* {2**64} elements"),
    "dims large": (
        raw.gguf([], [info("a", (2**31, 2**31), 0, 0)], EIGHT),
        f"takes bytes 96 to {96 + 2**64}, the file has 128",
    ),
    "block": (
        raw.gguf([], [info("a", (48,), 8, 0)], bytes(64)),
        "at byte 45: .* rows of 48 elements.* 32 in a block of q8_0",
    ),
    "type": (raw.gguf([], [info("a", (8,), 4, 0)], EIGHT), "at byte 45: tensor 'a' has type id 4, which is not known"),
    "type huge": (raw.gguf([], [info("a", (8,), 2**32 - 1, 0)], EIGHT), "type id 4294967295"),
    "unaligned": (raw.gguf([], [info("a", (8,), 0, 16)], bytes(64)), "at byte 49: .* offset 16, .* alignment 32"),
    "outside": (raw.gguf([], [info("a", (8,), 0, 32)], EIGHT), "takes bytes 96 to 128, the file has 96"),
    "far outside": (raw.gguf([], [info("a", (8,), 0, 2**64 - 32)], EIGHT), "the file has 96"),
    "truncated data": (raw.gguf([], [ONE], EIGHT[:-1]), "takes bytes 64 to 96, the file has 95; it is truncated"),
    "overlap": (
        raw.gguf([], [info("a", (16,), 0, 0), info("b", (8,), 0, 32)], bytes(96)),
        "'b' takes bytes 128 to 160, tensor 'a' ends only at 160",
    ),
    "same place": (raw.gguf([], [ONE, info("b", (8,), 0, 0)], EIGHT), "tensor 'a' ends only at"),
}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf(case, tmp_path):
    content, message = GGUF_CASES[case]
    path = raw.put(tmp_path / "bad.gguf", content)
    with pytest.raises(FormatError, match=rf"bad\.gguf: .*({message})"):
        gguf.open(path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            raw.gguf([string("k") + struct.pack("<IQ", 8, reader.MAX_HEADER - 9)], [])[:45],
            f"past the {reader.MAX_HEADER} that a header may",
        ),
        (raw.gguf([ARRAY_OF + struct.pack("<IQ", 0, 2**26)], [])[:49], f"is {2**26}, quantkit reads up to"),
        (raw.gguf([], [], n_tensors=2**20), f"number of tensors is {2**20}, quantkit reads up to {reader.MAX_TENSORS}"),
        (raw.gguf([], [], n_pairs=2**20), f"keys is {2**20}, quantkit reads up to {reader.MAX_KEYS}"),
    ],
    ids=["string", "array", "tensors", "keys"],
)
def test_counts_that_fit_a_large_file_are_limited_too(start, message, tmp_path):
    path = raw.put(tmp_path / "large.gguf", start)
    os.truncate(path, 1 << 32)  # sparse: it takes no disk
    with pytest.raises(FormatError, match=message):
        gguf.open(path)


def test_every_truncation_of_a_gguf_is_noticed(tmp_path):
    content = raw.small_gguf()
    assert len(gguf.open(raw.put(tmp_path / "good.gguf", content)).tensors) == 3
    for length in range(len(content)):
        with pytest.raises(FormatError):
            gguf.open(raw.put(tmp_path / "bad.gguf", content[:length]))


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent", tmp_path / "a\0b", tmp_path / ("n" * 300)):
        with pytest.raises(FormatError):
            gguf.open(path)
    with pytest.raises(FormatError, match="no such directory"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(FormatError, match="no other"):
        open_checkpoint(tmp_path)


# --------------------------------------------------------------------------------------------------------------- shards


def shard(path, number, count, total, names, kind="u16"):
    pairs = [
        pair("split.no", kind, number),
        pair("split.count", kind, count),
        pair("split.tensors.count", "i32", total),
    ]
    infos = [info(name, (8,), 0, 32 * i) for i, name in enumerate(names)]
    return raw.put(path, raw.gguf(pairs, infos, bytes(32 * len(names))))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((0, 2, 2, "a"), (0, 2, 2, "b"), "00002-of-00002.*split.no is 0, .* must be 1"),
        ((1, 2, 2, "a"), (1, 2, 2, "b"), "00001-of-00002.*split.no is 1, .* must be 0"),
        ((0, 2, 2, "a"), (1, 3, 2, "b"), "split.count is [23], so the name|00002.*split.count is 3, .* must be 2"),
        ((0, 2, 2, "a"), (1, 2, 3, "b"), "split.tensors.count is [23], .* must be [23]"),
        ((0, 2, 2, "ab"), (1, 2, 2, "cd"), "00002-of-00002.*4 tensors up to this shard, split.tensors.count is 2"),
        ((0, 2, 2**18, "a"), (1, 2, 2**18, "b"), "split.tensors.count is 262144, quantkit reads up to"),
        ((0, 2, 3, "a"), (1, 2, 3, "b"), "2 shards to m-00002.* hold 2 tensors, split.tensors.count is 3"),
        ((0, 2, 2, "a"), (1, 2, 2, "a"), "00002-of-00002.*tensor a is also in .*00001-of-00002"),
    ],
)
@pytest.mark.parametrize("opened", [1, 2])
def test_shards_that_disagree(first, second, message, opened, tmp_path):
    for i, (number, count, total, names) in enumerate((first, second)):
        shard(tmp_path / f"m-{i + 1:05d}-of-00002.gguf", number, count, total, names)
    with pytest.raises(FormatError, match=message):
        gguf.open(tmp_path / f"m-{opened:05d}-of-00002.gguf")


def test_shards_that_are_one_file(tmp_path):
    path = shard(tmp_path / "m-00001-of-00002.gguf", 0, 2, 2, "ab")
    (tmp_path / "m-00002-of-00002.gguf").symlink_to(path)
    for opened in tmp_path.iterdir():
        with pytest.raises(FormatError, match=r"00002-of-00002\.gguf: split\.no is 0, .* must be 1"):
            gguf.open(opened)


def test_shards_whose_others_cannot_be_found(tmp_path):
    with pytest.raises(FormatError, match=r"split\.count is 65535, so the name must end in"):
        gguf.open(shard(tmp_path / "m.gguf", 0, 65535, 1, "a"))
    with pytest.raises(FormatError, match=r"00002-of-65535\.gguf: shard 2 of 65535 is missing"):
        gguf.open(shard(tmp_path / "m-00001-of-65535.gguf", 0, 65535, 1, "a"))
    with pytest.raises(FormatError, match=r"split\.count is 2000000000"):
        gguf.open(shard(tmp_path / "h-00001-of-00002.gguf", 0, 2_000_000_000, 1, "a", "u32"))
    shard(tmp_path / "n-00002-of-00002.gguf", 1, 2, 1, "a")
    with pytest.raises(FormatError, match=r"split\.no is -1; it must be a number"):
        gguf.open(shard(tmp_path / "n-00001-of-00002.gguf", -1, 2, 1, "b", "i16"))


# ---------------------------------------------------------------------------------------------------------- safetensors

F4 = entry("F32", [4], 0, 16)
DATA = bytes(16)
DEEP = b"[" * 100_000

JSON = "safetensors refuses this file of .* bytes: invalid JSON in header: "
TWICE = f'{{"a": {json.dumps(F4)}, "a": {json.dumps(F4)}}}'

ST_CASES = {
    "empty": (b"", r"empty \(0 bytes\)"),
    "seven": (bytes(7), "7 bytes: header too small"),
    "length huge": (
        raw.safetensors({}, length=BIG),
        f"10 bytes: .* the header should end at byte {BIG + 8}; .* truncated",
    ),
    "length over": (raw.safetensors({}, length=3), "10 bytes: .* the header should end at byte 11"),
    "length 0": (struct.pack("<Q", 0), JSON + "EOF .* column 0"),
    "length short": (raw.safetensors({"a": F4}, DATA, length=20), JSON + "EOF .* column 20"),
    "no object": (raw.safetensors(b"[1]"), JSON + "invalid type: sequence"),
    "binary": (raw.safetensors(bytes(range(128, 192))), "invalid UTF-8 in header: .* from index 0"),
    "not UTF-8": (raw.safetensors(b'{"\xff": 1}'), "invalid UTF-8 in header: .* from index 2"),
    "bad escape": (raw.safetensors(rb'{"\x": 1}'), JSON + "invalid escape"),
    "half pair": (raw.safetensors(rb'{"\ud800": 1}'), JSON + "unexpected end of hex escape"),
    "no end": (raw.safetensors(b'{"abc'), JSON + "EOF .* column 5"),
    "backslash end": (raw.safetensors(b'{"abc\\'), JSON + "EOF"),
    "newline in name": (raw.safetensors(b'{"a\nb": 1}'), JSON + "control character"),
    "trailing": (raw.safetensors(b"{} x"), JSON + "trailing characters .* column 4"),
    "comma": (raw.safetensors(b'{"__metadata__":{"a":"b",}}'), JSON + "trailing comma"),
    "metadata number": (
        raw.safetensors({"__metadata__": {"a": 1}}),
        JSON + "invalid type: integer `1`, expected a string",
    ),
    "metadata deep": (raw.safetensors(b'{"__metadata__":' + DEEP), JSON + "invalid type: sequence"),
    "metadata twice": (raw.safetensors(b'{"__metadata__":{},"__metadata__":{}}'), JSON + "duplicate field"),
    "name twice": (
        raw.safetensors(b'{"a":' + json.dumps(F4).encode() + b',"a":1}', DATA),
        JSON + "invalid type: integer",
    ),
    "name twice, the same": (raw.safetensors(TWICE.encode(), DATA), "the header: an object has the key 'a' twice"),
    "metadata key twice": (
        raw.safetensors(b'{"__metadata__":{"b":"1","b":"2"},"a":' + json.dumps(F4).encode() + b"}", DATA),
        "the header: an object has the key 'b' twice",
    ),
    "tensor deep": (raw.safetensors(b'{"a":' + DEEP), JSON + "recursion limit exceeded"),
    "shape deep": (raw.safetensors(b'{"a":{"shape":' + DEEP), JSON + "recursion limit exceeded"),
    "key twice": (raw.safetensors(b'{"a":{"dtype":"F32","dtype":"F32"}}'), JSON + "duplicate field `dtype`"),
    "key unknown": (raw.safetensors({"a": {**F4, "x": 1}}, DATA), "tensor 'a' is {.*'x': 1}; it should have the keys"),
    "a list": (raw.safetensors({"a": ["F32", [4], [0, 16]]}, DATA), "tensor 'a' is .*; it should have the keys"),
    "lacks": (raw.safetensors({"a": {"dtype": "F32", "shape": [4]}}, DATA), JSON + "missing field `data_offsets`"),
    "one offset": (raw.safetensors({"a": {**F4, "data_offsets": [0]}}, DATA), JSON + "invalid length 1"),
    "three offsets": (raw.safetensors({"a": {**F4, "data_offsets": [0, 1, 2]}}, DATA), JSON + "invalid length 3"),
    "dtype": (
        raw.safetensors({"a": {**F4, "dtype": "F33"}}, DATA),
        JSON + "unknown variant `F33`, expected one of `BOOL`.*pip install -U safetensors",
    ),
    "dtype number": (raw.safetensors({"a": {**F4, "dtype": 3}}, DATA), JSON + "invalid type: integer `3`"),
    "negative": (raw.safetensors({"a": {**F4, "shape": [-4]}}, DATA), JSON + "invalid value: integer `-4`"),
    "fraction": (raw.safetensors({"a": {**F4, "shape": [4.0]}}, DATA), JSON + "invalid type: floating point"),
    "exponent": (raw.safetensors(b'{"a":{"shape":[1e9]}}', DATA), JSON + "invalid type: floating point"),
    "digits": (raw.safetensors(b'{"a":{"shape":[' + b"9" * 5000 + b"]}}", DATA), JSON + "number out of range"),
    "leading zero": (raw.safetensors(b'{"a":{"shape":[04]}}', DATA), JSON + "invalid number"),
    "many dims": (raw.safetensors({"a": {**F4, "shape": [1] * 8 + [4]}}, DATA), "tensor 'a' has 9 dimensions, up to 8"),
    "endless dims": (raw.safetensors({"a": entry("F32", [10**18] * 200_000, 0, 16)}, DATA), "overflow computing"),
    "dims wrap": (
        raw.safetensors({"a": entry("F32", [2**32, 2**32, 4], 0, 16)}, DATA),
        f"overflow .*; tensor 'a', F32 of shape .*, has {2**68} bytes; its offsets span 16",
    ),
    "size": (
        raw.safetensors({"a": entry("F32", [5], 0, 16)}, DATA),
        "tensor 'a', F32 of shape .5., has 20 bytes; its offsets span 16; it is truncated or corrupt: fetch it again",
    ),
    "backwards": (raw.safetensors({"a": entry("F32", [4], 16, 0)}, DATA), "invalid offset for tensor `a`.*span -16"),
    "outside": (
        raw.safetensors({"a": entry("F32", [8], 0, 32)}, DATA),
        "file of 86 bytes: .* not fully covered; the tensors end at byte 102; it is truncated",
    ),
    "overlap": (raw.safetensors({"a": F4, "b": entry("F32", [2], 8, 16)}, DATA), "invalid offset for tensor `b`"),
    "same place": (raw.safetensors({"a": F4, "b": F4}, DATA), "invalid offset for tensor `[ab]`"),
    "hole at first": (raw.safetensors({"b": entry("F32", [2], 8, 16)}, DATA), "invalid offset for tensor `b`"),
    "hole": (
        raw.safetensors({"a": entry("U8", [4], 0, 4), "b": entry("U8", [8], 8, 16)}, DATA),
        "invalid offset for tensor `b`",
    ),
    "rest": (
        raw.safetensors({"a": F4}, bytes(20)),
        "file of 90 bytes: .* not fully covered; the tensors end at byte 86",
    ),
    "long name": (raw.safetensors({"n" * 5000: F4}, DATA), "5000 characters long, up to 4096"),
    **{
        dtype: (
            raw.safetensors({"a": entry(dtype, shape, 0, 16)}, DATA),
            f"tensor 'a' is {dtype}; quantkit reads BOOL, ",
        )
        for dtype, shape in {"F4": [4, 8], "C64": [2], "F8_E4M3FNUZ": [16], "F8_E5M2FNUZ": [16]}.items()
    },
}


@pytest.mark.parametrize("case", ST_CASES)
def test_safetensors(case, tmp_path):
    content, message = ST_CASES[case]
    path = raw.put(tmp_path / "model.safetensors", content)
    for opened in (path, tmp_path):
        with pytest.raises(FormatError, match=rf"model\.safetensors: .*({message})"):
            open_checkpoint(opened)


def test_limits_of_a_safetensors_header(tmp_path, monkeypatch):
    path = raw.put(tmp_path / "model.safetensors", raw.small_safetensors())
    monkeypatch.setattr(checkpoint_reader, "MAX_FILE_TENSORS", 2)
    with pytest.raises(FormatError, match=r"model\.safetensors: 3 tensors, quantkit reads up to 2 of one file"):
        open_checkpoint(path)
    monkeypatch.setattr(checkpoint_reader, "MAX_HEADER", 100)
    with pytest.raises(FormatError, match=r"model\.safetensors: the header is .* bytes long, up to 100 are read"):
        open_checkpoint(path)


@pytest.mark.parametrize("limit", ["MAX_INDEX", "MAX_TENSORS"])
def test_limits_of_an_index(tmp_path, monkeypatch, limit):
    raw.put(tmp_path / "x.safetensors", raw.safetensors({"a": F4}, DATA))
    raw.put(tmp_path / "model.safetensors.index.json", b'{"weight_map": {"a": "x.safetensors"}}')
    monkeypatch.setattr(checkpoint_reader, limit, 0)
    with pytest.raises(FormatError, match=r"index\.json: (38 bytes, an index has up to 0|1 tensors, .* reads up to 0)"):
        open_checkpoint(tmp_path)


def test_a_panic_of_the_library_is_our_error(tmp_path, monkeypatch):
    """Panics of Rust code are BaseExceptions that `except Exception` lets through."""

    class PanicException(BaseException):
        pass

    def panic(*_, **__):
        raise PanicException("index out of bounds")

    path = raw.put(tmp_path / "model.safetensors", raw.small_safetensors())
    monkeypatch.setattr("safetensors.safe_open", panic)
    with pytest.raises(FormatError, match=r"model\.safetensors: safetensors refuses .*: index out of bounds; it is"):
        open_checkpoint(path)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.safe_open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(path)


def test_every_truncation_of_a_safetensors_file_is_noticed(tmp_path):
    content = raw.small_safetensors()
    assert len(open_checkpoint(raw.put(tmp_path / "good.safetensors", content)).tensors) == 3
    for length in range(len(content)):
        with pytest.raises(FormatError):
            open_checkpoint(raw.put(tmp_path / "bad.safetensors", content[:length]))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "empty"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map, or an empty one"),
        (b'{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}', "1 tensors are in y.safetensors, .* missing"),
        (
            b'{"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}',
            "'b' should be in x.safetensors, it is in none",
        ),
        (b'{"weight_map": {"c": "x.safetensors"}}', "'c' should be in x.safetensors, it is in none"),
        (b'{"weight_map": {"a": "z.safetensors", "z": "x.safetensors"}}', "'a' should be in z.safetensors, it is in x"),
        (
            b'{"weight_map": {"a": "../x.safetensors"}}',
            "'a' is said to be in '../x.safetensors', which is not a plain file name",
        ),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "not a plain file name"),
        (b'{"weight_map": {"a": "b\\\\c"}}', "not a plain file name"),
        (b'{"weight_map": {"a": ".."}}', "not a plain file name"),
        (b'{"weight_map": {"a": ""}}', "not a plain file name"),
        (b'{"weight_map": {"a": "x\\u0000"}}', "not a plain file name"),
        (b'{"weight_map": {"a": 1}}', "'a' is said to be in 1, which is not a plain file name"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "an object has the key 'a' twice"),
        (b'{"metadata": ' + b"[" * 100_000 + b"}", "nested deeper than 64"),
        (
            b'{"metadata": {"a": [1, -2.5e3, null, {"b": "c"}, [], {}]} "weight_map": {}}',
            "not JSON: Expecting ',' .* .char 58.",
        ),
        (b'{"metadata": [' + b"0," * 200_000 + b"0]}", "no weight_map"),
        (b'{"metadata": tru}', "not JSON: Expecting value: .* .char 13."),
    ],
)
def test_indexes(index, message, tmp_path):
    raw.put(tmp_path / "x.safetensors", raw.safetensors({"a": F4}, DATA))
    if b"z.safetensors" in index:
        raw.put(tmp_path / "z.safetensors", raw.safetensors({"z": F4}, DATA))
    raw.put(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(FormatError, match=rf"index\.json: .*({message})"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_too_few(tmp_path):
    table = {"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 8, 16)}
    raw.put(tmp_path / "x.safetensors", raw.safetensors(table, DATA))
    index = b'{"metadata": {"n": [1, -2.5e3, {"b": "c"}]}, "weight_map": {"a": "x.safetensors"}}'
    raw.put(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(FormatError, match=r"the files hold 2 tensors, the index names 1; 'b' in x\.safetensors"):
        open_checkpoint(tmp_path)
