"""convert-mla: between the layouts of latent attention, exactly where that can be, else with the error that is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import types
from quantkit.cli import main
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats import gguf
from quantkit.formats.gguf import shards
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.convert_mla import COPIED, LAYOUTS, REQUANTIZED, ROWS, TRANSPOSED, plan_relayout, write_relayout
from tests.archs.checkpoints import coded_checkpoint, tiny
from tests.archs.quantized import KINDS

TOKENS = np.random.default_rng(4).integers(2, 320, 150).tolist()
PARTS = {"kv_b": {"attn_kv_b"}, "k_b+v_b": {"attn_k_b", "attn_v_b"}, "both": {"attn_kv_b", "attn_k_b", "attn_v_b"}}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of float32 as ik_llama.cpp's converter makes it."""
    directory = tmp_path_factory.mktemp("mla")
    tiny(directory / "hf", arch="deepseek2", kv_lora_rank=96, v_head_dim=64, num_nextn_predict_layers=0)
    convert_checkpoint(directory / "hf", directory / "both.gguf", "f32")
    return directory / "both.gguf"


def laid_out(path: Path, layout: str, out: Path, kind: str | None = None) -> gguf.GGUF:
    job = plan_relayout(gguf.open(path), layout, kind)
    write_relayout(job, out)
    return gguf.open(out)


def quantized(path: Path, out: Path, kind: str) -> Path:
    """A file whose tensors between latent and heads are of a type."""
    source = gguf.open(path)
    kinds = {name: types.get(kind) if name.split(".")[-2] in PARTS["both"] else t.type
             for name, t in source.tensors.items()}  # fmt: skip
    specs = [gguf.TensorSpec(name, t.shape, kinds[name]) for name, t in source.tensors.items()]
    with gguf.Writer(out, source.metadata, specs) as writer:
        for name, t in source.tensors.items():
            x = t.dequantize().reshape(-1, t.shape[-1])
            writer.write(name, t.data if kinds[name] is t.type else kinds[name].quantize(x))
    return out


def parts(file: gguf.GGUF) -> set[str]:
    return {name.split(".")[-2] for name in file.tensors if name.endswith("_b.weight") and "attn_q" not in name}


def contents(file: gguf.GGUF) -> dict[str, Any]:
    return {name: (t.type.name, t.shape, t.data.tobytes()) for name, t in file.tensors.items()}


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_floats_lose_nothing(both: Path, tmp_path: Path, first: str, second: str) -> None:
    """From any layout to any other and on to `both`: the file there was, keys and all."""
    one = laid_out(both, first, tmp_path / "1.gguf")
    two = laid_out(tmp_path / "1.gguf", second, tmp_path / "2.gguf")
    assert (parts(one), parts(two)) == (PARTS[first], PARTS[second])
    for file, layout in ((one, first), (two, second)):
        split = layout == "k_b+v_b"
        sizes = (1, 128, 96, 64, 64) if split else (4, 64, 64, None, None)
        names = ("head_count_kv", "key_length", "value_length", "key_length_mla", "value_length_mla")
        assert tuple(file.metadata.get(f"deepseek2.attention.{name}") for name in names) == sizes
        assert not split or file.tensors["blk.1.attn_k_b.weight"].shape == (4, 96, 32)
    again = laid_out(tmp_path / "2.gguf", "both", tmp_path / "3.gguf")
    assert contents(again) == contents(gguf.open(both))
    assert dict(again.metadata) == dict(gguf.open(both).metadata)
    with pytest.MonkeyPatch.context() as patch:  # other pieces make the same file
        patch.setattr("quantkit.formats.pipeline.PIECE_ELEMENTS", 200)
        laid_out(tmp_path / "1.gguf", second, tmp_path / "4.gguf")
    assert (tmp_path / "2.gguf").read_bytes() == (tmp_path / "4.gguf").read_bytes()


@pytest.mark.parametrize("layout", ["kv_b", "k_b+v_b"])
def test_all_ways_of_attending_agree(both: Path, tmp_path: Path, layout: str) -> None:
    laid_out(both, layout, tmp_path / "m.gguf")
    wanted = quantkit.load(both, mla=0).logits(TOKENS)
    for mla in range(4):
        assert np.abs(quantkit.load(tmp_path / "m.gguf", mla=mla).logits(TOKENS) - wanted).max() < 1e-3


@pytest.mark.parametrize("kind", ["q8_0", "iq4_nl", "bf16", "q4_0_r8"])
def test_what_is_quantized_again_and_what_is_not(both: Path, tmp_path: Path, kind: str) -> None:
    """kv_b split into keys and values: values bit for bit, keys requantized with the reported error."""
    joint = laid_out(both, "kv_b", tmp_path / "joint.gguf")
    source = gguf.open(quantized(tmp_path / "joint.gguf", tmp_path / "q.gguf", kind))
    job = plan_relayout(source, "k_b+v_b")
    write_relayout(job, tmp_path / "m.gguf")
    made = gguf.open(tmp_path / "m.gguf")
    of_keys = "bf16" if kind == "bf16" else "q8_0"
    how = {change.spec.name.split(".")[-2]: change.how for change in job.new_tensors}
    assert how == {"attn_k_b": TRANSPOSED if kind == "bf16" else REQUANTIZED, "attn_v_b": ROWS}
    for i in range(3):
        whole = source.tensors[f"blk.{i}.attn_kv_b.weight"].dequantize().reshape(4, 96, 96)
        name = f"blk.{i}.attn_k_b.weight"
        keys, values = made.tensors[name], made.tensors[f"blk.{i}.attn_v_b.weight"]
        assert (keys.type.name, values.type.name) == (of_keys, kind)
        np.testing.assert_array_equal(values.dequantize(), whole[:, 32:])
        wanted = whole[:, :32].transpose(0, 2, 1)
        error = np.sqrt(np.square(keys.dequantize() - wanted).mean() / np.square(wanted).mean())
        assert job.errors.get(name, 0.0) == pytest.approx(error, rel=1e-5)
        assert error < (1e-12 if kind == "bf16" else 0.01)
    assert joint.metadata["general.file_type"] == made.metadata["general.file_type"]
    before, after = (quantkit.load(path).logits(TOKENS) for path in (tmp_path / "q.gguf", tmp_path / "m.gguf"))
    # the median: where a token now goes to another expert its logits jump
    assert np.median(np.abs(after - before)) < 0.01 * before.std()


def test_halves_joined_again(both: Path, tmp_path: Path) -> None:
    """Values of the wanted type are copied; another type is had by asking; both halves count in the error then."""
    laid_out(both, "k_b+v_b", tmp_path / "split.gguf")
    source = gguf.open(quantized(tmp_path / "split.gguf", tmp_path / "q.gguf", "q8_0"))
    for kind in (None, "q6_0"):
        job = plan_relayout(source, "both", kind)
        assert {change.how for change in job.changes} == {COPIED, REQUANTIZED}
        write_relayout(job, tmp_path / "m.gguf")
        made = gguf.open(tmp_path / "m.gguf")
        name = "blk.2.attn_kv_b.weight"
        assert made.tensors[name].type.name == (kind or "q8_0")
        halves = [source.tensors[f"blk.2.attn_{part}_b.weight"].dequantize() for part in "kv"]
        whole = np.concatenate([halves[0].transpose(0, 2, 1), halves[1]], axis=1)
        found = made.tensors[name].dequantize().reshape(4, 96, 96)
        if kind is None:
            np.testing.assert_array_equal(found[:, 32:], whole[:, 32:])
            whole, found = whole[:, :32], found[:, :32]
        error = np.sqrt(np.square(found - whole).mean() / np.square(whole).mean())
        assert job.errors[name] == pytest.approx(error, rel=1e-5)
        for part in "kv":
            half = f"blk.2.attn_{part}_b.weight"
            assert made.tensors[half].data.tobytes() == source.tensors[half].data.tobytes()


def test_as_typed(both: Path, tmp_path: Path, capsys: Any) -> None:
    def run(*args: Any, status: int = 0) -> str:
        assert main(["convert-mla", *map(str, args)]) == status
        out, err = capsys.readouterr()
        return err if status else out

    out = tmp_path / "m.gguf"
    shards.split(gguf.open(both), tmp_path / "s.gguf", [20, 20, len(gguf.open(both).tensors) - 40])
    first = next(tmp_path.glob("s-00001-of-*"))
    run(first, tmp_path / "k.gguf", "--layout", "kv_b", "--keep-split")
    kept = gguf.open(next(tmp_path.glob("k-00001-of-*")))
    assert len(kept.shards) == 3
    assert sum(kept.shards) == len(gguf.open(both).tensors) - 6
    quantized(kept.path, tmp_path / "q.gguf", "q8_0")
    capsys.readouterr()
    assert "left out" in run(tmp_path / "q.gguf", out, "--layout", "k_b+v_b", "--dry-run")
    assert not out.exists()
    said = run(tmp_path / "q.gguf", out, "--layout", "k_b+v_b")
    assert "largest error of quantizing again: 0.00" in said
    record = json.loads(run(tmp_path / "q.gguf", out, "--layout", "both", "--type", "bf16", "--json"))
    assert (len(record["made"]), record["left_out"]) == (6, [])
    assert 0 < record["made"][0]["relative_error"] <= record["largest_relative_error"] < 0.004
    assert "nothing to do" in run(out, tmp_path / "n.gguf", "--layout", "both")
    assert not (tmp_path / "n.gguf").exists()
    assert "'all' is not one of" in run(out, tmp_path / "n.gguf", "--layout", "all", status=2)
    assert "this is the input" in run(out, out, "--layout", "kv_b", status=1)
    for kind in ("q8_0_r8", "iq2_xxs"):
        message = run(out, tmp_path / "n.gguf", "--layout", "kv_b", "--type", kind, status=1)
        assert f"--type {kind}" in message
    joint = tmp_path / "joint.gguf"
    run(tmp_path / "q.gguf", joint, "--layout", "kv_b")
    assert "rows of attn_k_b have 32 elements" in run(
        tmp_path / "q.gguf", tmp_path / "n.gguf", "--layout", "both", "--type", "iq4_k", status=1
    )


def test_what_has_no_latents_or_odd_ones(both: Path, tmp_path: Path) -> None:
    tiny(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    with pytest.raises(UnsupportedError, match="llama has no latent attention"):
        plan_relayout(gguf.open(tmp_path / "m.gguf"), "kv_b")
    source = gguf.open(both)
    source.metadata.set("deepseek2.attention.value_length", 32, "u32")
    with pytest.raises(FormatError, match=r"attn_kv_b.weight has shape \(384, 96\), the metadata say \(256, 96\)"):
        plan_relayout(source, "k_b+v_b")
    source = gguf.open(both)
    for i in range(3):
        del source.tensors[f"blk.{i}.attn_kv_b.weight"], source.tensors[f"blk.{i}.attn_v_b.weight"]
    source.shards = [len(source.tensors)]
    with pytest.raises(FormatError, match=r"attn_kv_b.weight is missing, and so are"):
        plan_relayout(source, "kv_b")
    assert types.get("q8_0").block_size == 32


def test_scales_go_with_their_tensors(tmp_path: Path) -> None:
    """A scale of a tensor that is left out is of nothing, and no command read a file with it."""
    tiny(tmp_path / "hf", "bfloat16", "deepseek2", kv_lora_rank=64, qk_nope_head_dim=64, v_head_dim=64,
         num_nextn_predict_layers=0)  # fmt: skip
    make, settings = KINDS["nvfp4"]
    rng = np.random.default_rng(4)
    coded = coded_checkpoint(
        tmp_path / "hf", tmp_path / "nv", "kv_b_proj.weight", lambda *about: make(rng, *about), settings
    )
    convert_checkpoint(coded, tmp_path / "both.gguf", "stored")
    before = gguf.open(tmp_path / "both.gguf").tensors
    assert before["blk.0.attn_kv_b.weight"].scale is not None
    for layout in ("kv_b", "k_b+v_b"):
        made = laid_out(tmp_path / "both.gguf", layout, tmp_path / f"{layout}.gguf")
        assert {name.split(".")[-2] for name in made.tensors if name.endswith(".scale")} <= PARTS[layout]
        assert not quantkit.verify(tmp_path / f"{layout}.gguf").damage
        for name, tensor in made.tensors.items():
            np.testing.assert_array_equal(tensor.dequantize().ravel(), before[name].dequantize().ravel())
