"""Options of caches and attention, on every command that runs a model."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from quantkit.cli import load, main

COMMANDS = {
    "generate": ["-p", "x"],
    "bench": [],
    "sweep-bench": [],
    "perplexity": ["-f", "no.txt"],
    "imatrix": ["-f", "no.txt"],
    "compare": ["no.gguf", "-f", "no.txt"],
}
REFUSED = {"-ctk q9_0": "'q9_0' is not", "-ctv q3_K": "'q3_K' is not", "-fa 2": "'2' is not", "-mla 4": "-mla"}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_cannot_be_is_refused_before_a_file_is_looked_for(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in REFUSED.items():
        assert main([command, "no.gguf", *COMMANDS[command], *flags.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "bench", "sweep-bench", "perplexity"])
def test_quantized_values_need_flash_attention(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "no.gguf", *COMMANDS[command], "--cache-type", "q4_0", "-fa", "off"]) == 1
    assert "-ctv q4_0 needs flash attention (-fa 1); without, values can be f32, f16, bf16" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_the_options(command: str) -> None:
    parameters = inspect.signature(load(command)).parameters
    assert {"cache_type", "cache_type_k", "cache_type_v", "flash_attn", "attention_max_batch"} <= set(parameters)
    assert "attention" not in parameters


def test_they_reach_the_model(smollm2_q4_1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "-n",
        "2",
        "-c",
        "64",
        "--numerics",
        "exact",
        "-ctk",
        "q8_0",
        "-ctv",
        "F16",
        "-khad",
        "-fa",
        "0",
        "-amb",
        "2",
    ]
    assert main(["generate", str(smollm2_q4_1), "-p", "one two", "--json", *flags]) == 0
    conditions = json.loads(capsys.readouterr().out)["conditions"]
    assert conditions["cache_type"] == "q8_0/f16 khad"
    assert conditions["flash_attention"] == "off, -amb 2"
