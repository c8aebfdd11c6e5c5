"""The quantize loop: right bytes, the same for any thread count, nothing half-done."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit import recipe, types
from quantkit.cli import main
from quantkit.errors import DataError, QuantkitError, UnknownNameError, UnsupportedError
from quantkit.formats import imatrix
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.pipelines import quantize as loop
from quantkit.pipelines.quantize import Override, quantize_with_plan
from quantkit.pipelines.resume import unfinished

ROWS, COLUMNS, EXPERTS = 48, 256, 3


def write_model(path: Path, rng: np.random.Generator, **values: np.ndarray) -> Path:
    """A small F32 file: an embedding, a matrix, experts, a norm; `values` replaces tensors by class."""
    shapes = {
        "token_embd.weight": (ROWS, COLUMNS),
        "blk.0.attn_q.weight": (ROWS, COLUMNS),
        "blk.0.ffn_up_exps.weight": (EXPERTS, ROWS, COLUMNS),
        "blk.0.attn_norm.weight": (COLUMNS,),
    }
    metadata = Metadata({"general.architecture": "llama", "general.name": "tiny"})
    metadata.set("general.file_type", 0, "u32")
    metadata.set("llama.context_length", 128, "u32")
    metadata.set("general.alignment", 64, "u32")
    metadata.set("llama.block_count", 1, "u32")
    specs = [TensorSpec(name, shape, types.get("f32")) for name, shape in shapes.items()]
    with Writer(path, metadata, specs) as writer:
        for spec in specs:
            x = values.get(spec.name.split(".")[-2], rng.standard_normal(spec.shape)).astype("<f4")
            writer.write(spec.name, x.reshape(-1).view(np.uint8))
    return path


@pytest.fixture
def model(tmp_path: Path, rng: np.random.Generator) -> Path:
    return write_model(tmp_path / "in.gguf", rng)


def made_of(path: Path, target: str, rules: str = "", matrix: imatrix.Imatrix | None = None, **options: object):
    file = quantkit.open(path)
    return file, recipe.plan(
        file.tensors.values(), target, recipe.parse(rules), metadata=file.metadata, imatrix=matrix,
        options=recipe.Options(**options),
    )  # fmt: skip


def importance(rng: np.random.Generator) -> imatrix.Imatrix:
    names = {"blk.0.attn_q.weight": 1, "blk.0.ffn_up_exps.weight": EXPERTS}
    entries = {
        name: imatrix.Entry(rng.random((1, n * COLUMNS), np.float32) ** 4, np.ones(1, np.int64), 5)
        for name, n in names.items()
    }
    return imatrix.Imatrix(entries, 5, "some text")


# ------------------------------------------------------------------------------------------------------------ the bytes


def test_every_tensor_is_what_its_type_makes_of_it(
    model: Path, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts with their own slice of importance, chunks of odd sizes, an interleaved type."""
    matrix = importance(rng)
    file, plan = made_of(model, "Q8_0", "attn_q=q8_0_r8,exps=iq4_nl", matrix)
    out = tmp_path / "out.gguf"
    monkeypatch.setattr("quantkit.formats.provenance.PIECE_ELEMENTS", 11 * COLUMNS)  # 16 rows, the fewest
    written = quantize_with_plan(file, out, plan, imatrix=matrix, threads=2)
    back = quantkit.open(out)
    assert written.paths == [out]
    assert written.size == out.stat().st_size
    assert list(back.tensors) == list(file.tensors)
    for planned in plan.tensors:
        x = file.tensors[planned.name].dequantize()
        got = back.tensors[planned.name]
        assert (got.type, got.shape, got.nbytes) == (planned.type, planned.shape, planned.bytes_after)
        if len(planned.shape) == 3:
            weights = matrix[planned.importance].columns(COLUMNS)
            expected = np.concatenate([planned.type.quantize(x[e], weights[e]) for e in range(EXPERTS)])
            other = np.concatenate([planned.type.quantize(x[e], weights[0]) for e in range(EXPERTS)])
            assert not np.array_equal(expected, other)
        else:
            weights = None if planned.importance is None else matrix[planned.importance].columns(COLUMNS)[0]
            expected = planned.type.quantize(x.reshape(-1, x.shape[-1]), weights)
        np.testing.assert_array_equal(got.data, expected)


@pytest.mark.parametrize("target", ["Q8_0", "IQ4_NL"])
def test_the_same_bytes_for_any_thread_count(
    model: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.formats.provenance.PIECE_ELEMENTS", 5 * COLUMNS)
    contents = set()
    for threads in (1, 2, 5):
        file, plan = made_of(model, target, pure=True)
        contents.add(
            quantize_with_plan(file, tmp_path / f"{threads}.gguf", plan, threads=threads).paths[0].read_bytes()
        )
    assert len(contents) == 1


def test_interleaved_and_row_by_row_sources_give_the_same(model: Path, tmp_path: Path) -> None:
    file, plan = made_of(model, "Q8_0", "attn_q=q8_0_r8")
    quantize_with_plan(file, tmp_path / "r8.gguf", plan)
    again, plan = made_of(tmp_path / "r8.gguf", "F16", allow_requantize=True)
    quantize_with_plan(again, tmp_path / "f16.gguf", plan)
    x = again.tensors["blk.0.attn_q.weight"].dequantize().astype(np.float16)
    got = quantkit.open(tmp_path / "f16.gguf").tensors["blk.0.attn_q.weight"].dequantize()
    np.testing.assert_array_equal(got, x.astype(np.float32))


def test_f16_of_the_wheel_is_decode_and_round(smollm2_q4_1: Path, tmp_path: Path) -> None:
    file, plan = made_of(smollm2_q4_1, "F16", allow_requantize=True)
    quantize_with_plan(file, tmp_path / "f16.gguf", plan)
    back = quantkit.open(tmp_path / "f16.gguf")
    for name, tensor in file.tensors.items():
        x = tensor.dequantize()
        expected = x.astype("<f2") if x.ndim > 1 else x
        assert back.tensors[name].data.tobytes() == expected.tobytes(), name


# --------------------------------------------------------------------------------------------------------- the metadata


def test_metadata(model: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    matrix = importance(rng)
    file, plan = made_of(model, "Q8_0", "attn_q=q5_0", matrix)
    overrides = [Override.parse("llama.context_length=int:4096"), Override.parse("a.new=int:-7"),
                 Override.parse("general.name=str:other"), Override.parse("a.flag=bool:true")]  # fmt: skip
    quantize_with_plan(file, tmp_path / "o.gguf", plan, imatrix=matrix, imatrix_file="x" * 300, overrides=overrides)
    got = quantkit.open(tmp_path / "o.gguf").metadata
    kinds = {key: (value, got.kind(key)) for key, value in got.items()}
    assert "general.alignment" not in got
    assert list(got)[:5] == [
        "general.architecture", "general.name", "general.file_type", "llama.context_length", "llama.block_count"
    ]  # fmt: skip
    assert kinds["general.file_type"] == (7, "u32")
    assert kinds["general.quantization_version"] == (2, "u32")
    assert kinds["llama.context_length"] == (4096, "u32")
    assert kinds["a.new"] == (-7, "i32")
    assert kinds["a.flag"] == (True, "bool")
    assert kinds["general.name"] == ("other", "str")
    assert kinds["quantize.imatrix.file"] == ("x" * 127, "str")
    assert kinds["quantize.imatrix.dataset"] == ("some text", "str")
    assert kinds["quantize.imatrix.entries_count"] == (2, "i32")
    assert kinds["quantize.imatrix.chunks_count"] == (5, "i32")
    assert kinds["quantkit.version"] == (quantkit.__version__, "str")
    assert recipe.parse(got["quantkit.recipe"]).one_line() == "attn_q=q5_0"


def test_a_hidden_importance_matrix(model: Path, rng: np.random.Generator) -> None:
    matrix = importance(rng)
    file, plan = made_of(model, "Q8_0", "attn_q=q5_0", matrix)
    got = loop.output_metadata(file.metadata, plan, matrix, "secret.dat", hide_imatrix=True)
    kept = {key: (value, got.kind(key)) for key, value in got.items() if key.startswith("quantize.imatrix")}
    names = ("file", "dataset", "entries_count", "chunks_count")
    values = [("top_secret", "str")] * 2 + [(0, "i32")] * 2
    assert kept == {f"quantize.imatrix.{name}": value for name, value in zip(names, values)}


def test_the_file_type_comes_last_where_it_is_new(tmp_path: Path, model: Path) -> None:
    file, plan = made_of(model, "Q8_0")
    del file.metadata["general.file_type"]
    assert list(loop.output_metadata(file.metadata, plan))[-1] == "general.file_type"


@pytest.mark.parametrize("text", ["a", "a=int", "a=int:x", "a=bool:1", "a=u32:3", "=int:3"])
def test_bad_overrides(text: str) -> None:
    with pytest.raises(QuantkitError, match="is not KEY=TYPE:VALUE"):
        Override.parse(text)


def test_an_override_keeps_the_kind_or_is_refused(model: Path) -> None:
    file, plan = made_of(model, "Q8_0")
    for text in ("llama.context_length=str:x", "general.name=int:3", "llama.context_length=int:-1"):
        with pytest.raises(QuantkitError, match=r"llama\.context_length|general\.name"):
            loop.output_metadata(file.metadata, plan, overrides=[Override.parse(text)])


def test_copy_keeps_everything(model: Path, tmp_path: Path) -> None:
    file, plan = made_of(model, "COPY")
    file.metadata["quantkit.recipe"] = "as it was"
    quantize_with_plan(file, tmp_path / "copy.gguf", plan)
    back = quantkit.open(tmp_path / "copy.gguf")
    assert back.metadata["general.file_type"] == 0
    assert back.metadata["quantkit.recipe"] == "as it was"
    for name, tensor in file.tensors.items():
        np.testing.assert_array_equal(back.tensors[name].data, tensor.data)


def test_shards(model: Path, tmp_path: Path) -> None:
    file, plan = made_of(model, "Q8_0")
    whole = quantize_with_plan(file, tmp_path / "one.gguf", plan).paths[0]
    written = quantize_with_plan(file, tmp_path / "many.gguf", plan, split_max_tensors=2)
    assert [path.name for path in written.paths] == ["many-00001-of-00002.gguf", "many-00002-of-00002.gguf"]
    one, many = quantkit.open(whole), quantkit.open(written.paths[1])
    assert list(one.tensors) == list(many.tensors)
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(many.tensors[name].data, tensor.data)
    again, plan = made_of(written.paths[0], "F16", allow_requantize=True)
    back = quantize_with_plan(again, tmp_path / "joined.gguf", plan).paths[0]
    assert not [key for key in quantkit.open(back).metadata if key.startswith("split.")]


# ---------------------------------------------------------------------------------------------------------- what fails


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("target", ["Q8_0", "F16"])
def test_values_that_are_not_finite(tmp_path: Path, rng: np.random.Generator, value: float, target: str) -> None:
    x = rng.standard_normal((EXPERTS, ROWS, COLUMNS))
    x[1, 7, 19] = value
    bad = write_model(tmp_path / "bad.gguf", rng, ffn_up_exps=x)
    file, plan = made_of(bad, target)
    with pytest.raises(DataError) as error:
        quantize_with_plan(file, tmp_path / "out.gguf", plan, threads=2)
    assert f"{bad}: blk.0.ffn_up_exps.weight: row {ROWS + 7}, column 19 is {value}" in str(error.value)
    assert not (tmp_path / "out.gguf").exists()
    assert unfinished(tmp_path / "out.gguf") == (2, 4)
    x[1, 7, 19] = 0
    write_model(bad, np.random.default_rng(7), ffn_up_exps=x)
    file, plan = made_of(bad, target)
    said: list[str] = []
    written = quantize_with_plan(file, tmp_path / "out.gguf", plan, on_message=said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "out.gguf"]
    assert said == [f"resumed: {written.resumed} of 4 tensors were done"]


@pytest.mark.parametrize(("target", "large"), [("F16", 1e5), ("Q8_0", 3e7), ("Q4_0", 3e6)])
def test_weights_that_overflow_the_scales(tmp_path: Path, rng: np.random.Generator, target: str, large: float) -> None:
    x = rng.standard_normal((ROWS, COLUMNS))
    x[3, 5] = large
    file, plan = made_of(write_model(tmp_path / "bad.gguf", rng, attn_q=x), target, pure=True)
    with pytest.raises(DataError, match=r"bad\.gguf: blk\.0\.attn_q\.weight: row 3, column 5 .*(too large|not fit)"):
        quantize_with_plan(file, tmp_path / "out.gguf", plan)
    assert not (tmp_path / "out.gguf").exists()


def test_kept_floats_are_looked_at_and_copies_are_not(tmp_path: Path, rng: np.random.Generator) -> None:
    norm = np.ones(COLUMNS)
    norm[5] = np.nan
    bad = write_model(tmp_path / "bad.gguf", rng, attn_norm=norm)
    file, plan = made_of(bad, "Q8_0")
    with pytest.raises(DataError, match=r"blk\.0\.attn_norm\.weight: row 0, column 5 is nan"):
        quantize_with_plan(file, tmp_path / "out.gguf", plan)
    file, plan = made_of(bad, "COPY")
    quantize_with_plan(file, tmp_path / "out.gguf", plan)


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    spec = TensorSpec("blk.0.ffn_up_exps.weight", (6, 16384, COLUMNS), types.get("f32"))
    with Writer(tmp_path / "in.gguf", {"general.architecture": "llama"}, [spec]) as writer:
        for _ in range(6):
            writer.write(spec.name, np.zeros(spec.nbytes // 6, np.uint8))
    file, plan = made_of(tmp_path / "in.gguf", "Q8_0", pure=True)
    tracemalloc.start()
    try:
        quantize_with_plan(file, tmp_path / "out.gguf", plan, threads=2)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20 < spec.nbytes // 4
    finally:
        tracemalloc.stop()


def test_large_weights_that_fit_are_no_error(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((ROWS, COLUMNS))
    x[3, 5] = 60000.0
    file, plan = made_of(write_model(tmp_path / "in.gguf", rng, attn_q=x), "F16")
    quantize_with_plan(file, tmp_path / "out.gguf", plan)
    assert quantkit.open(tmp_path / "out.gguf").tensors["blk.0.attn_q.weight"].dequantize()[3, 5] == 60000.0


def test_the_input_is_never_overwritten(model: Path, tmp_path: Path) -> None:
    before = model.read_bytes()
    (tmp_path / "link.gguf").symlink_to(model)
    file, plan = made_of(model, "Q8_0")
    for out in (model, tmp_path / "link.gguf"):
        with pytest.raises(QuantkitError, match="this is the input"):
            quantize_with_plan(file, out, plan)
    assert model.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gguf", "link.gguf"]


def test_an_existing_output_is_replaced_only_by_a_complete_one(tmp_path: Path, rng: np.random.Generator) -> None:
    x = np.full((EXPERTS, ROWS, COLUMNS), np.nan)
    out = tmp_path / "out.gguf"
    out.write_bytes(b"GGUF, old")
    file, plan = made_of(write_model(tmp_path / "bad.gguf", rng, ffn_up_exps=x), "Q8_0")
    with pytest.raises(DataError):
        quantize_with_plan(file, out, plan)
    assert out.read_bytes() == b"GGUF, old"
    file, plan = made_of(write_model(tmp_path / "good.gguf", rng), "Q8_0")
    quantize_with_plan(file, out, plan)
    assert quantkit.open(out).metadata["general.file_type"] == 7


def test_types_without_codec_fail_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    file, plan = made_of(model, "Q8_0", "attn_q=i2_s")
    with pytest.raises(UnsupportedError, match=r"attn_q\.weight.*i2_s"):
        quantize_with_plan(file, tmp_path / "out.gguf", plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gguf"]


# -------------------------------------------------------------------------------------------------------- the command


def test_a_dry_run_is_the_real_plan_and_tells_the_real_sizes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    args = ["quantize", str(model), str(out), "q8_0", "1", "--custom-q", "attn_q=q5_0", "--json"]
    assert main([*args, "--dry-run"]) == 0
    dry = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert main(args) == 0
    real = json.loads(capsys.readouterr().out)
    assert (dry.pop("schema"), real["schema"]) == ("quantkit.plan/1", "quantkit.quantize/1")
    assert {key: real[key] for key in dry} == dry
    tensors = quantkit.open(out).tensors
    assert {t["name"]: (t["type"], t["bytes_after"]) for t in dry["tensors"]} == {
        name: (t.type.name, t.nbytes) for name, t in tensors.items()
    }
    assert real["paths"] == [str(out)]
    assert real["bytes"] == out.stat().st_size


def test_the_command_prints_plan_rules_and_warnings(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["quantize", str(model), str(tmp_path / "o.gguf"), "Q8_0", "--dry-run", "-v"]
    assert main([*args, "--custom-q", "attn_q=q5_0", "--custom-q", "nothing=q8_0"]) == 0
    said = capsys.readouterr().out
    assert "rule 1: attn_q=q5_0" in said
    assert "warning: rule 2 'nothing=q8_0' matches none of the 4 tensors" in said
    assert main([*args, "--custom-q", "nothing=q8_0", "--strict"]) == 1
    assert capsys.readouterr().err.startswith("error: rule 1 'nothing=q8_0'")


def test_rules_of_any_length_and_from_a_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["quantize", str(model), str(tmp_path / "o.gguf"), "Q8_0", "--dry-run", "--json", "--custom-q"]
    long = ",".join(f"blk\\.{i}\\.attn_q=q5_0" for i in range(300))
    (tmp_path / "rules.txt").write_text("# mine\n" + long.replace(",", "\n"))
    plans = []
    for rules in (long, str(tmp_path / "rules.txt")):
        assert main([*args, rules]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[1]["recipe"] == "# mine\n" + plans[0]["recipe"]
    assert plans[0] == plans[1] | {"recipe": plans[0]["recipe"]}
    assert len(plans[0]["rules"]) == 300


def test_a_dry_run_also_refuses_to_requantize(
    smollm2_q4_1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(smollm2_q4_1), str(tmp_path / "o"), "Q4_0", "--dry-run"]) == 1
    assert "--allow-requantize" in capsys.readouterr().err


def test_weights_of_the_imatrix_can_be_filtered(
    model: Path, tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    imatrix.write(tmp_path / "i.dat", importance(rng))
    args = ["quantize", str(model), str(tmp_path / "o.gguf"), "IQ4_NL", "--pure", "--dry-run", "--json"]
    args += ["--imatrix", str(tmp_path / "i.dat")]
    for flags, used in (((), 2), (("--include-weights", "exps"), 1), (("--exclude-weights", "blk"), 0)):
        assert main([*args, *flags]) == 0
        found = json.loads(capsys.readouterr().out)["tensors"]
        assert sum(t["importance"] is not None for t in found) == used
    assert main([*args, "--include-weights", "a", "--exclude-weights", "b"]) == 2


def test_an_interrupt_leaves_nothing_at_all(tmp_path: Path, rng: np.random.Generator) -> None:
    spec = TensorSpec("blk.0.ffn_up.weight", (1 << 16, COLUMNS), types.get("f32"))
    with Writer(tmp_path / "in.gguf", {"general.architecture": "llama"}, [spec]) as writer:
        writer.write(spec.name, rng.standard_normal(spec.shape, np.float32).view(np.uint8))
    command = [
        sys.executable,
        "-m",
        "quantkit",
        "quantize",
        "--pure",
        str(tmp_path / "in.gguf"),
        str(tmp_path / "out.gguf"),
    ]
    process = subprocess.Popen(
        [*command, "IQ4_NL", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which whoever runs the tests may ignore
    )
    while process.poll() is None and not list(tmp_path.glob("*.partial-*")):
        time.sleep(0.01)
    time.sleep(0.1)  # well into the loop
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1].strip().split("\n")
    assert said[-1] == "interrupted"
    assert process.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gguf"]


def test_effort_is_taken_checked_and_remembered(model, tmp_path):
    file, plan = made_of(model, "Q4_0", pure=True)
    found = {}
    for effort in ("fast", "best"):
        quantize_with_plan(file, tmp_path / effort, plan, effort=effort)
        out = quantkit.open(tmp_path / effort)
        assert out.metadata["quantkit.effort"] == effort
        found[effort] = out.tensors["blk.0.attn_q.weight"].data.tobytes()
    assert found["fast"] != found["best"]
    with pytest.raises(UnknownNameError, match="unknown effort 'quick'; known: best, fast, normal"):
        quantize_with_plan(file, tmp_path / "other", plan, effort="quick")
    assert not (tmp_path / "other").exists()
    again = made_of(tmp_path / "best", "Q8_0", pure=True, allow_requantize=True)[1]
    quantize_with_plan(quantkit.open(tmp_path / "best"), tmp_path / "again", again)
    assert "quantkit.effort" not in quantkit.open(tmp_path / "again").metadata
