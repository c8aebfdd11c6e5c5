"""Names of outputs as typed: templates, directories, parts of a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from quantkit.cli import main
from quantkit.errors import OptionError
from quantkit.formats import gguf, imatrix
from quantkit.pipelines.output import filled_name
from tests.documentation import make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    make_world(folder)
    return folder


@pytest.mark.parametrize(
    ("out", "source", "filled"),
    [
        ("d/{name}-{ftype}.gguf", "/a/model.gguf", "d/model-q4_k_m.gguf"),
        ("{name}.{FTYPE}.gguf", "/a/model-00001-of-00007.gguf", "model.Q4_K_M.gguf"),
        ("{name}-{outtype}", "/a/Model-7B", "Model-7B-q4_k_m"),
        ("plain.gguf", "/a/model.gguf", "plain.gguf"),
        ("{}.gguf", "/a/model.gguf", "{}.gguf"),
    ],
)
def test_templates(out: str, source: str, filled: str) -> None:
    assert filled_name(out, source, "Q4_K_M") == Path(filled)


def test_words_that_stand_for_nothing() -> None:
    with pytest.raises(OptionError, match=r"{x} is not a placeholder; known: {name}, {ftype}"):
        filled_name("{name}-{x}.gguf", "m.gguf", "Q4_0")
    with pytest.raises(OptionError, match=r"{ftype} is not a placeholder; known: {name}$"):
        filled_name("{name}-{ftype}.gguf", "m.gguf")


def test_quantize_and_repack_fill_templates(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = world / "model-bf16.gguf"
    assert main(["quantize", str(model), str(tmp_path / "{name}-{ftype}.gguf"), "Q4_0"]) == 0
    made = tmp_path / "model-bf16-q4_0.gguf"
    assert f"the output is {made}" in capsys.readouterr().out
    assert main(["repack", str(made), str(tmp_path / "{name}-r.gguf")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-bf16-q4_0-r.gguf", "model-bf16-q4_0.gguf"]


@pytest.mark.parametrize("out", [".", "..", "/", "folder", "folder/"])
@pytest.mark.parametrize("command", ["quantize", "convert", "repack"])
def test_a_directory_is_no_output(
    world: Path, tmp_path: Path, command: str, out: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    source = world / ("HF_DIR" if command == "convert" else "model-bf16.gguf")
    if command == "repack":
        source = tmp_path.parent / "q8_0.gguf"
        assert main(["quantize", str(world / "model-bf16.gguf"), str(source), "Q8_0"]) == 0
    assert main([command, str(source), out, *(["Q4_0"] if command == "quantize" else [])]) == 1
    assert "this is a directory; name the file to write in it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_a_part_says_that_it_is_one(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not run, is not damaged, and merge makes it whole."""
    source, part, rest = world / "model-bf16.gguf", tmp_path / "part.gguf", tmp_path / "rest.gguf"
    assert main(["quantize", str(source), str(part), "Q4_0", "--only", r"blk\.0\."]) == 0
    assert main(["quantize", str(source), str(rest), "Q4_0", "--only", r"^(?!blk\.0\.)"]) == 0
    capsys.readouterr()
    for command in (
        ["perplexity", str(part), "-f", str(world / "wiki.txt"), "-c", "16"],
        ["generate", str(part), "-p", "a"],
    ):
        assert main(command) == 1
        assert "a part of a model" in (said := capsys.readouterr().err)
        assert "quantkit merge" in said
    assert main(["verify", str(part)]) == 0
    assert main(["inspect", str(part)]) == 0
    assert "metadata set" not in capsys.readouterr().out
    whole, merged = tmp_path / "whole.gguf", tmp_path / "merged.gguf"
    assert main(["quantize", str(source), str(whole), "Q4_0"]) == 0
    for path in (part, rest):  # NaN is the same in both, though it equals nothing
        assert main(["metadata", "set", str(path), "a.number=f32:nan"]) == 0
    assert main(["merge", str(part), str(rest), str(merged)]) == 0
    for name, tensor in gguf.open(whole).tensors.items():
        np.testing.assert_array_equal(gguf.open(merged).tensors[name].data, tensor.data)


def test_other_files_are_not_replaced(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slip in a name must not cost an importance matrix, a text, or a checkpoint's config.json."""
    model, checkpoint = str(world / "model-bf16.gguf"), tmp_path / "hf"
    rules, matrix = tmp_path / "rules.txt", tmp_path / "im.gguf"
    shutil.copytree(world / "HF_DIR", checkpoint)
    rules.write_text("ffn=q8_0")
    found = {name: t.shape[-1] for name, t in gguf.open(model).tensors.items() if len(t.shape) == 2}
    entries = {name: imatrix.Entry(np.ones((1, n), np.float32), np.ones(1, int), 1) for name, n in found.items()}
    imatrix.write(matrix, imatrix.Imatrix(entries, 1, "text", 512), "gguf")
    for command, out in (
        (["convert", str(checkpoint)], checkpoint / "config.json"),
        (["quantize", str(checkpoint), "Q8_0"], checkpoint / "tokenizer.json"),
        (["quantize", model, "Q8_0", "--custom-q", str(rules)], rules),
        (["quantize", model, "Q8_0", "--imatrix", str(matrix)], matrix),
        (["prune", model, "--prune-layers", "1"], rules),
    ):
        before = out.read_bytes()
        assert main([*command[:2], str(out), *command[2:]]) == 1, out
        said = capsys.readouterr().err
        assert f"{out}: exists and is no GGUF file" in said or f"{out}: this is the input" in said
        assert out.read_bytes() == before
    (empty := tmp_path / "m.gguf").touch()  # as mktemp makes it
    assert main(["convert", str(checkpoint), str(empty)]) == 0
    assert main(["convert", str(checkpoint), str(empty)]) == 0
    assert not list(tmp_path.rglob("*.partial*"))
