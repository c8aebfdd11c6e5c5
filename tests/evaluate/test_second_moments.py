"""Second moments from text to file: collecting, saving and resuming, quantizing with them, records and verify."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.evaluate.imatrix import collect as collecting
from quantkit.evaluate.imatrix import saved_run
from quantkit.evaluate.imatrix.second_moments import MomentsCollector, MomentsForm, plan_blocks, sizes
from quantkit.formats import gguf, imatrix, provenance
from quantkit.runtime.loading import load
from tests.evaluate import test_imatrix
from tests.recipe.configs import DEEPSEEK_V3
from tests.runtime.test_experts import moe  # noqa: F401

CTX = test_imatrix.CTX
model, run, text = test_imatrix.model, test_imatrix.run, test_imatrix.text  # fixtures


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    return {n: t.shape for n, t in gguf.open(path).tensors.items() if n.startswith("blk.") and len(t.shape) > 1}


@pytest.mark.parametrize("form", ["full", "blocks:96"])
def test_sums_are_those_of_what_enters(moe: Path, form: str) -> None:  # noqa: F811
    """Against plain numpy, with the vectors that another observer takes down."""
    runner = load(moe)
    blocks = plan_blocks(shapes_of(moe), MomentsForm.parse(form), None)
    collector, seen = collecting.Collector(moments=MomentsCollector(blocks)), {}

    def observe(name, x, number=0, matrices=1):
        collector.observe(name, x, number, matrices)
        seen.setdefault((name, number), []).append(x.reshape(-1, x.shape[-1]).astype(np.float64))

    runner.observer = observe
    for seed in (1, 2):
        runner.hidden_sequences(np.random.default_rng(seed).integers(0, 320, (3, 16)), slice(0, 0))
    found = collector.result("t", 16)
    moments = found.second_moments
    same = {n: moments[f"blk.0.{n}.weight"] for n in ("attn_q", "attn_k", "attn_v", "ffn_gate_exps", "ffn_up_exps")}
    assert same["attn_q"] is same["attn_k"] is same["attn_v"]
    assert same["ffn_gate_exps"] is same["ffn_up_exps"]
    assert len(same["ffn_up_exps"].tokens) == 1  # one for all experts, of all that was routed
    assert same["ffn_up_exps"].tokens[0] == found["blk.0.ffn_up_exps.weight"].counts.sum()
    assert moments["blk.0.ffn_down_exps.weight"].tokens.tolist() == found["blk.0.ffn_down_exps.weight"].counts.tolist()
    for (name, number), parts in seen.items():
        if name not in moments or len(moments[name].tokens) < found[name].values.shape[0]:
            continue
        x = np.concatenate(parts)
        c = np.nan_to_num(x.T @ x / np.sqrt(np.outer((x * x).sum(0), (x * x).sum(0))))
        block = moments[name].block
        places = np.arange(x.shape[1]) // block
        expected = np.where(places[:, None] == places, c, 0)
        np.fill_diagonal(expected, 1)
        np.testing.assert_allclose(moments[name].correlation(number), expected, atol=2**-10)


def test_a_saved_run_keeps_them(moe: Path, tmp_path: Path) -> None:  # noqa: F811
    blocks = plan_blocks(shapes_of(moe), MomentsForm.parse("blocks:128"), None)
    collector = collecting.Collector(moments=MomentsCollector(blocks))
    runner = load(moe)
    runner.observer = collector.observe
    runner.hidden_sequences(np.random.default_rng(1).integers(0, 320, (3, 16)), slice(0, 0))
    saved_run.SavedRun("r", [collecting.TextState(collector)]).save(tmp_path / "r")
    again = saved_run.SavedRun.load(tmp_path / "r").texts[0].collector
    for one in (collector, again):
        runner.observer = one.observe
        runner.hidden_sequences(np.random.default_rng(2).integers(0, 320, (3, 16)), slice(0, 0))
    a, b = (one.result("t", 16).second_moments for one in (collector, again))
    assert a.keys() == b.keys()
    assert all(a[name].sha256() == b[name].sha256() for name in a)


def test_from_text_to_file(run, model, text, tmp_path) -> None:
    """`quantize` encodes each matrix as the type does with its dense second moments; the records say so."""
    measured, out = tmp_path / "x.gguf", tmp_path / "q.gguf"
    options = ["-f", text, "-c", CTX, "--chunks", 3, "--no-ppl"]
    run("imatrix", model, *options, "-o", measured, "--second-moments", "full")
    found = imatrix.read(measured)
    said = run("quantize", "--imatrix", measured, "--pure", model, out, "IQ4_K")
    assert "inputs come from fewer than 4 tokens a column: " in said
    file, source = gguf.open(out), gguf.open(model)
    changed = 0
    for name in ("blk.0.attn_v.weight", "blk.1.attn_output.weight", "blk.0.ffn_up_exps.weight"):
        made, values = file.tensors[name], found[name].values
        rows = made.shape[-2]
        for matrix in (0, len(values) - 1):
            x = source.tensors[name].decode_rows(matrix * rows, (matrix + 1) * rows)
            h = found.second_moments[name].dense(values[matrix], matrix)
            expected = made.type.quantize(x, values[matrix], second_moments=h)
            assert np.array_equal(made.rows(matrix * rows, (matrix + 1) * rows), expected)
            changed += not np.array_equal(expected, made.type.quantize(x, values[matrix]))
    assert changed >= 4
    record = provenance.records(file.metadata)["blk.0.attn_v.weight"]
    assert provenance.has_moments(record.importance)
    assert record.codec != provenance.codec("iq4_k", "normal")
    sources = ["--source", model, "--imatrix"]
    assert "a rerun would give the same bytes" in run("verify", out, *sources, measured)
    run("imatrix", "convert", measured, tmp_path / "x.dat")
    assert not imatrix.read(tmp_path / "x.dat").second_moments
    assert "a rerun is without" in run("verify", out, *sources, tmp_path / "x.dat")
    for out_of in (("x.dat",), ("x.gguf", "--no-second-moments")):
        run(
            "quantize",
            "--imatrix",
            tmp_path / out_of[0],
            *out_of[1:],
            "--pure",
            model,
            tmp_path / "plain.gguf",
            "IQ4_K",
        )
        plain = gguf.open(tmp_path / "plain.gguf").tensors["blk.0.attn_v.weight"]
        x, values = source.tensors[plain.name].dequantize(), found[plain.name].values[0]
        assert np.mean(plain.data != plain.type.quantize(x, values)) < 0.01  # legacy sums differ in the last bit
    run("imatrix", model, *options, "-o", tmp_path / "other.gguf", "--second-moments", "blocks:64")
    said = run("verify", out, *sources, tmp_path / "other.gguf")
    assert "its second moments have changed" in said


def test_show_lists_inputs(run, model, text, tmp_path) -> None:
    measured = tmp_path / "x.gguf"
    run("imatrix", model, "-f", text, "-c", CTX, "--chunks", 2, "--no-ppl", "-o", measured, "--second-moments", "full")
    said = run("imatrix", "show", measured)
    assert "blk.0.attn_q.weight, attn_k.weight, attn_v.weight" in said
    assert "inputs saw fewer than 4 tokens a column" in said
    record = json.loads(run("imatrix", "show", measured, "--json"))
    row = next(r for r in record["second_moments"] if r["name"] == "blk.0.attn_q.weight")
    assert row["shared_with"] == ["blk.0.attn_k.weight", "blk.0.attn_v.weight"]
    h = imatrix.read(measured)
    dense = h.second_moments[row["name"]].dense(h[row["name"]].values[0]).astype(np.float64)
    values = np.linalg.eigvalsh(dense)
    assert row["effective_rank"] == pytest.approx(values.sum() ** 2 / (values**2).sum(), rel=1e-4)
    assert row["first_share"] == pytest.approx(values[-1] / values.sum(), rel=1e-3)


def test_sizes_and_limits() -> None:
    wide = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    wide |= {"ffn_gate": (512, 64), "ffn_up": (512, 64), "ffn_down": (64, 512)}
    wide |= {"ffn_up_exps": (4, 512, 64), "ffn_down_exps": (4, 64, 512)}
    shapes = {f"blk.0.{name}.weight": shape for name, shape in wide.items()}
    full = plan_blocks(shapes, MomentsForm.parse("full"), None)
    memory, stored = sizes(shapes, full)
    assert memory == 4 * (4 * 64**2 + 5 * 512**2)
    assert stored == 2 * (4 * 64 * 65 // 2 + 5 * 512 * 513 // 2)
    auto = plan_blocks(shapes, MomentsForm.parse("auto"), memory - 1)
    assert sizes(shapes, auto)[0] < memory
    assert {name for name in shapes if auto[name] != full[name]} == {"blk.0.ffn_down.weight"}
    assert plan_blocks(shapes, MomentsForm.parse("auto"), memory) == full
    with pytest.raises(QuantkitError, match="second moments need"):
        plan_blocks(shapes, MomentsForm.parse("full"), memory - 1)
    for text in ("half", "blocks:", "blocks:0", "blocks:x", "", "full:3", "blocks:²"):
        with pytest.raises(QuantkitError, match="known are full, blocks"):
            MomentsForm.parse(text)


def test_sizes_are_known_before(run, model, text, tmp_path) -> None:
    """`--dry-run` gives the bytes that the file then has, and says nothing of a config that it cannot know."""
    measured, forms = tmp_path / "x.gguf", ("full", "blocks:64")
    for form in forms:
        options = ["-f", text, "-c", CTX, "--chunks", 1, "--no-ppl", "--second-moments", form]
        run("imatrix", model, *options, "-o", measured)
        stored = {id(m): m.nbytes for m in imatrix.read(measured).second_moments.values()}
        record = json.loads(run("imatrix", model, "--dry-run", "--second-moments", form, "--json"))
        assert record["forms"] == [{"form": form, "memory_bytes": record["forms"][0]["memory_bytes"],
                                    "file_bytes": sum(stored.values())}]  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    said = run("imatrix", tmp_path / "config.json", "--dry-run")
    assert "full                 381.81 GB     95.49 GB" in said
    assert "is 1,000,000,000" in run("imatrix", tmp_path / "config.json", "--dry-run", "--second-moments", "full",
                                     "--second-moments-size", "1G", status=1)  # fmt: skip


def test_bad_options(run, model, text, tmp_path) -> None:
    command = ["imatrix", model, "-f", text, "-c", CTX, "--chunks", 1]
    assert "name in .gguf" in run(*command, "--second-moments", "full", "-o", tmp_path / "x.dat", status=1)
    assert "add --second-moments" in run(*command, "--second-moments-size", "1G", "-o", tmp_path / "x.gguf", status=1)
    said = run(*command, "--second-moments", "full", "--second-moments-size", "1M", "-o", tmp_path / "x.gguf", status=1)
    assert "--second-moments-size is 1,000,000" in said


def test_eight_bits_use_them_at_effort_best(run, model, text, tmp_path) -> None:
    measured, name = tmp_path / "x.gguf", "blk.0.attn_v.weight"
    run("imatrix", model, "-f", text, "-c", CTX, "--chunks", 2, "--no-ppl", "-o", measured, "--second-moments", "full")
    entry, x = imatrix.read(measured)[name].values[0], gguf.open(model).tensors[name].dequantize()
    h = imatrix.read(measured).second_moments[name].dense(entry, 0)
    for effort in ("normal", "best"):
        out = tmp_path / f"{effort}.gguf"
        run("quantize", "--imatrix", measured, "--pure", "--effort", effort, model, out, "Q8_0")
        file = gguf.open(out)
        made, record = file.tensors[name], provenance.records(file.metadata)[name]
        without = made.type.quantize(x, entry, effort=effort)
        assert np.array_equal(made.data, made.type.quantize(x, entry, second_moments=h, effort=effort))
        assert np.array_equal(made.data, without) == (effort == "normal")
        assert provenance.has_moments(record.importance) == (effort == "best")
        assert "a rerun would give the same bytes" in run("verify", out, "--source", model, "--imatrix", measured)
