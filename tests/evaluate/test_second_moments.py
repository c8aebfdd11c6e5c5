"""Second moments from text to file: collecting, saving and resuming, quantizing with them, records and verify."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quantkit.cli import main
from quantkit.codegen import blas, thread_pool
from quantkit.errors import QuantkitError
from quantkit.evaluate.imatrix import collect as collecting
from quantkit.evaluate.imatrix import saved_run
from quantkit.evaluate.imatrix.input_sums import ProductSketch, random_matrix
from quantkit.evaluate.imatrix.second_moments import (
    InputForm,
    MomentsCollector,
    MomentsForm,
    describe,
    measured_shapes,
    plan_forms,
    sizes,
)
from quantkit.formats import gguf, imatrix, provenance
from quantkit.formats.imatrix import factors, second_moments
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.evaluate import test_imatrix
from tests.recipe.configs import DEEPSEEK_V3
from tests.runtime.test_experts import moe  # noqa: F401

CTX = test_imatrix.CTX
model, run, text = test_imatrix.model, test_imatrix.run, test_imatrix.text  # fixtures


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    return {n: t.shape for n, t in gguf.open(path).tensors.items() if n.startswith("blk.") and len(t.shape) > 1}


def check_encoded(made: gguf.Tensor, source: gguf.Tensor, found: imatrix.Imatrix, name: str) -> int:
    """Checks that a tensor's first and last matrix are encoded with their dense H; how many differ from plain ones."""
    values, rows = found[name].values, made.shape[-2]
    changed = 0
    for matrix in (0, len(values) - 1):
        x = source.decode_rows(matrix * rows, (matrix + 1) * rows)
        h = found.second_moments[name].dense(values[matrix], matrix)
        expected = made.type.quantize(x, values[matrix], second_moments=h)
        assert np.array_equal(made.rows(matrix * rows, (matrix + 1) * rows), expected)
        changed += not np.array_equal(expected, made.type.quantize(x, values[matrix]))
    return changed


@pytest.mark.parametrize("form", ["full", "blocks:96"])
def test_sums_are_those_of_what_enters(moe: Path, form: str) -> None:  # noqa: F811
    """Against plain numpy, with the vectors that another observer takes down."""
    runner = load(moe)
    forms = plan_forms(shapes_of(moe), MomentsForm.parse(form), None)
    collector, seen = collecting.Collector(moments=MomentsCollector(forms)), {}

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


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35", "kimi-linear", "deepseek4", "minimax-m3", "nemotron_h"])
def test_predicted_sizes_are_those_of_what_is_measured(tmp_path: Path, arch: str) -> None:
    """Weights that share an input count once; convolutions, tables and norms do not count."""
    runner = load(written(tmp_path / "m.gguf", arch))
    shapes = measured_shapes(runner.weights.values(), process_output=True)
    forms = plan_forms(shapes, MomentsForm.parse("full"), None)
    collector = collecting.Collector(True, MomentsCollector(forms), "attention")
    runner.weighs_tokens, runner.observer = True, collector.observe
    tokens = np.random.default_rng(1).integers(0, 200, (8, 16))
    runner.project(runner.hidden_sequences(tokens, slice(0, 16)).reshape(128, -1))
    found = {id(m): m.nbytes for m in collector.result("t", 16).second_moments.values()}
    sums = [block for m in collector.moments.sums.values() for blocks in m.blocks for block in blocks]
    assert sizes(shapes, forms) == (sum(block.nbytes for block in sums), sum(found.values()))


@pytest.mark.parametrize("form", ["blocks:128", "rank:40"])
def test_a_saved_run_keeps_them(moe: Path, tmp_path: Path, form: str) -> None:  # noqa: F811
    forms = plan_forms(shapes_of(moe), MomentsForm.parse(form), None)
    collector = collecting.Collector(moments=MomentsCollector(forms))
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
    assert {moments.form for moments in a.values()} == {form}


def of_rank(count: int, n: int, rank: int, seed: int = 0) -> np.ndarray:
    """Vectors float32[count, n] within a space of `rank` dimensions; columns differ in size, one is 0 at first."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, rank)) @ rng.standard_normal((rank, n)) * np.exp(2 * rng.standard_normal(n))
    x[: count // 2, n // 3] = 0
    x[:, n // 2] = 0
    return x.astype(np.float32)


def sketched(x: np.ndarray, rank: int, batch: int) -> ProductSketch:
    sketch = ProductSketch.zeros(2, x.shape[1], rank)
    for first in range(0, len(x), batch):
        sketch.add(x[first : first + batch], 1)
    return sketch


def correlations(x: np.ndarray) -> np.ndarray:
    length = np.sqrt((x.astype(np.float64) ** 2).sum(0))
    unit = np.divide(x, length, out=np.zeros(x.shape), where=length > 0)
    c = unit.T @ unit
    np.fill_diagonal(c, 1)
    return c


def correlation_of(sketch: ProductSketch) -> np.ndarray:
    n = sketch.squares.shape[1]
    return imatrix.SecondMoments(n, n, sketch.packed(), sketch.tokens, rank=sketch.rank).correlation(1)


@pytest.mark.parametrize(("n", "rank", "batch"), [(300, 20, 7), (513, 3, 64), (40, 10, 50), (96, 48, 1000)])
def test_a_sketch_is_the_product(n: int, rank: int, batch: int) -> None:
    """Against plain float64; correlations are exact where the vectors have no more dimensions than the rank."""
    x = of_rank(400, n, rank - 1)  # and one more, because of the column that is 0 at first
    sketch = sketched(x, rank, batch)
    scaled = x.astype(np.float64) / sketch.scales[1]
    k = min(n, 4 * rank)
    expected = scaled.T @ (scaled @ random_matrix(n, k) if k < n else scaled)
    size = np.sqrt(np.diagonal(scaled.T @ scaled))[:, None] * np.sqrt(np.trace(scaled.T @ scaled))
    assert (np.abs(sketch.products[1] - expected) <= 1e-5 * size + 1e-30).all()
    np.testing.assert_allclose(sketch.squares[1], (x.astype(np.float64) ** 2).sum(0), rtol=1e-6)
    assert sketch.tokens.tolist() == [0, 400]
    assert not sketch.products[0].any()
    assert np.abs(correlation_of(sketch) - correlations(x)).max() < 5e-3
    assert not sketch.packed()[0].any()  # of nothing: no correlations


def test_a_sketch_is_near_the_eigenvectors() -> None:
    """With a tail of small eigenvalues: not much worse than the best factors of the whole matrix."""
    x = of_rank(3000, 400, 400, seed=1) * 0.1 + of_rank(3000, 400, 30, seed=2)
    c = correlations(x)
    best = factors.expand(factors.fit(np.linalg.cholesky(c + 1e-9 * np.eye(400)), 24).astype(np.float32))
    errors = [np.linalg.norm(found - c) for found in (correlation_of(sketched(x, 24, 512)), best, np.eye(400))]
    assert errors[1] < errors[0] < 1.6 * errors[1]
    assert errors[0] < 0.6 * errors[2]


def test_sketches_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of threads of ours and of BLAS."""
    x, found, functions = of_rank(300, 700, 50), set(), blas._functions()
    before = functions[0]() if functions else 0
    for threads in (1, 2, 3):
        monkeypatch.setattr(thread_pool, "default_threads", lambda count=threads: count)
        if functions:
            functions[1](threads)
        found.add(sketched(x, 16, 100).packed().tobytes())
    if functions:
        functions[1](before)
    assert len(found) == 1


def test_factors_from_text_to_file(run, model, text, tmp_path) -> None:
    """Measured, shown, merged, used and refused, by the commands."""
    options = ["-f", text, "-c", CTX, "--no-ppl", "--second-moments", "rank:24"]
    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "both.gguf"]
    for path, first in zip(paths, ("0", "2")):
        run("imatrix", model, *options, "--chunks", 2, "--from-chunk", first, "-o", path)
    run("imatrix", "merge", *paths[:2], "-o", paths[2])
    said = run("imatrix", "show", paths[2])
    assert "rank:24" in said
    assert "128  " in said  # tokens
    record = json.loads(run("imatrix", "show", paths[2], "--json"))["second_moments"]
    assert {row["form"] for row in record} == {"rank:24"}
    assert record[0]["tokens"] == 4 * CTX
    out = tmp_path / "q.gguf"
    run("quantize", "--imatrix", paths[2], "--pure", model, out, "IQ4_K")
    found, file, source = imatrix.read(paths[2]), gguf.open(out), gguf.open(model)
    changed = 0
    for name in ("blk.0.attn_v.weight", "blk.1.ffn_down_exps.weight"):
        changed += check_encoded(file.tensors[name], source.tensors[name], found, name)
    assert changed >= 2
    assert "a rerun would give the same bytes" in run("verify", out, "--source", model, "--imatrix", paths[2])
    options[-1] = "rank:23"
    run("imatrix", model, *options, "--chunks", 1, "-o", tmp_path / "other.gguf")
    said = run("imatrix", "merge", paths[0], tmp_path / "other.gguf", "-o", tmp_path / "c.gguf", status=1)
    assert "rank:24" in said
    assert "rank:23" in said


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
        changed += check_encoded(file.tensors[name], source.tensors[name], found, name)
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


def test_the_output_matrix_is_measured_on_request(run, model, text, tmp_path) -> None:
    """Here it is the embedding too; what is before it are the states after the last norm."""
    measured, out = tmp_path / "x.gguf", tmp_path / "q.gguf"
    options = ["--process-output", "--second-moments", "full"]
    run("imatrix", model, "-f", text, "-c", CTX, "--chunks", 1, "--no-ppl", "-o", measured, *options)
    found = imatrix.read(measured)
    h = found.second_moments["token_embd.weight"].dense(found["token_embd.weight"].values[0])
    stored = {id(m): m.nbytes for m in found.second_moments.values()}
    record = json.loads(run("imatrix", model, "--dry-run", *options, "--json"))
    assert record["forms"][0]["file_bytes"] == sum(stored.values())
    run("quantize", "--imatrix", measured, "--only", "^token_embd", model, out, "Q4_0", "--pure")
    made, x = (
        gguf.open(out).tensors["token_embd.weight"],
        gguf.open(model).tensors["token_embd.weight"].decode_rows(0, 8),
    )
    values = found["token_embd.weight"].values[0]
    assert np.array_equal(made.rows(0, 8), made.type.quantize(x, values, second_moments=h))
    assert not np.array_equal(made.rows(0, 8), made.type.quantize(x, values))


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
    full = plan_forms(shapes, MomentsForm.parse("full"), None)
    memory, stored = sizes(shapes, full)
    assert memory == 4 * (4 * 64**2 + 5 * 512**2)
    assert stored == 2 * (4 * 64 * 65 // 2 + 5 * 512 * 513 // 2)
    auto = plan_forms(shapes, MomentsForm.parse("auto"), memory - 1)
    assert sizes(shapes, auto)[0] < memory
    assert {name: form.key for name, form in auto.items() if form != full[name]} == {
        "blk.0.ffn_down_exps.weight": "rank:32"
    }  # what takes most; a sketch for rank 128 would have all 512 columns
    assert plan_forms(shapes, MomentsForm.parse("auto"), memory) == full
    with pytest.raises(QuantkitError, match="second moments need"):
        plan_forms(shapes, MomentsForm.parse("full"), memory - 1)
    for text in ("half", "blocks:", "blocks:0", "blocks:x", "", "full:3", "blocks:²", "rank:", "rank:0", "rank:-1"):
        with pytest.raises(QuantkitError, match="known are full, rank, rank:N, blocks"):
            MomentsForm.parse(text)


def test_auto_takes_the_best_that_fits() -> None:
    """From full to rank:128, rank:32 and blocks:64, what takes most memory first, weights of one input together."""
    shapes = {f"blk.{i}.{name}.weight": (8, 2048) for i in range(2) for name in ("attn_q", "attn_k", "attn_output")}
    shapes |= {f"blk.{i}.ffn_down.weight": (8, 8192) for i in range(2)}
    auto, full = MomentsForm.parse("auto"), sizes(shapes, plan_forms(shapes, MomentsForm.parse("full"), None))[0]

    def chosen(limit: int) -> list[int | str]:
        forms = plan_forms(shapes, auto, limit)
        assert sizes(shapes, forms)[0] <= limit
        assert all(forms[f"blk.{i}.attn_q.weight"] == forms[f"blk.{i}.attn_k.weight"] for i in range(2))
        return [forms[f"blk.{i}.{name}.weight"].key for name in ("ffn_down", "attn_q", "attn_output") for i in range(2)]

    wide, narrow = InputForm(0, 128).memory(8192), InputForm(0, 128).memory(2048)
    assert chosen(full) == [8192, 8192, 2048, 2048, 2048, 2048]
    assert chosen(full - 1) == ["rank:128", 8192, 2048, 2048, 2048, 2048]
    assert chosen(2 * wide + 4 * narrow) == ["rank:128"] * 6
    assert chosen(2 * wide + 4 * narrow - 1) == ["rank:32"] + ["rank:128"] * 5
    least = sum(n * 64 * 4 for n in (8192, 8192, 2048, 2048, 2048, 2048))
    assert chosen(least) == [64] * 6
    with pytest.raises(QuantkitError, match=f"is {least - 1:,}; take"):
        chosen(least - 1)


def test_a_rank_that_is_no_smaller_is_full() -> None:
    """Factors of half the columns take as many bytes as all of a symmetric matrix."""
    form = MomentsForm.parse("rank:48")
    assert [form.of(n) for n in (97, 96, 32)] == [InputForm(0, 48), InputForm(96), InputForm(32)]
    assert InputForm(0, 48).stored(97) < InputForm(97).stored(97)
    assert InputForm(0, 48).stored(96) > InputForm(96).stored(96) - 2 * 96
    for made in (InputForm(0, 48), InputForm(96)):
        assert InputForm.of(made.key) == made
    assert MomentsForm.parse("rank").of(4096) == InputForm(0, 128)


def test_sizes_are_known_before(run, model, text, tmp_path) -> None:
    """`--dry-run` gives the bytes that the file then has, and says nothing of a config that it cannot know."""
    measured, forms = tmp_path / "x.gguf", ("full", "blocks:64", "rank:16", "rank:200")
    for form in forms:
        options = ["-f", text, "-c", CTX, "--chunks", 1, "--no-ppl", "--second-moments", form]
        run("imatrix", model, *options, "-o", measured)
        stored = {id(m): m.nbytes for m in imatrix.read(measured).second_moments.values()}
        record = json.loads(run("imatrix", model, "--dry-run", "--second-moments", form, "--json"))
        assert record["forms"] == [{"form": form, "memory_bytes": record["forms"][0]["memory_bytes"],
                                    "file_bytes": sum(stored.values())}]  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    said = run("imatrix", tmp_path / "config.json", "--dry-run")
    assert "full                 357.56 GB     89.42 GB" in said
    assert "rank:32 " in said
    sized = ("imatrix", tmp_path / "config.json", "--dry-run", "--second-moments-size", "1G")
    assert "add --second-moments auto" in run(*sized, status=2)
    assert "is 1,000,000,000" in run("imatrix", tmp_path / "config.json", "--dry-run", "--second-moments", "full",
                                     "--second-moments-size", "1G", status=1)  # fmt: skip


def test_shared_moments_are_shown_with_the_importance_of_all_experts(rng) -> None:
    """Expert 0 saw nothing: its importance of 1 is none."""
    values = np.vstack([np.ones(8), rng.gamma(0.3, 1, (2, 8))]).astype(np.float32)
    x = rng.standard_normal((64, 8))
    packed = second_moments.pack([(x.T @ x).astype(np.float32)])[None]
    moments = imatrix.SecondMoments(8, 8, packed, np.array([64]))
    entry = imatrix.Entry(values, np.array([0, 10, 54]), 1)
    (row,) = describe(imatrix.Imatrix({"a": entry}, 1, "t", 64, second_moments={"a": moments}))
    h = moments.dense((10 * values[1] + 54 * values[2]) / np.float32(64)).astype(np.float64)
    assert row.effective_rank == pytest.approx(np.trace(h) ** 2 / (h * h).sum(), rel=1e-4)


def test_matrices_that_are_measured_otherwise_are_not_added_to(run, model, text, tmp_path) -> None:
    """Before the run: what it measures would be lost, or could not be merged."""
    plain, moments, out = (tmp_path / f"{name}.gguf" for name in ("plain", "moments", "o"))
    command = ("imatrix", model, "-f", text, "-c", CTX, "--chunks", 1, "--no-ppl", "-o")
    run(*command, plain)
    measured = ("--second-moments", "blocks:64", "--token-weights", "none", "--no-process-output")
    run(*command, moments, *measured)
    said = run(*command, out, "--second-moments", "blocks:64", "--in-file", plain, status=1)
    assert "plain.gguf: measured with --token-weights none, this run has attention; add --token-weights none" in said
    for more, needle in (
        ((*measured, "--in-file", plain), "blk.0.attn_q.weight: none in the file, blocks:64 in this run"),
        (("--in-file", moments), "blk.0.attn_q.weight: blocks:64 in the file, none in this run"),
        ((*measured, "--second-moments", "full", "--in-file", moments), "blocks:64 in the file, full in this run"),
    ):
        assert needle in run(*command, out, *more, status=1)
    assert not list(tmp_path.glob("o.gguf*"))
    run(*command, out, *measured, "--in-file", moments)
    assert imatrix.read(out).second_moments.keys() == imatrix.read(moments).second_moments.keys()


def test_a_merge_that_loses_second_moments_says_so(tmp_path, capsys) -> None:
    entry, paths = imatrix.Entry(np.ones((1, 32), np.float32), np.array([9]), 1), []
    moments = imatrix.SecondMoments(32, 32, np.ones((1, 528), np.float16), np.array([9]))
    for name, found in (("a", {"w": moments}), ("b", {})):
        paths.append(str(tmp_path / f"{name}.gguf"))
        imatrix.write(paths[-1], imatrix.Imatrix({"w": entry}, 1, "t", 9, second_moments=found))
    assert main(["imatrix", "merge", *paths, "-o", str(tmp_path / "c.gguf")]) == 0
    assert "note: 1 weights, such as w, have second moments in some of the files only" in capsys.readouterr().err


def test_bad_options(run, model, text, tmp_path) -> None:
    command = ["imatrix", model, "-f", text, "-c", CTX, "--chunks", 1]
    assert "name in .gguf" in run(*command, "--second-moments", "full", "-o", tmp_path / "x.dat", status=1)
    assert "add --second-moments" in run(*command, "--second-moments-size", "1G", "-o", tmp_path / "x.gguf", status=2)
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
