"""Importance matrices in both forms: golden file, round trips, merges, missing experts, and files that lie."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest

from quantkit.errors import DataError, FormatError, QuantkitError
from quantkit.formats import gguf, imatrix
from quantkit.formats.imatrix import Entry, Imatrix, fill_missing
from tests.formats import raw


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
        (b"GGUF" + bytes(40), "version 0 is not read"),
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
    with pytest.raises(FormatError, match=message) as error:
        imatrix.read(path)
    assert str(path) in str(error.value)


def test_no_mutation_escapes_as_anything_but_our_error(file, rng):
    read = 0
    for _ in range(500):
        data = bytearray(GOOD)
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(256)
        with contextlib.suppress(QuantkitError):  # anything else fails here
            imatrix.read(file(bytes(data[: rng.integers(1, len(data) + 1)])))
            read += 1
    assert read < 500


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
    assert both["w"].counts.tolist() == [2, 2]  # nobody knows what a legacy file saw: its calls


def test_merge_refuses_other_models():
    with pytest.raises(DataError, match=r"'w' has 1 x 2, 1 x 3 values"):
        imatrix.merge([Imatrix({"w": entry([1, 2])}), Imatrix({"w": entry([1, 2, 3])})])
    with pytest.raises(DataError, match=r"'w' has 1 x 4, 2 x 2, 4 x 1 values"):
        imatrix.merge([Imatrix({"w": entry(np.ones(shape))}) for shape in ((1, 4), (2, 2), (4, 1))])
    with pytest.raises(DataError, match="finite and positive"):
        imatrix.merge([Imatrix({"w": entry([1, 2])})], weights=[-1])


# ------------------------------------------------------------------------------------------------------------ GGUF form


def experts(rng, matrices=4, n=8, missing=()):
    """An entry of experts that saw different numbers of tokens, and those in `missing` none."""
    counts = rng.integers(1, 900, matrices)
    counts[list(missing)] = 0
    values = rng.random((matrices, n)).astype(np.float32)
    values[list(missing)] = 0
    return Entry(values, counts, 3)


def stored_by_hand(entries, chunks=3, size=300, pairs=()):
    """A GGUF file as llama.cpp writes it: sums and counts, dims fastest first."""
    infos, data = [], b""
    for name, sums, counts in entries:
        for suffix, values in ((".in_sum2", sums), (".counts", counts)):
            values = np.asarray(values, np.float32)
            infos.append(raw.info(name + suffix, values.shape[::-1], 0, len(data)))
            data += values.tobytes() + bytes(-values.nbytes % 32)
    about = [raw.pair("general.type", "str", "imatrix"), raw.pair("imatrix.datasets", "str[]", ["a.txt", "b.txt"]),
             raw.pair("imatrix.chunk_count", "u32", chunks), raw.pair("imatrix.chunk_size", "u32", size)]  # fmt: skip
    return raw.gguf([*about, *pairs], infos, data)


def test_llama_cpp_s_form_is_read(file):
    found = imatrix.read(file(stored_by_hand([
        ("blk.0.attn_q.weight", [900.0, 1800.0], [900.0]),
        ("blk.0.ffn_up_exps.weight", [[10.0, 20.0], [0.0, 0.0], [6.0, 3.0]], [[5.0], [0.0], [3.0]]),
        ("blk.0.ffn_down_exps.weight", [[[2.0], [4.0]]], [[1.0], [2.0]]),
    ])))  # fmt: skip
    assert (found.chunks, found.chunk_size, found.dataset) == (3, 300, "a.txt+b.txt")
    assert found["blk.0.attn_q.weight"].values.tolist() == [[1, 2]]
    assert (found["blk.0.attn_q.weight"].counts.tolist(), found["blk.0.attn_q.weight"].calls) == ([900], 3)
    assert found["blk.0.ffn_up_exps.weight"].values.tolist() == [[2, 4], [1, 1], [2, 1]]  # ones where none were seen
    assert found["blk.0.ffn_up_exps.weight"].counts.tolist() == [5, 0, 3]
    assert found["blk.0.ffn_up_exps.weight"].calls == 3
    assert found["blk.0.ffn_down_exps.weight"].values.tolist() == [[2], [2]]


def test_experts_become_a_legacy_file_that_keeps_every_one(file, tmp_path):
    """Where the reference's converter writes the number of experts for that of values, and expert 0's count for all."""
    source = file(stored_by_hand([
        ("blk.0.ffn_up_exps.weight", [[10.0, 20.0], [0.0, 0.0], [6.0, 3.0]], [[5.0], [0.0], [3.0]]),
        ("blk.1.attn_q.weight", [900.0, 1800.0], [900.0]),
    ]))  # fmt: skip
    imatrix.write(tmp_path / "x.dat", imatrix.read(source))
    data = (tmp_path / "x.dat").read_bytes()
    name = b"blk.0.ffn_up_exps.weight"
    entry = struct.pack(f"<i{len(name)}sii6f", len(name), name, 3, 6, 6, 12, 3, 3, 6, 3)
    assert data[4 : 4 + len(entry)] == entry
    found = imatrix.read(tmp_path / "x.dat")
    assert found["blk.0.ffn_up_exps.weight"].columns(2).tolist() == [[2, 4], [1, 1], [2, 1]]
    assert found["blk.1.attn_q.weight"].values.tolist() == [[1, 2]]


def test_the_gguf_form_is_what_llama_cpp_s_package_reads(tmp_path, rng):
    import gguf as reader

    made = Imatrix({"blk.0.ffn_up_exps.weight": experts(rng, missing=[2]), "q": entry([1, 2])}, 3, "a+b", 300)
    made = fill_missing(made, "weight-one")
    imatrix.write(tmp_path / "x.gguf", made)
    found = reader.GGUFReader(tmp_path / "x.gguf")
    tensors = {t.name: t for t in found.tensors}
    sums, counts = (tensors[f"blk.0.ffn_up_exps.weight.{k}"] for k in ("in_sum2", "counts"))
    assert (sums.shape.tolist(), counts.shape.tolist()) == ([8, 4], [1, 4])
    assert tensors["q.in_sum2"].shape.tolist() == [2]
    e = made["blk.0.ffn_up_exps.weight"]
    np.testing.assert_array_equal(counts.data[:, 0], e.counts)
    expected = e.values * e.counts[:, None]
    np.testing.assert_allclose(sums.data, expected, rtol=1e-6)
    assert found.fields["imatrix.chunk_count"].contents() == 3
    assert found.fields["imatrix.datasets"].contents() == ["a", "b"]


@pytest.mark.parametrize("policy", ["weight-one", "layer-mean"])
@pytest.mark.parametrize("suffix", [".dat", ".gguf"])
def test_round_trips_and_what_was_done_about_missing_experts(tmp_path, rng, policy, suffix):
    made = Imatrix({"x_exps": experts(rng, missing=[0, 3]), "full_exps": experts(rng), "q": entry([1, 2])}, 3, "t", 300)
    filled = fill_missing(made, policy)
    mean = np.average(made["x_exps"].values[1:3], axis=0, weights=made["x_exps"].counts[1:3])
    expected = np.ones(8) if policy == "weight-one" else mean
    np.testing.assert_allclose(filled["x_exps"].values[[0, 3]], [expected, expected], rtol=1e-6)
    imatrix.write(tmp_path / f"a{suffix}", filled)
    found = imatrix.read(tmp_path / f"a{suffix}")
    assert (found.chunks, found.dataset, found.policy) == (3, "t", policy)
    for name, e in filled.entries.items():
        np.testing.assert_array_max_ulp(found[name].columns(e.values.shape[1]), e.values, 2)
    if suffix == ".gguf":
        assert [found[n].counts.tolist() for n in made.entries] == [e.counts.tolist() for e in made.entries.values()]
        assert found.chunk_size == 300
    imatrix.write(tmp_path / f"b{suffix}", filled)
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_from_one_form_to_the_other_and_back(tmp_path, rng, golden):
    for source in (golden / "smollm2-135m-f16.imatrix.dat", None):
        path = tmp_path / "0.dat"
        if source is None:
            imatrix.write(path, Imatrix({"x_exps": experts(rng), "q": entry([1, 2])}, 3, "text"))
        else:
            path.write_bytes(source.read_bytes())
        imatrix.write(tmp_path / "1.gguf", imatrix.read(path))
        imatrix.write(tmp_path / "2.dat", imatrix.read(tmp_path / "1.gguf"))
        between = imatrix.read(tmp_path / "1.gguf")  # which does not pretend to have counted
        assert between.chunk_size == 0
        assert all((e.counts == e.calls).all() for e in between.entries.values())
        first, last = imatrix.read(path), imatrix.read(tmp_path / "2.dat")
        assert (list(last.entries), last.chunks, last.dataset) == (list(first.entries), first.chunks, first.dataset)
        for name, e in first.entries.items():
            assert last[name].calls == e.calls
            np.testing.assert_array_max_ulp(last[name].values, e.values, 4)


def test_error_policy_and_entries_that_nobody_saw(rng):
    made = Imatrix({"x_exps": experts(rng, missing=[1, 3]), "none": experts(rng, missing=range(4))}, 3, "t.txt", 300)
    with pytest.raises(DataError, match=r"x_exps: no token of t\.txt entered 2 of 4 matrices: 1, 3; measure on more"):
        fill_missing(made, "error")
    assert list(fill_missing(made, "layer-mean").entries) == ["x_exps"]
    with pytest.raises(DataError, match="unknown policy"):
        fill_missing(made, "guess")
    whole = Imatrix({"x_exps": experts(rng)}, 3, "t", 300)
    assert fill_missing(whole, "error").policy == ""


def test_merging_experts_weighs_each_by_what_it_saw(rng):
    a, b = experts(rng, missing=[1, 2]), experts(rng, missing=[2])
    first = fill_missing(Imatrix({"x": a}, 1, "a", 300), "layer-mean")
    second = fill_missing(Imatrix({"x": b}, 1, "b", 300), "layer-mean")
    both = imatrix.merge([first, second], [2, 1])
    for e in (0, 3):
        expected = (2 * a.counts[e] * a.values[e] + b.counts[e] * b.values[e]) / (2 * a.counts[e] + b.counts[e])
        np.testing.assert_allclose(both["x"].values[e], expected, rtol=1e-6)
    np.testing.assert_allclose(both["x"].values[1], b.values[1], rtol=1e-6)  # the other one only guessed
    assert both["x"].counts.tolist() == (a.counts + b.counts).tolist()
    assert both.policy == "layer-mean"
    np.testing.assert_allclose(both["x"].values[2], (first["x"].values[2] + second["x"].values[2]) / 2, rtol=1e-6)
    c = Imatrix({"x": experts(rng)}, 1, "c", 300)
    assert imatrix.merge([first, c]).policy == ""


@pytest.mark.parametrize(
    ("entries", "pairs", "message"),
    [
        ([("q", [1.0, -2.0], [1.0])], [], r"q\.in_sum2 at \(1,\) is -2"),
        ([("q", [1.0, 2.0], [np.nan])], [], r"q\.counts at \(0,\) is nan"),
        ([("q", [1.0, 2.0, 3.0], [[1.0], [1.0]])], [], "3 values, .* 2 counts"),
        ([("q", [1.0, 2.0], [1e30])], [], r"q\.counts has a count of 1e\+30; quantkit reads counts of up to 9\.0"),
        ([("q", [1e38, 2.0], [1e-10])], [], r"q\.in_sum2: matrix 0 has sums up to 1e\+38 and a count of 1e-10"),
        ([], [], "no tensor NAME"),
        ([("q", [1.0], [1.0])], [raw.pair("quantkit.imatrix.filled", "str[]", ["q:4"])], r"names matrices \[4\] of q"),
        ([("q", [1.0], [1.0])], [raw.pair("quantkit.imatrix.filled", "str[]", ["q"])], "it should list NAME:3,17"),
    ],
)
def test_gguf_files_that_lie(file, entries, pairs, message):
    with pytest.raises(FormatError, match=message):
        imatrix.read(file(stored_by_hand(entries, pairs=pairs)))


def test_gguf_files_of_other_things(file, tmp_path):
    with pytest.raises(FormatError, match=r"not an importance matrix: general\.type is None"):
        imatrix.read(file(raw.small_gguf()))
    with gguf.Writer(
        tmp_path / "x.gguf", {"general.type": "imatrix"}, [gguf.TensorSpec("q.in_sum2", (2,), "f32")]
    ) as w:
        w.write("q.in_sum2", np.zeros(8, np.uint8))
    with pytest.raises(FormatError, match=r"q\.in_sum2 is there, q\.counts is missing"):
        imatrix.read(tmp_path / "x.gguf")
