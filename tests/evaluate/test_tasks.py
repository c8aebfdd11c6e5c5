"""Tasks with choices: the file formats, which tokens are scored, the order of draws; chunks that are taken up again."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest

from quantkit import cli
from quantkit.errors import DataError, FormatError
from quantkit.evaluate import task_flips, tasks
from quantkit.evaluate.chunk_log import ChunkLog
from quantkit.evaluate.perplexity import perplexity_of_chunks
from quantkit.evaluate.report import tables
from quantkit.evaluate.text import Chunks, windows
from tests.evaluate.fake import FakeModel


def log_softmax(x):
    x = x.astype(np.float64)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


def plain_score(model, ids, start, stop):
    """Mean log-probability of ids[start:stop], each given what is before it."""
    logits = model.hidden_sequences(np.array([ids]), slice(None))[0]
    return np.mean([log_softmax(logits[j - 1])[ids[j]] for j in range(start, stop)])


@pytest.fixture
def model():
    return FakeModel(adds_bos=True)


def encoded(model, texts):
    return [model.tokenizer.encode(t) for t in texts]


def test_the_first_draws_are_std_mt19937_s():
    twister = np.random.MT19937()
    twister._legacy_seeding(1)
    assert int(twister.random_raw()) == 1791095845  # the first number of std::mt19937 with seed 1
    made = [tasks.Task((str(i),), 0) for i in range(10)]
    first = tasks.sampled(made, 4)
    assert first[0].texts == (str(1791095845 * 10 >> 32),)
    assert tasks.sampled(made, 9)[:4] == first
    assert sorted(t.texts for t in tasks.sampled(made, 99)) == sorted(t.texts for t in made)


def test_hellaswag(model, tmp_path):
    path = tmp_path / "h.txt"
    path.write_text("a cat\n2\nsat\nsang loud\nsits\nate\n" * 3)
    found = tasks.hellaswag(path, 2)
    assert len(found) == 2
    assert found[0] == tasks.Task(("a cat sat", "a cat sang loud", "a cat sits", "a cat ate"), 2)
    ids = encoded(model, found[0].texts)
    shared = 1 + len("a cat ")  # BOS, and then "s" differs from "a"
    wanted = [plain_score(model, i, shared, len(i)) for i in ids]
    np.testing.assert_allclose(tasks.scores(model, found[0]), wanted, rtol=1e-6)
    *_, last = tasks.evaluate(model, found)
    assert (last.tasks, last.chance) == (2, 0.25)
    assert last.correct == 2 * (int(np.argmax(wanted)) == 2)
    path.write_bytes("a\u2028b\x85\r\n2\r\nb\r\nc\x0c\r\nd\r\ne\r\n\r\n".encode())  # as getline reads lines
    assert tasks.hellaswag(path) == [tasks.Task(tuple(f"a\u2028b\x85 {end}" for end in ("b", "c\x0c", "d", "e")), 2)]
    path.write_text("a\n2\nb\nc\n")
    with pytest.raises(FormatError, match="4 lines; HellaSwag tasks have six"):
        tasks.hellaswag(path)
    path.write_text("a\n7\nb\nc\nd\ne\n")
    with pytest.raises(FormatError, match="line 2: '7'"):
        tasks.hellaswag(path)


def test_winogrande_scores_what_follows_the_choice(model, tmp_path):
    path = tmp_path / "w.csv"
    path.write_text('0,the _ was so big,cup,pan,2\n1,"we, too, ran by _.",car,bus,1\n')
    long, short = tasks.winogrande(path)
    assert long.texts == ("the cup was so big", "the pan was so big")
    assert (long.correct, short.correct) == (1, 0)
    assert short.texts[0] == "we, too, ran by car."
    ids = encoded(model, long.texts)
    start = 1 + len("the cup")  # both go on for more than three tokens: the choice is not scored, nor the last token
    np.testing.assert_allclose(
        tasks.scores(model, long), [plain_score(model, i, start, len(i) - 1) for i in ids], rtol=1e-6
    )
    two = tasks.Task(("abX", "abYc"), 0, ("abX", "abY"))
    ids = encoded(model, two.texts)
    np.testing.assert_allclose(
        tasks.scores(model, two), [plain_score(model, ids[0], 3, 4), plain_score(model, ids[1], 3, 4)], rtol=1e-6
    )
    path.write_text("0,a\u2028 _ b,c,d,1\n")
    assert tasks.winogrande(path)[0].texts == ("a\u2028 c b", "a\u2028 d b")
    path.write_text("0,no gap,a,b,1\n")
    with pytest.raises(FormatError, match="line 1: the sentence has no _"):
        tasks.winogrande(path)


def packed(questions):
    def text(s):
        return struct.pack("<I", len(s)) + s.encode()

    def answers(pairs):
        return (
            struct.pack("<I", len(pairs))
            + b"".join(text(a) for a, _ in pairs)
            + b"".join(struct.pack("<i", right) for _, right in pairs)
        )

    bodies = [text(q) + answers(a) + answers([]) for q, a in questions]
    places = np.cumsum([4 + 4 * len(bodies), *map(len, bodies)])[:-1]
    return struct.pack("<I", len(bodies)) + places.astype("<u4").tobytes() + b"".join(bodies)


def test_multiple_choice(model, tmp_path):
    path = tmp_path / "m.bin"
    data = packed([("who", [("me", 0), ("you", 1), ("we", 0)]), ("is it", [("yes", 1), ("no", 0)])])
    path.write_bytes(data)
    found = tasks.multiple_choice(path)
    assert found == [tasks.Task(("who me", "who you", "who we"), 1), tasks.Task(("is it yes", "is it no"), 0)]
    assert tasks.multiple_choice(path, 1) == found[:1]
    *_, last = tasks.evaluate(model, found)
    assert last.chance == pytest.approx((1 / 3 + 1 / 2) / 2)
    for cut in (3, 20, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(FormatError, match="truncated"):
            tasks.multiple_choice(path)


def test_windows_score_every_token_once(model, tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("the quick brown fox jumps over the lazy dog again and again")
    ids = np.array(model.tokenizer.encode(path.read_text()))
    chunks = windows(model.tokenizer, path, 16, 6)
    assert chunks.n_ctx == 19
    assert len(chunks) == -(-(len(ids) - 19) // 6)
    found = perplexity_of_chunks(model, chunks)
    wanted = [
        -log_softmax(model.hidden_sequences(ids[None, i * 6 : i * 6 + 19], slice(None))[0, j - 1])[ids[i * 6 + j]]
        for i in range(len(chunks))
        for j in range(13, 19)
    ]
    np.testing.assert_allclose(found.nll.reshape(-1), wanted, rtol=1e-5)
    with pytest.raises(DataError, match="a stride of 16"):
        windows(model.tokenizer, path, 16, 16)


def test_a_run_goes_on_from_its_lines(rng, tmp_path):
    model = FakeModel()
    tokens = rng.integers(0, 31, (7, 16)).astype(np.int32)
    chunks = Chunks(tokens, tokens, "x")
    path, rows = tmp_path / "r.jsonl", 7

    def run(stop_after=None):
        with ChunkLog(path, "this run", rows, 2, {"n_ctx": 16}) as log:

            def add(so_far):
                if len(so_far.nll) == stop_after:
                    raise KeyboardInterrupt
                log.add(so_far.nll[-1])

            return len(log.done), perplexity_of_chunks(model, chunks, n_batch=32, on_chunk=add, done=log.done)

    whole = perplexity_of_chunks(model, chunks, n_batch=32)
    with pytest.raises(KeyboardInterrupt):
        run(stop_after=6)
    with path.open("ab") as stream:
        stream.write(b'{"chunk": 6, "nl')  # as a kill leaves it
    kept, found = run()
    assert kept == 4  # whole batches of two of the five that were written
    np.testing.assert_array_equal(found.nll, whole.nll)
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head["run"] == "this run"
    assert [line["chunk"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert lines[-1]["ppl"] == pytest.approx(math.exp(whole.nll.mean()))
    assert run()[0] == 6
    before = path.read_bytes()
    with pytest.raises(DataError, match="belongs to another run"):
        ChunkLog(path, "another", rows, 2, {})
    path.write_text("{}\n")
    with pytest.raises(FormatError, match="not a chunk log"):
        ChunkLog(path, "this run", rows, 2, {})
    assert before


def test_answers_that_change(tmp_path):
    def score(*answers):
        expected = (0, 1, 2, 0, 1)
        right = sum(map(int.__eq__, answers, expected))
        return tasks.Score(right, 5, 0.25, "x", answers=answers, expected=expected)

    found = task_flips.flips(tmp_path / "m.gguf", score(0, 1, 2, 3, 3), score(0, 2, 0, 0, 2))
    assert (found.lost, found.gained, found.changed) == (2, 1, 4)
    change = np.array([0, -1, -1, 1, 0])
    assert found.difference == pytest.approx(change.mean())
    assert found.error == pytest.approx(change.std(ddof=1) / math.sqrt(5))
    assert found.p_value == 1.0  # 2 and 1 of 3
    four = task_flips.TaskFlips(tmp_path, score(0, 0, 0, 0, 0), 6, 0, 6, 0.0, 0.0)
    assert four.p_value == pytest.approx(2 / 2**6)
    with pytest.raises(DataError, match="5 tasks"):
        task_flips.flips(tmp_path / "m.gguf", tasks.Score(0, 1, 0.5, answers=(0,), expected=(1,)), score(0, 1, 2, 0, 1))
    header, rows = tables.flip_table(
        task_flips.TaskComparison("hellaswag", tmp_path / "r.gguf", score(0, 1, 2, 3, 3), [found])
    )
    assert [len(row) for row in rows] == [len(header)] * 2
    assert rows[1][4:7] == ["2", "1", "4"]


def test_compare_counts_answers(capsys, smollm2_q4_1, tmp_path):
    path = tmp_path / "h.txt"
    path.write_text("The cat\n0\nsat on the mat.\nblue seven of.\nran quickly ran.\nto to to.\n" * 4)
    args = ["compare", str(smollm2_q4_1), str(smollm2_q4_1), "--hellaswag", "--hellaswag-tasks", "3", "-f", str(path)]
    assert cli.main([*args, "--json", "-o", str(tmp_path / "o.json")]) == 0
    out = capsys.readouterr().out
    record = json.loads(out)
    assert json.loads((tmp_path / "o.json").read_text()) == record
    assert record["schema"] == "quantkit.compare-tasks/1"
    assert (record["tasks"], record["chance"], record["accuracy"]) == (3, 0.25, 1.0)
    assert [record["models"][0][name] for name in ("lost", "gained", "changed", "p_value")] == [0, 0, 0, 1.0]
    assert cli.main([*args, "--by-position"]) == 2
    assert "remove --by-position" in capsys.readouterr().err
    for flags in (["--jsonl", "x"], ["--kl-divergence-base", "b"], ["--by-layer"], ["--chunks", "2"]):
        assert cli.main(["perplexity", str(smollm2_q4_1), "--hellaswag", "-f", str(path), *flags]) == 2
        assert f"remove {flags[0]}" in capsys.readouterr().err
