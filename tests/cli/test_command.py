"""How words of a command line are read: options whose value may be missing, unknown short options, names of tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit import cli
from quantkit.cli.common.command import _normalized

OPTIONS = {"--warmup": False, "--no-warmup": False, "-ger": False, "--chat": False, "--file": True,
           "-fa": True, "--flash-attn": True, "-p": True, "-n": True, "-m": True, "-t": True, "--mlock": False,
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
        ("-no-fa a.gguf", "--flash-attn off a.gguf"),
        ("--no_flash_attn", "--flash-attn off"),
        ("-w 0 -v", "--no-warmup -v"),
        ("--warmup 1 a.gguf", "--warmup a.gguf"),
        ("--warmup a.gguf", "--warmup a.gguf"),
        ("-ger 1 a.gguf", "-ger a.gguf"),
        ("-ger 10", "-ger 10"),
        ("-p -w -w 1", "-p -w --warmup"),
        ("--chat x.jsonl", "--file x.jsonl --chat"),
        ("--chat not-there.txt", "--chat not-there.txt"),
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
        ("python3.11 -u ./convert_hf_to_gguf.py dir", "convert dir"),
        ("/usr/bin/python3 -u -B convert_hf_to_gguf.py dir", "convert dir"),
        ("python3.11 convert.py dir", "python3.11 convert.py dir"),
        ("llama-imatrix --in-file a --in-file b -o c", "imatrix merge a b -o c"),
        ("llama-imatrix --in-file a --show-statistics", "imatrix show a"),
        ("llama-imatrix -m m --in-file a -f t -o c", "imatrix -m m --in-file a -f t -o c"),
        ("llama-imatrix --model=m --in-file a", "imatrix --model=m --in-file a"),
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


def test_the_word_after_chat_is_a_text_unless_it_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("talk.txt").write_text("Who are you?", encoding="utf-8")
    Path("model").write_bytes(b"GGUF and more")
    assert normalized("--chat talk.txt") == "--file talk.txt --chat"
    assert normalized("--chat model") == "--chat model"
    assert normalized("--chat .") == "--chat ."


@pytest.mark.parametrize("value", ["2", "yes", "never"])
def test_a_wrong_value_of_the_variable_says_which_are_valid(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUANTKIT_PROGRESS", value)
    assert cli.main(["verify", "not-there.gguf"]) == 2
    assert f"QUANTKIT_PROGRESS={value}: write 0 (no progress) or 1 (progress)" in capsys.readouterr().err
    assert cli.main(["verify", "--help"]) == 0


@pytest.mark.parametrize("command", [name for name in cli.commands() if name != "lm-eval"])
def test_scripts_can_pass_quiet_to_every_command(command: str) -> None:
    for path in ([command], *([command, name] for name in cli.subcommands(command))):
        names = {name for param in cli.parser(*path).params for name in (*param.opts, *param.secondary_opts)}
        assert {"-q", "--quiet", "--progress", "--no-progress"} <= names, path


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["-hf", "org/name"], "hf:/org/name"),
        (["--hf-repo", "org/name", "--hf-file", "a/b.gguf"], "hf:/org/name/a/b.gguf"),
        (["-hfr", "org/name:Q4_0", "-hff", "b.gguf"], "hf:/org/name/b.gguf"),
        (["-hf", "hf://org/name@v1"], "hf:/org/name@v1"),
    ],
)
def test_a_repository_of_the_hub(words: list[str], given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """-hf is the address that the argument may be too, of commands with one model and with several."""
    from quantkit.hub import models

    asked: list[str] = []

    def fetch(path: Path) -> Path:
        asked.append(str(path))
        raise OSError

    monkeypatch.setattr(models, "model_file", fetch)
    monkeypatch.setattr(models, "header_file", fetch)
    for command in (["generate", "-p", "x"], ["bench"], ["inspect"]):
        assert cli.main([*command, *words]) == 1
    assert asked == [given] * 3


def test_devices_by_the_names_of_llama_cpp() -> None:
    from quantkit.cli.common.launch import device_text, placement_flags
    from quantkit.cli.common.run_options import PLACEMENT

    given = {name: default for name, (_, default) in PLACEMENT.items()}
    assert [device.name for device in placement_flags({**given, "device": "CUDA0,cuda:1"}).devices] == [
        "CPU", "CUDA0", "CUDA1"
    ]  # fmt: skip
    assert device_text({**given, "device": "none"}) is None
    assert placement_flags({**given, "gpu_layers": "all"}).gpu_layers == 999
    assert placement_flags({**given, "gpu_layers": "AUTO"}).gpu_layers is None
    assert placement_flags({**given, "gpu_layers": "7"}).gpu_layers == 7
