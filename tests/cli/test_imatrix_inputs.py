"""Importance matrices that cannot be meant: of another model, without content, in the model's place, of odd names."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.formats import gguf, imatrix
from quantkit.formats.imatrix import Entry, Imatrix
from tests.cli.running import printed, refused

NAMES = ("blk.0.ffn_up.weight", "blk.0.ffn_down.weight")


def written(path: Path, values: dict[str, float]) -> Path:
    entries = {name: Entry(np.full((1, 32), value, np.float32), np.array([32]), 1) for name, value in values.items()}
    imatrix.write(path, Imatrix(entries, 1, "t", 32))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    specs = [gguf.TensorSpec(name, (4, 32), types.layout("f32")) for name in NAMES]
    with gguf.Writer(tmp_path / "m.gguf", gguf.Metadata({"general.architecture": "llama"}), specs) as writer:
        for name in NAMES:
            writer.write(name, np.linspace(-1, 1, 128, dtype=np.float32).view(np.uint8))
    return tmp_path / "m.gguf"


def test_a_matrix_of_another_model(capsys, model, tmp_path) -> None:
    other, out = written(tmp_path / "o.dat", {"nothing.weight": 2}), tmp_path / "q.gguf"
    needle = "none of the importance matrix's 1 entries, such as nothing.weight, is for one of the 2 matrices"
    assert needle in refused(capsys, "quantize", model, out, "Q8_0", "--imatrix", other)
    assert needle in refused(capsys, "plan", model, "Q8_0", "--imatrix", other)
    assert needle in refused(capsys, "recipe", "lint", "ffn=q4_0", model, "--imatrix", other)
    assert not out.exists()
    for args in (("show", other), ("convert", other, out)):
        assert "none of the 1 entries (the first is nothing.weight)" in refused(
            capsys, "imatrix", *args, "--model", model
        )


def test_the_model_is_not_replaced_by_a_matrix(capsys, model, tmp_path) -> None:
    matrix = written(tmp_path / "i.gguf", dict.fromkeys(NAMES, 1))
    assert "this is the input" in refused(capsys, "imatrix", "convert", matrix, model, "--model", model)


def test_an_entry_of_zeros(capsys, model, tmp_path) -> None:
    zeros, out = written(tmp_path / "z.dat", dict(zip(NAMES, (0, 1)))), tmp_path / "q.gguf"
    said = refused(capsys, "quantize", model, out, "Q4_0", "--imatrix", zeros)
    assert "blk.0.ffn_up.weight: the importance matrix holds only zeros under blk.0.ffn_up.weight" in said
    assert not out.exists()
    printed(capsys, "quantize", model, out, "Q4_0", "--imatrix", zeros, "--exclude-weights", NAMES[0])


def test_a_matrix_in_the_place_of_the_model(capsys, model, tmp_path) -> None:
    matrix, out, text = written(tmp_path / "i.gguf", dict.fromkeys(NAMES, 1)), tmp_path / "q.gguf", tmp_path / "t"
    text.write_text("a b c")
    for args in (
        ("quantize", matrix, out, "Q8_0"), ("plan", matrix, "Q8_0"), ("repack", matrix, out), ("unpack", matrix, out),
        ("convert-mla", matrix, out, "--layout", "kv_b"), ("perplexity", matrix, "-f", text), ("bench", matrix),
        ("generate", matrix, "-p", "a"), ("imatrix", matrix, "-f", text, "-o", out),
        ("compare", matrix, model, "-f", text), ("recipe", "lint", "a=q8_0", matrix),
    ):  # fmt: skip
        assert "an importance matrix (general.type), not a model" in refused(capsys, *args), args
    assert not out.exists()


def test_a_name_that_is_not_utf8(capsys, model, tmp_path) -> None:
    matrix = written(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.gguf")), dict.fromkeys(NAMES, 1))
    printed(capsys, "quantize", model, tmp_path / "q.gguf", "Q4_0", "--imatrix", matrix)
    assert gguf.open(tmp_path / "q.gguf").metadata["quantize.imatrix.file"].endswith("/caf?.gguf")
    assert "--imatrix 'caf?.gguf'" in printed(capsys, "inspect", tmp_path / "q.gguf", "--card")


@pytest.mark.parametrize("name", ["x.bmp", "x", "x.jpeg"])
def test_a_picture_of_a_form_that_is_not_drawn(capsys, tmp_path, name) -> None:
    pytest.importorskip("matplotlib")
    matrix = written(tmp_path / "i.gguf", {"a": 1})
    said = refused(capsys, "imatrix", "show", matrix, "--plot", tmp_path / name)
    assert f"{name}: a plot's file name must end in .png, .svg or .pdf" in said
