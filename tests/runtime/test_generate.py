from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quantkit import cli
from quantkit.errors import DataError
from quantkit.runtime.generate import Sampler, Sampling, candidates, generate, penalized
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from quantkit.tokenizers import vocab
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.checkpoints import byte_level, sentencepiece, write_tokenizer

LOGITS = np.log(np.array([0.05, 0.4, 0.3, 0.2, 0.05], np.float32))

# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [
        (0, 1.0, 0.0, [1, 2, 3, 0, 4]),  # equal ones in order of number
        (2, 1.0, 0.0, [1, 2]),
        (9, 1.0, 0.0, [1, 2, 3, 0, 4]),
        (0, 0.39, 0.0, [1]),
        (0, 0.0, 0.0, [1]),
        (0, 0.45, 0.0, [1, 2]),
        (0, 0.75, 0.0, [1, 2, 3]),
        (0, 1.0, 0.3, [1, 2, 3]),
        (0, 1.0, 1.0, [1]),
        (3, 0.7, 0.4, [1, 2]),  # top-p counts probabilities among the three: 4/9, 7/9, 1
    ],
)
def test_candidates(top_k: int, top_p: float, min_p: float, expected: list[int]) -> None:
    assert candidates(LOGITS, top_k, top_p, min_p).tolist() == expected


def test_top_k_keeps_exactly_k_of_equals() -> None:
    assert candidates(np.zeros(10, np.float32), 4, 1.0, 0.0).tolist() == [0, 1, 2, 3]


def test_penalty_makes_seen_tokens_less_likely() -> None:
    logits = np.array([2.0, -2.0, 1.0], np.float32)
    assert penalized(logits, [0, 1, 1], 2.0).tolist() == [1.0, -4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]
    assert Sampler(Sampling(penalty=4.0))(logits, [0]) == 2
    assert Sampler(Sampling(penalty=4.0, penalty_last=2))(logits, [0, 1, 1]) == 0  # 0 was too long ago


def test_temperature_zero_takes_the_likeliest() -> None:
    assert Sampler(Sampling(temperature=0.0))(LOGITS, []) == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-40, 1e-320])
def test_a_temperature_near_zero_takes_the_likeliest(temperature: float) -> None:
    sampler = Sampler(Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0))
    assert {sampler(logits, []) for logits in (LOGITS, LOGITS + np.float32(50)) for _ in range(5)} == {1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_probabilities(temperature: float) -> None:
    sampler = Sampler(Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=1))
    counts = np.bincount([sampler(LOGITS, []) for _ in range(4000)], minlength=5)
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    p /= p.sum()
    assert (np.abs(counts - 4000 * p) < 5 * np.sqrt(4000 * p)).all()


def test_a_seed_repeats_its_draws_and_another_does_not() -> None:
    def draws(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler(LOGITS, []) for _ in range(50)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("top_k", -1), ("top_p", 2), ("min_p", 2), ("penalty", 0), ("seed", -1)]
)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(DataError, match=f"{name} is {value}"):
        Sampling(**{name: value})


# ----------------------------------------------------------------------------------------------------------- generation


@pytest.fixture(scope="module")
def model(smollm2_q4_1: Path) -> Model:
    return load(smollm2_q4_1)


def test_greedy_text_is_the_argmax_of_a_fresh_forward(model: Model) -> None:
    pieces: list[str] = []
    result = generate(model, "The capital of France is", 6, on_text=pieces.append)
    assert "Paris" in result.text
    assert "".join(pieces) == result.text == model.tokenizer.decode(result.tokens)
    assert (result.stopped, len(result.tokens), result.steps) == ("length", 6, 5)
    logits = model.logits(result.prompt_tokens + result.tokens[:-1])
    assert logits[len(result.prompt_tokens) - 1 :].argmax(1).tolist() == result.tokens


def test_a_reply_ends_at_an_end_token_which_is_no_text(model: Model) -> None:
    prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    tokens = model.tokenizer.encode(prompt, bos=False, special=True)
    result = model.generate(tokens, 40)
    assert result.stopped == "end"
    assert result.text == "The capital of France is Paris."


def test_a_reply_does_not_end_if_its_ends_are_ignored(model: Model) -> None:
    prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    tokens = model.tokenizer.encode(prompt, bos=False, special=True)
    result = model.generate(tokens, 12, Sampling(ignore_eos=True))
    assert (result.stopped, len(result.tokens)) == ("length", 12)
    assert not set(result.tokens) & set(model.tokenizer.eos_ids)
    assert result.text.startswith("The capital of France is Paris.")


def test_sampling_is_deterministic_for_a_seed(model: Model) -> None:
    def text(seed: int) -> str:
        return model.generate("Once", 8, Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)).text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(3)}) > 1


def test_generation_stops_where_the_cache_ends(model: Model) -> None:
    cache = model.new_cache(8)
    result = generate(model, [100, 200, 300], -1, cache=cache)
    assert result.stopped in ("context", "end")
    assert result.stopped == "end" or (cache.length == 8 and len(result.tokens) == 6)


def test_a_cache_may_hold_what_came_before(model: Model) -> None:
    tokens = model.tokenizer.encode("The capital of France is")
    cache = model.new_cache(32)
    model.forward(tokens[:3], cache)
    assert generate(model, tokens[3:], 3, cache=cache).tokens == generate(model, tokens, 3).tokens


def test_an_empty_prompt_is_an_error(model: Model) -> None:
    with pytest.raises(DataError, match="no tokens"):
        model.generate("", 3)


def test_no_tokens_may_be_asked_for(model: Model) -> None:
    result = model.generate("Hello", 0)
    assert (result.tokens, result.text) == ([], "")


class Scripted:
    """A model that says `reply`, whatever it reads."""

    def __init__(self, tokenizer: Tokenizer, reply: list[int]):
        self.tokenizer, self.reply, self.n_ctx, self.vocab_size = tokenizer, list(reply), 64, tokenizer.vocab_size

    def new_cache(self, n_ctx: int) -> Any:
        return SimpleNamespace(length=0, n_ctx=n_ctx)

    def forward(self, tokens: Sequence[int], cache: Any, logits: str) -> np.ndarray:
        cache.length += len(tokens)
        row = np.zeros((1, self.vocab_size), np.float32)
        row[0, self.reply.pop(0)] = 1
        return row


def tokenizer_of(tmp_path: Path, made: dict[str, Any], size: int, **config: Any) -> Tokenizer:
    write_tokenizer(tmp_path, made, **config)
    return Tokenizer.from_gguf({key: value for key, (value, _) in vocab.read(tmp_path, {"vocab_size": size}).items()})


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_prompt_and_its_reply_are_one_text(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level() if kind == "gpt2" else sentencepiece(), 400)
    prompt = "the river"
    start = len(tokenizer.encode(prompt))
    ids = tokenizer.encode(prompt + " and the é")
    result = generate(Scripted(tokenizer, ids[start:]), prompt, len(ids) - start)
    assert result.prompt_tokens == ids[:start]
    assert result.text == " and the é"


def test_a_prompt_is_encoded_to_be_continued(tmp_path: Path) -> None:
    """Control tokens are found, as in `serve` and in llama.cpp; BOS comes first once, and EOS does not follow."""
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = tokenizer_of(tmp_path, byte_level(), 320, **special)
    the = tokenizer.encode("the", bos=False)
    for prompt, expected in (
        ("the", [0, *the]),
        ("<|begin|>the", [0, *the]),
        ("the<|end|>the", [0, *the, 1, *the]),
        ("", [0]),
    ):
        assert generate(Scripted(tokenizer, [1]), prompt, 1).prompt_tokens == expected


# --------------------------------------------------------------------------------------------------------- command line


def test_the_command_finds_control_tokens_in_a_prompt(smollm2_q4_1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert cli.main(["generate", str(smollm2_q4_1), "-p", chat, "--temp", "0", "-n", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "The capital of France is Paris."


def test_the_command_prints_text_and_conditions(smollm2_q4_1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(smollm2_q4_1)
    prompt = ["-p", "The capital of France is", "-n", "3", "--temp", "0", "--numerics", "exact"]
    assert cli.main(["generate", path, *prompt]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out
    assert "prompt 5 tokens" in err
    assert "numerics exact, cache f32" in err
    assert cli.main(["generate", path, "-p", "A", "-n", "2", "--json", "-ot", "nothing=CPU"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["conditions"]["numerics"] == "fast"
    assert len(record["tokens"]) == 2
    assert "-ot nothing=CPU decides no tensor" in err


def test_a_context_beyond_the_training_is_warned_of(smollm2_q4_1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size, is_warned in ((8192, False), (9000, True)):
        assert cli.main(["generate", str(smollm2_q4_1), "-p", "A", "-n", "1", "-c", str(size)]) == 0
        warning = f"warning: -c {size}: the model was trained with 8192 tokens"
        assert (warning in capsys.readouterr().err) == is_warned


def test_the_command_refuses_what_it_cannot_do(smollm2_q4_1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(smollm2_q4_1)
    for args, message, status in (
        (["-n", "2"], "one prompt", 2),
        (["-p", "x", "-ngl", "4", "--devices", "cpu=8GiB"], "valid devices: CPU", 1),
        (["-p", "x", "--system", "y"], "--chat", 2),
    ):
        assert cli.main(["generate", path, *args]) == status
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"a\nb\tc\r", "a\nb\tc\r"),
        (r"\'\"\\n", "'\"\\n"),
        (r"\x41\x7a\x4", "Az\\x4"),
        ("\\d\\", "\\d\\"),
        ("é\\n", "é\n"),
        (r"caf\xc3\xA9 \xff", "café \udcff"),
    ],
)
def test_escapes_of_a_prompt(typed: str, meant: str) -> None:
    from quantkit.cli.generate import _unescaped

    assert _unescaped(typed) == meant
