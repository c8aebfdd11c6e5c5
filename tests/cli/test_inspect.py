"""`quantkit inspect`."""

from __future__ import annotations

import json

import numpy as np

from quantkit.cli import main
from quantkit.formats.gguf import Metadata, TensorSpec, Writer


def make(path):
    metadata = Metadata({"general.architecture": "llama", "epsilon": 1e-5, "long": "x" * 300, "esc\x1b[2J": "\x1b[2J"})
    metadata.set("tokens", [f"t{i}" for i in range(100)])
    specs = [TensorSpec("e", (3, 4, 32), "q8_0"), TensorSpec("n", (8,), "f32")]
    with Writer(path, metadata, specs) as writer:
        for spec in specs:
            writer.write(spec.name, np.zeros(spec.nbytes, np.uint8))
    return path


def test_text(tmp_path, capsys):
    assert main(["inspect", str(make(tmp_path / "m.gguf"))]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["epsilon", "f32", "1e-05"] in lines
    assert ["e", "q8_0", "3", "x", "4", "x", "32", "408"] in lines
    assert ["n", "f32", "8", "32"] in lines
    assert ["q8_0", "1", "384", "0.000", "8.5000"] in lines
    assert ["all", "2", "392", "0.000", f"{8 * 440 / 392:.4f}"] in lines
    assert any(line[:1] == ["tokens"] and line[-3:] == ["100", "in", "all"] for line in lines)
    assert any(line[:1] == ["long"] and line[-2:] == ["302", "characters"] for line in lines)
    assert not any("\x1b" in word for line in lines for word in line)


def test_json(tmp_path, capsys):
    path = make(tmp_path / "m.gguf")
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["paths"] == [str(path)]
    assert found["metadata"]["tokens"] == {"kind": "str[]", "count": 100, "first": [f"t{i}" for i in range(8)]}
    assert found["tensors"][0] == {"name": "e", "type": "q8_0", "shape": [3, 4, 32], "bytes": 408}
    assert found["types"][-1] == {
        "type": "all",
        "tensors": 2,
        "elements": 392,
        "bytes": 440,
        "bits_per_weight": 8 * 440 / 392,
    }
    assert main(["inspect", str(path), "--json", "--no-tensors"]) == 0
    assert "tensors" not in json.loads(capsys.readouterr().out)


def test_what_is_no_gguf(tmp_path, capsys):
    (tmp_path / "x").write_bytes(b"PK\x03\x04")
    assert main(["inspect", str(tmp_path / "x")]) == 1
    assert "at byte 0: a GGUF file begins with b'GGUF', this one with b'PK" in capsys.readouterr().err
