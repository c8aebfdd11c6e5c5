"""Comparison, its table and its picture, on fake models over small real files."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from quantkit import types
from quantkit.cli import compare as command
from quantkit.errors import DataError, QuantkitError
from quantkit.evaluate import compare
from quantkit.evaluate.bench import Case, MeasuredSpeed
from quantkit.evaluate.comparison import Comparison
from quantkit.evaluate.layers.tensor_errors import TensorError
from quantkit.evaluate.report import html_page, page_plots, plots, tables
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from tests.evaluate import browser
from tests.evaluate.fake import FakeModel


def fake_vocabulary(path, **options):
    model = FakeModel(**options)
    return compare.Vocabulary(model.vocab_size, model.tokenizer)


SHORT = compare.CompareOptions(ctx_size=32, chunks=10)
QUIET = dataclasses.replace(SHORT, noise_floor="off")


@pytest.fixture
def files(tmp_path):
    """Three small GGUF files of 2, 1 and 1 bytes a weight or so."""
    made = {}
    for name, kind in (("ref", "f16"), ("near", "q8_0"), ("far", "q8_0")):
        made[name] = tmp_path / f"{name}.gguf"
        metadata = Metadata()
        metadata.set("general.architecture", "fake")
        with Writer(made[name], metadata, [TensorSpec("a.weight", (4, 64), types.get(kind))]) as writer:
            writer.write("a.weight", types.get(kind).quantize(np.ones((4, 64), np.float32)))
    return made


@pytest.fixture
def compared(files, tmp_path):
    text = tmp_path / "letters.txt"
    text.write_text("pack my box with five dozen liquor jugs " * 12)
    (again := tmp_path / "again.txt").write_text(text.read_text())
    noise = {"ref.gguf": 0.0, "near.gguf": 0.02, "far.gguf": 0.3}
    said = []
    found = compare.compare(
        files["ref"], [files["near"], files["far"]], [text, again], SHORT, on_message=said.append,
        open_model=lambda path, numerics, **_: FakeModel(noise=0.05 if numerics == "fast" else noise[path.name]),
        read_vocabulary=fake_vocabulary,
    )  # fmt: skip
    assert len(said) == 4
    return found


def test_a_text_twice_is_refused(files, tmp_path):
    (text := tmp_path / "letters.txt").write_text("pack my box with five dozen liquor jugs " * 12)
    (linked := tmp_path / "linked.txt").symlink_to(text)
    for twice in ([text, text], [text, linked]):
        with pytest.raises(DataError, match="given twice, so each of its tokens would count as two"):
            compare.compare(files["ref"], [files["near"]], twice, SHORT, read_vocabulary=fake_vocabulary)


def test_progress_is_told_of_every_chunk_of_every_run(files, tmp_path):
    text = tmp_path / "letters.txt"
    text.write_text("pack my box with five dozen liquor jugs " * 12)
    states: list[compare.CompareProgress] = []
    found = compare.compare(
        files["ref"], [files["near"]], text, SHORT, progress=states.append,
        open_model=lambda path, numerics, **_: FakeModel(noise=0.05 if numerics == "fast" else 0.02),
        read_vocabulary=fake_vocabulary,
    )  # fmt: skip
    runs = [("ref.gguf", 0), ("ref.gguf", 1), ("near.gguf", 2)]  # the second one for the noise floor
    chunks = range(1, found.chunks + 1)
    assert [(s.model, s.run, s.runs, s.chunk.done) for s in states] == [(*r, 3, done) for r in runs for done in chunks]
    assert {s.chunk.chunks for s in states} == {found.chunks}
    last = [states[(run + 1) * found.chunks - 1].chunk.so_far for run in range(3)]
    assert last[0].value == found.candidates[0].ppl.value
    assert last[1].mean_kld == found.noise.paired.divergence.mean_kld
    assert last[2].mean_kld == found.candidates[1].divergence.mean_kld


def test_candidates_are_measured_against_the_reference(compared):
    reference, near, far = compared.candidates
    assert (compared.chunks, compared.positions) == (20, 20 * 15)
    assert reference.divergence is None
    assert reference.bits_per_weight == 16
    assert near.bits_per_weight == 8.5
    assert near.size_bytes == near.path.stat().st_size
    assert 0 < near.divergence.mean_kld.value < far.divergence.mean_kld.value
    assert near.divergence.ppl_base.value == pytest.approx(reference.ppl.value, rel=1e-4)


def test_another_vocabulary_is_refused_before_any_work(files, tmp_path):
    vocab = {"ref.gguf": 9, "near.gguf": 7}

    def refuse(line):
        pytest.fail(f"work began: {line}")

    with pytest.raises(QuantkitError, match=r"near\.gguf: has a vocabulary of 7, .*ref\.gguf has 9"):
        compare.compare(files["ref"], [files["near"]], [tmp_path / "text"], SHORT, on_message=refuse,
                        open_model=refuse,
                        read_vocabulary=lambda path: fake_vocabulary(path, vocab=vocab[path.name]))  # fmt: skip


def test_another_tokenizer_of_as_many_tokens_is_refused(files, tmp_path):
    text = tmp_path / "letters.txt"
    text.write_text("jackdaws love my big sphinx of quartz " * 8)

    def read(path, **options):
        found = fake_vocabulary(path, **options)
        if path.name == "near.gguf" and not options:
            found.tokenizer.encode = lambda text, bos=None: [1 + ord(letter) % 29 for letter in text]
        return found

    with pytest.raises(QuantkitError, match=r"near\.gguf: tokenizes .*letters\.txt to 304 tokens, .*ref\.gguf to 304"):
        compare.compare(files["ref"], [files["near"]], [text], SHORT, open_model=pytest.fail, read_vocabulary=read)
    found = compare.compare(  # a flag of the file, which does not make the text another one
        files["ref"], [files["near"]], [text], QUIET, open_model=lambda path, **_: FakeModel(),
        read_vocabulary=lambda path: read(path, adds_bos=path.name == "near.gguf"),
    )  # fmt: skip
    assert found.chunks == 9


def test_files_and_texts_of_one_name_are_told_apart(files, tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.gguf").write_bytes(files["near"].read_bytes())
        (tmp_path / folder / "t.txt").write_text("the five boxing wizards jump quickly " * (6 if folder == "a" else 9))
    models, texts = ([tmp_path / folder / name for folder in "ab"] for name in ("x.gguf", "t.txt"))
    noise = {models[0]: 0.02, models[1]: 0.3}
    found = compare.compare(files["ref"], models, texts, QUIET,
                            open_model=lambda path, **_: FakeModel(noise=noise.get(path, 0)),
                            read_vocabulary=fake_vocabulary)  # fmt: skip
    assert [row[0] for row in tables.table_rows(found)] == ["ref", *map(str, models)]
    assert set(found.record()["models"][1]["domains"]) == set(map(str, texts))
    assert [r["name"] for r in found.record()["ranks"]] == list(map(str, models))
    assert str(models[0]) in tables.verdicts(found)[0]
    same = compare.compare(files["ref"], [files["ref"]], texts[:1], QUIET, open_model=lambda path, **_: FakeModel(),
                           read_vocabulary=fake_vocabulary)  # fmt: skip
    assert abs(same.candidates[1].paired.ppl_difference.value) < 1e-5  # the base's rounding is not in it


def test_records_and_rows_say_the_same(compared):
    header, rows = tables.table_header(compared), tables.table_rows(compared)
    assert [len(row) for row in rows] == [len(header)] * 4
    assert rows[1][0] == "noise floor: numerics fast"
    assert "PP t/s" not in header
    record = compared.candidates[2].record()
    assert f"{record['kld']:.6f}" in rows[3][header.index("KLD mean")]
    assert record["kld_median"] <= record["kld_p99"] <= record["kld_max"]
    assert "kld" not in compared.candidates[0].record()


def test_texts_are_domains_of_their_own(compared):
    header, rows = tables.domain_rows(compared)
    assert [len(row) for row in rows] == [len(header)] * 4
    assert rows[0][1:] == rows[2][1:]  # the same text under two names
    assert [rows[0][0], rows[2][0]] == ["letters.txt", "again.txt"]
    record = compared.record()
    near = record["models"][1]
    assert near["domains"]["letters.txt"]["kld"] == pytest.approx(near["kld"])
    assert near["kld_interval_95"][0] < near["kld"] < near["kld_interval_95"][1]
    assert record["ranks"][0]["difference_to_next"]["kld_interval_95"][0] > 0
    assert json.loads(json.dumps(record, allow_nan=False))["noise_floor"]["how"] == "numerics fast"


def test_ranks_and_what_is_within_the_noise(compared):
    assert [(r.model, r.place) for r in compared.ranks] == [(0, 1), (1, 2)]
    first, second = tables.verdicts(compared)
    assert first.startswith("near is closer to the reference than far: by 0.")
    assert second.startswith("near is within the noise floor")


def test_what_cannot_be_told_apart_is_not_ranked(compared):
    reference, near, _ = compared.candidates
    again = dataclasses.replace(compared, candidates=[reference, near, near], noise=None)
    assert [r.place for r in again.ranks] == [1, 1]
    assert "are indistinguishable" in tables.verdicts(again)[0]


def test_few_chunks_are_said_to_be_few(compared):
    assert "errors are too small: 4 chunks" in tables.verdicts(dataclasses.replace(compared, chunks=4))[-1]
    assert not any("too small" in line for line in tables.verdicts(compared))


def test_model_card_says_all(compared):
    card = tables.model_card(compared, "n_ctx 32")
    assert "## near 0.000 GiB (8.500 BPW)" in card
    assert "Final estimate: PPL = " in card
    assert "300 tokens; n_ctx 32." in card


class Page(HTMLParser):
    """Collects tags, checks that they nest, and refuses what would be loaded."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        for name, value in attrs:
            assert name not in ("src", "onload")
            assert not (value or "").startswith(("http", "//")), (tag, name, value)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_one_file_that_loads_nothing(compared):
    added = {
        "near": [
            TensorError("blk.0.attn_q.weight", 0, "q8_0", 0.01, 0.2),
            TensorError("blk.1.<b>", 1, "q8_0", 0.02, 0.8),
        ]
    }
    text = html_page.page(dataclasses.replace(compared, layers=added, conditions={"n_ctx": 32, "cpu": "<x>"}))
    page = Page()
    page.feed(text)
    assert not page.open
    assert page.seen.count("svg") == 4
    assert "script" not in page.seen
    assert "url(" not in text
    assert "@import" not in text
    assert "<x>" not in text
    assert "<b>" not in text
    assert "noise floor: numerics fast" in text
    assert "nan" not in text.lower().replace("financ", "")


def test_plots_of_the_report_use_the_page_s_colours(compared):
    text = html_page.page(compared)
    assert re.search(r'<g class="s1"><title>far</title>\s*<path [^>]*stroke: var\(--s1\)', text)
    assert text.count("<title>near</title>") == 3  # one in each plot
    assert "#fe0" not in text
    assert text == html_page.page(compared)
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'xlink:href="#([^"]*)"', text)) == set(ids)


@pytest.mark.parametrize("kind", ["line", "step", "point"])
def test_what_a_plot_cannot_show_is_skipped(kind):
    x, y = [1.0, 2.0, 3.0, np.nan, 5.0], [0.1, 0.0, np.inf, 0.3, 0.2]
    drawn = page_plots.plot([page_plots.Series("a <&> $b$", x, y, kind, [0.05] * 5)], "x", "y", x_log=True, y_log=True)
    assert "<title>a &lt;&amp;&gt; $b$</title>" in drawn
    assert "nan" not in drawn
    assert "inf" not in drawn
    nothing = page_plots.plot([page_plots.Series("a", x[1:3], y[1:3], kind)], "x", "y", y_log=True)
    assert nothing == '<p class="note">no data</p>'


def test_pictures_are_reproducible(compared, tmp_path):
    for form in ("svg", "pdf", "png"):
        made = []
        for name in "ab":
            plots.plot_comparison(tmp_path / f"{name}.{form}", compared)
            made.append((tmp_path / f"{name}.{form}").read_bytes())
        assert made[0] == made[1]
        assert b"Date" not in made[0]


def test_without_matplotlib_the_report_has_no_plots_and_says_so(compared, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    text = html_page.page(compared)
    assert "<svg" not in text
    assert "no plot without matplotlib: pip install &#x27;quantkit[plots]&#x27;" in text
    assert "<table" in text
    command._write(None, tmp_path / "report.html", compared, {})
    assert (tmp_path / "report.html").read_text() == text
    warning = "report.html: no plot without matplotlib: pip install 'quantkit[plots]'"
    assert [line for line in capsys.readouterr().err.splitlines() if line.endswith(warning)] == [
        f"warning: {tmp_path}/{warning}"
    ]


@pytest.fixture(scope="module")
def chromium():
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is installed")
    with browser.Browser(program) as opened:
        yield opened


def test_the_browser_s_ears(chromium, tmp_path):
    """A page that is not quiet is heard, so that silence means something."""
    path = tmp_path / "loud.html"
    body = '<script>console.error("oh"); nothing()</script><img src="x.png"><div style="width:900px">wide'
    path.write_text(f"<!DOCTYPE html>{body}")
    seen = chromium.open(path, 420)
    assert [(tmp_path / name).as_uri() for name in ("loud.html", "x.png")] == seen.requests
    assert len(seen.messages) >= 2
    assert seen.width >= 900


@pytest.mark.parametrize("width", [1280, 420])
def test_a_browser_shows_the_report_quietly(chromium, compared: Comparison, tmp_path, width):
    added = {"near": [TensorError(f"blk.{i}.attn_q.weight", i, "q8_0", 0.01 + i, 0.2) for i in range(4)]}
    path = tmp_path / "report.html"
    conditions = {"n_ctx": 32, "cpu": "a long name of a processor " * 8}
    path.write_text(html_page.page(dataclasses.replace(compared, layers=added, conditions=conditions)))
    seen = chromium.open(path, width)
    assert seen.requests == [path.resolve().as_uri(), "data:,"][: len(seen.requests)]
    assert seen.messages == []
    assert seen.width == width
    # All figures are in sight: the table fits, or is laid out as cards.
    hidden = "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert chromium.value(hidden) == 0
    assert chromium.value("document.querySelectorAll('svg').length") == 4
    assert chromium.value("getComputedStyle(document.querySelector('g.s0 use')).fill") == "rgb(47, 109, 179)"
    assert chromium.screenshot().startswith(b"\x89PNG")


def test_picture(compared, tmp_path):
    plots.plot_comparison(tmp_path / "x.png", compared)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(QuantkitError, match="nothing to draw"):
        plots.plot_comparison(tmp_path / "y.png", dataclasses.replace(compared, candidates=compared.candidates[:1]))


def test_without_matplotlib_one_line_says_how(compared, tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(plots.MissingPlots, match=r"pip install 'quantkit\[plots\]'"):
        plots.plot_comparison(tmp_path / "x.png", compared)


def test_throughput_is_the_bench_s(monkeypatch):
    model = FakeModel()  # trained for 64 tokens
    asked = []

    def bench(*args):
        asked.append(args)
        return [MeasuredSpeed("pp64", 0, 64, (0.5,)), MeasuredSpeed("tg64", 0, 64, (4.0, 3.0, 5.0))]

    monkeypatch.setattr(compare, "bench", bench)
    assert compare.throughput(model, repeat=2) == (128, 16)
    assert asked == [(model, [Case(64, 0), Case(0, 64)], 2)]
