"""Checkpoints: exact values of every dtype, shards, writing, other readers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quantkit.errors import DataError, UnsupportedError
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter, open_checkpoint
from tests.formats import raw
from tests.formats.raw import entry


def e4m3(code: int) -> float:
    """The plain formula."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8)


def e5m2(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 2 & 31, code & 3
    if exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    return sign * (2.0 ** (exponent - 15) * (1 + mantissa / 4) if exponent else 2.0**-14 * mantissa / 4)


CODES = {"F8_E4M3": e4m3, "F8_E5M2": e5m2, "U8": float, "I8": lambda c: float(c if c < 128 else c - 256),
         "F8_E8M0": lambda c: 2.0 ** (c - 127) if c < 255 else float("nan")}  # fmt: skip


@pytest.mark.parametrize("dtype", CODES)
def test_every_byte_has_its_value(dtype, tmp_path):
    table = {"pad": entry("U8", [1], 0, 1), "t": entry(dtype, [16, 16], 1, 257)}
    path = raw.put(tmp_path / "model.safetensors", raw.safetensors(table, bytes(1) + bytes(range(256))))
    tensor = open_checkpoint(path).tensors["t"]
    expected = np.array([CODES[dtype](code) for code in range(256)], np.float32)
    values, numbers = tensor.dequantize().reshape(-1), ~np.isnan(expected)
    assert np.isnan(values[~numbers]).all()
    assert np.array_equal(values[numbers].view(np.uint32), expected[numbers].view(np.uint32))  # the sign of zero too
    assert np.array_equal(tensor.rows(3, 5), expected.reshape(16, 16)[3:5], equal_nan=True)


def test_wide_floats_are_exact_and_may_be_unaligned(tmp_path, rng):
    halves = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    bits = {
        "U16": halves,
        "I16": halves,
        "F32": rng.integers(0, 2**32, (5, 7), np.uint32),
        "F16": halves,
        "BF16": halves,
    }
    table, data = {"pad": entry("U8", [1], 0, 1)}, bytes(1)
    for dtype, values in bits.items():
        table[dtype] = entry(dtype, list(values.shape), len(data), len(data) + values.nbytes)
        data += values.tobytes()
    tensors = open_checkpoint(raw.put(tmp_path / "model.safetensors", raw.safetensors(table, data))).tensors
    assert np.array_equal(tensors["U16"].dequantize(), halves)
    assert np.array_equal(tensors["I16"].dequantize(), halves.view(np.int16))
    assert np.array_equal(tensors["F32"].dequantize(), bits["F32"].view(np.float32), equal_nan=True)
    assert np.array_equal(tensors["F16"].dequantize(), bits["F16"].view(np.float16).astype(np.float32), equal_nan=True)
    assert np.array_equal(tensors["BF16"].dequantize().view(np.uint32), bits["BF16"].astype(np.uint32) << 16)
    assert tensors["F32"].rows(1, 3).flags.aligned


def test_shapes_of_all_ranks(tmp_path):
    table = {"scalar": entry("F32", [], 0, 4), "vector": entry("F16", [3], 4, 10), "none": entry("F32", [0, 4], 10, 10),
             "cube": entry("U8", [2, 3, 4], 10, 34), "wide": entry("I64", [1], 34, 42)}  # fmt: skip
    data = np.float32(1.5).tobytes() + bytes(6) + bytes(range(24)) + np.int64(-7).tobytes()
    tensors = open_checkpoint(raw.put(tmp_path / "model.safetensors", raw.safetensors(table, data))).tensors
    assert (tensors["scalar"].dequantize().shape, float(tensors["scalar"].dequantize())) == ((), 1.5)
    assert tensors["vector"].rows(0, 1).shape == (1, 3)
    assert tensors["none"].dequantize().shape == (0, 4)
    assert tensors["cube"].rows(2, 4).tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert tensors["cube"].dequantize().shape == (2, 3, 4)
    assert not tensors["cube"].raw().flags.writeable
    assert tensors["wide"].raw().view("<i8").tolist() == [-7]
    with pytest.raises(UnsupportedError, match="I64, whose values are not exact"):
        tensors["wide"].rows(0, 1)
    with pytest.raises(DataError, match="rows 0 to 6, not 5 to 7"):
        tensors["cube"].rows(5, 7)


def some_specs():
    return [CheckpointSpec("layers.0.a", (3, 5), "U8"), CheckpointSpec("layers.0.b", (40, 8), "BF16"),
            CheckpointSpec("embed", (64, 8), "F32"), CheckpointSpec("empty", (0, 8), "F32"),
            CheckpointSpec("scalar", (), "F32"), CheckpointSpec("layers.1.b", (40, 8), "BF16")]  # fmt: skip


def write(directory, **options):
    rng = np.random.default_rng(3)
    data = {spec.name: rng.integers(0, 256, spec.nbytes, np.uint8) for spec in some_specs()}
    with CheckpointWriter(directory, some_specs(), {"format": "pt"}, **options) as writer:
        for name, values in data.items():
            for piece in np.array_split(values, 3):
                writer.write(name, piece)
    return data, [path.name for path in writer.paths]


@pytest.mark.parametrize("limit", [10**9, 1000])
def test_what_is_written_comes_back(tmp_path, limit):
    data, names = write(tmp_path, max_shard_bytes=limit)
    if limit == 1000:
        assert names[0] == "model.safetensors.index.json"
        assert names[1] == f"model-00001-of-{len(names) - 1:05d}.safetensors"
        index = json.loads((tmp_path / names[0]).read_text())
        assert index["metadata"]["total_size"] == sum(values.nbytes for values in data.values())
    else:
        assert names == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.metadata == {"format": "pt"}
    assert list(checkpoint.tensors) == list(data)
    for spec in some_specs():
        tensor = checkpoint.tensors[spec.name]
        assert (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape)
        assert np.array_equal(tensor.raw(), data[spec.name])


@pytest.mark.parametrize("limit", [10**9, 1000])
def test_the_safetensors_library_reads_it(tmp_path, limit):
    import safetensors as library

    data, names = write(tmp_path, max_shard_bytes=limit)
    found = {}
    for name in names:
        if name.endswith(".safetensors"):
            found.update(library.deserialize((tmp_path / name).read_bytes()))
    assert {name: (v["dtype"], tuple(v["shape"]), bytes(v["data"])) for name, v in found.items()} == {
        spec.name: (spec.dtype, spec.shape, data[spec.name].tobytes()) for spec in some_specs()
    }


def test_torch_reads_it_and_we_read_torch(tmp_path):
    import torch
    from safetensors import torch as safetensors_torch

    data, _ = write(tmp_path / "ours")
    loaded = safetensors_torch.load_file(tmp_path / "ours" / "model.safetensors")
    assert np.array_equal(loaded["layers.1.b"].view(torch.uint8).numpy().reshape(-1), data["layers.1.b"])
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = {str(dtype): torch.randn(6, 10).to(dtype) for dtype in dtypes}
    (tmp_path / "theirs").mkdir()
    safetensors_torch.save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    read = open_checkpoint(tmp_path / "theirs").tensors
    for name, tensor in tensors.items():
        assert np.array_equal(read[name].dequantize(), tensor.float().numpy()), name


def test_files_without_an_index_join(tmp_path):
    for name in ("b", "a"):
        raw.put(tmp_path / f"{name}.safetensors", raw.safetensors({name: entry("U8", [1], 0, 1)}, b"\x05"))
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]


def test_another_checkpoint_is_not_mixed_with_ours(tmp_path):
    write(tmp_path, max_shard_bytes=1000)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="another checkpoint"):
        write(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    write(tmp_path, max_shard_bytes=1000)


def test_wrong_specs_and_counts(tmp_path):
    for spec in (("a", (1,), "F33"), ("__metadata__", (1,), "F32"), ("a", (-1,), "F32")):
        with pytest.raises(DataError):
            CheckpointSpec(*spec)
    specs = [CheckpointSpec("a", (4,), "BF16")]
    with pytest.raises(DataError, match="tensor a has 6 of 8 bytes"), CheckpointWriter(tmp_path, specs) as writer:
        writer.write("a", bytes(6))
    with pytest.raises(DataError, match="10 bytes, its BF16 data"), CheckpointWriter(tmp_path, specs) as writer:
        writer.write("a", bytes(10))
    assert list(tmp_path.iterdir()) == []
