"""What differs between two files, against plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit import types
from quantkit.formats import gguf
from quantkit.formats.gguf import Metadata, TensorSpec, Writer, difference


def write(path, tensors, **keys):
    """tensors: name -> (float32 array, type)."""
    specs = [TensorSpec(name, x.shape, types.get(kind)) for name, (x, kind) in tensors.items()]
    with Writer(path, Metadata(keys), specs) as writer:
        for name, (x, kind) in tensors.items():
            rows = x.reshape(-1, x.shape[-1])
            if x.ndim == 3:  # groups of interleaved rows stay within a matrix
                for matrix in x:
                    writer.write(name, types.get(kind).quantize(matrix))
            else:
                writer.write(name, types.get(kind).quantize(rows))
    return gguf.open(path)


def expected(x, y, weights=None):
    p, q = x.astype(np.float64), y.astype(np.float64)
    e = p - q
    found = {
        "rms": np.linalg.norm(e) / np.linalg.norm(p),
        "largest": np.abs(e).max(),
        "cosine": (p * q).sum() / np.linalg.norm(p) / np.linalg.norm(q),
    }
    if weights is not None:
        found["weighted"] = math.sqrt((weights * e * e).sum() / (weights * p * p).sum())
    return found


@pytest.mark.parametrize("kind", ["q8_0", "q4_0_r8", "iq4_ks"])
@pytest.mark.parametrize("shape", [(40, 256), (3, 16, 512)])
def test_figures_are_those_of_the_values(tmp_path, rng, monkeypatch, kind, shape):
    monkeypatch.setattr(difference, "_PIECE_ELEMENTS", 4096)
    x = rng.standard_normal(shape).astype(np.float32)
    a, b = write(tmp_path / "a.gguf", {"w": (x, "f32")}), write(tmp_path / "b.gguf", {"w": (x, kind)})
    weights = rng.random((math.prod(shape[:-2]), shape[-1])).astype(np.float32)
    asked = []

    def find(*about):
        asked.append(about)
        return weights

    (found,) = difference.of_tensors(a, b, weights=find, threads=2)
    assert asked == [("w", math.prod(shape[:-2]), shape[-1])]
    y = b.tensors["w"].dequantize()
    broad = weights.reshape(*shape[:-2], 1, shape[-1])
    assert found.status == "type"
    for name, value in expected(x, y, broad).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    row, column = found.place
    assert abs(x.reshape(-1, shape[-1])[row, column] - y.reshape(-1, shape[-1])[row, column]) == found.largest


def test_one_bit_in_a_large_tensor_is_found_and_nothing_is_lost_by_order(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(difference, "_PIECE_BYTES", 1000)
    x = rng.standard_normal((30, 64)).astype(np.float32)
    y = x.copy()
    y[17, 3] = np.nextafter(y[17, 3], np.float32(9))
    a = write(tmp_path / "a.gguf", {"same": (x, "f32"), "w": (x, "f32")})
    b = write(tmp_path / "b.gguf", {"same": (x, "f32"), "w": (y, "f32")})
    first, last = difference.of_tensors(a, b)
    assert (first.name, first.status, first.place) == ("w", "bytes", (17, 3))
    assert (last.name, last.status, last.rms) == ("same", "same", None)
    assert difference.of_tensors(a, b, threads=3)[0] == difference.of_tensors(a, b, threads=1)[0] == first
    assert difference.of_tensors(a, b, values=False)[0].rms is None


def test_interleaved_rows_are_no_error(tmp_path, rng):
    x = rng.standard_normal((16, 256)).astype(np.float32)
    a, b = write(tmp_path / "a.gguf", {"w": (x, "iq4_k")}), write(tmp_path / "b.gguf", {"w": (x, "iq4_k_r4")})
    (found,) = difference.of_tensors(a, b)
    assert (found.status, found.rms, found.largest, found.cosine) == ("type", 0, 0, pytest.approx(1))


def test_the_worst_comes_first(tmp_path, rng):
    x = rng.standard_normal((8, 256)).astype(np.float32)
    names = {"f16": "f16", "q8": "q8_0", "q2": "q2_K", "same": "f32", "gone": "f32"}
    a = write(tmp_path / "a.gguf", {name: (x, "f32") for name in names})
    b = write(tmp_path / "b.gguf", {name: (x, kind) for name, kind in names.items() if name != "gone"})
    assert [d.name for d in difference.of_tensors(a, b)] == ["gone", "q2", "q8", "f16", "same"]


def test_zeros_and_values_that_are_not_finite(tmp_path):
    zeros, ones = np.zeros((2, 32), np.float32), np.ones((2, 32), np.float32)
    odd = ones.copy()
    odd[1, 5], odd[0, 2] = np.nan, np.inf
    a = gguf_of(tmp_path / "a.gguf", z=zeros, zz=zeros, n=ones, all=odd * np.nan)
    b = gguf_of(tmp_path / "b.gguf", z=ones, zz=-zeros, n=odd, all=ones)
    found = {d.name: d for d in difference.of_tensors(a, b)}
    assert (found["z"].rms, found["z"].cosine) == (math.inf, 0)
    assert (found["zz"].rms, found["zz"].cosine, found["zz"].status) == (0, 1, "bytes")
    assert (found["n"].rms, found["n"].nonfinite) == (0, 2)
    assert (found["all"].rms, found["all"].nonfinite) == (0, 64)


def gguf_of(path, **tensors):
    """Raw float32, NaN and all, which encoders refuse."""
    with Writer(path, {}, [TensorSpec(name, x.shape, "f32") for name, x in tensors.items()]) as writer:
        for name, x in tensors.items():
            writer.write(name, x.view(np.uint8))
    return gguf.open(path)


def test_metadata(tmp_path):
    a = Metadata({"same": 1, "gone": "x", "value": 1, "list": [1, 2], "nan": float("nan")})
    b = Metadata({"same": 1, "value": 2, "list": [1, 3], "new": True, "nan": float("nan")})
    a.set("kind", 1, "u32")
    b.set("kind", 1, "i32")
    found = {d.key: (d.status, d.a, d.b, d.kinds) for d in difference.of_metadata(a, b)}
    assert found == {
        "gone": ("removed", "x", None, ("str", None)),
        "value": ("changed", 1, 2, ("u32", "u32")),
        "list": ("changed", [1, 2], [1, 3], ("i32", "i32")),
        "kind": ("changed", 1, 1, ("u32", "i32")),
        "new": ("added", None, True, (None, "bool")),
    }
