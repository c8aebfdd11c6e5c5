"""types and diff."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.cli import main
from quantkit.formats.gguf import TensorSpec, Writer


def write(path: Path, x: np.ndarray, kind: str, name: str = "a.weight", **metadata: object) -> Path:
    t = types.get(kind)
    with Writer(path, {"general.architecture": "llama", **metadata}, [TensorSpec(name, x.shape, t)]) as writer:
        writer.write(name, t.quantize(x))
    return path


def test_types_lists_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["types", "--json"]) == 0
    listed = {r["name"]: r for r in json.loads(capsys.readouterr().out)["types"]}
    assert list(listed) == [t.name for t in types.all()]
    assert listed["q8_0"]["bits_per_weight"] == 8.5
    assert main(["types"]) == 0
    assert "q8_0" in capsys.readouterr().out
    assert main(["types", "--layouts", "--json"]) == 0
    assert any(r["name"] == "i32" and not r["decode"] for r in json.loads(capsys.readouterr().out)["types"])


def test_diff(tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    x = rng.standard_normal((32, 64)).astype(np.float32)
    a = write(tmp_path / "a.gguf", x, "f32")
    assert main(["diff", str(a), str(write(tmp_path / "b.gguf", x, "f32")), "--exit-code"]) == 0
    assert "0 key(s) and 0 of 1 tensors differ" in capsys.readouterr().out

    y = x.copy()
    y[3] *= 2
    other = write(tmp_path / "c.gguf", y, "f32", key=3)
    assert main(["diff", str(a), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metadata"] == [{"key": "key", "status": "added", "a": None, "b": "3", "kinds": [None, "u32"]}]
    assert found["tensors"][0]["status"] == "bytes"
    assert found["tensors"][0]["error"] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x))
    assert main(["diff", str(a), str(other), "--exit-code"]) == 1
    assert "a.weight" in capsys.readouterr().out


def test_diff_of_types_shapes_and_names(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    x = rng.standard_normal((32, 64)).astype(np.float32)
    a = write(tmp_path / "a.gguf", x, "f32")
    cases = {
        "type": write(tmp_path / "t.gguf", x, "q8_0_r8"),
        "shape": write(tmp_path / "s.gguf", x[:16], "f32"),
        "only in a": write(tmp_path / "n.gguf", x, "f32", name="b.weight"),
    }
    for status, other in cases.items():
        assert main(["diff", str(a), str(other), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["tensors"]
        assert found[0]["status"] == status
        if status == "type":
            assert 0 < found[0]["error"] < 0.01
    assert found[1]["status"] == "only in b"
    assert main(["diff", str(a), str(cases["type"]), "--no-values", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][0]["error"] is None
