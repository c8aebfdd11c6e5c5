"""Conversations: which tokens are the assistant's, base files that record them, KLD by category and position."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from quantkit import cli
from quantkit.errors import DataError, FormatError, QuantkitError
from quantkit.evaluate import compare, corpus, divergence, text
from quantkit.evaluate.breakdown import by_category, by_position, position_edges
from quantkit.evaluate.chat_chunks import chat_chunks
from quantkit.evaluate.comparison import Domain
from quantkit.evaluate.perplexity import PerplexityOptions, chunks_of, perplexity, perplexity_of_chunks
from quantkit.evaluate.statistics import Sample
from quantkit.formats import gguf
from quantkit.formats.kld.base_file import BaseReader, BaseWriter
from quantkit.formats.kld.bounded_file import MAGIC, MAGIC_SCORED, BoundedReader, BoundedWriter
from quantkit.formats.kld.chunk_file import digest
from quantkit.formats.kld.scored_tokens import ScoredTokens
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.files import written
from tests.evaluate.fake import FakeModel

SHORT = [{"role": "user", "content": "Where is Ulm?"}, {"role": "assistant", "content": "On the Danube."}]
LONG = [
    {"role": "system", "content": "Be brief."},
    *SHORT,
    {"role": "user", "content": "And Graz?"},
    {"role": "assistant", "content": "On the Mur, naïvely."},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: the last turn shows that nothing was thought, those before do not.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think></think>\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WITHOUT_PROMPT = (
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}??{% endif %}"
)


@pytest.fixture(scope="module")
def metadata(smollm2_q4_1) -> dict[str, object]:
    return dict(gguf.open(smollm2_q4_1).metadata.items())


@pytest.fixture
def chat(metadata, tmp_path):
    """Chunks of conversations, with a chat template."""

    def make(*lines: Any, template: str = CHATML, n_ctx: int = 512, **options: Any) -> tuple[Tokenizer, text.Chunks]:
        path = tmp_path / "c.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": template})
        return tokenizer, chat_chunks(tokenizer, path, n_ctx, **options)

    return make


def scored_text(tokenizer: Tokenizer, chunks: text.Chunks, index: int) -> str:
    return b"".join(map(tokenizer.token_bytes, chunks.of(index).tolist())).decode()


def test_what_the_assistant_writes_is_scored_with_the_end_of_its_turn(chat) -> None:
    tokenizer, chunks = chat(SHORT, LONG)
    assert scored_text(tokenizer, chunks, 0) == "On the Danube.<|im_end|>"
    assert scored_text(tokenizer, chunks, 1) == "On the Danube.<|im_end|>On the Mur, naïvely.<|im_end|>"
    whole = tokenizer.encode(tokenizer.apply_chat_template(LONG, add_generation_prompt=False), bos=False, special=True)
    assert chunks.tokens[1].tolist() == whole
    assert chunks.inputs is chunks.tokens  # no BOS but the template's
    assert set(chunks.tokens[0, len(tokenizer.encode_with_offsets(CHATML)[0]) :]) <= {chunks.tokens[0, -1]}
    assert chunks.counts.tolist() == [len(chunks.of(0)), len(chunks.of(1))]
    assert len(chunks.depths) == chunks.counts.sum()
    assert chunks.tokens[1][chunks.depths[chunks.counts[0] :]].tolist() == chunks.of(1).tolist()
    tokenizer, everything = chat(SHORT, score="all")
    assert everything.counts.tolist() == [len(everything.tokens[0]) - 1]


def test_templates_that_format_the_last_turn_otherwise(chat) -> None:
    tokenizer, chunks = chat(LONG, template=THINKING)
    assert (
        scored_text(tokenizer, chunks, 0) == "On the Danube.<|im_end|><think></think>\nOn the Mur, naïvely.<|im_end|>"
    )
    tokenizer, chunks = chat(LONG, template=WITHOUT_END)
    assert scored_text(tokenizer, chunks, 0) == " On the Danube.\n On the Mur, naïvely.\n"
    with pytest.raises(DataError, match=r"c\.jsonl: line 1: message 2: .*use --score all"):
        chat(SHORT, template=WITHOUT_PROMPT)
    assert chat(SHORT, template=WITHOUT_PROMPT, score="all")[1].counts.sum() > 4


def test_turns_of_gpt_oss_end_where_its_replies_do_not(metadata, tmp_path) -> None:
    """<|end|> ends the turns of the past; the last one ends with <|return|>, as a reply does."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[1:5] = ["<|start|>", "<|end|>", "<|return|>", "<|call|>"]
    template = CHATML.replace("<|im_start|>", "<|start|>").replace(
        "<|im_end|>", "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
    )
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 3, "tokenizer.chat_template": template}
    tokenizer = Tokenizer.from_gguf(metadata | changed)
    (tmp_path / "c.jsonl").write_text(json.dumps(LONG))
    chunks = chat_chunks(tokenizer, tmp_path / "c.jsonl", 512)
    assert scored_text(tokenizer, chunks, 0) == "On the Danube.<|end|>On the Mur, naïvely.<|return|>"
    assert 2 not in tokenizer.eos_ids


def test_long_conversations_are_cut_and_counted(chat) -> None:
    _, chunks = chat(SHORT, LONG)
    short, long = (int(chunks.choice.rows(i)[-1]) + 2 for i in range(2))
    first_of_long = int(chunks.choice.rows(1)[0]) + 2
    _, cut = chat(SHORT, LONG, n_ctx=long - 3)
    assert cut.counts.tolist() == [chunks.counts[0], chunks.counts[1] - 3]
    assert len(cut.notes) == 1
    assert f"1 of 2 conversations are cut after {long - 3} tokens" in cut.notes[0]
    none = [{"role": "user", "content": "Hello?"}]
    _, left = chat(SHORT, none)
    assert (len(left), left.notes[0].rpartition(": ")[2]) == (
        1, "1 of 2 conversations have no scored token and are left out",
    )  # fmt: skip
    assert short > first_of_long - 40
    with pytest.raises(DataError, match=r"1 conversations without a token of the assistant among their first 512"):
        chat(none)


def test_categories(chat, tmp_path) -> None:
    lines = [{"messages": SHORT, "category": c} for c in ("b", "a", "b")]
    assert list(chat(*lines, by_category=True)[1].choice.labels) == ["b", "b", "a"]
    assert not chat(*lines)[1].choice.labels
    with pytest.raises(DataError, match=r'line 2 has no "category"'):
        chat(lines[0], {"messages": SHORT}, by_category=True)
    with pytest.raises(DataError, match=r'line 1: its "category" is 3'):
        chat({"messages": SHORT, "category": 3})
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"text": "x", "category": "b"}\n\n{"text": "y", "category": "a"}\n{"text": "z", "category": "b"}\n'
    )
    assert corpus.texts_by_category(path) == {"b": "x\n\nz", "a": "y"}
    for line, said in (
        ('{"text": "x"}', 'line 1 has no "category"'),
        ('{"messages": [], "category": "a"}', "line 1 is no object .*; add --chat"),
        ("plain", "line 1: not JSON.*--by-category takes a .jsonl file"),
    ):
        path.write_text(line)
        with pytest.raises(DataError, match=said):
            corpus.texts_by_category(path)


# ---------------------------------------------------------------------------------------------------------- base files


def chosen(
    rng: np.random.Generator, labels: tuple[str, ...] = (), chat: bool = True
) -> tuple[np.ndarray, ScoredTokens]:
    tokens = rng.integers(1, 31, (5, 19)).astype(np.int32)
    mask = rng.random((5, 19)) < 0.4
    mask[:, 0], mask[:, 9] = False, True
    return tokens, ScoredTokens(mask, "assistant", chat, labels)


def test_a_base_file_records_the_scored_tokens(rng, tmp_path) -> None:
    tokens, scored = chosen(rng, ("a", "a", "b", "a", "b"))
    reference, candidate = FakeModel(adds_bos=True), FakeModel(noise=0.3, adds_bos=True)
    chunks = text.Chunks(tokens, tokens, "x", choice=scored)
    path, exact = tmp_path / "x.qkld", tmp_path / "x.kld"
    with BoundedWriter(path, tokens, 31, target=1e-4, scored=scored) as writer:
        found = perplexity_of_chunks(reference, chunks, base=writer)
    with BaseWriter(exact, tokens, 31, scored=scored) as writer:
        perplexity_of_chunks(reference, chunks, base=writer)
    base = BoundedReader(path)
    assert path.read_bytes()[:8] == MAGIC_SCORED != MAGIC
    np.testing.assert_array_equal(base.scored.mask, scored.mask)
    assert dataclasses.replace(base.scored, mask=scored.mask) == scored
    # a plain computation
    logits = reference.table[tokens] + 0.01 * np.arange(19, dtype=np.float32)[:, None]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at, t = np.nonzero(scored.mask)
    expected = -log_p[at, t - 1, tokens[at, t]]
    np.testing.assert_allclose(found.nll, expected, rtol=1e-4, atol=1e-5)
    assert found.value == pytest.approx(np.exp(expected.mean()), rel=1e-5)
    assert found.after(2).nll.size == scored.counts[:2].sum()
    other = candidate.table[tokens] + 0.01 * np.arange(19, dtype=np.float32)[:, None]
    log_q = other - np.log(np.exp(other).sum(-1, keepdims=True))
    kld = (np.exp(log_p) * (log_p - log_q)).sum(-1)[at, t - 1]
    by_file = divergence.divergence_from_base(candidate, BaseReader(exact, scored))
    np.testing.assert_allclose(by_file.kld, kld, atol=1e-4)
    bounded = divergence.divergence_from_base(candidate, base, n_batch=38)
    assert abs(bounded.mean_kld.value - kld.mean()) <= bounded.bound + 1e-5
    np.testing.assert_allclose(bounded.nll, by_file.nll, rtol=1e-6)
    with pytest.raises(FormatError, match="take"):
        BaseReader(exact)  # as a file of second halves it has the wrong size
    parts = by_category(by_file, base.scored.labels, base.counts)
    assert [(p.name, p.sequences, p.tokens) for p in parts] == [
        ("a", 3, scored.counts[[0, 1, 3]].sum()), ("b", 2, scored.counts[[2, 4]].sum()),
    ]  # fmt: skip
    assert parts[1].kld.value == pytest.approx(by_file.kld[np.isin(at, (2, 4))].mean())


@pytest.mark.parametrize(
    "change", [{"mask": ""}, {"mask": "AAAA"}, {"what": "some"}, {"labels": ["a"]}, {"mask": 3}, None]
)
def test_damaged_records_of_scored_tokens(rng, tmp_path, change) -> None:
    tokens, scored = chosen(rng)
    path = tmp_path / "x.qkld"
    with BoundedWriter(path, tokens, 31, scored=scored) as writer:
        perplexity_of_chunks(FakeModel(), text.Chunks(tokens, tokens, "x", choice=scored), base=writer)
    data = path.read_bytes()
    (place,) = struct.unpack("<Q", data[8:16])
    index = json.loads(zlib.decompress(data[place:-16]))
    if change is None:
        del index["scored"]
    else:
        index["scored"] |= change
    packed = zlib.compress(json.dumps(index).encode())
    path.write_bytes(data[:place] + packed + bytes.fromhex(digest(packed)))
    with pytest.raises(FormatError, match=r"x\.qkld: offset \d+: the index is not one of a bounded base"):
        BoundedReader(path)


def test_text_keeps_its_bos_and_conversations_do_not_get_one(rng, tmp_path) -> None:
    inputs = {}
    for is_chat in (True, False):
        tokens, scored = chosen(rng, chat=is_chat)
        with BaseWriter(tmp_path / "x.kld", tokens, 31, scored=scored) as writer:
            perplexity_of_chunks(FakeModel(), text.Chunks(tokens, tokens, "x", choice=scored), base=writer)
        model = FakeModel(adds_bos=True)
        divergence.divergence_from_base(model, BaseReader(tmp_path / "x.kld", scored))
        inputs[is_chat] = {int(first) for call in model.calls for first in call[:, 0]}
    assert 0 not in inputs[True]
    assert inputs[False] == {0}


@pytest.mark.parametrize("change", ["first", "none", "labels"])
def test_scored_tokens_that_cannot_be(rng, change) -> None:
    _, scored = chosen(rng)
    mask = scored.mask.copy()
    if change == "first":
        mask[2, 0] = True
    elif change == "none":
        mask[2] = False
    with pytest.raises(DataError, match="scored tokens"):
        ScoredTokens(mask, "assistant", True, ("a",) if change == "labels" else ())


def test_options_that_do_not_fit(tmp_path, rng) -> None:
    path = tmp_path / "t.txt"
    path.write_text("the quick brown fox jumps over the lazy dog again and again" * 3)
    model: Any = FakeModel()
    model.path = tmp_path / "m.gguf"
    for options, said in (
        ({"score": "assistant"}, "add --chat"),
        ({"score": "half", "chat": True}, "--score half is for plain text"),
        ({"score": "some"}, "some"),
        ({"ppl_stride": 4, "score": "all"}, "--ppl-stride"),
        ({"ppl_stride": 4, "by_category": True}, "--ppl-stride .* remove --chat, --score and --by-category"),
    ):
        with pytest.raises(QuantkitError, match=said):
            perplexity(model, path, PerplexityOptions(ctx_size=16, **options))
    with pytest.raises(QuantkitError, match=r"x\.kld: llama.cpp's base files .* name the file .qkld"):
        perplexity(model, path, PerplexityOptions(ctx_size=16, score="all", kl_divergence_base=tmp_path / "x.kld"))
    found = perplexity(model, path, PerplexityOptions(ctx_size=16, score="all"))
    assert found.nll.size == found.chunks * 15
    assert found.conditions["scored"] == "all tokens of a chunk"


# -------------------------------------------------------------------------------------------- by position and category


def test_position_edges() -> None:
    assert position_edges(np.arange(257, 512)) == [257, 289, 321, 353, 385, 417, 449, 481, 512]
    assert position_edges(np.arange(1, 32768)) == [
        1, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 20480, 24576, 28672, 32768,
    ]  # fmt: skip
    assert position_edges(np.array([3])) == [3, 4]


def test_by_position(rng) -> None:
    n_ctx, n_chunk = 300, 9
    counts = np.full(n_chunk, n_ctx - 1)
    depths = np.tile(np.arange(1, n_ctx), n_chunk)
    kld = 1 / depths + 0.1 * rng.random(depths.size)
    same = rng.random(depths.size) < 0.9
    found = divergence.Divergence(kld, kld, kld, same)
    parts = by_position(found, depths, counts)
    assert sum(part.tokens for part in parts) == depths.size
    for part in parts:
        chosen = (depths >= part.low) & (depths < part.high)
        assert part.kld.value == pytest.approx(kld[chosen].mean())
        assert part.flips.value == pytest.approx(1 - same[chosen].mean())
        assert part.sequences == n_chunk
        of_chunk = kld[chosen].reshape(n_chunk, -1).mean(1)
        assert part.kld.error == pytest.approx(of_chunk.std(ddof=1) / 3)
        assert part.kld.low < part.kld.value < part.kld.high
    assert parts[0].kld.value > parts[-1].kld.high


def test_a_curve_to_32k(rng, tmp_path) -> None:
    tokens = rng.integers(1, 31, (2, 32768)).astype(np.int32)
    chunks = text.score_chunks(text.Chunks(tokens, tokens, "x"), "all")
    reference, candidate = FakeModel(), FakeModel(noise=0.3)
    reference.n_ctx_train = candidate.n_ctx_train = 32768
    path = tmp_path / "x.qkld"
    with BoundedWriter(path, tokens, 31, scored=chunks.choice) as writer:
        perplexity_of_chunks(reference, chunks, base=writer)
    found = divergence.divergence_from_base(candidate, BoundedReader(path))
    parts = by_position(found, found.chunks.depths, found.chunks.counts)
    assert [part.name for part in parts[:3]] == ["1-31", "32-63", "64-127"]
    assert [part.name for part in parts[-2:]] == ["24576-28671", "28672-32767"]
    assert [part.tokens for part in parts[-2:]] == [2 * 4096] * 2
    assert all(part.kld.low < part.kld.value < part.kld.high for part in parts)


def test_errors_of_chunks_of_different_lengths(rng) -> None:
    """The error of a ratio covers the truth as often as it says, and equal lengths give the error of a mean."""
    x = rng.random(12 * 7)
    equal, ragged = Sample(12, 7), Sample(12, 0, (7,) * 12)
    assert Sample.of([7] * 12) == equal
    np.testing.assert_allclose(ragged.mean(x), equal.mean(x), rtol=1e-12)
    assert list(Sample.of([3, 1, 20]).starts) == [0, 1, 2, 3, 4, 10, 17]
    assert Sample.of([3, 1, 20]).part(1, 2) == (slice(3, 24), Sample.of([1, 20]))
    covered = 0
    for _ in range(400):
        counts = rng.integers(1, 60, 40)
        level = rng.normal(1, 0.3, 40) + 0.01 * counts  # long conversations are harder
        truth = 1 + 0.01 * np.mean(np.arange(1, 60) ** 2) / np.mean(np.arange(1, 60))
        values = np.repeat(level, counts) + rng.normal(0, 0.5, counts.sum())
        found = Sample.of(counts).mean(values)
        covered += found.low <= truth <= found.high
    assert 0.91 < covered / 400 < 0.985


def test_a_log_without_categories_is_not_taken_up(tmp_path) -> None:
    """Categories decide which chunks there are, and their order."""
    model, path = written(tmp_path / "m.gguf", "llama", tokenizer=True), tmp_path / "t.jsonl"
    path.write_text(json.dumps({"text": "the quick brown fox jumps over the lazy dog", "category": "prose"}))
    options = PerplexityOptions(ctx_size=16, chunks=2, score="all", jsonl=tmp_path / "log.jsonl", batch_size=16)
    perplexity(model, path, options)
    with pytest.raises(DataError, match="belongs to another run"):
        perplexity(model, path, dataclasses.replace(options, by_category=True))


def test_compare_by_category(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    letters = "pack my box with five dozen liquor jugs " * 12
    path.write_text("\n".join(json.dumps({"text": letters, "category": c}) for c in ("prose", "code")))
    options = compare.CompareOptions(ctx_size=32, chunks=6, noise_floor="off", by_category=True, score="all")
    chunks = chunks_of(FakeModel().tokenizer, path, 32, 6, False, "all", True)
    assert chunks.counts.tolist() == [31] * 12
    made = compare._chunks_of_texts(FakeModel().tokenizer, [path], options, "all")
    assert made[1] == [Domain("prose", 0, 6), Domain("code", 6, 6)]
    np.testing.assert_array_equal(made[0].choice.mask, chunks.choice.mask)
    other = path.with_name("u.jsonl")
    other.write_bytes(path.read_bytes())
    two = compare._chunks_of_texts(FakeModel().tokenizer, [path, other], options, "all")[1]
    assert {domain.chunks for domain in two} == {6}
    path.write_text(json.dumps({"text": "short", "category": "prose"}))
    with pytest.raises(DataError, match=r"t\.jsonl: category prose: 5 tokens"):
        chunks_of(FakeModel().tokenizer, path, 32, None, False, "half", True)


# --------------------------------------------------------------------------------------------------------- the commands


@pytest.fixture
def run(capsys):
    def call(*args: object, status: int = 0) -> str:
        found = cli.main([*map(str, args), "--no-progress"])
        caught = capsys.readouterr()
        assert found == status, caught.err
        return caught.out if status == 0 else caught.err

    return call


def test_the_commands_on_a_real_model(run, smollm2_q4_1, q8_0_model, tmp_path) -> None:
    path, base = tmp_path / "c.jsonl", tmp_path / "b.qkld"
    lines = [{"messages": m, "category": c} for m, c in ((SHORT, "one"), (LONG, "two"), (SHORT, "two"))]
    path.write_text("\n".join(map(json.dumps, lines)))
    log = tmp_path / "x.jsonl"
    args = ("perplexity", "-m", smollm2_q4_1, "--chat", path, "--by-category", "--kl-divergence-base", base)
    out = run(*args, "--jsonl", log, "-b", 8)
    assert "over 3 chunks" in out
    written, lines_of_log = base.read_bytes(), log.read_text().splitlines(keepends=True)
    base.unlink()
    log.write_text("".join(lines_of_log[:3]))
    run(*args, "--jsonl", log, "-b", 8)
    assert log.read_text() == "".join(lines_of_log)
    assert base.read_bytes() == written
    measured = ("perplexity", q8_0_model, "--kl-divergence-base", base, "--kl-divergence")
    found = json.loads(run(*measured, "--chat", "--score", "assistant", "--json"))
    assert found["conditions"]["scored"] == "the assistant's tokens"
    assert sum(part["tokens"] for part in found["by_position"]) == found["positions"]
    assert [part["category"] for part in found["by_category"]] == ["one", "two"]
    said = run(*measured, "--score", "all", status=1)
    assert "made with --chat --score assistant, this run asks for --score all" in said
    compared = json.loads(
        run("compare", smollm2_q4_1, q8_0_model, "--chat", path, "--by-category", "--noise-floor", "off", "--json",
            "--plot", tmp_path / "p.svg", "--html", tmp_path / "p.html", "--by-position", "--layers")
    )  # fmt: skip
    model = compared["models"][1]
    assert abs(model["kld"] - found["kld"]) <= found["kld_bound"] + 1e-6
    assert model["flips"] == pytest.approx(1 - model["same_top"])
    assert list(model["domains"]) == ["one", "two"]
    assert sum(part["tokens"] for part in model["by_position"]) == model["positions"]
    assert "By position" in (tmp_path / "p.svg").read_text()
    whole = [
        float(run("perplexity", smollm2_q4_1, "--chat", path, "--score", "all", *more).split()[-3])
        for more in ((), ("--by-layer",))
    ]
    assert whole[0] == pytest.approx(whole[1], abs=1e-3)
    plain = tmp_path / "plain.qkld"
    (tmp_path / "t.txt").write_text("The Danube flows through Ulm. " * 20)
    run("perplexity", smollm2_q4_1, "-f", tmp_path / "t.txt", "-c", 32, "--kl-divergence-base", plain)
    assert plain.read_bytes()[:8] == MAGIC
    measured = ("perplexity", q8_0_model, "--kl-divergence-base", plain, "--kl-divergence")
    assert "made with --score half, this run asks for --chat" in run(*measured, "--chat", status=1)
    assert "position" in run(*measured, "--by-position").splitlines()[-3]
