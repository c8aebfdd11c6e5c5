"""Models whose layers read more than hidden states run one layer at a time, with the numbers of whole runs.

Per-layer embeddings need tokens, the last layers keys and values of earlier ones (Gemma 3n, Gemma 4 E2B and E4B), and
Gemma 3n passes several residual streams on. Layers of GLM-5.2 attend to what an earlier one has selected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.evaluate.chunk_runs import evaluate_chunks
from quantkit.evaluate.imatrix.one_pass import CalibrationOptions, quantize_calibrated
from quantkit.evaluate.imatrix.run import ImatrixOptions, imatrix
from quantkit.evaluate.layer_similarity import layer_similarity
from quantkit.evaluate.layers.checkpoint_model import ComputedTensor
from quantkit.evaluate.layers.layer_by_layer import LayerRun, chunk_batches, chunks_layer_by_layer
from quantkit.evaluate.layers.parts import parts
from quantkit.evaluate.layers.shared_keys import needs_shared_keys, read_by
from quantkit.evaluate.layers.tensor_errors import tensor_errors
from quantkit.evaluate.sensitivity.probes import EncodedTensor, Probes
from quantkit.evaluate.sensitivity.run import SensitivityOptions, sensitivity
from quantkit.evaluate.text import Chunks
from quantkit.formats import gguf
from quantkit.pipelines import api
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.options import QuantizeOptions
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from quantkit.types import QuantType
from tests.archs.checkpoints import GEMMA_E, tiny
from tests.archs.files import written
from tests.evaluate.conftest import rewrite
from tests.test_architectures import OTHERS

Q4_0 = types.get("q4_0")
CTX = 60
INPUTS = np.random.default_rng(3).integers(2, 320, (4, CTX))
CHUNKS = Chunks(INPUTS, INPUTS, "tokens")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4", GEMMA_E),
    "gemma3n": ("gemma3n", {}),
    "gemma3n-shared": ("gemma3n", OTHERS["gemma3n"] | {"vocab_size": 320}),
}


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, change = MODELS[request.param]
    return written(tmp_path_factory.mktemp("shared") / f"{request.param}.gguf", arch, tokenizer=True, **change)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last two layers attend to the positions that the second selects, 24 of 60."""
    kinds = ["full", "full", "shared", "shared"]
    return written(tmp_path_factory.mktemp("sparse") / "m.gguf", "glm-dsa", index_topk=24, indexer_types=kinds)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog 0123456789 " * 12)
    return path


def readers(model: Model) -> dict[int, int]:
    """The layers that read keys of another, with that one."""
    return {block.layer: source for block in model.blocks for source in read_by(block)}


def test_logits_are_those_of_a_whole_run(path: Path) -> None:
    """Batches of two chunks, in two of which keys and values wait while the other runs."""
    model = load(path)
    whole = dict(evaluate_chunks(model, INPUTS, 2 * CTX))
    for index, logits in chunks_layer_by_layer(model, INPUTS, 2 * CTX):
        assert np.array_equal(logits, whole.pop(index))
    assert not whole


@pytest.mark.parametrize("how", [{}, {"devices": "cpu:0,cpu:1"}, {"profile": True}], ids=str)
def test_selections_are_those_of_a_whole_run(sparse: Path, how: dict[str, Any]) -> None:
    """The last batch has fewer chunks than the one before."""
    whole = dict(evaluate_chunks(load(sparse), INPUTS[:3], 2 * CTX))
    for index, logits in chunks_layer_by_layer(load(sparse, **how), INPUTS[:3], 2 * CTX):
        np.testing.assert_allclose(logits, whole.pop(index), atol=1e-4)
    assert not whole


def test_a_layer_that_runs_twice_attends_to_the_same(sparse: Path) -> None:
    """As with --calibrate --propagate quantized: the first time measures it."""
    model, batches = load(sparse), chunk_batches(4, CTX, 2 * CTX)
    once, twice = (LayerRun(model, INPUTS, batches) for _ in range(2))
    for block in model.blocks:
        once.advance(block)
        twice.advance(block, keep=False)
        twice.advance(block)
    np.testing.assert_array_equal(twice.hidden, once.hidden)


def test_keys_are_passed_on_only_where_they_are_read(path: Path) -> None:
    model = load(path)
    blocks, of = model.blocks, readers(model)
    assert bool(model.shared_key_bytes) == bool(of) == (path.stem != "gemma3n")
    for done in range(len(blocks) + 1):
        expected = any(source < done <= layer for layer, source in of.items())
        assert needs_shared_keys(blocks[:done], blocks[done:]) == expected


def encoded(kind: QuantType, tensor: gguf.Tensor) -> gguf.Tensor:
    return EncodedTensor(tensor, kind, kind.quantize(tensor.dequantize().reshape(-1, tensor.shape[-1])))


def test_probes_are_the_divergence_of_a_file(path: Path, tmp_path: Path) -> None:
    """Of matrices before, in and behind the layers whose keys others read, and of the table of all layers."""
    model = load(path)
    last = len(model.blocks) - 1
    source = max(readers(model).values(), default=1)
    require_probes(path, tmp_path, ["token_embd.weight", "per_layer_token_embd.weight", "blk.0.ffn_down.weight",
                                    f"blk.{source}.attn_k.weight", f"blk.{last}.inp_gate.weight",
                                    f"blk.{last}.attn_q.weight"])  # fmt: skip


def test_probes_select_positions_of_their_chunk(sparse: Path, tmp_path: Path) -> None:
    """Of matrices whose layer selects, and of layers that attend to what is selected."""
    require_probes(sparse, tmp_path, ["blk.1.indexer.attn_k.weight", "blk.2.attn_kv_a_mqa.weight",
                                      "blk.3.attn_output.weight"])  # fmt: skip


def require_probes(path: Path, tmp_path: Path, names: list[str]) -> None:
    model = load(path)
    found = dict(Probes(model, CHUNKS, lambda tensor: encoded(Q4_0, tensor)).run(names))
    assert list(found) == names
    p = log_probabilities(model)
    for name in names:
        file = rewrite(path, tmp_path / "x.gguf", "q4_0", lambda t, name=name: t.name == name)  # type: ignore[misc]
        kld = float((np.exp(p) * (p - log_probabilities(load(file)))).sum(axis=1).mean())
        assert found[name].kld == pytest.approx(kld, rel=1e-3, abs=1e-7)
        assert kld > 1e-5
        alone = Probes(load(path), CHUNKS, lambda tensor: encoded(Q4_0, tensor))
        assert dict(alone.run([name])) == {name: found[name]}


def log_probabilities(model: Model) -> np.ndarray:
    assert isinstance(CHUNKS.rows, slice)
    hidden = model.hidden_sequences(INPUTS, CHUNKS.rows)
    x = model.project(hidden.reshape(-1, hidden.shape[2])).astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    found: np.ndarray = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return found


def test_costs_of_all_matrices(path: Path, text: Path, tmp_path: Path) -> None:
    options = SensitivityOptions(types=("q8_0",), ctx_size=32, chunks=2, rows=8)
    found = sensitivity(path, text, tmp_path / "costs.json", options)
    model = load(path)
    assert all(f"blk.{block.layer}.ffn_down.weight" in found.tensors for block in model.blocks)
    assert {name for name, tensor in found.tensors.items() if tensor.kld < 1e-7} == {
        name for name in model.hparams.unread & found.tensors.keys() if "norm" not in name
    }


def test_errors_of_tensors_are_those_of_one_tensor(path: Path, tmp_path: Path) -> None:
    """The others have their own values, also those that made the keys."""
    model = load(path)
    source = max(readers(model).values(), default=1)
    last = len(model.blocks) - 1
    names = [f"blk.{source}.attn_k.weight", f"blk.{last}.attn_q.weight", f"blk.{last}.proj.weight"]
    require_errors(path, tmp_path, names)


def test_errors_of_tensors_that_select_positions_are_their_own(sparse: Path, tmp_path: Path) -> None:
    """The layer behind attends to what the reference's own tensors select."""
    require_errors(sparse, tmp_path, ["blk.1.indexer.attn_k.weight", "blk.2.attn_output.weight"], "q4_0")


def require_errors(path: Path, tmp_path: Path, names: list[str], kind: str = "q8_0") -> None:
    model = load(path)
    file = gguf.open(rewrite(path, tmp_path / "q.gguf", kind, lambda t: t.name in names))
    found = {error.name: error.error for error in tensor_errors(model, file, INPUTS)}
    assert found.keys() == set(names)
    for name in names:
        alone = gguf.open(rewrite(path, tmp_path / "one.gguf", kind, lambda t, name=name: t.name == name))  # type: ignore[misc]
        (error,) = tensor_errors(model, alone, INPUTS)
        assert error.error == found[name] > 0


def test_projections_of_streams_are_measured_where_they_are_computed(path: Path) -> None:
    model = load(path)
    first, *_, last = (part.weights for part in parts(model, INPUTS))
    altup = {"altup_proj.weight", "altup_unembd_proj.weight"} & set(model.weights)
    assert altup & set(first) == altup - {"altup_unembd_proj.weight"}
    assert altup & set(last) == altup - {"altup_proj.weight"}


def test_similarity_is_that_of_the_states_of_a_whole_run(path: Path) -> None:
    model = load(path)
    cosines = np.zeros(len(model.blocks))
    for ids in INPUTS:
        x, span = model.embed(ids), Span(0, CTX, model.new_cache(CTX), tokens=ids)
        for number, block in enumerate(model.blocks):
            y = model.run_block(block, x, [span])
            cosines[number] += np.sum((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1))
            x = y
    np.testing.assert_allclose(layer_similarity(model, CHUNKS), cosines / INPUTS.size, rtol=1e-4)


SETTINGS = CalibrationOptions(ctx_size=CTX, chunks=4, batch_size=2 * CTX)


def test_calibration_gives_the_bytes_of_two_steps(path: Path, text: Path, tmp_path: Path) -> None:
    options = ImatrixOptions(ctx_size=CTX, chunks=4, batch_size=2 * CTX, process_output=True, second_moments="full")
    matrix = imatrix(path, text, tmp_path / "i.gguf", options).matrix  # files round second moments
    api.quantize(path, tmp_path / "two.gguf", "IQ4_NL", QuantizeOptions(imatrix=matrix))
    quantize_calibrated(path, tmp_path / "one.gguf", "IQ4_NL", text, None, SETTINGS)
    made, wanted = (gguf.open(tmp_path / name).tensors for name in ("one.gguf", "two.gguf"))
    assert made.keys() == wanted.keys()
    for name, tensor in made.items():
        assert tensor.type is wanted[name].type, name
        assert np.array_equal(tensor.data, wanted[name].data), name


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", MODELS)
def test_calibration_of_a_checkpoint(name: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a converted file. Its metadata are rounded to float32, and Gemma 3n's gates depend on them. The
    tables are never computed as a whole."""
    most: dict[str, int] = {}
    rows = ComputedTensor._rows

    def noted(tensor: ComputedTensor, start: int, stop: int) -> np.ndarray:
        most[tensor.name] = max(most.get(tensor.name, 0), stop - start)
        return rows(tensor, start, stop)

    monkeypatch.setattr(ComputedTensor, "_rows", noted)
    arch, change = MODELS[name]
    tiny(tmp_path / "hf", "bfloat16", arch=arch, **change)
    convert_checkpoint(tmp_path / "hf", tmp_path / "c.gguf", "auto")
    for source, out in ((tmp_path / "hf", "a.gguf"), (tmp_path / "c.gguf", "b.gguf")):
        quantize_calibrated(source, tmp_path / out, "IQ4_NL", text, None, SETTINGS)
    made, wanted = (gguf.open(tmp_path / out).tensors for out in ("a.gguf", "b.gguf"))
    assert [n for n, tensor in made.items() if not np.array_equal(tensor.data, wanted[n].data)] == []
    assert 0 < most["per_layer_token_embd.weight"] < 64


def test_calibration_by_quantized_layers_resumes(path: Path, text: Path, tmp_path: Path) -> None:
    """Layers that are done run again as quantized, and make the keys that the others read."""
    settings = CalibrationOptions(ctx_size=CTX, chunks=4, batch_size=2 * CTX, propagate="quantized")
    quantize_calibrated(path, tmp_path / "whole.gguf", "IQ4_NL", text, None, settings)
    last = len(load(path).blocks) - 1

    def stop(done: int, total: int, label: str) -> None:
        if label.startswith(f"blk.{last}."):
            raise Stop

    with pytest.raises(Stop):
        quantize_calibrated(path, tmp_path / "out.gguf", "IQ4_NL", text, None, settings, progress=stop)
    assert quantize_calibrated(path, tmp_path / "out.gguf", "IQ4_NL", text, None, settings).resumed > 0
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
