"""The commands perplexity, imatrix and compare on a real model and little text."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit import cli
from quantkit.cli.common.output import print_json
from quantkit.formats import imatrix
from quantkit.formats.kld.base_file import BaseReader, BaseWriter


@pytest.fixture
def run(capsys):
    def call(*args: object) -> str:
        status = cli.main([str(a) for a in args])
        caught = capsys.readouterr()
        assert status == 0, caught.err
        return caught.out

    return call


@pytest.fixture
def text(golden, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text((golden / "eval.txt").read_text()[:2000])
    return path


def test_perplexity_prints_the_reference_s_lines(run, f16_model, text):
    out = run("perplexity", f16_model, "-f", text, "-c", 64, "--chunks", 3)
    assert re.fullmatch(
        r"(\[\d\]\d+\.\d{4},){3}\nFinal estimate: PPL over 3 chunks for n_ctx=64 = \d+\.\d{4} \+/- \d+\.\d{5}\n", out
    )
    lines = run("perplexity", f16_model, "-f", text, "-c", 64, "--chunks", 3, "--ppl-output-type", 1).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["0", "64", "128"]
    assert out.split()[-3] == lines[-1].split()[-3]


def test_base_written_and_read(run, f16_model, q8_0_model, text, tmp_path):
    base = tmp_path / "base.kld"
    written = run("perplexity", f16_model, "-f", text, "-c", 64, "--chunks", 4, "--kl-divergence-base", base)
    assert BaseReader(base).n_chunk == 4
    out = run("perplexity", q8_0_model, "--kl-divergence-base", base, "--kl-divergence")
    assert out.count(" ± ") >= 4 * 5 + 8
    stated = float(re.search(r"Mean PPL\(base\)\s*:\s*([\d.]+)", out)[1])
    assert abs(stated / float(written.split()[-3]) - 1) < 1e-4
    record = json.loads(run("perplexity", q8_0_model, "--kl-divergence-base", base, "--kl-divergence", "--json"))
    assert f"{record['kld']:10.6f}" in out
    assert record["conditions"]["numerics"] == "exact"


def test_a_bounded_base_says_how_far_off_it_may_be(run, f16_model, q8_0_model, text, tmp_path):
    base = tmp_path / "base.qkld"
    args = ("perplexity", f16_model, "-f", text, "-c", 64, "--chunks", 4)
    run(*args, "--kl-divergence-base", base, "--kl-divergence-bound", 0.01)
    out = run("perplexity", q8_0_model, "--kl-divergence-base", base, "--kl-divergence")
    assert 0 < float(re.search(r"Bound of KLD:\s*([\d.]+)", out)[1]) < 0.02
    assert 0 < float(re.search(r"Mean    KLD:\s*([\d.]+)", out)[1]) < 0.005


def test_strides_and_lines_that_are_taken_up(run, capsys, f16_model, text, tmp_path):
    args = ("perplexity", f16_model, "-f", text, "-c", 48, "--ppl-stride", 16, "--chunks", 3)
    out = run(*args, "--jsonl", tmp_path / "x.jsonl", "-b", 56)
    assert re.fullmatch(r"(\[\d\]\d+\.\d{4},){3}\n", out)
    lines = (tmp_path / "x.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "x.jsonl").write_text("".join(lines[:3]) + lines[3][:30])
    again = run(*args, "--jsonl", tmp_path / "x.jsonl", "-b", 56)
    assert again == out.partition(",")[2].partition(",")[2]  # the third chunk alone was run
    assert (tmp_path / "x.jsonl").read_text() == "".join(lines)
    status = cli.main([str(a) for a in (*args, "--kl-divergence-base", tmp_path / "x.kld")])
    assert status == 2
    assert "exclude each other" in capsys.readouterr().err


def test_outputs_are_refused_before_the_work(capsys, f16_model, text, tmp_path):
    whole = text.read_bytes()
    for args in (
        ("imatrix", f16_model, "-f", text, "-o", text), ("imatrix", f16_model, "-f", text, "-o", f16_model),
        ("perplexity", f16_model, "-f", text, "--kl-divergence-base", text),
        ("compare", f16_model, f16_model, "-f", text, "-o", f16_model),
        ("compare", f16_model, f16_model, "-f", text, "--html", text / "x.html"),
        ("compare", f16_model, f16_model, "-f", text, "--plot", tmp_path / "x.jpeg"),
    ):  # fmt: skip
        assert cli.main([str(a) for a in args]) == 1
        assert re.search("this is the input|is not a directory|a plot's file name", capsys.readouterr().err), args
    assert text.read_bytes() == whole


def test_a_base_of_another_tokenizer_is_warned_about(capsys, text, f16_model, tmp_path, rng):
    tokenizer = quantkit.load(f16_model).tokenizer
    own = np.array(tokenizer.encode(text.read_text(), bos=False))[:256].reshape(4, 64)
    for name, tokens, warned in (("own", own, False), ("other", rng.permutation(tokenizer.vocab_size)[own], True)):
        with BaseWriter(tmp_path / name, tokens, tokenizer.vocab_size) as writer:
            for _ in tokens:
                writer.write(np.zeros((31, tokenizer.vocab_size), np.float32))
        base = str(tmp_path / name)
        assert cli.main(["perplexity", str(f16_model), "--kl-divergence", "--kl-divergence-base", base]) == 0
        assert ("the base file has another tokenizer" in capsys.readouterr().err) == warned


def test_names_that_are_no_utf8_nor_plain_text(run, f16_model, text, tmp_path):
    """Files are called as they are: Latin-1, escape sequences, what matplotlib takes for mathematics."""
    odd, said = (
        Path(os.fsdecode(os.fsencode(tmp_path) + name)) for name in (b"/caf\xe9 \x1b[31m$\\x.gguf", b"/\xe9.txt")
    )
    odd.symlink_to(f16_model)
    said.write_bytes(text.read_bytes())
    run("imatrix", odd, "-f", said, "-c", 64, "--chunks", 1, "--no-ppl", "-o", tmp_path / "x.dat")
    assert imatrix.read(tmp_path / "x.dat").dataset.endswith("\\udce9.txt")
    drawn = (("--html", "x.html"), ("-o", "x.json"), ("--plot", "x.png"))
    options = [part for flag, name in drawn for part in (flag, tmp_path / name)]
    out = run("compare", f16_model, odd, "-f", said, "-c", 32, "--chunks", 2, "--noise-floor", "off", *options)
    assert "caf\\udce9 \\x1b[31m$\\x" in out
    assert all((tmp_path / name).stat().st_size for _, name in drawn)


def test_json_has_no_nan(capsys):
    print_json("quantkit.perplexity/1", {"ppl": [1.5, float("inf"), float("nan")]})
    assert json.loads(capsys.readouterr().out) == {"schema": "quantkit.perplexity/1", "ppl": [1.5, None, None]}


def test_golden_s_chunk_line(run, golden, f16_model):
    out = run("perplexity", f16_model, "--kl-divergence-base", golden / "smollm2-135m-f16.c64.kld", "--kl-divergence")
    line = next(line for line in out.splitlines() if line.startswith("   1 "))
    assert line.endswith("100.000 ±  0.000 %")
    assert "31 positions" in out


def test_imatrix_collect_show_and_continue(run, f16_model, text, tmp_path):
    whole, first, rest = (tmp_path / f"{name}.dat" for name in ("whole", "first", "rest"))
    out = run("imatrix", f16_model, "-f", text, "-c", 64, "--chunks", 4, "-o", whole, "-ofreq", 2)
    assert re.search(r"\[4\]\d+\.\d{4},\nFinal estimate: PPL = ", out)
    run("imatrix", f16_model, "-f", text, "-c", 64, "--chunks", 2, "-o", first, "--no-ppl")
    run("imatrix", f16_model, "-f", text, "-c", 64, "--chunks", 2, "--chunk", 2, "--in-file", first, "-o", rest)
    at_once, in_two = imatrix.read(whole), imatrix.read(rest)
    assert (at_once.chunks, in_two.chunks) == (4, 4)
    for name, entry in at_once.entries.items():
        assert abs(in_two[name].values - entry.values).max() <= 1e-4 * entry.values.max()
    assert "blk.0.attn_q.weight" in run("imatrix", "show", whole)
    assert "210 entries, 8 chunks" in run("imatrix", "merge", whole, rest, "-o", tmp_path / "merged.dat")


def test_imatrix_of_the_output(run, f16_model, text, tmp_path):
    run("imatrix", f16_model, "-f", text, "-c", 64, "--chunks", 1, "-o", tmp_path / "x.dat", "--process-output")
    found = imatrix.read(tmp_path / "x.dat")
    assert set(found.entries) - {n for n in found.entries if n.startswith("blk.")} == {"token_embd.weight"}  # tied


def test_compare(run, f16_model, q8_0_model, text, tmp_path):
    (other := tmp_path / "other.txt").write_text(text.read_text()[::-1])
    args = ("compare", f16_model, q8_0_model, "-f", text, "-f", other, "-c", 64, "--chunks", 4)
    out = run(*args, "-o", tmp_path / "x.json", "--html", tmp_path / "x.html", "--noise-floor", "q8_0", "--layers")
    assert "numerics exact" in out
    assert out.splitlines()[2].startswith("f16 ")
    assert out.splitlines()[3].startswith("noise floor: cache q8_0 ")
    assert "short.txt" in out
    assert "other.txt" in out
    assert re.search(r"blk\.\d+\.(attn|ffn)_\w+\.weight +q8_0 +0\.0", out)
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["models"][1]["kld"] > 0
    assert len(record["layers"]["q8_0"]) == 30 * 7 + 2  # the tied embedding stands there twice
    assert "</html>" in (tmp_path / "x.html").read_text()


def test_what_is_missing_is_said(capsys, f16_model):
    assert cli.main(["perplexity", str(f16_model)]) == 2
    assert "pass one with -f FILE" in capsys.readouterr().err
    assert cli.main(["perplexity", str(f16_model), "--kl-divergence"]) == 2
    assert "--kl-divergence-base FILE" in capsys.readouterr().err


def test_options_without_effect_on_a_divergence_are_named(capsys, f16_model, tmp_path):
    args = ["perplexity", f16_model, "--kl-divergence", "--kl-divergence-base", tmp_path / "none.kld", "--chunks", 3]
    assert cli.main([str(arg) for arg in (*args, "-f", tmp_path / "other.txt")]) == 1
    said = capsys.readouterr().err
    for flag in ("--chunks", "-f"):
        assert f"warning: {flag} has no effect: the chunks are those of the base file" in said
