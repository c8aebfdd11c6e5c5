"""The adapter for lm-evaluation-harness: log-likelihoods against transformers, replies, and lm_eval itself."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_lm_eval, checkpoints
from quantkit import archs, cli
from quantkit.errors import DataError, OptionError, UnsupportedError
from quantkit.evaluate import harness
from quantkit.evaluate.harness import HarnessModel
from quantkit.pipelines import api
from quantkit.tokenizers.tokenizer import Tokenizer

N_CTX = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama whose tokens are bytes: hf/ and tiny.gguf."""
    folder = tmp_path_factory.mktemp("harness")
    checkpoints.write(folder / "hf", archs.get("llama").EXAMPLE, "BF16")
    assert cli.main(["convert", str(folder / "hf"), str(folder / "tiny.gguf"), "--outtype", "f32", "--json"]) == 0
    return folder


@pytest.fixture(scope="module")
def log_softmax(folder: Path) -> Any:
    """float64[tokens, vocabulary] log-probabilities by transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)

    def compute(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()

    return compute


def adapter(folder: Path, **options: Any) -> HarnessModel:
    return HarnessModel(str(folder / "tiny.gguf"), **({"max_length": N_CTX, "threads": 2} | options))


def ask(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 1}, {"batch_size": "3"}, {"batch_size": "auto", "max_batch_size": 2}]
)
def test_loglikelihoods_are_those_of_transformers(folder, log_softmax, rng, options) -> None:
    lm = adapter(folder, **options)
    context = rng.integers(1, 200, 9).tolist()
    likely = [int(log_softmax(context)[-1].argmax())]
    likely.append(int(log_softmax(context + likely)[-1].argmax()))
    pairs = [(None, context, likely), (None, context, [*likely, 7])]
    pairs += [(None, context, [int(token)]) for token in rng.integers(1, 200, 4)]  # choices of one token: one input
    pairs += [(None, rng.integers(1, 200, n).tolist(), rng.integers(1, 200, k).tolist())
              for n, k in ((1, 1), (1, 5), (40, 3), (3, N_CTX), (30, N_CTX), (17, 6))]  # fmt: skip
    found = lm._loglikelihood_tokens(pairs)
    for (_, before, scored), (value, greedy) in zip(pairs, found):
        sequence = [*before, *scored][-(N_CTX + 1) :]  # the beginning of longer ones is lost
        log_p = log_softmax(sequence[:-1])[-len(scored) :]
        assert value == pytest.approx(log_p[np.arange(len(scored)), scored].sum(), abs=2e-4)
        assert greedy == bool((log_p.argmax(-1) == scored).all())
    assert [greedy for _, greedy in found[:2]] == [True, False]
    for context, scored in (([], [1]), ([1], []), ([1], [1] * (N_CTX + 1))):
        with pytest.raises(DataError, match=r"request 1: .*max_length"):
            lm._loglikelihood_tokens([pairs[0], (None, context, scored)])


def test_inputs_that_are_the_same_run_once(folder, monkeypatch) -> None:
    lm = adapter(folder)
    calls = []
    real = lm.model.hidden_sequences
    monkeypatch.setattr(lm.model, "hidden_sequences", lambda tokens, rows: calls.append(tokens) or real(tokens, rows))
    lm._loglikelihood_tokens([(None, [1, 2, 3], [token]) for token in range(4, 12)])
    assert [call.tolist() for call in calls] == [[[1, 2, 3]]]


def test_rolling_scores_every_token_once(folder, log_softmax, monkeypatch) -> None:
    lm = adapter(folder)
    monkeypatch.setattr(HarnessModel, "prefix_token_id", 5)
    monkeypatch.setattr(harness, "LOGITS_BYTES", 3 * 4 * lm.model.vocab_size)  # in pieces of three tokens
    texts = ["a" * 7, "the quick brown fox jumps over the lazy dog, and again over the dog", "x" * N_CTX, ""]
    found = lm.loglikelihood_rolling([ask(text) for text in texts])
    for text, value in zip(texts, found):
        tokens = lm.tok_encode(text)
        known, expected = [5, *tokens], 0.0
        for start in range(0, len(tokens), N_CTX):
            end = min(start + N_CTX, len(tokens))
            window = known[max(0, end - N_CTX) : end]
            log_p = log_softmax(window)[-(end - start) :]
            expected += log_p[np.arange(end - start), tokens[start:end]].sum()
        assert value == pytest.approx(expected, abs=5e-4)
    assert found[3] == 0


def plain_reply(lm: HarnessModel, context: list[int], limit: int) -> str:
    tokens = list(context)
    for _ in range(limit):
        tokens.append(int(lm.model.logits(tokens)[-1].argmax()))
    return lm.model.tokenizer.decode(tokens[len(context) :], special=False)


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_replies_are_greedy_and_end_at_stops(folder, batch_size) -> None:
    lm = adapter(folder, batch_size=batch_size)
    texts = ["abc", "something longer", "q", "another one", "the context of this one is too long for its room"]
    plain = [plain_reply(lm, lm.tok_encode(text)[-(N_CTX - 6) :], 6) for text in texts]
    requests = [ask(text, {"until": ["\0\0"], "max_gen_toks": 6}) for text in texts]
    assert lm.generate_until(requests) == plain
    stop = plain[1][2:4]
    cut = lm.generate_until([ask(texts[1], {"until": stop, "max_new_tokens": 6, "do_sample": False, "temperature": 2})])
    assert cut == [plain[1][: plain[1].index(stop)]]
    assert lm.generate_until([ask(texts[0], {"max_gen_toks": 0})]) == [""]


def test_sampled_replies(folder) -> None:
    lm = adapter(folder)
    options = {"max_gen_toks": 8, "do_sample": True, "temperature": 5.0, "top_k": 50, "until": []}
    (first, again, other), greedy = (
        [lm.generate_until([ask("abc", options | {"seed": seed})])[0] for seed in (1, 1, 2)], plain_reply(
            lm, lm.tok_encode("abc"), 8
        ),
    )  # fmt: skip
    assert first == again
    assert len({first, other, greedy}) == 3
    for unknown in ({"num_beams": 3}, {"max_length": 4}):
        with pytest.raises(OptionError, match=f"'{next(iter(unknown))}' is not supported; known are until"):
            lm.generate_until([ask("a", unknown)])
    with pytest.raises(DataError, match="256 tokens to generate, the context holds 24"):
        lm.generate_until([ask("a", {})])


def test_cached_requests_are_those_of_one_template(folder, monkeypatch) -> None:
    lm, again = adapter(folder), adapter(folder)
    assert lm.tokenizer_name == again.tokenizer_name
    assert lm.tokenizer_name.startswith("tiny.gguf-")
    template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    monkeypatch.setattr(again.model, "_tokenizer", Tokenizer.from_gguf({**again.model.metadata} | template))
    assert lm.tokenizer_name != again.tokenizer_name


def test_the_repetition_penalty_concerns_the_whole_text(folder, monkeypatch) -> None:
    """As in transformers, not the last tokens only, as in llama.cpp."""
    lm = adapter(folder, max_length=128)
    rows = np.zeros((1, lm.model.vocab_size), np.float32)
    first, other = lm.tok_encode("ab")
    rows[0, [first, other]] = 2, 1.5
    monkeypatch.setattr(lm.model, "forward_batch", lambda parts: rows)
    request = ask("a" + "c" * 100, {"max_gen_toks": 1, "repetition_penalty": 2.0})
    assert lm.generate_until([request]) == ["b"]


def test_options_that_are_refused(folder, caplog) -> None:
    for options, said in (
        ({"dtype": "float16"}, "unknown 'dtype'; known are .*cache_type.*threads"),
        ({"batch_size": "many"}, "--batch_size many"),
    ):
        with pytest.raises(OptionError, match=said):
            adapter(folder, **options)
    assert adapter(folder, device="cpu", batch_size="auto:4").batch_size == 0
    assert not caplog.messages
    with caplog.at_level("INFO"):
        adapter(folder, device="cuda:0")
    assert "device cuda:0, lm_eval's default, has no effect" in caplog.text
    with pytest.raises(UnsupportedError, match="no token ends a text"):
        _ = adapter(folder).prefix_token_id


def test_chat(smollm2_q4_1) -> None:
    lm = HarnessModel(str(smollm2_q4_1))
    messages = [{"role": "user", "content": "Where is Ulm?"}, {"role": "assistant", "content": "On the "}]
    assert lm.apply_chat_template(messages[:1]).endswith("<|im_start|>assistant\n")
    assert lm.apply_chat_template(messages, add_generation_prompt=False).endswith("assistant\nOn the")
    assert lm.chat_template(True) == lm.model.tokenizer.chat_template
    assert lm.chat_template() is None
    bos = lm.model.tokenizer.bos_id
    assert lm.prefix_token_id == bos
    assert lm.tok_encode("<|im_start|>user")[0] == bos
    doubled = HarnessModel(str(smollm2_q4_1), add_bos_token=True)
    assert doubled.tok_encode("Hi") == [bos, *lm.tok_encode("Hi")]
    assert doubled.tok_encode("Hi", add_special_tokens=False) == lm.tok_encode("Hi")
    assert doubled.tok_encode("<|im_start|>user") == lm.tok_encode("<|im_start|>user")


def test_the_command_passes_words_on(monkeypatch, capsys) -> None:
    given = []
    monkeypatch.setattr(harness, "run", given.append)
    words = [
        "--model",
        "quantkit",
        "--model_args",
        "path=m.gguf,numerics=fast",
        "-t",
        "a",
        "b",
        "-h",
        "--apply_chat_template",
    ]
    assert cli.main(["lm-eval", *words]) == 0
    assert cli.main(["lm-eval", "ls", "tasks", "-m"]) == 0
    assert given == [words, ["ls", "tasks", "-m"]]
    assert cli.main(["lm-eval", "--help"]) == 0
    assert "lm-evaluation-harness" in capsys.readouterr().out


def test_without_lm_eval(monkeypatch, capsys) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    assert cli.main(["lm-eval", "--model", "quantkit"]) == 1
    assert "pip install 'quantkit[lm-eval]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed (620 MB with what it needs): pip install 'quantkit[lm-eval]' 'lm_eval[hf]'",
)
def test_lm_eval_gives_the_scores_of_its_hf_model(smollm2_q4_1, golden, tmp_path) -> None:
    api.export(smollm2_q4_1, tmp_path / "hf")
    (tmp_path / "tasks").mkdir()
    bench_lm_eval.write_tasks(tmp_path / "tasks", (golden / "eval.txt").read_text(), 6)
    rows = bench_lm_eval.rows(smollm2_q4_1, tmp_path / "hf", tmp_path / "tasks")
    assert {row["task"] for row in rows} == set(bench_lm_eval.TASKS)
    for task, of_task in itertools.groupby(rows, key=lambda row: row["task"]):
        for row in of_task:
            assert row["quantkit"] == pytest.approx(row["hf"], rel=1e-4), row
            assert row["difference"] <= (0 if task == "generate" else 3e-3), row  # nats of up to a hundred tokens
