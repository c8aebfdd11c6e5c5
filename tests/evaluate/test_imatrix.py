"""Importance matrices of models with experts, of several texts, of runs that were killed; and what they tell."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quantkit import cli, recipe
from quantkit.errors import DataError, FormatError
from quantkit.evaluate import corpus
from quantkit.evaluate import text as text_of
from quantkit.evaluate.fingerprint import fingerprint
from quantkit.evaluate.imatrix import collect as collecting
from quantkit.evaluate.imatrix import saved_run
from quantkit.evaluate.imatrix.coverage import coverage, split_by_matrix
from quantkit.formats import gguf, imatrix
from quantkit.formats.imatrix import Entry, Imatrix
from quantkit.pipelines.quantize import quantize_with_plan
from quantkit.runtime.blocks import experts
from quantkit.runtime.loading import load
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.evaluate.fake import FakeModel
from tests.runtime.conftest import random_model
from tests.runtime.test_experts import moe  # noqa: F401

EMBD, FF, EXPERTS, USED, CTX = 256, 256, 16, 2, 32


@pytest.fixture
def run(capsys):
    def call(*args: object, status: int = 0) -> str:
        found = cli.main([str(a) for a in args])
        caught = capsys.readouterr()
        assert found == status, caught.err
        return caught.out if status == 0 else caught.err

    return call


@pytest.fixture(scope="module")
def model(smollm2_q4_1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3moe of one layer, with a real tokenizer."""
    theirs = gguf.open(smollm2_q4_1).metadata
    vocab = len(theirs["tokenizer.ggml.tokens"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, EMBD), "output_norm.weight": (EMBD,)}
    for i in range(2):
        shapes |= {f"blk.{i}.{name}_norm.weight": (EMBD,) for name in ("attn", "ffn")}
        shapes |= {f"blk.{i}.attn_{name}_norm.weight": (64,) for name in "qk"}
        shapes |= {f"blk.{i}.attn_{name}.weight": (rows, EMBD) for name, rows in (("q", 128), ("k", 64), ("v", 64))}
        shapes |= {f"blk.{i}.attn_output.weight": (EMBD, 128), f"blk.{i}.ffn_gate_inp.weight": (EXPERTS, EMBD)}
        shapes |= {f"blk.{i}.ffn_{name}_exps.weight": (EXPERTS, FF, EMBD) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down_exps.weight": (EXPERTS, EMBD, FF)}
    metadata = gguf.Metadata()
    metadata.set("general.architecture", "qwen3moe", "str")
    numbers = {
        "block_count": 2, "context_length": 128, "embedding_length": EMBD, "feed_forward_length": 512,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 64,
        "attention.value_length": 64, "expert_count": EXPERTS, "expert_used_count": USED,
        "expert_feed_forward_length": FF, "vocab_size": vocab,
    }  # fmt: skip
    for key, value in numbers.items():
        metadata.set(f"qwen3moe.{key}", value, "u32")
    metadata.set("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6, "f32")
    for key in theirs:
        if key.startswith("tokenizer."):
            metadata.set(key, theirs[key], theirs.kind(key))
    return random_model(tmp_path_factory.mktemp("moe") / "moe.gguf", metadata, shapes, np.random.default_rng(6))


@pytest.fixture
def text(golden: Path, tmp_path: Path) -> Path:
    path = tmp_path / "short.txt"
    path.write_text((golden / "eval.txt").read_text()[:2000])
    return path


def test_experts_get_sums_and_counts_of_what_is_routed_to_them(moe: Path, monkeypatch) -> None:  # noqa: F811
    """Against routes that are taken down and sums in plain numpy."""
    routes = []
    real = experts.route
    monkeypatch.setattr(experts, "route", lambda *a: routes.append(real(*a)) or routes[-1])
    tokens = np.random.default_rng(1).integers(0, 320, (3, 16))
    model, collector, seen = load(moe), collecting.Collector(), {}

    def observe(name, x, number=0, matrices=1):
        collector.observe(name, x, number, matrices)
        if name == "blk.0.ffn_gate_inp.weight":
            seen[name] = x

    model.observer = observe
    model.hidden_sequences(tokens, slice(0, 0))
    collector.chunks = 3
    found = collector.result("t", 16)
    entry = found["blk.0.ffn_up_exps.weight"]
    chosen, y = routes[0][0], seen["blk.0.ffn_gate_inp.weight"].astype(np.float64)
    assert entry.values.shape == (8, 256)
    assert entry.counts.tolist() == [(chosen == e).sum() for e in range(8)]
    assert entry.counts.sum() == 3 * 16 * 3
    for e in range(8):
        mine = y[(chosen == e).any(axis=1)]
        expected = (mine**2).mean(axis=0) if len(mine) else np.zeros(256)
        np.testing.assert_allclose(entry.values[e], expected, rtol=1e-5)
    assert np.array_equal(found["blk.0.ffn_gate_exps.weight"].values, entry.values)
    assert found["blk.0.ffn_down_exps.weight"].counts.tolist() == entry.counts.tolist()
    assert found["blk.0.attn_q.weight"].counts.tolist() == [48]


def test_collect_show_convert_and_quantize_with_experts(run, model, text, tmp_path) -> None:
    out, legacy = tmp_path / "x.gguf", tmp_path / "x.dat"
    run(
        "imatrix", model, "-f", text, "-c", CTX, "--chunks", 3, "-o", out, "--no-ppl", "--missing-experts", "layer-mean"
    )
    found = imatrix.read(out)
    up = found["blk.0.ffn_up_exps.weight"]
    assert up.counts.sum() == 3 * CTX * USED
    assert (found.chunk_size, found.policy) == (CTX, "layer-mean" if up.missing else "")
    said = run("imatrix", "show", out, "--threshold", 12)
    assert "layer 0: " in said
    assert "experts saw fewer than 12 tokens (ffn_gate_exps, ffn_up_exps, ffn_down_exps)" in said
    record = json.loads(run("imatrix", "show", out, "--threshold", 12, "--json"))
    row = next(e for e in record["tensors"] if e["name"] == "blk.0.ffn_up_exps.weight")
    assert row["counts"] == up.counts.tolist()
    assert row["few"] == np.flatnonzero(up.counts < 12).tolist()
    share = up.counts[up.counts > 0] / up.counts.sum()
    assert row["effective_experts"] == pytest.approx(2 ** -(share * np.log2(share)).sum())
    run("imatrix", "convert", out, legacy)
    run("imatrix", "convert", legacy, tmp_path / "y.gguf", "--model", model)
    assert imatrix.read(tmp_path / "y.gguf")["blk.0.ffn_up_exps.weight"].values.shape == (EXPERTS, EMBD)
    files = [tmp_path / f"{name}.gguf" for name in ("from-gguf", "from-dat")]
    for path, matrix in zip(files, (out, legacy)):
        said = run("quantize", model, path, "Q8_0", "--custom-q", "up_exps=q4_0", "--imatrix", matrix)
        assert ("saw fewer than 32 tokens of some experts" in said) == (matrix is out)  # which counts them
        policy = gguf.open(path).metadata["quantize.imatrix.dataset"].partition(" (missing experts: ")[2]
        assert policy == (f"{found.policy})" if found.policy else "")
    first, second = (gguf.open(path).tensors["blk.1.ffn_up_exps.weight"].data for path in files)
    assert np.mean(first != second) < 1e-2  # sums over counts differ in the last bit


def test_each_expert_is_quantized_by_its_own_importance(model, tmp_path, rng) -> None:
    file = gguf.open(model)
    name = "blk.0.ffn_down_exps.weight"
    values = (rng.random((EXPERTS, FF)) ** 6).astype(np.float32)
    matrix = Imatrix({name: Entry(values, np.full(EXPERTS, 99), 3)}, 3, "t", 16)
    plan = recipe.plan(
        file.tensors.values(), "Q8_0", recipe.parse("ffn_down_exps=iq4_ks"), metadata=file.metadata, imatrix=matrix
    )
    quantize_with_plan(file, tmp_path / "q.gguf", plan, imatrix=matrix)
    made = gguf.open(tmp_path / "q.gguf").tensors[name]
    for e in (0, 7, EXPERTS - 1):
        rows = file.tensors[name].decode_rows(e * EMBD, (e + 1) * EMBD)
        assert np.array_equal(made.rows(e * EMBD, (e + 1) * EMBD), made.type.quantize(rows, values[e]))
        assert not np.array_equal(made.rows(e * EMBD, (e + 1) * EMBD), made.type.quantize(rows, values[e - 1]))


# ------------------------------------------------------------------------------------------ several texts, interruption


class Letters:
    """Chunks of a FakeModel's letters."""

    def __init__(self, tmp_path: Path):
        from quantkit.evaluate import text

        self.model = FakeModel()
        self.cuts = []
        for name, length in (("a", 200), ("b", 70)):
            path = tmp_path / f"{name}.txt"
            path.write_text("".join(chr(97 + (i * i + len(name) * 7 + length) % 26) for i in range(length)))
            self.cuts.append(text.chunked(self.model.tokenizer, path, 16))


def test_texts_weigh_as_their_shares_say(tmp_path) -> None:
    both = Letters(tmp_path)
    parts = [collecting.collect(both.model, cut)[0] for cut in both.cuts]
    name = "blk.0.ffn_down.weight"
    a, b = (part[name].values.astype(np.float64) for part in parts)
    n, m = (len(cut) for cut in both.cuts)
    plain = collecting.pooled(parts)
    np.testing.assert_allclose(plain[name].values, (n * a + m * b) / (n + m), rtol=1e-5)
    shared = collecting.pooled(parts, [1, 3])
    np.testing.assert_allclose(shared[name].values, (a + 3 * b) / 4, rtol=1e-5)
    assert (shared.chunks, shared[name].counts.tolist()) == (n + m, [16 * (n + m)])
    with pytest.raises(DataError, match="1 shares for 2 texts"):
        collecting.pooled(parts, [1])


@pytest.mark.parametrize("with_perplexity", [True, False])
def test_a_run_goes_on_where_it_was_saved(tmp_path, with_perplexity) -> None:
    model, cut = Letters(tmp_path).model, Letters(tmp_path).cuts[0]
    whole, ppl = collecting.collect(model, cut, n_batch=48, with_perplexity=with_perplexity)
    saved = saved_run.SavedRun("run", [collecting.TextState(collecting.Collector())])
    batches = []

    class Killed(Exception):
        pass

    def save(state):
        batches.append(state.done)
        saved.save(tmp_path / "r")
        if len(batches) == 2:
            raise Killed

    with pytest.raises(Killed):
        collecting.collect(model, cut, n_batch=48, with_perplexity=with_perplexity, on_batch=save, state=saved.texts[0])
    again = saved_run.SavedRun.load(tmp_path / "r")
    assert (again.run, again.texts[0].done, batches) == ("run", 6, [3, 6])
    model.calls.clear()
    found, ppl_again = collecting.collect(model, cut, n_batch=48, with_perplexity=with_perplexity, state=again.texts[0])
    assert sum(map(len, model.calls)) == len(cut) - 6
    for suffix in ("dat", "gguf"):
        imatrix.write(tmp_path / f"a.{suffix}", whole)
        imatrix.write(tmp_path / f"b.{suffix}", found)
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert ppl is None or ppl.value == ppl_again.value


def test_saved_runs_that_are_none(tmp_path) -> None:
    for data in (b"", b"PK\3\4 no zip", b"hello"):
        (tmp_path / "r").write_bytes(data)
        with pytest.raises(FormatError, match="not a saved run"):
            saved_run.SavedRun.load(tmp_path / "r")


def test_killed_and_run_again(run, model, golden, tmp_path) -> None:
    """SIGKILL at whatever moment a save is there; two texts with shares, the bytes are those of one run."""
    texts = []
    for i in range(2):
        texts.append(tmp_path / f"{i}.txt")
        texts[-1].write_text((golden / "eval.txt").read_text()[i * 9000 : i * 9000 + 6000])
    out = tmp_path / "x.gguf"
    options = ["-c", CTX, "--chunks", 12, "-b", 2 * CTX, "-ofreq", 4, "--no-ppl", "--shares", "1,2"]
    args = ["imatrix", model, "-f", texts[0], "-f", texts[1], *options, "-o"]
    run(*args, tmp_path / "whole.gguf")
    command = [sys.executable, "-m", "quantkit", *map(str, args), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    resume = tmp_path / "x.gguf.resume"
    while not resume.exists() and process.poll() is None:
        time.sleep(0.002)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if process.returncode == 0:
        pytest.skip("the run was over before it could be killed")
    done = [text.done for text in saved_run.SavedRun.load(resume).texts]
    assert sum(done) >= 4
    assert "saved by a run with another model" in run(*args, out, "--process-output", status=1)
    run(*args, out)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not resume.exists()


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    """A text that needs no other files."""
    path = tmp_path / "prose.txt"
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "wizards",
        "box",
        "in",
        "rain",
    ]
    path.write_text(" ".join(words[(i * i + i // 7) % len(words)] for i in range(1500)))
    return path


def test_the_output_appears_when_the_run_is_complete(run, model, prose, tmp_path, monkeypatch, capsys) -> None:
    """On the way the matrix has names of its own: one that is replaced, and copies that stay."""
    out, other = tmp_path / "x.gguf", tmp_path / "other.txt"
    other.write_text(prose.read_text())
    args = ["imatrix", model, "-f", prose, "-f", other, "-c", CTX, "-b", CTX, "--chunks", 3, "--no-ppl"]
    options = ["-ofreq", 1, "--save-frequency", 2, "-o", out]
    seen = []
    real = imatrix.write

    def write(path, made, form=""):
        assert not out.exists()
        real(path, made, form)
        seen.append((path.name, made.chunks))
        if seen.count(("x.gguf.partial", 4)) == 1 and len(seen) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(imatrix, "write", write)
    assert cli.main([str(a) for a in (*args, *options)]) == 130
    said = capsys.readouterr().err
    assert "x.gguf.resume: contains the saved chunks" in said
    assert "x.gguf.partial" in said
    names = [("partial", 1), ("at_2", 2), ("partial", 2), ("partial", 3), ("at_4", 4), ("partial", 4)]
    assert seen == [(f"x.gguf.{name}", chunks) for name, chunks in names]
    assert not out.exists()
    for name, chunks in (("at_2", 2), ("at_4", 4), ("partial", 4)):
        path = tmp_path / f"x.gguf.{name}"
        assert path.read_bytes()[:4] == b"GGUF"
        assert imatrix.read(path).chunks == chunks
    monkeypatch.setattr(imatrix, "write", real)
    run(*args, *options)
    assert sorted(p.name for p in tmp_path.glob("x.gguf*")) == ["x.gguf", *(f"x.gguf.at_{n}" for n in (2, 4, 6))]
    run(*args, "-o", tmp_path / "y.gguf")
    assert out.read_bytes() == (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf.at_6").read_bytes()
    run(*args[:4], "-c", CTX, "-b", CTX, "--chunks", 2, "--no-ppl", "-o", tmp_path / "z.gguf")
    assert (tmp_path / "z.gguf").read_bytes() == (tmp_path / "x.gguf.at_2").read_bytes()


def test_a_run_that_ends_where_it_began(run, model, prose, tmp_path, monkeypatch) -> None:
    """--in-file is the output, too: it stays what it was until the end, or a resumed run would add to itself."""
    args = ("imatrix", model, "-f", prose, "-c", CTX, "--chunks", 3, "-b", CTX, "-ofreq", 1, "--no-ppl")
    run(*args, "-o", tmp_path / "a.dat")
    run(*args, "--in-file", tmp_path / "a.dat", "-o", tmp_path / "b.dat")
    written, write = [], imatrix.write

    def spy(path, made, form=""):
        written.append(path.name)
        write(path, made, form)

    monkeypatch.setattr(imatrix, "write", spy)
    run(*args, "--in-file", tmp_path / "a.dat", "-o", tmp_path / "a.dat")
    assert written == ["a.dat.partial", "a.dat.partial", "a.dat"]
    assert (tmp_path / "a.dat").read_bytes() == (tmp_path / "b.dat").read_bytes()
    for name in ("a.dat.partial", "a.dat.at_2"):
        (tmp_path / name).write_bytes((tmp_path / "b.dat").read_bytes())
        more = ("--in-file", tmp_path / name, "--save-frequency", 2, "-o", tmp_path / "a.dat")
        assert f"{name}: " in run(*args, *more, status=1)


@pytest.mark.parametrize(("name", "limit"), [("x.dat", 20), ("x.gguf", 20), ("x.dat.resume", 10)])
def test_a_full_disk_is_said_of_a_file(run, model, prose, tmp_path, monkeypatch, name, limit) -> None:
    """Where the output cannot be written what was measured is kept."""
    out = tmp_path / name.removesuffix(".resume")
    args = ("imatrix", model, "-f", prose, "-c", CTX, "--chunks", 4, "-b", CTX, "--no-ppl", "-o", out)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def small(*_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit << 10, before[1]))

    def large(*_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def around(real, first, last):
        def call(*given):
            first()
            try:
                return real(*given)
            finally:
                last()

        return call

    if name.endswith(".resume"):
        monkeypatch.setattr(saved_run.SavedRun, "save", around(saved_run.SavedRun.save, small, large))
        said = run(*args, "-ofreq", 2, status=1)
    else:
        monkeypatch.setattr(imatrix, "write", around(imatrix.write, small, large))
        said = run(*args, status=1)
    assert re.search(rf"{re.escape(name)}(\.partial-\d+)?: cannot write.*: File too large", said)
    if not name.endswith(".resume"):
        assert f"the measurements are saved in {out}.resume" in said
        monkeypatch.undo()
        assert "resumed after 4 chunks" in cli_err(run, *args)
        assert out.exists()


def cli_err(run, *args: object) -> str:
    """What a command that succeeds says on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        run(*args)
    return said.getvalue()


def test_what_was_measured_is_kept_where_experts_are_missing(run, model, text, tmp_path) -> None:
    args = ("imatrix", model, "-f", text, "-c", 8, "--chunks", 1, "--no-ppl", "-o", tmp_path / "x.gguf")
    assert "the measurements are saved in" in run(*args, "--missing-experts", "error", status=1)
    assert not (tmp_path / "x.gguf").exists()
    assert [t.done for t in saved_run.SavedRun.load(tmp_path / "x.gguf.resume").texts] == [1]
    run(*args, "--missing-experts", "layer-mean")
    again = tmp_path / "y.gguf"
    run(*args[:-1], again, "--missing-experts", "layer-mean")
    assert (tmp_path / "x.gguf").read_bytes() == again.read_bytes()
    assert not (tmp_path / "x.gguf.resume").exists()


def test_what_cannot_be_meant_is_refused_before_the_run(run, model, text, tmp_path) -> None:
    args = ("imatrix", model, "-f", text, "-c", CTX, "-o", tmp_path / "x.gguf")
    assert "short.txt: given twice" in run(*args, "-f", text, status=1)
    for flags in (["--numerics", "fast"], ["--devices", "cpu:2"]):
        assert "--layer-similarity is measured on the CPU with exact" in run(*args, "-lsim", *flags, status=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt"]


def test_a_matrix_of_another_model_is_refused_before_the_run(run, model, text, tmp_path) -> None:
    entry = Entry(np.ones((1, 7), np.float32), np.array([32]), 1)
    imatrix.write(tmp_path / "o.gguf", Imatrix({"blk.0.attn_q.weight": entry}, 1, "x", 32))
    args = ("imatrix", model, "-f", text, "-c", CTX, "-o", tmp_path / "x.gguf")
    said = run(*args, "--in-file", tmp_path / "o.gguf", status=1)
    assert "o.gguf: blk.0.attn_q.weight: the importance matrix has 1 x 7 values" in said
    assert "importance matrix over" not in said


@pytest.mark.parametrize("size", [3 << 20, 100 << 20])
def test_a_saved_run_is_that_of_its_files(tmp_path, size) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.truncate(size)
    first = fingerprint([path], {"n": 1})
    assert fingerprint([path], {"n": 1}) == first != fingerprint([path], {"n": 2})
    with path.open("r+b") as file:  # neither the beginning nor the end
        file.seek(size // 2)
        file.write(bytes(range(256)) * (size // 1000 // 256 + 1))
    assert fingerprint([path], {"n": 1}) != first


# ------------------------------------------------------------------------------------------------------- conversations


def test_conversations_go_through_the_chat_template(smollm2_q4_1, tmp_path) -> None:
    tokenizer = Tokenizer.from_gguf(gguf.open(smollm2_q4_1).metadata)
    said = [{"role": "user", "content": "Where is Ulm?"}, {"role": "assistant", "content": "On the Danube."}]
    other = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in ({"messages": said}, said, other)) + "\n")
    third = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert [c.messages for c in corpus.conversations(path)] == [said, said, third]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))  # as some editors save it
    assert [c.messages for c in corpus.conversations(path)] == [said, said, third]
    made = text_of.chunked(tokenizer, path, 16, chat=True)
    first = tokenizer.apply_chat_template(said, add_generation_prompt=False)
    expected = tokenizer.encode(first, bos=False, special=True)
    assert tokenizer.encode("<|im_start|>", bos=False, special=True)[0] in made.tokens[0]
    assert made.tokens.reshape(-1)[: len(expected)].tolist() == expected
    (tmp_path / "p.txt").write_text("Where is Ulm?\n\nOn the Danube.\n \nAnd?")
    assert [c.messages for c in corpus.conversations(tmp_path / "p.txt")] == [
        said,
        [{"role": "user", "content": "And?"}],
    ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": None}, "message 2: the content is null"),
        ({"role": None}, "message 2: the role is None, not a text"),
    ],
)
def test_messages_without_a_role_or_content(tmp_path, message, said) -> None:
    """Templates would write "None". A call of a tool may come without content."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"} | message]
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(messages))
    with pytest.raises(DataError, match=said):
        corpus.conversations(path)
    messages[1] = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    path.write_text(json.dumps(messages))
    assert corpus.conversations(path)[0].messages == messages


@pytest.mark.parametrize(
    "line", ["no json", "{}", "[]", '[{"role": "user"}]', "[3]", '{"conversations": [{"from": "x"}]}']
)
def test_lines_that_are_no_conversation(tmp_path, line) -> None:
    (tmp_path / "c.jsonl").write_text(f'[{{"role": "user", "content": "a"}}]\n{line}')
    with pytest.raises(DataError, match=r"c\.jsonl: line 2 is not a conversation"):
        corpus.conversations(tmp_path / "c.jsonl")


# ------------------------------------------------------------------------------------------------------- what they tell


def test_the_table_has_the_median_of_the_record(run, tmp_path) -> None:
    entry = Entry(np.ones((4, 8), np.float32), np.array([1, 2, 5, 90]), 2)
    imatrix.write(tmp_path / "x.gguf", Imatrix({"blk.0.x_exps.weight": entry}, 2, "t", 24))
    assert "1 / 3.5 / 90" in run("imatrix", "show", tmp_path / "x.gguf")


def test_coverage(rng) -> None:
    one = np.zeros((4, 8), np.float32)
    one[:, 3] = 2.0
    entries = {
        "blk.0.x_exps.weight": Entry(np.ones((4, 8), np.float32), np.array([10, 10, 0, 0]), 2),
        "blk.2.x_exps.weight": Entry(one, np.array([40, 1, 5, 2]), 2),
        "output.weight": Entry(rng.random((1, 8)).astype(np.float32), np.array([48]), 2),
    }
    first, second, output = coverage(Imatrix(entries, 2, "t", 24), 5)
    assert (first.few, first.covered, first.effective_experts) == ([2, 3], 0.5, pytest.approx(2))
    assert (first.effective_columns, first.similarity) == (pytest.approx(1), None)
    assert (second.few, second.effective_columns) == ([1, 3], pytest.approx(1 / 8))
    assert second.similarity == pytest.approx(1 / np.sqrt(8))  # layer 1 has none, so with layer 0
    assert (output.layer, output.effective_experts, output.few) == (None, None, [])
    assert (second.median_count, second.record()["tokens"]["median"]) == (3.5, 3.5)
    legacy = Imatrix({"blk.0.x_exps.weight": Entry(np.ones((1, 32), np.float32), np.array([3]), 3)}, 3)
    assert split_by_matrix(legacy, {"blk.0.x_exps.weight": (4, 2, 8)})["blk.0.x_exps.weight"].values.shape == (4, 8)
    with pytest.raises(DataError, match=r"1 x 32 values, the model's tensor needs 4 x 9 = 36"):
        split_by_matrix(legacy, {"blk.0.x_exps.weight": (4, 2, 9)})
    with pytest.raises(DataError, match=r"4 x 8 values, the model's tensor needs 2 x 16 = 32"):
        split_by_matrix(Imatrix(entries), {"blk.0.x_exps.weight": (2, 2, 16)})


@pytest.mark.parametrize("stacked", [True, False])
def test_the_picture(run, tmp_path, rng, stacked) -> None:
    matrices = 12 if stacked else 1
    entries = {
        f"blk.{i}.{kind}.weight": Entry(
            rng.random((matrices, 16)).astype(np.float32), rng.integers(0, 99, matrices) + (not stacked), 2
        )
        for i in range(3)
        for kind in ("ffn_up_exps", "ffn_down_exps")
    }
    imatrix.write(tmp_path / "x.gguf", Imatrix(entries, 2, "t", 16))
    run("imatrix", "show", tmp_path / "x.gguf", "--plot", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_merge_with_weights(run, tmp_path) -> None:
    for name, value in (("a", 1.0), ("b", 4.0)):
        entry = Entry(np.full((1, 4), value, np.float32), np.array([32]), 1)
        imatrix.write(tmp_path / f"{name}.gguf", Imatrix({"w": entry}, 1, name, 32))
    args = ("imatrix", "merge", tmp_path / "a.gguf", tmp_path / "b.gguf", "-o", tmp_path / "m.gguf")
    run(*args, "--weights", "1,2")
    found = imatrix.read(tmp_path / "m.gguf")
    assert found["w"].values.tolist() == [[3] * 4]
    assert (found.dataset, found["w"].counts.tolist()) == ("a+b", [64])
    assert "2 positive numbers" in run(*args, "--weights", "1", status=2)
    (tmp_path / "c.gguf").symlink_to(tmp_path / "a.gguf")
    assert "c.gguf: given twice" in run(*args, tmp_path / "c.gguf", status=1)


def test_what_a_merge_says_of_missing_experts_does_not_depend_on_the_order() -> None:
    parts = []
    for policy in ("layer-mean", "weight-one"):
        entry = Entry(np.ones((2, 4), np.float32), np.array([0, 32]), 1)
        parts.append(Imatrix({"w": entry}, 1, "x", 32, policy))
    assert imatrix.merge(parts).policy == imatrix.merge(parts[::-1]).policy == "weight-one"


def test_the_reference_reads_experts_from_our_legacy_file(model, text, run, tmp_path) -> None:
    """Its plan of types that need importance fails where a tensor has none, or one of another size."""
    tool = pytest.importorskip("ik_llama_cpp", reason="the reference wheel is not installed")
    quantizer = Path(tool.__file__).parent / "bin" / "llama-quantize"
    options = ["-c", CTX, "--chunks", 2, "--no-ppl", "--missing-experts", "layer-mean"]
    run("imatrix", model, "-f", text, *options, "-o", tmp_path / "x.gguf")
    run("imatrix", "convert", tmp_path / "x.gguf", tmp_path / "x.dat")
    args = [quantizer, "--imatrix", tmp_path / "x.dat", "--dry-run", model, tmp_path / "o.gguf", "IQ2_XS", "2"]
    done = subprocess.run(list(map(str, args)), capture_output=True, text=True)
    count = len(imatrix.read(tmp_path / "x.dat"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"loaded {count} importance matrix entries" in done.stdout + done.stderr
    assert "did not find weights for blk" not in done.stdout + done.stderr


def test_control_tokens_of_a_text_are_found_on_request(smollm2_q4_1, tmp_path):
    tokenizer = Tokenizer.from_gguf(gguf.open(smollm2_q4_1).metadata)
    path = tmp_path / "a.txt"
    path.write_text("<|im_start|>user\nHi<|im_end|>\n" * 8, encoding="utf-8")
    control = tokenizer.encode("<|im_start|>", bos=False, special=True)
    assert len(control) == 1
    assert (text_of.chunked(tokenizer, path, 16).tokens == control[0]).sum() == 0
    assert (text_of.chunked(tokenizer, path, 16, special=True).tokens == control[0]).sum() >= 6
