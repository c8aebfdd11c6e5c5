"""`quantize --calibrate`: the same file as by an importance matrix, from a checkpoint too, resumed, and its errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import DataError, OptionError, QuantkitError
from quantkit.evaluate.imatrix import collect as collecting
from quantkit.evaluate.imatrix.one_pass import CalibrationOptions, quantize_calibrated
from quantkit.evaluate.imatrix.second_moments import MomentsCollector, MomentsForm, measured_shapes, plan_forms
from quantkit.evaluate.text import chunked
from quantkit.formats import gguf, imatrix, provenance
from quantkit.pipelines import api
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.options import QuantizeOptions
from quantkit.pipelines.resume import unfinished
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs.checkpoints import tiny
from tests.evaluate import test_imatrix

CTX, CHUNKS = test_imatrix.CTX, 5
model, run, text = test_imatrix.model, test_imatrix.run, test_imatrix.text  # fixtures
SMALLER = QuantizeOptions(token_embedding_type="q8_0")  # else the embedding, 12 million weights, takes most of the time
SETTINGS = CalibrationOptions(ctx_size=CTX, chunks=CHUNKS, batch_size=2 * CTX)


def measured(runner: Model, text: Path, form: str = "full") -> imatrix.Imatrix:
    """What `imatrix` measures, in memory."""
    forms = plan_forms(measured_shapes(runner.weights.values(), True), MomentsForm.parse(form), None)
    state = collecting.TextState(collecting.Collector(True, MomentsCollector(forms), "attention"))
    runner.weighs_tokens = True
    chunks = chunked(runner.tokenizer, text, CTX, CHUNKS)
    found, _ = collecting.collect(
        runner, chunks, process_output=True, with_perplexity=False, n_batch=2 * CTX, state=state
    )
    return imatrix.fill_missing(found, "weight-one")


def tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    return {name: (t.type.name, t.data.tobytes()) for name, t in gguf.open(path).tensors.items()}


@pytest.fixture
def two_steps(model: Path, text: Path, tmp_path: Path) -> Path:
    out = tmp_path / "two-steps.gguf"
    api.quantize(model, out, "IQ4_K", QuantizeOptions(imatrix=measured(load(model), text)))
    return out


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bytes_as_in_two_steps(model: Path, text: Path, two_steps: Path, tmp_path: Path, threads: int) -> None:
    options = QuantizeOptions(threads=threads)
    found = quantize_calibrated(model, tmp_path / "o.gguf", "IQ4_K", text, options, SETTINGS)
    assert tensors(tmp_path / "o.gguf") == tensors(two_steps)
    assert found.bytes == (tmp_path / "o.gguf").stat().st_size
    plain = tmp_path / "plain.gguf"
    api.quantize(model, plain, "IQ4_K")
    assert tensors(plain) != tensors(two_steps)


def test_a_file_has_the_values_in_memory(model: Path, text: Path, tmp_path: Path) -> None:
    """So calibration gives the bytes that a file gives. Counts are 160, and any number for experts."""
    found = measured(load(model), text)
    imatrix.write(tmp_path / "i.gguf", found)
    read = imatrix.read(tmp_path / "i.gguf")
    assert all(np.array_equal(read[name].values, entry.values) for name, entry in found.entries.items())


def test_factors_are_those_of_two_steps(model: Path, text: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, second_moments="rank:24")
    quantize_calibrated(model, tmp_path / "o.gguf", "IQ4_K", text, SMALLER, settings)
    matrix = measured(load(model), text, "rank:24")
    assert {m.form for m in matrix.second_moments.values()} == {"rank:24"}
    api.quantize(model, tmp_path / "two.gguf", "IQ4_K", replace(SMALLER, imatrix=matrix))
    assert tensors(tmp_path / "o.gguf") == tensors(tmp_path / "two.gguf")


def test_quantized_layers_make_the_next_inputs(model: Path, text: Path, two_steps: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    settings = CalibrationOptions(ctx_size=CTX, chunks=CHUNKS, batch_size=2 * CTX, propagate="quantized")
    quantize_calibrated(model, out, "IQ4_K", text, SMALLER, settings)
    made, before = gguf.open(out), gguf.open(two_steps)
    first = [name for name in made.tensors if name.startswith("blk.0.")]
    second = [name for name in made.tensors if name.startswith("blk.1.") and len(made.tensors[name].shape) > 1]
    assert all(np.array_equal(made.tensors[name].data, before.tensors[name].data) for name in first)
    runner = load(model)
    runner.weights = {**runner.weights, **{name: made.tensors[name] for name in first}}
    found = measured(runner, text)
    source, differ = gguf.open(model), 0
    for name in second:
        tensor = made.tensors[name]
        if tensor.type.name == source.tensors[name].type.name:
            continue
        rows = tensor.shape[-2]
        for matrix in (0, len(found[name].values) - 1):
            here = slice(matrix * rows, (matrix + 1) * rows)
            values = found[name].values[matrix]
            h = found.second_moments[name].dense(values, matrix) if tensor.type.uses_second_moments else None
            x = source.tensors[name].decode_rows(here.start, here.stop)
            assert np.array_equal(tensor.data[here], tensor.type.quantize(x, values, second_moments=h)), name
            differ += not np.array_equal(tensor.data[here], before.tensors[name].data[here])
    assert differ >= 4


class Stop(Exception):
    pass


@pytest.mark.parametrize("propagate", ["original", "quantized"])
def test_an_interrupted_run_resumes(model: Path, text: Path, tmp_path: Path, propagate: str) -> None:
    settings = CalibrationOptions(ctx_size=CTX, chunks=CHUNKS, batch_size=2 * CTX, propagate=propagate)
    options = QuantizeOptions() if propagate == "original" else SMALLER
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    quantize_calibrated(model, whole, "IQ3_K", text, options, settings)

    def stop(done: int, total: int, label: str) -> None:
        if label == "blk.1.ffn_up_exps.weight":
            raise Stop

    with pytest.raises(Stop):
        quantize_calibrated(model, out, "IQ3_K", text, options, settings, progress=stop)
    assert not out.exists()
    left = unfinished(out)
    assert left is not None
    assert 0 < left[0] < left[1]
    found = quantize_calibrated(model, out, "IQ3_K", text, options, settings)
    assert found.resumed == left[0]
    assert out.read_bytes() == whole.read_bytes()
    assert [path.name for path in tmp_path.glob("out*")] == ["out.gguf"]


def test_another_text_does_not_resume(model: Path, text: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, label: str) -> None:
        if label.startswith("blk.1."):
            raise Stop

    other, out = tmp_path / "other.txt", tmp_path / "out.gguf"
    other.write_text(text.read_text()[::-1])
    with pytest.raises(Stop):
        quantize_calibrated(model, out, "IQ4_K", other, SMALLER, SETTINGS, progress=stop)
    found = quantize_calibrated(model, out, "IQ4_K", text, SMALLER, SETTINGS)
    assert found.resumed == found.reused == 0


def test_from_a_checkpoint(text: Path, tmp_path: Path) -> None:
    """The file that conversion and calibration in two steps give, with blocks of second moments."""
    tiny(tmp_path / "hf", "bfloat16")
    convert_checkpoint(tmp_path / "hf", tmp_path / "c.gguf", "auto")
    settings = CalibrationOptions(ctx_size=CTX, chunks=2, second_moments="blocks:32")
    for source, out in ((tmp_path / "hf", "a.gguf"), (tmp_path / "c.gguf", "b.gguf")):
        quantize_calibrated(source, tmp_path / out, "IQ4_NL", text, QuantizeOptions(), settings)
    assert tensors(tmp_path / "a.gguf") == tensors(tmp_path / "b.gguf")
    records = provenance.records(gguf.open(tmp_path / "a.gguf").metadata)
    assert provenance.has_moments(records["blk.0.ffn_up.weight"].importance)


def test_commands(run: Any, model: Path, text: Path, two_steps: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    options = ["--calibrate", text, "--calibrate-ctx", CTX, "--calibrate-chunks", CHUNKS]
    options += ["--token-embedding-type", "q8_0"]  # as SMALLER
    said = run("quantize", model, out, "IQ4_K", *options)
    assert f"calibrating on {CHUNKS} chunks of {CTX} tokens" in said
    metadata = gguf.open(out).metadata
    assert "propagate original" in str(metadata["quantkit.calibration"])
    said = run("verify", out, "--source", model)
    assert "the importance was measured while the file was written" in said
    run("quantize", model, tmp_path / "h.gguf", "IQ4_K", *options, "--hide-imatrix")
    assert "quantkit.calibration" not in gguf.open(tmp_path / "h.gguf").metadata
    again = json.loads(run("quantize", model, out, "IQ4_K", *options, "--json"))
    assert again["bytes"] == out.stat().st_size


def test_bad_options(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    def refused(*options: object, status: int = 1) -> str:
        said: str = run("quantize", model, tmp_path / "o.gguf", "IQ4_K", *options, status=status)
        assert not (tmp_path / "o.gguf").exists()
        return said

    few = ["--calibrate", text, "--calibrate-ctx", CTX]
    assert "drop one of them" in refused(*few, "--imatrix", tmp_path / "x.gguf", status=2)
    assert "nothing of an older file" in refused(*few, "--partial-requant", status=2)
    assert "'original', 'quantized'" in refused(*few, "--propagate", "both", status=2)
    assert "known are full, rank, rank:N, blocks" in refused(*few, "--second-moments", "half", status=2)
    assert "pass --calibrate TEXT" in refused("--propagate", "original", status=2)
    assert "second moments need" in refused(*few, "--second-moments-size", "1M")
    (tmp_path / "short.txt").write_text("a few words")
    assert "need at least" in refused("--calibrate", tmp_path / "short.txt")


def test_errors_of_the_function(model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        quantize_calibrated(model, tmp_path / "o", "IQ4_K", text, QuantizeOptions(imatrix="x"), SETTINGS)
    with pytest.raises(DataError, match="the model was trained with 128; take shorter chunks"):
        quantize_calibrated(model, tmp_path / "o", "IQ4_K", text, None, CalibrationOptions(ctx_size=160, chunks=1))
    with pytest.raises(QuantkitError, match="missing"):
        quantize_calibrated(model, tmp_path / "o", "IQ4_K", text, None, CalibrationOptions(missing_experts="none"))
