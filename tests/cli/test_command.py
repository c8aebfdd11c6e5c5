"""How words of a command line are read: options whose value may be missing, unknown short options, names of tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit import cli
from quantkit.cli.common.command import _normalized

OPTIONS = {"-fa": True, "--flash-attn": True, "-p": True, "-n": True, "-m": True, "-t": True, "--mlock": False,
           "-v": False, "-rtr": False, "--n-gpu-layers": True}  # fmt: skip


def normalized(words: str) -> str:
    def fail(message: str) -> None:
        raise AssertionError(message)

    return " ".join(_normalized(words.split(), OPTIONS, fail))


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("-fa", "-fa on"),
        ("-fa -m a.gguf", "-fa on -m a.gguf"),
        ("-fa off a.gguf", "-fa off a.gguf"),
        ("-fa 0,1", "-fa 0,1"),
        ("-fa a.gguf", "-fa on a.gguf"),
        ("-fa ./on", "-fa on ./on"),
        ("--flash_attn", "--flash-attn on"),
        ("--flash_attn=off", "--flash-attn=off"),
        ("--n_gpu_layers 3", "--n-gpu-layers 3"),
        ("-rtr 1", "-rtr 1"),  # a switch here: the word after it is an argument
        ("-p -fa -n -1", "-p -fa -n -1"),  # what follows an option is its value
        ("-m a_b.gguf -p --x_y", "-m a_b.gguf -p --x_y"),
        ("-t8 -v", "-t8 -v"),
        ("--mlock -- -muge --x_y", "--mlock -- -muge --x_y"),
        ("-p", "-p"),
        ("-1 -", "-1 -"),
    ],
)
def test_words(words: str, read: str) -> None:
    assert normalized(words) == read


@pytest.mark.parametrize("word", ["-muge", "-vm", "-fax", "-pg"])
def test_letters_are_not_taken_apart(word: str) -> None:
    """As clusters of short options, `-muge` would be the model `uge`."""
    with pytest.raises(AssertionError, match=f"No such option: {word}"):
        normalized(word)


def test_a_file_that_is_named_like_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").touch()
    assert normalized("-fa model") == "-fa on model"
    assert normalized("-fa modell") == "-fa modell"  # refused by the option


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("llama-bench -m a", "bench -m a"),
        ("../bin/llama-cli.exe -m a", "generate -m a"),
        ("llama-server -m a --port 8081", "serve -m a --port 8081"),
        ("python convert_hf_to_gguf.py dir", "convert dir"),
        ("python3 llama.cpp/convert_hf_to_gguf.py dir", "convert dir"),
        ("llama-gguf-split a b", "split a b"),
        ("llama-gguf-split --merge a b", "merge a b"),
        ("llama-gguf-split --split --dry-run a b", "split --dry-run a b"),
        ("llama-quantize --repack a b Q4_0 8", "repack a b"),
        ("llama-quantize --repack-pattern x,y --repack a b Q4_0", "repack --repack-pattern x,y a b"),
        ("llama-quantize a b Q4_0 8", "quantize a b Q4_0 8"),
        ("quantize a b Q4_0 --repack", "quantize a b Q4_0 --repack"),
        ("python -m quantkit", "python -m quantkit"),
        ("llama-tts -m a", "llama-tts -m a"),
        ("", ""),
    ],
)
def test_names_of_tools(words: str, read: str) -> None:
    assert cli.as_command(words.split()) == read.split()


def test_a_tool_without_a_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["llama-tts", "-m", "a.gguf"]) == 2
    assert "No such command 'llama-tts'" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.commands())
def test_help_is_in_sections_and_names_no_python_types(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert "\nOptions:\n" in said
    assert not any(word in said for word in ("<int", "<float", "<str>", "<path>", "list[Path]"))
    if command in ("generate", "perplexity", "bench", "plan"):
        assert "\nPlacement:\n" in said
