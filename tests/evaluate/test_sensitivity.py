"""Costs of matrices: errors and divergences are what a plain computation gives; a killed run is resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError, QuantkitError, UnsupportedError
from quantkit.evaluate.sensitivity import run
from quantkit.evaluate.sensitivity.encoding_errors import EncodingErrors, encoding_errors, row_errors
from quantkit.evaluate.sensitivity.probes import EncodedTensor, Probes
from quantkit.evaluate.sensitivity.run import SensitivityOptions, sensitivity
from quantkit.evaluate.text import chunked
from quantkit.formats import gguf
from quantkit.formats.atomic import JOURNAL, PARTIAL_JOB
from quantkit.formats.imatrix import Entry, Imatrix, second_moments
from quantkit.formats.imatrix import write as write_imatrix
from quantkit.formats.imatrix.second_moments import SecondMoments, pack
from quantkit.pipelines.second_moments import PreparedMoments, inputs_of
from quantkit.placement.allocation import costs as costs_file
from quantkit.runtime.loading import load
from tests.evaluate.conftest import rewrite

Q4_0, Q8_0 = types.get("q4_0"), types.get("q8_0")


class Stored(gguf.Tensor):
    """A float32 tensor in memory."""

    def __init__(self, name: str, values: np.ndarray):
        super().__init__(name, values.shape, types.get("f32"), values.nbytes, 0, Path("memory"))
        self._file = values.reshape(-1).view(np.uint8)


def moments_of(rng: np.random.Generator, n: int) -> tuple[Imatrix, np.ndarray]:
    """An importance matrix with full second moments for "blk.0.attn_q.weight", and H float32[n, n]."""
    x = (rng.standard_normal((4 * n, n)) @ rng.standard_normal((n, n))).astype(np.float32)
    h = x.T @ x / len(x)
    stored = SecondMoments(n, n, pack([h])[None], np.array([1 << 40]))
    entry = Entry(np.diagonal(h).copy()[None], np.array([len(x)]), 1)
    return Imatrix({"blk.0.attn_q.weight": entry}, second_moments={"blk.0.attn_q.weight": stored}), h


@pytest.mark.parametrize("metric", ["plain", "importance", "second moments"])
def test_errors_are_those_of_the_plain_sum(
    metric: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_moments, "OF_THE_TEXT", 0.0)
    w = rng.standard_normal((48, 64)).astype(np.float32)
    imatrix, h = moments_of(rng, 64)
    if metric == "importance":
        imatrix = Imatrix(imatrix.entries)
    moments = None if metric == "plain" else PreparedMoments(imatrix)
    found, probe, errors = encoding_errors(Stored("blk.0.attn_q.weight", w), Q4_0, [Q4_0, Q8_0], moments, rows=48)
    assert found == metric
    metrics = {"plain": np.eye(64), "importance": np.diag(np.diagonal(h)), "second moments": h.astype(np.float64)}

    def error(refined: bool) -> float:
        importance, moments = None, None
        if metric != "plain":
            importance = imatrix["blk.0.attn_q.weight"].columns(64)[0]
        if refined:
            moments = imatrix.second_moments["blk.0.attn_q.weight"].dense(importance)
        e = Q4_0.dequantize(Q4_0.quantize(w, importance, second_moments=moments), 64).astype(np.float64) - w
        return float(np.einsum("ij,jk,ik->", e, metrics[metric], e))

    # Second moments choose the codes too. Correlations are stored as float16.
    assert probe == pytest.approx(error(metric == "second moments"), rel=2e-3)
    if metric == "second moments":
        assert probe < 0.9 * error(refined=False)
    assert errors["q4_0"][0] == probe
    assert errors["q8_0"][0] < 0.03 * probe
    assert errors["q8_0"][1] == 0  # all rows were measured


def test_a_sample_is_as_accurate_as_it_says(rng: np.random.Generator) -> None:
    w = (rng.standard_normal((4096, 64)) * rng.lognormal(size=(4096, 1))).astype(np.float32)
    stored, kinds = Stored("w.weight", w), [types.get("q5_0")]
    _, of_all, whole = encoding_errors(stored, Q4_0, kinds, rows=4096)
    _, probe, errors = encoding_errors(stored, Q4_0, kinds)
    ratio, true = errors["q5_0"][0] / probe, whole["q5_0"][0] / of_all
    error = errors["q5_0"][1] / probe
    assert 0 < error < 0.1 * true
    assert abs(ratio - true) < 4 * error


def test_experts_are_sampled_with_their_own_importance(rng: np.random.Generator) -> None:
    w = rng.standard_normal((4, 32, 32)).astype(np.float32)
    importance = np.ones((4, 32), np.float32) * np.array([[1], [2], [3], [4]], np.float32)
    imatrix = Imatrix({"blk.0.ffn_up_exps.weight": Entry(importance, np.full(4, 10), 1)})
    found, _ = row_errors(Stored("blk.0.ffn_up_exps.weight", w), [Q4_0], PreparedMoments(imatrix), rows=128)
    values = found.reshape(4, 32).mean(axis=1)
    assert values / values[0] == pytest.approx([1, 2, 3, 4], rel=0.3)


def test_a_matrix_has_the_inputs_of_its_entry_or_of_a_stand_in() -> None:
    values = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    moments = SecondMoments(4, 4, np.ones((1, 10), np.float16), np.array([10]))
    entry = Entry(values, np.full(2, 10), 1)
    measured = Imatrix({"blk.0.ffn_up_exps.weight": entry}, second_moments={"blk.0.ffn_up_exps.weight": moments})
    for name in ("blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_exps.weight"):
        found, importance, stored = inputs_of(name, 4, 1, measured)
        assert found == "blk.0.ffn_up_exps.weight"
        assert stored is moments
        assert np.array_equal(importance, values[1])
    assert inputs_of("blk.0.ffn_down_exps.weight", 4, 1, measured) == (None, None, None)
    assert inputs_of("blk.0.ffn_up_exps.weight", 4, 1, None) == (None, None, None)
    with pytest.raises(DataError, match="8 importance values do not fit rows of 3 columns"):
        inputs_of("blk.0.ffn_up_exps.weight", 3, 1, measured)


def test_probes_are_the_divergence_of_a_file(f16_model: Path, tmp_path: Path, golden: Path) -> None:
    names = ["token_embd.weight", "blk.0.ffn_down.weight", "blk.17.attn_v.weight", "blk.29.ffn_up.weight"]
    model = load(f16_model)
    chunks = chunked(model.tokenizer, golden / "eval.txt", 32, 2)

    def encoded(tensor: gguf.Tensor) -> gguf.Tensor:
        x = tensor.type.dequantize(tensor.data, tensor.shape[-1])
        return EncodedTensor(tensor, Q4_0, Q4_0.quantize(x))

    found = dict(Probes(model, chunks, encoded).run(names))
    assert list(found) == names
    p = _log_probabilities(model, chunks.inputs, chunks.rows)
    for name in names:
        path = rewrite(f16_model, tmp_path / "x.gguf", "q4_0", lambda t, name=name: t.name == name)  # type: ignore[misc]
        q = _log_probabilities(load(path), chunks.inputs, chunks.rows)
        kld = float((np.exp(p) * (p - q)).sum(axis=1).mean())
        assert found[name].kld == pytest.approx(kld, rel=1e-3, abs=1e-7)
        assert 0 < found[name].error < found[name].kld
    again = _log_probabilities(model, chunks.inputs, chunks.rows)
    np.testing.assert_array_equal(again, p)  # the model is as it was


def _log_probabilities(model: Any, inputs: np.ndarray, rows: slice) -> np.ndarray:
    hidden = model.hidden_sequences(inputs, rows)
    x = model.project(hidden.reshape(-1, hidden.shape[2])).astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    found: np.ndarray = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return found


FEW = SensitivityOptions(types=("q5_0", "iq4_k"), ctx_size=16, chunks=1, rows=8)


class Killed(Exception):
    """Ends a run."""


def test_a_killed_run_is_resumed_with_the_same_numbers(
    f16_model: Path, tmp_path: Path, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = golden / "eval.txt", tmp_path / "costs.json"
    free = run._free
    some = ("token_e", "blk.28.")
    monkeypatch.setattr(run, "_free", lambda model, matrix: [t for t in free(model, matrix) if t.name[:7] in some])
    whole = sensitivity(f16_model, text, tmp_path / "whole.json", FEW)
    assert set(whole.tensors["blk.28.attn_q.weight"].errors) == {"q5_0"}  # also what rows of 576 have for iq4_k
    assert len(whole.tensors) == 8
    assert all(t.kld > 0 and t.probe_error > 0 and t.metric == "plain" for t in whole.tensors.values())
    journal = out.with_name(out.name + PARTIAL_JOB + JOURNAL)
    resumed_at = []
    for kill_at in (3, 6, 11):

        def progress(done: int, total: int, name: str, kill_at: int = kill_at) -> None:
            if not name:
                resumed_at.append(done)
            if done == kill_at:
                raise Killed

        with pytest.raises(Killed):
            sensitivity(f16_model, text, out, FEW, progress=progress)
        assert not out.exists()
        assert journal.exists()
    assert resumed_at == [0, 3, 6]
    with pytest.raises(DataError, match="another run"):
        sensitivity(f16_model, text, out, SensitivityOptions(types=("q5_0",), ctx_size=16, chunks=1, rows=8))
    sensitivity(f16_model, text, out, FEW)
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not journal.exists()
    assert costs_file.read(out).tensors == whole.tensors


def test_a_probe_that_changes_nothing(
    f16_model: Path, tmp_path: Path, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = EncodingErrors("plain", 0.0, {"q4_0": (0.0, 0.0), "q6_0": (1.5, 0.1)})
    monkeypatch.setattr(run, "encoding_errors", lambda *_, **__: none)
    with pytest.raises(DataError, match=r"\.weight: the probe type has no error, q6_0 has 1\.5: .* --probe"):
        sensitivity(f16_model, golden / "eval.txt", tmp_path / "c.json", FEW)
    assert not (tmp_path / "c.json").exists()


def test_what_cannot_be_measured(f16_model: Path, tmp_path: Path, golden: Path) -> None:
    text = golden / "eval.txt"
    with pytest.raises(UnsupportedError, match="row by row"):
        sensitivity(f16_model, text, tmp_path / "c.json", SensitivityOptions(types=("iq4_nl_r4",)))
    with pytest.raises(UnsupportedError, match="--probe iq4_nl_r4: measured are types"):
        sensitivity(f16_model, text, tmp_path / "c.json", SensitivityOptions(probe="iq4_nl_r4"))
    with pytest.raises(DataError, match="--types f16,bf16: floats have no errors to measure"):
        sensitivity(f16_model, text, tmp_path / "c.json", SensitivityOptions(types=("f16", "bf16")))
    with pytest.raises(QuantkitError, match=r"f16\.gguf"):
        sensitivity(f16_model, text, f16_model, FEW)
    with pytest.raises(DataError, match="--probe f16: stores matrices without an error"):
        sensitivity(f16_model, text, tmp_path / "c.json", SensitivityOptions(probe="f16"))
    name, other = "blk.0.attn_q.weight", tmp_path / "other.gguf"
    write_imatrix(other, Imatrix({name: Entry(np.ones((1, 64), np.float32), np.array([9]), 1)}))
    with pytest.raises(
        DataError, match=rf"{name}: the importance matrix has 1 x 64 values for it, the tensor needs 1 x 576"
    ):
        sensitivity(f16_model, text, tmp_path / "c.json", SensitivityOptions(imatrix=other))
    assert not list(tmp_path.glob("c.json*"))


def test_a_value_that_is_not_finite_is_found(f16_model: Path, tmp_path: Path, golden: Path) -> None:
    path, name = tmp_path / "nan.gguf", "blk.1.attn_q.weight"
    shutil.copyfile(f16_model, path)
    with open(path, "r+b") as file:
        file.seek(gguf.open(f16_model).tensors[name].offset)
        file.write(np.array([np.nan], np.float16).tobytes())
    with pytest.raises(DataError, match=rf"nan\.gguf: {name} made nan .* the tensor itself is not finite in 1 row"):
        sensitivity(path, golden / "eval.txt", tmp_path / "c.json", FEW)
    assert not (tmp_path / "c.json").exists()
