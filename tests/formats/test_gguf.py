"""Reading and writing GGUF: round trips, shards, lazy tensors, other readers."""

from __future__ import annotations

import itertools
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError, FormatError, QuantkitError, UnsupportedError
from quantkit.formats import gguf
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.formats.gguf.writer import partition
from tests.formats import raw

VALUES = {
    "u8": [0, 255], "i8": [-128, 127], "u16": [0, 65535], "i16": [-32768, 32767], "u32": [0, 2**32 - 1],
    "i32": [-(2**31), 2**31 - 1], "u64": [0, 2**64 - 1], "i64": [-(2**63), 2**63 - 1], "f32": [0.5, float("inf")],
    "f64": [0.1, -1e300], "bool": [True, False], "str": ["", "Ġthe 日本\n"],
}  # fmt: skip


def write(path, specs, metadata=(), seed=0, **limits):
    """A file of random bytes and those bytes."""
    rng = np.random.default_rng(seed)
    data = {s.name: rng.integers(0, 256, (s.n_rows, s.row_bytes), np.uint8) for s in specs}
    with Writer(path, Metadata(metadata), specs, **limits) as writer:
        for name, rows in data.items():
            for piece in np.array_split(rows, 3):
                writer.write(name, piece)
    return writer.paths, data


def some_specs(count=7):
    names = ("f32", "q4_0", "iq4_k", "iq4_ks", "bf16", "iq2_kt", "q8_KV")
    return [TensorSpec(f"blk.{i}.w", (2 + i, 256), types.layout(names[i % 7])) for i in range(count)]


# ------------------------------------------------------------------------------------------------------------- metadata


def test_every_kind_of_value_comes_back(tmp_path):
    metadata = Metadata()
    for kind, values in VALUES.items():
        for i, value in enumerate(values):
            metadata.set(f"{kind}.{i}", value, kind)
        metadata.set(f"{kind}.list", values, kind)
        metadata.set(f"{kind}.none", [], kind)
    write(tmp_path / "a.gguf", [], metadata)
    read = gguf.open(tmp_path / "a.gguf").metadata
    assert list(read.items()) == list(metadata.items())
    assert [read.kind(k) for k in read] == [metadata.kind(k) for k in metadata]
    assert all(type(read[k]) is type(metadata[k]) for k in read)


def test_a_key_keeps_its_kind_and_new_ones_get_the_usual():
    m = Metadata()
    m.set("count", 5, "u16")
    m["count"] = 6
    assert m.kind("count") == "u16"
    m["count"] = 70000
    assert m.kind("count") == "u32"
    m["count"] = "many"
    assert m.kind("count") == "str"
    for value, kind in ((1, "u32"), (-1, "i32"), (2**40, "u64"), (1.5, "f32"), (True, "bool"), ([1, 2], "i32"),
                        ([1.0], "f32"), (["a"], "str"), (np.float32(2), "f32"), (np.int64(3), "i64"),
                        (np.zeros(3, np.uint8), "u8"), ((True,), "bool")):  # fmt: skip
        m["x"] = value
        del m["x"]
        m.setdefault("x", value)
        assert m.kind("x") == kind, value
        m.pop("x")
    assert "x" not in m
    assert m.pop("x", None) is None


@pytest.mark.parametrize(
    ("value", "kind"),
    [(256, "u8"), (-1, "u32"), (1.5, "i32"), (True, "u32"), (1, "bool"), (1e39, "f32"), ("a", "u32"), (1, "str"),
     ([1, "a"], "i32"), ([[1]], "i32"), (None, None), ({}, None), ([], None), (2**64, None), (1, "array"), (1, "q4")],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused(value, kind):
    with pytest.raises(DataError, match="metadata key k"):
        Metadata().set("k", value, kind)


def test_copies_keep_kinds(tmp_path):
    import copy
    import pickle

    m = Metadata()
    m.set("a", 1, "u8")
    m.set("none", [], "f32")
    for other in (m.copy(), Metadata(m), copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert other == m
        assert (other.kind("a"), other.kind("none")) == ("u8", "f32")


def test_bytes_that_are_not_utf8_survive(tmp_path):
    path = raw.put(tmp_path / "a.gguf", raw.gguf([raw.pair("words", "str[]", [b"\xff\xfe", b"ok"])], []))
    read = gguf.open(path).metadata
    write(tmp_path / "b.gguf", [], read)
    assert raw.string(b"\xff\xfe") in (tmp_path / "b.gguf").read_bytes()
    with pytest.raises(DataError, match="UTF-8"):
        write(tmp_path / "c.gguf", [], {"a": "\ud800"})
    assert [p.name for p in tmp_path.glob("c*")] == []


def test_a_large_vocabulary_loads_fast(tmp_path):
    tokens = [f"Ġtoken{i}" for i in range(150_000)]
    write(tmp_path / "a.gguf", [], {"tokens": tokens, "scores": [float(i) for i in range(150_000)]})
    best = min(itertools.islice(_timed(lambda: gguf.open(tmp_path / "a.gguf")), 5))
    assert gguf.open(tmp_path / "a.gguf").metadata["tokens"] == tokens
    assert best < 0.5


def _timed(task):
    """CPU seconds: other processes do not count."""
    while True:
        start = time.process_time()
        task()
        yield time.process_time() - start


# -------------------------------------------------------------------------------------------------------------- tensors


def test_tensors_come_back(tmp_path):
    specs = [*some_specs(), TensorSpec("vector", (256,), types.layout("f32")),
             TensorSpec("experts", (3, 8, 512), types.layout("iq4_k_r4")), TensorSpec("i", (5,), types.layout("i32")),
             TensorSpec("four", (2, 3, 4, 32), types.layout("q8_0")), TensorSpec("one", (1, 32), "q8_0")]  # fmt: skip
    (path,), data = write(tmp_path / "a.gguf", specs)
    assert path == tmp_path / "a.gguf"
    file = gguf.open(path)
    assert [(t.name, t.shape, t.type) for t in file.tensors.values()] == [(s.name, s.shape, s.type) for s in specs]
    for name, tensor in file.tensors.items():
        assert tensor.nbytes == data[name].nbytes
        assert np.array_equal(tensor.data, data[name])
        assert not tensor.data.flags.writeable
        assert tensor.offset % 32 == 0
    assert path.stat().st_size % 32 == 0
    assert np.shares_memory(file.tensors["four"].rows(3, 5), file.tensors["four"].data)


def test_versions_2_and_3_and_other_alignments(tmp_path):
    values = np.arange(8, dtype="<f4")
    for version, alignment in ((2, 32), (3, 32), (3, 64), (3, 8)):
        pairs = [raw.pair("general.alignment", "u32", alignment)] if alignment != 32 else []
        infos = [raw.info("a", (3,), 0, 0), raw.info("b", (5,), 0, alignment * 2)]
        data = values[:3].tobytes().ljust(alignment * 2, b"\0") + values[3:].tobytes()
        content = raw.gguf(pairs, infos, data, version=version, alignment=alignment)
        file = gguf.open(raw.put(tmp_path / "a.gguf", content))
        assert file.version == version
        assert file.tensors["a"].dequantize().tolist() == [0, 1, 2]
        assert file.tensors["b"].dequantize().tolist() == [3, 4, 5, 6, 7]
    write(tmp_path / "b.gguf", [], file.metadata)
    assert "general.alignment" not in gguf.open(tmp_path / "b.gguf").metadata


def test_rows_decode_alone(tmp_path):
    x = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    half = types.get("f16")
    with Writer(tmp_path / "a.gguf", {}, [TensorSpec("half", (2, 3, 64), half)]) as writer:
        writer.write("half", half.quantize(x))
    tensor = gguf.open(tmp_path / "a.gguf").tensors["half"]
    assert tensor.decode_rows(1, 4).shape == (3, 64)
    assert np.array_equal(tensor.dequantize(), x.astype(np.float16).astype(np.float32).reshape(2, 3, 64))
    assert np.array_equal(tensor.decode_rows(1, 4), tensor.dequantize().reshape(6, 64)[1:4])
    with pytest.raises(DataError, match="rows 0 to 6, not 4 to 7"):
        tensor.rows(4, 7)


def test_interleaved_rows_come_in_groups(tmp_path):
    write(tmp_path / "a.gguf", [TensorSpec("w", (16, 32), types.get("q8_0_r8"))])
    tensor = gguf.open(tmp_path / "a.gguf").tensors["w"]
    assert tensor.rows(8, 16).shape == (8, 34)
    with pytest.raises(DataError, match="multiples of 8"):
        tensor.rows(4, 12)
    with pytest.raises(DataError, match="a multiple of 8 rows"):
        TensorSpec("w", (12, 32), types.get("q8_0_r8"))


def test_types_without_codec_open_but_do_not_decode(tmp_path):
    file = gguf.open(raw.put(tmp_path / "a.gguf", raw.gguf([], [raw.info("i", (4,), 26, 0)], bytes(32))))
    assert file.tensors["i"].data.view("<i4").tolist() == [[0, 0, 0, 0]]
    with pytest.raises(UnsupportedError, match="tensor i: quantkit cannot decode i32"):
        file.tensors["i"].dequantize()


def test_i2_s_has_one_scale_for_all_rows(tmp_path):
    """Rows are read out of a tensor that has none, and keep their values as iq2_bn."""
    t = np.random.default_rng(3).integers(0, 3, (2, 5, 256)).astype(np.uint8)
    x = np.float32(0.3) * (t.astype(np.float32) - 1)
    groups = t.reshape(-1, 4, 32)
    codes = groups[:, 0] << 6 | groups[:, 1] << 4 | groups[:, 2] << 2 | groups[:, 3]
    stored = np.r_[codes.ravel(), np.array([0.3], "<f4").view(np.uint8), np.zeros(28, np.uint8)]
    infos = [raw.info("a", (256, 5, 2), 36, 0), raw.info("b", (4,), 26, stored.size)]
    file = gguf.open(raw.put(tmp_path / "a.gguf", raw.gguf([], infos, stored.tobytes() + bytes(32))))
    tensor = file.tensors["a"]
    assert (tensor.nbytes, tensor.type.name, tensor.n_rows) == (256 * 10 // 4 + 32, "i2_s", 10)
    assert np.array_equal(tensor.dequantize(), x)
    assert np.array_equal(tensor.decode_rows(3, 7), x.reshape(10, 256)[3:7])
    assert tensor.rows(3, 7).shape == tensor.data[3:7].shape == (4, tensor.row_bytes)
    with pytest.raises(DataError, match="can only be read"):
        TensorSpec("a", tensor.shape, tensor.type)
    as_rows = types.get("iq2_bn")
    assert np.array_equal(
        as_rows.dequantize(as_rows.quantize(tensor.dequantize().reshape(10, 256)), 256).ravel(), x.ravel()
    )


def test_i2_s_that_is_cut_short_or_has_odd_rows_is_refused(tmp_path):
    with pytest.raises(FormatError, match="truncated"):
        gguf.open(raw.put(tmp_path / "a.gguf", raw.gguf([], [raw.info("a", (128, 2), 36, 0)], bytes(64))))
    with pytest.raises(FormatError, match="rows of 64 elements"):
        gguf.open(raw.put(tmp_path / "b.gguf", raw.gguf([], [raw.info("a", (64, 2), 36, 0)], bytes(64))))


# --------------------------------------------------------------------------------------------------------------- shards


def test_shards_join_from_any_member(tmp_path):
    specs = some_specs(20)
    paths, data = write(tmp_path / "m.gguf", specs, {"general.architecture": "llama"}, split_max_bytes=8000)
    assert len(paths) > 3
    assert paths[1].name == f"m-00002-of-{len(paths):05d}.gguf"
    assert sorted(tmp_path.iterdir()) == paths
    for path in paths:
        file = gguf.open(path)
        assert file.paths == paths
        assert file.metadata["general.architecture"] == "llama"
        assert list(file.tensors) == list(data)
        assert all(np.array_equal(file.tensors[name].data, rows) for name, rows in data.items())
    first, second = (gguf.Shard(path).metadata for path in paths[:2])
    expected = {"split.no": ("u16", 1), "split.count": ("u16", len(paths)), "split.tensors.count": ("i32", 20)}
    assert {k: (second.kind(k), v) for k, v in second.items()} == expected
    assert first["split.no"] == 0
    # Written again from what was read, the split keys are the writer's own.
    (joined,), _ = write(tmp_path / "joined.gguf", specs, file.metadata)
    assert dict(gguf.open(joined).metadata) == {"general.architecture": "llama"}


def test_shard_limits(tmp_path):
    paths, _ = write(tmp_path / "t-00001-of-00009.gguf", some_specs(7), split_max_tensors=2)
    assert sorted(len(gguf.Shard(p).tensors) for p in paths) == [1, 2, 2, 2]
    assert paths[0].name == "t-00001-of-00004.gguf"
    paths, _ = write(tmp_path / "whole.gguf", some_specs(7), split_max_bytes=10**9)
    assert [p.name for p in paths] == ["whole.gguf"]
    assert "split.count" not in gguf.open(paths[0]).metadata


def best_cut(sizes, max_bytes, max_tensors):
    """By trying every cut: (number of runs, largest run), oversized tensors counted as full runs of their own."""
    sizes = [min(s, max_bytes or s) for s in sizes]
    found = []
    for cuts in itertools.product((False, True), repeat=len(sizes) - 1):
        runs = [[sizes[0]]]
        for size, cut in zip(sizes[1:], cuts):
            runs.append([size]) if cut else runs[-1].append(size)
        if all(sum(r) <= (max_bytes or 10**9) and len(r) <= (max_tensors or 99) for r in runs):
            found.append((len(runs), max(map(sum, runs))))
    return min(found)


def test_shards_are_few_and_balanced(rng):
    for _ in range(200):
        sizes = rng.integers(1, 60, rng.integers(1, 10)).tolist()
        max_bytes = int(rng.integers(20, 150)) if rng.random() < 0.8 else None
        max_tensors = int(rng.integers(1, 6)) if rng.random() < 0.5 else None
        counts = partition(sizes, max_bytes, max_tensors)
        stops = np.cumsum(counts)
        clipped = [min(s, max_bytes or s) for s in sizes]
        runs = [clipped[b - n : b] for b, n in zip(stops, counts)]
        assert sum(counts) == len(sizes)
        assert (len(runs), max(map(sum, runs))) == best_cut(sizes, max_bytes, max_tensors)


def test_a_tensor_above_the_limit_stands_alone():
    assert partition([10, 100, 10, 10], max_bytes=30) == [1, 1, 2]
    assert partition([], 10) == [0]
    with pytest.raises(DataError, match="at least 1"):
        partition([1], 0)


# --------------------------------------------------------------------------------------------------------------- writer


def test_the_writer_counts(tmp_path):
    specs = [TensorSpec("a", (4, 32), "q8_0"), TensorSpec("b", (4,), "f32")]
    row = np.zeros((1, 34), np.uint8)

    def attempt(*steps):
        with Writer(tmp_path / "x.gguf", {}, specs) as writer:
            for name, data in steps:
                writer.write(name, data)

    full = ("a", np.zeros((4, 34), np.uint8))
    for steps, message in (
        ([("b", row)], "tensor a comes next .0 of 136"),
        ([("a", row), ("b", row)], "tensor a comes next .34 of 136"),
        ([("a", np.zeros(170, np.uint8))], "170 bytes, its q8_0 data of shape"),
        ([("a", np.zeros((4, 32), np.float32))], "expected uint8 data, got float32"),
        ([full], "1 of 2 tensors were written; tensor b has 0 of 16"),
        ([("a", row)], "tensor a has 34 of 136"),
        ([full, ("b", bytes(16)), ("c", row)], "all 2 tensors are written"),
        ([full, ("b", bytes(15))], "tensor b has 15 of 16"),
    ):
        with pytest.raises(DataError, match=message):
            attempt(*steps)
        assert list(tmp_path.iterdir()) == []
    attempt(full, ("b", bytes(16)))
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_parts_may_be_put_in_any_order_by_several_threads(tmp_path, rng):
    specs = [TensorSpec("a", (64, 32), "q8_0"), TensorSpec("empty_row", (1,), "f32"), TensorSpec("b", (8, 32), "q8_0")]
    data = {spec.name: rng.integers(0, 256, spec.nbytes, dtype=np.uint8) for spec in specs}
    parts = [
        (name, start, whole[start : start + 50]) for name, whole in data.items() for start in range(0, len(whole), 50)
    ]
    for limit in (None, 2):
        writer = Writer(tmp_path / "x.gguf", {}, specs, split_max_tensors=limit, durable=False)
        with writer, ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(writer.put, *parts[i]) for i in rng.permutation(len(parts))]:
                future.result()
        found = gguf.open(writer.paths[0])
        assert {name: tensor.data.tobytes() for name, tensor in found.tensors.items()} == {
            name: whole.tobytes() for name, whole in data.items()
        }


def test_parts_that_do_not_fit(tmp_path):
    specs = [TensorSpec("a", (4, 32), "q8_0"), TensorSpec("b", (4,), "f32")]
    row = np.zeros(34, np.uint8)

    def attempt(*steps):
        with Writer(tmp_path / "x.gguf", {}, specs) as writer:
            for step in steps:
                writer.put(*step)

    for steps, message in (
        ([("a", 110, row)], "144 bytes, its q8_0 data of shape"),
        ([("a", 0, row), ("a", 0, row), ("a", 0, row), ("a", 0, row), ("a", 0, row)], "170 bytes, its q8_0 data"),
        ([("c", 0, row)], "there is no tensor c"),
        ([("b", 0, bytes(16)), ("a", 34, row)], "1 of 2 tensors were written; tensor a has 34 of 136"),
    ):
        with pytest.raises(DataError, match=message):
            attempt(*steps)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("n" * 64, (32,), "1 to 63 bytes, this one 64"), ("é" * 32, (32,), "this one 64"), ("", (32,), "this one 0"),
     ("a", (), "1 to 4 dimensions"), ("a", (1, 1, 1, 1, 32), "1 to 4 dimensions"), ("a", (0, 32), "at least 1"),
     ("a", (4, 33), "rows of 33 elements")],
)  # fmt: skip
def test_specs_that_no_reader_takes(name, shape, message):
    with pytest.raises(DataError, match=message):
        TensorSpec(name, shape, types.layout("q8_0"))


def test_names_are_unique(tmp_path):
    with pytest.raises(DataError, match="tensor a is to be written twice"):
        Writer(tmp_path / "x.gguf", {}, [TensorSpec("a", (4,), "f32")] * 2)
    assert list(tmp_path.iterdir()) == []


def test_an_output_larger_than_the_disk_is_refused_at_once(tmp_path):
    with pytest.raises(QuantkitError, match="free"):
        Writer(tmp_path / "x.gguf", {}, [TensorSpec("a", (1 << 30, 1 << 20), "f32")])
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- other readers


def test_gguf_py_reads_what_we_write(tmp_path):
    import gguf as reader_module

    metadata = Metadata({"general.architecture": "llama", "words": ["a", "日本"], "numbers": [1, 2, 3], "flag": True})
    specs = [TensorSpec("e", (4, 32), "q8_0"), TensorSpec("n", (8,), "f32"), TensorSpec("x", (2, 2, 256), "q4_K")]
    (path,), data = write(tmp_path / "a.gguf", specs, metadata)
    reader = reader_module.GGUFReader(path)
    assert {t.name: tuple(t.shape.tolist()) for t in reader.tensors} == {s.name: s.shape[::-1] for s in specs}
    for tensor in reader.tensors:
        assert np.array_equal(tensor.data.view(np.uint8).reshape(-1), data[tensor.name].reshape(-1))
    for key, value in metadata.items():
        assert reader.fields[key].contents() == value


def test_a_real_file_written_again_is_the_same_file(tmp_path, smollm2_q4_1):
    file = gguf.open(smollm2_q4_1)
    specs = [TensorSpec(t.name, t.shape, t.type) for t in file.tensors.values()]
    with Writer(tmp_path / "again.gguf", file.metadata, specs) as writer:
        for tensor in file.tensors.values():
            writer.write(tensor.name, tensor.data)
    assert (tmp_path / "again.gguf").read_bytes() == smollm2_q4_1.read_bytes()


def test_the_reference_reads_our_shards(tmp_path, smollm2_q4_1):
    """llama-quantize COPY joins our shards into a file with the same tensors."""
    from tests.conformance.ggml import QUANTIZE_TOOL

    file = gguf.open(smollm2_q4_1)
    specs = [TensorSpec(t.name, t.shape, t.type) for t in file.tensors.values()]
    with Writer(tmp_path / "s.gguf", file.metadata, specs, split_max_bytes=40_000_000) as writer:
        for tensor in file.tensors.values():
            writer.write(tensor.name, tensor.data)
    assert len(writer.paths) == 3
    command = [QUANTIZE_TOOL, "--allow-requantize", writer.paths[0], tmp_path / "joined.gguf", "COPY", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    joined = gguf.open(tmp_path / "joined.gguf")
    assert list(joined.tensors) == list(file.tensors)
    assert all(np.array_equal(joined.tensors[name].data, t.data) for name, t in file.tensors.items())


def test_a_missing_shard_is_named(tmp_path):
    paths, _ = write(tmp_path / "m.gguf", some_specs(6), split_max_tensors=2)
    paths[1].unlink()
    with pytest.raises(FormatError, match=r"m-00002-of-00003\.gguf: shard 2 of 3 is missing"):
        gguf.open(paths[2])


@pytest.mark.parametrize("shards", [[3, 0, 4], [0, 7], [7]])
def test_shards_by_their_tensors(tmp_path, shards):
    """As another file has them; the first or any may hold no tensor."""
    paths, data = write(tmp_path / "s.gguf", some_specs(7), {"a": 1}, shards=shards)
    assert len(paths) == len(shards)
    file = gguf.open(paths[-1])
    assert file.shards == shards
    assert file.metadata["a"] == 1
    assert all(np.array_equal(file.tensors[name].data, rows) for name, rows in data.items())


def test_shards_that_do_not_fit_are_refused(tmp_path):
    for shards in ([3, 3], [8, -1], []):
        with pytest.raises(DataError, match=r"shards of \d+ tensors in all for a file of 7"):
            write(tmp_path / "s.gguf", some_specs(7), shards=shards)
    with pytest.raises(DataError, match="not both"):
        write(tmp_path / "s.gguf", some_specs(7), shards=[7], split_max_tensors=2)
    assert not list(tmp_path.iterdir())
