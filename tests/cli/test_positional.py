"""quantize IN [OUT] TYPE [THREADS]: every order of words means one thing or is asked about; none gives a wrong file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import typer

from quantkit.cli import main
from quantkit.cli.common.positional import default_out, read
from quantkit.formats import gguf
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from tests.cli.running import refused


@pytest.mark.parametrize(
    ("words", "out", "file_type", "threads"),
    [
        ("Q4_K_M", None, "Q4_K_M", None),
        ("q4_k_m", None, "q4_k_m", None),
        ("15", None, "15", None),
        ("COPY", None, "COPY", None),
        ("bf16", None, "bf16", None),
        ("Q4_K_M 8", None, "Q4_K_M", 8),
        ("Q4_K_M 0", None, "Q4_K_M", 0),
        ("15 8", None, "15", 8),
        ("out.gguf", "out.gguf", None, None),
        ("out.gguf Q4_K_M", "out.gguf", "Q4_K_M", None),
        ("out.gguf 8", "out.gguf", "8", None),
        ("out.gguf Q4_K_M 8", "out.gguf", "Q4_K_M", 8),
        ("out.gguf 15 8", "out.gguf", "15", 8),
        ("Q4_K_M.gguf Q5_K_M", "Q4_K_M.gguf", "Q5_K_M", None),
        ("./Q4_K_M 8", "./Q4_K_M", "8", None),
        ("to/8 Q4_K_M 2", "to/8", "Q4_K_M", 2),
        ("model Q4_K_M", "model", "Q4_K_M", None),
        ("", None, None, None),
    ],
)
def test_what_words_mean(words: str, out: str | None, file_type: str | None, threads: int | None) -> None:
    found = read([*words.split(), None])
    assert (found.out, found.file_type, found.threads) == (out and Path(out), file_type, threads)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("Q4_K_M Q5_K_M", r"'Q5_K_M' after it is not a number of THREADS.*write \./Q4_K_M"),
        ("Q4_K_M out.gguf", "IN OUT TYPE"),
        ("8 Q4_K_M", r"write \./8"),
        ("Q4_K_M 8 4", "'8 4' after it"),
        ("Q4_K_M Q5_K_M 8", "IN OUT TYPE"),
        ("Q4_KM 8", "unknown file type 'Q4_KM'; did you mean.*Q4_K_M"),
        ("q8_K 8", r"unknown file type 'q8_K'.*write \./q8_K"),
        ("IQ2_S_R4 8", "unknown file type 'IQ2_S_R4'"),
        ("99 8", "unknown file type '99'"),
        ("out.gguf Q4_K_M eight", "THREADS 'eight' is not a number"),
        ("out.gguf 8 Q4_K_M", "THREADS 'Q4_K_M' is not a number"),
    ],
)
def test_what_cannot_be_told_is_asked(words: str, said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        read(words.split())


@pytest.fixture
def source(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "models" / "in.gguf"
    spec = TensorSpec("blk.0.ffn_up.weight", (4, 256), "f32")
    with Writer(path, Metadata({"general.architecture": "llama", "llama.block_count": 1}), [spec]) as writer:
        writer.write(spec.name, rng.standard_normal(spec.shape).astype(np.float32).view(np.uint8))
    return path


@pytest.mark.parametrize("words", [("Q4_0",), ("q4_0", "2"), ("2",), ("2", "8")])
def test_without_out_the_file_is_named_by_its_type(
    source: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(source), *words]) == 0
    out = source.parent / "ggml-model-Q4_0.gguf"
    assert f"OUT is not given: the output is {out}" in capsys.readouterr().out
    made = gguf.open(out)
    assert made.metadata["general.file_type"] == 2
    assert made.tensors["blk.0.ffn_up.weight"].type.name == "q4_0"
    assert not list(Path.cwd().iterdir())


def test_nothing_is_written_for_words_that_are_asked_about(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("Q4_0", "Q5_0"), ("Q4_0", "8", "4"), ("Q4_KM", "8"), ("out.gguf",)):
        assert "TYPE" in refused(capsys, "quantize", source, *words, status=2).upper()
    said = refused(capsys, "quantize", source, "out.gguf", "Q4_0", "8", "--threads", "2", status=2)
    assert "THREADS is 8 and --threads 2" in " ".join(said.split())
    assert not list(Path.cwd().iterdir())
    assert [path.name for path in source.parent.iterdir()] == ["in.gguf"]


def test_a_checkpoints_directory_gets_the_file_inside(tmp_path: Path) -> None:
    assert default_out(tmp_path, "Q8_0") == tmp_path / "ggml-model-Q8_0.gguf"
    assert default_out(tmp_path / "model.gguf", "Q8_0") == tmp_path / "ggml-model-Q8_0.gguf"


@pytest.mark.parametrize("name", ["q8_0", "BF16", "auto"])
def test_convert_refuses_a_type_as_its_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`convert HF_DIR q8_0` lacks the output; `./q8_0` is a file, and the missing HF_DIR is found next."""
    monkeypatch.chdir(tmp_path)
    assert f"'{name}' is a type, and OUT.gguf is missing" in refused(capsys, "convert", "HF_DIR", name, status=2)
    assert "not a directory" in refused(capsys, "convert", "HF_DIR", f"./{name}")
