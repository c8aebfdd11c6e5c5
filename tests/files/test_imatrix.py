"""Legacy importance matrices: golden file, round trips, merges, and files that lie."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest

from quantkit.errors import DataError, FormatError, QuantkitError, UnsupportedError
from quantkit.files import imatrix
from quantkit.files.imatrix import Entry, Imatrix


def entry(values: list, calls: int = 3) -> Entry:
    array = np.atleast_2d(np.array(values, np.float32))
    return Entry(array, np.full(len(array), 10 * calls, np.int64), calls)


def entry_bytes(name: bytes = b"blk.0.ffn_up.weight", calls: int = 2, values: tuple = (2.0, 4.0)) -> bytes:
    return struct.pack(f"<i{len(name)}sii{len(values)}f", len(name), name, calls, len(values), *values)


GOOD = struct.pack("<i", 1) + entry_bytes() + struct.pack("<ii4s", 7, 4, b"text")


@pytest.fixture
def file(tmp_path):
    def make(data: bytes):
        path = tmp_path / "x.dat"
        path.write_bytes(data)
        return path

    return make


def test_reads_the_reference_s_file(golden):
    found = imatrix.read(golden / "smollm2-135m-f16.imatrix.dat")
    assert (len(found), found.chunks, found.dataset) == (210, 11, "eval.txt")
    values = found["blk.0.attn_q.weight"].values
    assert values.shape == (1, 576)
    assert found["blk.29.ffn_down.weight"].columns(1536).shape == (1, 1536)
    assert np.array_equal(values, found["blk.0.attn_k.weight"].values)  # the same vectors enter both


def test_writing_what_was_read_gives_the_file_again(golden, tmp_path):
    source = golden / "smollm2-135m-f16.imatrix.dat"
    imatrix.write(tmp_path / "copy.dat", imatrix.read(source))
    ours, theirs = (tmp_path / "copy.dat").read_bytes(), source.read_bytes()
    assert len(ours) == len(theirs)
    again = imatrix.read(tmp_path / "copy.dat")
    for name, e in imatrix.read(source).entries.items():  # x / 11 * 11 may differ from x in the last bit
        np.testing.assert_array_max_ulp(again[name].values, e.values, 2)


def test_layout(file):
    found = imatrix.read(file(GOOD))
    assert found["blk.0.ffn_up.weight"].values.tolist() == [[1.0, 2.0]]  # divided by ncall
    assert (found["blk.0.ffn_up.weight"].calls, found.chunks, found.dataset) == (2, 7, "text")


def test_trailer_is_optional_and_zero_calls_mean_values_as_they_are(file):
    found = imatrix.read(file(struct.pack("<i", 1) + entry_bytes(calls=0)))
    assert found["blk.0.ffn_up.weight"].values.tolist() == [[2.0, 4.0]]
    assert (found.chunks, found.dataset) == (0, "")


def test_round_trip_and_same_bytes(tmp_path):
    made = Imatrix({"blk.0.ffn_up_exps.weight": entry([[1, 2], [3, 4]]), "b": entry([0.5, 0.25])}, 3, "wiki.txt")
    imatrix.write(tmp_path / "a.dat", made)
    imatrix.write(tmp_path / "b.dat", made)
    assert (tmp_path / "a.dat").read_bytes() == (tmp_path / "b.dat").read_bytes()
    found = imatrix.read(tmp_path / "a.dat")
    assert list(found.entries) == ["blk.0.ffn_up_exps.weight", "b"]
    assert found["blk.0.ffn_up_exps.weight"].columns(2).tolist() == [[1, 2], [3, 4]]
    assert (found.chunks, found.dataset, found["b"].calls) == (3, "wiki.txt", 3)
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_columns_refuses_rows_that_do_not_fit():
    with pytest.raises(DataError, match="4 importance values do not fit rows of 3"):
        entry([1, 2, 3, 4]).columns(3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\1\0", "number of entries needs 4 bytes, the file has 2"),
        (b"GGUF" + bytes(40), "in GGUF form"),
        (struct.pack("<i", 0), "number of entries is 0"),
        (struct.pack("<i", -1), "number of entries is -1"),
        (struct.pack("<i", 2**31 - 1) + bytes(64), "number of entries is 2147483647"),
        (struct.pack("<ii", 1, 2**30) + bytes(64), "length of name is 1073741824"),
        (struct.pack("<i", 1) + entry_bytes(name=b""), "length of name is 0"),
        (struct.pack("<i", 1) + entry_bytes(name=b"\xff\xfe"), "name is not UTF-8"),
        (struct.pack("<i", 1) + entry_bytes(calls=-5), r"ncall is -5.*expected 0 to"),
        (struct.pack("<i", 1) + entry_bytes(values=()), "number of values is 0"),
        (GOOD[:40], "2 values needs 8 bytes, the file has 5 left"),
        (struct.pack("<i", 1) + entry_bytes(values=(1.0, float("nan"))), r"value 1 of 2 is nan"),
        (struct.pack("<i", 1) + entry_bytes(values=(-1.0, 1.0)), r"value 0 of 2 is -1"),
        (struct.pack("<i", 2) + entry_bytes() * 2, r"entry 1 of 2 \('blk.0.ffn_up.weight'\).*second entry"),
        (GOOD[:-2], "dataset name needs 4 bytes, the file has 2"),
        (GOOD + b"!", "1 bytes follow"),
    ],
)
def test_files_that_lie_are_named_with_the_place(file, data, message):
    path = file(data)
    with pytest.raises((FormatError, UnsupportedError), match=message) as error:
        imatrix.read(path)
    assert str(path) in str(error.value)


def test_no_mutation_escapes_as_anything_but_our_error(file, rng):
    for _ in range(500):
        data = bytearray(GOOD)
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(256)
        with contextlib.suppress(QuantkitError):
            imatrix.read(file(bytes(data[: rng.integers(1, len(data) + 1)])))


def test_writing_refuses_what_readers_could_not_use(tmp_path):
    with pytest.raises(DataError, match="at least one entry"):
        imatrix.write(tmp_path / "x.dat", Imatrix({}))
    with pytest.raises(DataError, match="entry 'a' holds values"):
        imatrix.write(tmp_path / "x.dat", Imatrix({"a": entry([1, np.inf])}))
    assert list(tmp_path.iterdir()) == []


def test_merge_is_a_mean_weighted_by_calls():
    a = Imatrix({"w": entry([1, 10], calls=1), "only a": entry([5, 5])}, 1, "a.txt")
    b = Imatrix({"w": entry([4, 40], calls=2)}, 2, "b.txt")
    both = imatrix.merge([a, b])
    np.testing.assert_allclose(both["w"].values, [[3, 30]], rtol=1e-6)
    assert (both["w"].calls, both.chunks, both.dataset) == (3, 3, "a.txt+b.txt")
    assert both["only a"].values.tolist() == [[5, 5]]
    weighed = imatrix.merge([a, b], weights=[2, 1])
    np.testing.assert_allclose(weighed["w"].values, [[2.5, 25]], rtol=1e-6)


def test_merge_keeps_the_shape_that_knows_its_matrices():
    flat, stacked = entry([1, 1, 2, 2], calls=1), entry([[3, 3], [4, 4]], calls=1)
    both = imatrix.merge([Imatrix({"w": flat}), Imatrix({"w": stacked})])
    assert both["w"].values.tolist() == [[2, 2], [3, 3]]
    assert both["w"].counts.tolist() == [20, 20]


def test_merge_refuses_other_models():
    with pytest.raises(DataError, match=r"'w' has \[2, 3\] values"):
        imatrix.merge([Imatrix({"w": entry([1, 2])}), Imatrix({"w": entry([1, 2, 3])})])
    with pytest.raises(DataError, match="finite and positive"):
        imatrix.merge([Imatrix({"w": entry([1, 2])})], weights=[-1])
