"""MTP layers that draft: against torch, and files that have them apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit import types
from quantkit.archs.common import validate
from quantkit.cli import main
from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.evaluate.imatrix.one_pass import CalibrationOptions, quantize_calibrated
from quantkit.evaluate.imatrix.run import ImatrixOptions, imatrix
from quantkit.evaluate.mtp import Drafting, continued, measure
from quantkit.evaluate.text import chunked
from quantkit.formats import gguf
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.mtp import plan_head, plan_join, plan_trunk
from quantkit.pipelines.options import PlanOptions, QuantizeOptions
from quantkit.pipelines.rewrite import Rewrite
from quantkit.placement.kv_size import of_layers
from quantkit.recipe.models import from_config, read_config
from quantkit.runtime.mtp import MtpHead
from tests.archs.checkpoints import tiny
from tests.archs.files import changed, reshaped, written
from tests.archs.mtp_checkpoints import mtp_checkpoint

TOKENS = np.random.default_rng(1).integers(3, 300, (2, 24))


def log_probabilities(x: np.ndarray) -> np.ndarray:
    return np.asarray(x - np.logaddexp.reduce(x.astype(np.float64), axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("arch", "layers", "shared"),
    [("deepseek2", 1, False), ("deepseek2", 2, True), ("glm4moe", 1, True), ("deepseek32", 1, True),
     ("qwen35", 1, True), ("qwen35moe", 1, True), ("qwen3next", 1, True)],
)  # fmt: skip
def test_against_torch(tmp_path: Path, arch: str, layers: int, shared: bool) -> None:
    """Steps with a layer of their own, and steps that repeat the last layer."""
    made = mtp_checkpoint(tmp_path, arch, layers, shared)
    convert_checkpoint(made.directory, tmp_path / "m.gguf", "f32", mtp="keep")
    model = quantkit.load(tmp_path / "m.gguf", n_ctx=24)
    head = MtpHead(model)
    hidden = model.hidden_sequences(TOKENS, slice(None))
    found = head.states(TOKENS, hidden, 3, slice(2, None))
    assert [x.shape for x in found] == [(2, 24 - 3 - 2, 64)] * 3
    for sequence, start in ((0, 2), (1, 9), (1, 20)):
        for step, wanted in enumerate(made.draft(TOKENS[sequence], 3, start)):
            logits = head.project(step, found[step][sequence, start - 2][None])[0]
            assert np.abs(log_probabilities(logits) - log_probabilities(wanted)).max() < 2e-4, (step, start)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a text, a checkpoint, and its file with an MTP layer."""
    directory = tmp_path_factory.mktemp("mtp")
    made = mtp_checkpoint(directory, "glm4moe", shared=True)
    convert_checkpoint(made.directory, directory / "whole.gguf", "f32")
    words = ["deep", "mind", "layer", "draft", "token", "head"]
    rng = np.random.default_rng(0)
    (directory / "text.txt").write_text(" ".join(words[i] for i in rng.integers(0, 6, 400)))
    return directory


def contents(path: Path) -> dict[str, tuple[str, bytes]]:
    return {name: (t.type.name, t.data.tobytes()) for name, t in gguf.open(path).tensors.items()}


def test_apart_and_joined_again(files: Path) -> None:
    """The same file as before, and --mtp only the same as taking the layers out of it."""
    whole, trunk, head, joined = (files / f"{name}.gguf" for name in ("whole", "trunk", "head", "joined"))
    assert main(["mtp", "split", str(whole), "--trunk", str(trunk), "--head", str(head)]) == 0
    assert main(["mtp", "join", str(trunk), str(head), str(joined)]) == 0
    assert joined.read_bytes() == whole.read_bytes()
    assert main(["mtp", "split", str(whole), "--trunk", str(files / "x.gguf"), "--head", str(files / "x.gguf")]) == 2
    assert not (files / "x.gguf").exists()
    dropped = convert_checkpoint(files / "hf", files / "drop.gguf", "f32", mtp="drop")
    assert contents(trunk) == contents(dropped.paths[0])
    only = convert_checkpoint(files / "hf", files / "only.gguf", "f32", mtp="only")
    assert contents(head) == contents(only.paths[0])
    assert set(contents(head)) == {"token_embd.weight", "output_norm.weight", "output.weight"} | {
        name for name in contents(whole) if name.startswith("blk.3.")
    }
    keys, wanted = (dict(gguf.open(path).metadata) for path in (trunk, files / "drop.gguf"))
    assert {key for key in keys.keys() | wanted.keys() if keys.get(key) != wanted.get(key)} == {"general.size_label"}
    assert np.array_equal(quantkit.load(trunk).logits(TOKENS[0]), quantkit.load(whole).logits(TOKENS[0]))
    specs, _ = from_config(read_config(files / "hf"), mtp="only")
    shared = {"blk.3.nextn.embed_tokens.weight", "blk.3.nextn.shared_head_head.weight"}  # config.json does not say
    assert {s.name for s in specs} - shared == set(contents(head))


def test_what_cannot_be_joined_or_run_is_refused(files: Path, tmp_path: Path) -> None:
    whole = gguf.open(files / "whole.gguf")
    plan_trunk(whole).write(tmp_path / "trunk.gguf")
    plan_head(whole).write(tmp_path / "head.gguf")
    trunk, head = gguf.open(tmp_path / "trunk.gguf"), gguf.open(tmp_path / "head.gguf")
    with pytest.raises(DataError, match=r"has 1 MTP layer.* already"):
        plan_join(whole, head)
    with pytest.raises(UnsupportedError, match="no MTP layers"):
        plan_join(trunk, trunk)
    with pytest.raises(UnsupportedError, match=r"MTP layers alone.*--head FILE"):
        quantkit.load(head.path)
    assert validate.problems(head.metadata, head.tensors) == []
    with pytest.raises(UnsupportedError, match=r"no MTP layers.*--mtp keep"):
        MtpHead(quantkit.load(trunk.path))
    tiny(tmp_path / "other", arch="glm4moe", num_hidden_layers=4)
    convert_checkpoint(tmp_path / "other", tmp_path / "other.gguf", "f32")
    with pytest.raises(DataError, match=r"with 3 blocks, .* has 4"):
        plan_join(gguf.open(tmp_path / "other.gguf"), head)
    theta = "glm4moe.rope.freq_base"
    changed(Path(trunk.path), tmp_path / "theta.gguf", {theta: (12345.0, "f32")})
    with pytest.raises(DataError, match=rf"{theta} is 1000000\.0, .* 12345\.0: not one model"):
        plan_join(gguf.open(tmp_path / "theta.gguf"), head)
    with pytest.raises(DataError, match=r"n_main = 3, .* has 4"):
        MtpHead(quantkit.load(tmp_path / "other.gguf"), head)


def test_lists_that_are_not_of_layers_stay(tmp_path: Path) -> None:
    """Four sections of RoPE in a model of four layers."""
    made = {"num_hidden_layers": 3, "mtp_num_hidden_layers": 1, "mtp": "keep"}
    whole = gguf.open(written(tmp_path / "whole.gguf", "qwen35", **made))
    assert whole.metadata["qwen35.block_count"] == len(whole.metadata["qwen35.rope.dimension_sections"]) == 4
    plan_trunk(whole).write(tmp_path / "trunk.gguf")
    key, trunk = "qwen35.rope.dimension_sections", gguf.open(tmp_path / "trunk.gguf")
    assert trunk.metadata[key] == whole.metadata[key]
    assert plan_join(trunk, whole).metadata[key] == whole.metadata[key]


def test_layers_that_contradict_their_metadata_are_refused(files: Path, tmp_path: Path) -> None:
    """By every command, with the name of the file that has them."""
    whole = gguf.open(files / "whole.gguf")
    plan_trunk(whole).write(tmp_path / "trunk.gguf")
    plan_head(whole).write(tmp_path / "head.gguf")
    trunk, head, name = gguf.open(tmp_path / "trunk.gguf"), tmp_path / "head.gguf", "blk.3.attn_v.weight"
    other = gguf.open(reshaped(head, tmp_path / "shape.gguf", name, (64, 128)))
    with pytest.raises(FormatError, match=rf"shape\.gguf: tensor {name} has shape \(64, 128\), the metadata say"):
        plan_join(trunk, other)
    with pytest.raises(FormatError, match=rf"shape\.gguf: tensor {name} has shape"):
        MtpHead(quantkit.load(trunk.path), other)
    with pytest.raises(FormatError, match=rf"whole2\.gguf: tensor {name} has shape"):
        plan_head(gguf.open(reshaped(whole.path, tmp_path / "whole2.gguf", name, (64, 128))))
    with pytest.raises(FormatError, match=rf"less\.gguf: tensor {name} is missing"):
        plan_join(trunk, gguf.open(changed(head, tmp_path / "less.gguf", {}, drop=name)))
    planned = plan_trunk(whole)
    without = [tensor for tensor in planned.tensors if not tensor.spec.name.startswith("blk.")]
    (empty,) = Rewrite(planned.sources, without, planned.metadata).write(tmp_path / "empty.gguf")
    with pytest.raises(FormatError, match=r"empty\.gguf: .*block_count = 3, but there are no tensors of blk\.0"):
        plan_join(gguf.open(empty), gguf.open(head))
    for count in (-1, 4, 9):
        wrong = changed(Path(whole.path), tmp_path / f"{count}.gguf", {"glm4moe.nextn_predict_layers": (count, "i32")})
        with pytest.raises(FormatError, match=rf"nextn_predict_layers = {count}, glm4moe\.block_count = 4; correct"):
            plan_trunk(gguf.open(wrong))
    wrong = changed(head, tmp_path / "key.gguf", {"glm4moe.expert_weights_scale": (-1.0, "f32")})
    with pytest.raises(FormatError, match=r"key\.gguf: metadata key glm4moe\.expert_weights_scale = -1"):
        MtpHead(quantkit.load(trunk.path), gguf.open(wrong))


def test_acceptance_is_that_of_the_logits(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure computed from whole logits; a head of another file on a trunk without one."""
    model = quantkit.load(files / "whole.gguf", n_ctx=32)
    chunks = chunked(model.tokenizer, files / "text.txt", 32, 3)
    drafting = Drafting(model, MtpHead(model))
    found = measure(drafting, chunks, steps=2, base=drafting)
    tokens = np.asarray(chunks.inputs, np.int64)
    hidden = model.hidden_sequences(tokens, slice(None))
    states = drafting.head.states(tokens, hidden, 2)
    position = 0
    for i in range(3):
        trunk = model.project(hidden[i])
        for t in range(16, 30):
            for step in range(2):
                q, p = drafting.head.project(step, states[step][i, t][None])[0], trunk[t + step + 1]
                assert found.agrees[position, step] == (q.argmax() == p.argmax())
                overlap = np.exp(np.minimum(log_probabilities(q), log_probabilities(p))).sum()
                assert abs(found.overlap[position, step] - overlap) < 1e-5
            position += 1
    assert len(found.agrees) == position
    assert found.kld is not None
    assert np.abs(found.kld).max() < 1e-9
    both = found.agrees[:, 0] & found.agrees[:, 1]
    assert found.length(2).value == found.agrees[:, 0].mean() + both.mean()
    plan_trunk(gguf.open(files / "whole.gguf")).write(files / "t.gguf")
    plan_head(gguf.open(files / "whole.gguf")).write(files / "h.gguf")
    command = ["mtp", str(files / "t.gguf"), "--head", str(files / "h.gguf"), "-f", str(files / "text.txt"), "-c", "32",
               "--chunks", "3", "--draft-max", "2", "--base", str(files / "whole.gguf"), "--json"]  # fmt: skip
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["layers"] == [3]
    assert record["steps"][1]["length"] == found.length(2).value
    assert abs(record["steps"][0]["kld"]) < 1e-9


def test_greedy_text_is_the_trunks(files: Path) -> None:
    """What the model writes after a prompt has its own first choices, so a head of the trunk's choices is accepted."""
    model = quantkit.load(files / "whole.gguf", n_ctx=32)
    made = continued(model, TOKENS, 12)
    assert np.array_equal(made[:, :12], TOKENS[:, :12])
    for sequence in made:
        assert np.array_equal(model.logits(sequence)[11:-1].argmax(axis=1), sequence[12:])


def test_importance_of_mtp_layers(files: Path, tmp_path: Path) -> None:
    """The mean squares of what enters the layers' matrices; with --calibrate the same."""
    text, whole = files / "text.txt", files / "whole.gguf"
    options = ImatrixOptions(ctx_size=32, chunks=4, second_moments="full", batch_size=64)
    run = imatrix(quantkit.load(whole, n_ctx=32), text, tmp_path / "i.gguf", options)
    names = {name for name in run.matrix.entries if name.startswith("blk.3.")}
    matrices = {t.name for t in gguf.open(whole).tensors.values() if len(t.shape) > 1 and t.name.startswith("blk.3.")}
    assert names == matrices
    assert names <= set(run.matrix.second_moments) | {"blk.3.ffn_gate_inp.weight"}
    model = quantkit.load(whole, n_ctx=32)
    chunks = chunked(model.tokenizer, text, 32, 4)
    tokens = np.asarray(chunks.inputs, np.int64)
    head, seen = MtpHead(model), []
    head.observer = lambda name, x, *which: seen.append(x) if name.endswith("nextn.eh_proj.weight") else None
    head.observe_all(tokens, model.hidden_sequences(tokens, slice(None)))
    x = np.concatenate(seen)
    entry = run.matrix.entries["blk.3.nextn.eh_proj.weight"]
    assert entry.counts[0] == len(x) == 4 * 31
    np.testing.assert_allclose(entry.values[0], (x.astype(np.float64) ** 2).mean(axis=0), rtol=1e-6)
    in_steps = ImatrixOptions(ctx_size=32, chunks=4, batch_size=64)
    imatrix(quantkit.load(whole, n_ctx=32), text, tmp_path / "i.dat", in_steps)  # whose float32 are the measured ones
    rules = ["nextn=q5_0,blk.3=q8_0,.*=q4_0"]
    quantkit.quantize(whole, tmp_path / "two.gguf", "Q4_0", QuantizeOptions(imatrix=tmp_path / "i.dat", custom_q=rules))
    calibration = CalibrationOptions(ctx_size=32, chunks=4, second_moments="", batch_size=64)
    quantize_calibrated(whole, tmp_path / "one.gguf", "Q4_0", text, QuantizeOptions(custom_q=rules), calibration)
    made = contents(tmp_path / "one.gguf")
    assert made == contents(tmp_path / "two.gguf")
    assert made["blk.3.nextn.eh_proj.weight"][0] == "q5_0"


def test_plan_counts_the_cache_only_where_the_layers_draft(files: Path) -> None:
    f16 = types.layout("f16")
    model = quantkit.load(files / "whole.gguf")
    sizes = [of_layers(model.metadata, 64, f16, f16, mtp=mtp) for mtp in (False, True)]
    assert sizes[0][:3] == sizes[1][:3]
    assert (sizes[0][3], sizes[1][3]) == (0, sizes[1][2])
    assert sum(sizes[0]) == model.new_cache(64, "f16").nbytes
    found = quantkit.plan(files / "whole.gguf", None, PlanOptions(ctx_size=64, mtp_cache=True))
    assert found.devices is not None
    assert sum(load.cache for load in found.devices.loads) == sum(sizes[1])
