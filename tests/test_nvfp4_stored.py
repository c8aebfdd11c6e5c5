"""NVFP4 that stays NVFP4: codes and scales of the checkpoint in the GGUF, and every reader of the file applies them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import recipe, types
from quantkit.cli import main
from quantkit.errors import FormatError, QuantkitError, UnsupportedError
from quantkit.evaluate.layers.tensor_errors import tensor_errors
from quantkit.formats import gguf
from quantkit.formats.gguf import TensorSpec, Writer
from quantkit.formats.safetensors import open_checkpoint
from quantkit.formats.safetensors.quantized import unscaled
from quantkit.pipelines.prune import plan_prune
from quantkit.pipelines.quantize import written_size
from tests.archs.checkpoints import Coded, coded_checkpoint, tiny
from tests.archs.quantized import groups_of

DOWN, SCALE = "blk.0.ffn_down_exps.weight", "blk.0.ffn_down_exps.scale"
TOKENS = [3, 5, 8, 13, 21]


def _codes(rng: np.random.Generator, name: str, rows: int, n: int) -> Coded:
    """Codes whose values are about 0.05, under a number of each matrix' own."""
    return [
        (f"{name}_packed", "U8", rng.integers(0, 256, (rows, n // 2), np.uint8)),
        (f"{name}_scale", "F8_E4M3", rng.integers(0x60, 0x70, (rows, n // 16), np.uint8)),
        (f"{name}_global_scale", "F32", rng.uniform(1500, 4000, 1).astype("<f4")),
        (f"{name.removesuffix('.weight')}.input_global_scale", "F32", np.ones(1, "<f4")),
    ]


def nvfp4(plain: Path, target: Path) -> Path:
    rng = np.random.default_rng(7)
    return coded_checkpoint(
        plain, target, "_proj.weight", lambda *about: _codes(rng, *about), groups_of("nvfp4-pack-quantized", 16)
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints: a llama, whose rows of q and k are reordered, and a model with experts."""
    made = {}
    for arch, config in (("llama", {"num_hidden_layers": 2}), ("qwen3moe", {"num_hidden_layers": 1})):
        where = tmp_path_factory.mktemp(arch)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}
        tiny(where / "plain", "bfloat16", arch, **sizes, **config,
             **({"moe_intermediate_size": 64} if arch == "qwen3moe" else {}))  # fmt: skip
        made[arch] = nvfp4(where / "plain", where / "hf")
    return made


def _converted(sources: dict[str, Path], where: Path, outtype: str) -> dict[str, Path]:
    for arch, source in sources.items():
        quantkit.convert(source, where / f"{arch}.gguf", outtype)
    return {arch: where / f"{arch}.gguf" for arch in sources}


@pytest.fixture(scope="module")
def stored(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same as GGUF with NVFP4 tensors."""
    return _converted(sources, tmp_path_factory.mktemp("stored"), "stored")


@pytest.fixture(scope="module")
def floats(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return _converted(sources, tmp_path_factory.mktemp("floats"), "f32")


def test_codes_and_scales_are_the_checkpoint_s(sources: dict[str, Path], stored: dict[str, Path]) -> None:
    """Bit for bit, one number for each matrix; values differ from the checkpoint's by roundings only."""
    for arch, ours, theirs in (
        ("llama", "blk.1.ffn_down", ["model.layers.1.mlp.down_proj"]),
        ("qwen3moe", "blk.0.ffn_up_exps", [f"model.layers.0.mlp.experts.{i}.up_proj" for i in range(6)]),
    ):
        tensor, checkpoint = gguf.open(stored[arch]).tensors, open_checkpoint(sources[arch]).tensors
        parts = [[checkpoint[f"{name}.weight_{part}"] for name in theirs if f"{name}.weight_{part}" in checkpoint]
                 for part in ("packed", "scale", "global_scale")]  # fmt: skip
        weight, scale = tensor[f"{ours}.weight"], tensor[f"{ours}.scale"]
        assert (weight.type.name, scale.type.name, scale.shape) == ("nvfp4", "f32", (len(parts[0]),))
        blocks = weight.data.reshape(-1, 36)
        assert np.array_equal(blocks[:, :4].reshape(-1), np.concatenate([t.raw() for t in parts[1]]))
        packed = np.concatenate([t.raw() for t in parts[0]]).reshape(-1, 4, 8)
        low, high = packed & 15, packed >> 4
        elements = np.stack([low, high], axis=-1).reshape(-1, 4, 16)
        assert np.array_equal(blocks[:, 4:].reshape(-1, 4, 8), elements[..., :8] | elements[..., 8:] << 4)
        assert np.array_equal(scale.dequantize(), np.float32(1) / np.concatenate([t.dequantize() for t in parts[2]]))
        settings = json.loads((sources[arch] / "config.json").read_text())
        read = unscaled(open_checkpoint(sources[arch]), settings).tensors
        values = np.stack([read[f"{name}.weight"].dequantize() for name in theirs]).reshape(weight.shape)
        np.testing.assert_allclose(weight.dequantize(), values, rtol=3e-7)


def test_models_run_with_them(stored: dict[str, Path], floats: dict[str, Path]) -> None:
    for arch in stored:
        expected = quantkit.load(floats[arch]).logits(TOKENS)
        exact, fast = (quantkit.load(stored[arch], numerics=numerics) for numerics in ("exact", "fast"))
        np.testing.assert_allclose(exact.logits(TOKENS), expected, atol=2e-4 * np.abs(expected).max())
        assert fast.fallback_reason is None
        cache = fast.new_cache(16)
        first = fast.forward(TOKENS[:-1], cache)
        both = np.concatenate([first, fast.forward(TOKENS[-1:], cache)])
        np.testing.assert_allclose(both, expected, atol=0.05 * np.abs(expected).max())


def test_errors_of_tensors(stored: dict[str, Path], floats: dict[str, Path]) -> None:
    """The scales are in a tensor's values, on either side."""
    tokens = np.array([TOKENS])
    for a, b in ((stored, floats), (floats, stored)):
        for arch in stored:
            errors = tensor_errors(quantkit.load(a[arch]), gguf.open(b[arch]), tokens)
            assert any(error.name.endswith("ffn_down.weight") or error.name == DOWN for error in errors)
            assert max(error.error for error in errors) < 1e-5, (arch, a is stored)


def test_quantizing_the_file_applies_the_scales(stored: dict[str, Path], tmp_path: Path) -> None:
    """The new values have the scales, so their tensors go; a copy keeps both. Sizes of plans are right to the byte."""
    source, out, copy = stored["qwen3moe"], tmp_path / "q.gguf", tmp_path / "copy.gguf"
    for target, path in (("Q8_0", out), ("COPY", copy)):
        assert main(["quantize", str(source), str(path), target, "--allow-requantize"]) == 0
        planned = quantkit.plan(source, target, quantkit.PlanOptions(allow_requantize=True)).plan
        assert planned.bytes_after == sum(tensor.nbytes for tensor in gguf.open(path).tensors.values())
        assert written_size(gguf.open(source).metadata, planned) == path.stat().st_size
        arguments = ["quantize", str(source), str(path), target, "--allow-requantize", "--effort", "fast"]
        assert main(arguments) == 0
        assert written_size(gguf.open(source).metadata, planned, effort="fast") == path.stat().st_size
        replayed = recipe.replay(planned.to_json(), gguf.open(source).tensors.values(), allow_requantize=True)
        assert [(t.name, t.type) for t in replayed.tensors] == [(t.name, t.type) for t in planned.tensors]
    before, after = gguf.open(source).tensors, gguf.open(out).tensors
    assert not [name for name in after if "scale" in name]
    values = before[DOWN].dequantize().reshape(-1, before[DOWN].shape[-1])
    assert np.array_equal(after[DOWN].data, types.get("q8_0").quantize(values))
    assert np.array_equal(gguf.open(copy).tensors[DOWN].dequantize(), before[DOWN].dequantize())
    for path in (out, copy):
        assert main(["verify", str(path), "--source", str(source)]) == 0
    # The scale is part of what a tensor was made from, though the tensor's own bytes are the same.
    other = with_scales(source, tmp_path / "other.gguf", lambda x: 2 * x)
    found = quantkit.verify(out, quantkit.VerifyOptions(source=other))
    assert list(found.changes) == [DOWN]
    assert found.changes[DOWN] == ["its source has changed"]
    assert (
        main(["quantize", str(other), str(tmp_path / "again.gguf"), "Q8_0", "--allow-requantize", "--reuse", str(out)])
        == 0
    )
    assert np.array_equal(gguf.open(tmp_path / "again.gguf").tensors[DOWN].dequantize(), 2 * after[DOWN].dequantize())


def with_scales(source: Path, target: Path, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """The file with other scales of the down matrices."""
    tensor = gguf.open(source).tensors[SCALE]
    data = bytearray(source.read_bytes())
    data[tensor.offset : tensor.offset + tensor.nbytes] = change(tensor.dequantize().copy()).astype("<f4").tobytes()
    target.write_bytes(data)
    return target


def test_files_that_differ_in_scales(stored: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    source = stored["qwen3moe"]
    other = with_scales(source, tmp_path / "other.gguf", lambda x: 1.5 * x)
    assert main(["diff", str(source), str(other), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    found = {row["name"]: row for row in rows if row["status"] != "same"}
    assert found.keys() == {DOWN, SCALE}
    assert found[DOWN]["error"] == pytest.approx(0.5)
    assert main(["export", str(other), str(tmp_path / "hf")]) == 0
    exported = open_checkpoint(tmp_path / "hf").tensors["model.layers.0.mlp.experts.3.down_proj.weight"]
    assert np.array_equal(exported.dequantize(), gguf.open(other).tensors[DOWN].dequantize()[3])


def test_scales_in_another_shard(stored: dict[str, Path], tmp_path: Path) -> None:
    """A shard alone does not say whether a tensor has scales; the set does."""
    source = stored["qwen3moe"]
    assert main(["split", str(source), str(tmp_path / "s"), "--split-max-tensors", "1"]) == 0
    first, *others = sorted(tmp_path.glob("s-*.gguf"))
    alone = [gguf.open_parts([path]).tensors for path in (first, *others)]
    part = next(tensors for tensors in alone if DOWN in tensors)
    with pytest.raises(FormatError, match=rf"{DOWN}: its values are multiplied by {SCALE}, if .* only a part"):
        part[DOWN].dequantize()
    whole = gguf.open(first).tensors[DOWN].dequantize()
    assert np.array_equal(whole, gguf.open(source).tensors[DOWN].dequantize())
    for flags in ([], ["--individual-tensors", "3"]):
        done = main(["quantize", str(first), str(tmp_path / "q.gguf"), "Q8_0", "--keep-split", "--pure",
                     "--allow-requantize", *flags])  # fmt: skip
        assert done == (2 if flags else 0)
    assert gguf.open(sorted(tmp_path.glob("q-*.gguf"))[0]).tensors.keys() == {
        name for name in gguf.open(source).tensors if not name.endswith(".scale")
    }


def test_pruned_experts_keep_their_scales(stored: dict[str, Path], tmp_path: Path) -> None:
    plan_prune(gguf.open(stored["qwen3moe"]), {0: [1, 4, 5]}).write(tmp_path / "p.gguf")
    whole, pruned = (gguf.open(path).tensors[DOWN] for path in (stored["qwen3moe"], tmp_path / "p.gguf"))
    assert np.array_equal(pruned.dequantize(), whole.dequantize()[[1, 4, 5]])


@pytest.mark.parametrize(("value", "message"), [(0, "has 0.0 for matrix 2"), (-1, "has -1.0"), (np.nan, "has nan")])
def test_scales_that_are_no_scales_are_refused_by_name(
    value: float, message: str, stored: dict[str, Path], tmp_path: Path
) -> None:
    def change(x: np.ndarray) -> np.ndarray:
        x[2] = value
        return x

    bad = with_scales(stored["qwen3moe"], tmp_path / "bad.gguf", change)
    with pytest.raises(FormatError, match=rf"bad.gguf: tensor {SCALE} {message}"):
        gguf.open(bad).tensors[DOWN].dequantize()
    with pytest.raises(QuantkitError, match=rf"{SCALE} {message}"):
        quantkit.load(bad)
    assert any(f"tensor {SCALE} {message}" in sentence for sentence in quantkit.verify(bad).damage)


def test_values_that_scales_make_infinite_are_damage(stored: dict[str, Path], tmp_path: Path) -> None:
    bad = with_scales(stored["qwen3moe"], tmp_path / "bad.gguf", lambda x: np.full_like(x, 3e38))
    (sentence,) = quantkit.verify(bad).damage
    assert re.search(rf"bad.gguf: {DOWN}: row \d+, column \d+ is -?inf", sentence)


@pytest.mark.parametrize(("shape", "kind"), [((2,), "f32"), ((1, 3), "f32"), ((3,), "f16")])
def test_scales_that_do_not_fit_are_refused_by_name(shape: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    specs = [TensorSpec("a.weight", (3, 4, 64), types.get("nvfp4")), TensorSpec("a.scale", shape, types.get(kind))]
    with Writer(tmp_path / "a.gguf", {"general.architecture": "llama"}, specs) as writer:
        for spec in specs:
            writer.write(spec.name, np.zeros(spec.nbytes, np.uint8))
    with pytest.raises(
        FormatError, match=r"tensor a.scale is f(32|16) of shape .*; a.weight, .*needs f32 of shape \(3,\)"
    ):
        gguf.open(tmp_path / "a.gguf")


def test_scales_in_two_tensors_are_refused(tmp_path: Path) -> None:
    specs = [TensorSpec("a.weight", (4, 64), types.get("nvfp4"))]
    specs += [TensorSpec(name, (1,), types.get("f32")) for name in ("a.scale", "a.weight.scale")]
    with Writer(tmp_path / "a.gguf", {"general.architecture": "llama"}, specs) as writer:
        for spec in specs:
            writer.write(spec.name, np.zeros(spec.nbytes, np.uint8))
    with pytest.raises(FormatError, match=r"a.gguf: tensor a.weight has two .*, a.scale and a.weight.scale; "):
        gguf.open(tmp_path / "a.gguf")


def test_what_the_type_cannot_say_becomes_bf16(sources: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    """Fused, gate and up have two numbers for one matrix; a negative scale of a block has no code."""
    out = tmp_path / "m.gguf"
    assert main(["convert", str(sources["qwen3moe"]), str(out), "--outtype", "stored", "--fuse-gate-up"]) == 0
    assert "ffn_gate_up_exps.weight: not kept as nvfp4: a matrix of it is made of several" in capsys.readouterr().err
    kinds = {name: tensor.type.name for name, tensor in gguf.open(out).tensors.items()}
    assert (kinds["blk.0.ffn_gate_up_exps.weight"], kinds[DOWN]) == ("bf16", "nvfp4")
    assert main(["convert", str(sources["qwen3moe"]), str(out), "--outtype", "stored", "--dialect", "ik"]) == 1
    assert "become nvfp4, which --dialect ik does not read" in capsys.readouterr().err


def test_scales_on_several_devices(stored: dict[str, Path]) -> None:
    devices = "cpu:0=1GiB,cpu:1=1GiB"
    with pytest.raises(UnsupportedError, match=r"blk.0.ffn_gate_exps.scale scales .* of experts that devices share"):
        quantkit.load(stored["qwen3moe"], devices=devices, split_mode="graph")
    ways: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"split_mode": "graph"}), ("qwen3moe", {}), ("qwen3moe", {"override_tensor": "down_exps=cpu:1"}),
    ]  # fmt: skip
    for arch, how in ways:
        several, alone = quantkit.load(stored[arch], devices=devices, **how), quantkit.load(stored[arch])
        np.testing.assert_allclose(several.logits(TOKENS), alone.logits(TOKENS), atol=1e-4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are as small as those of large models."""
    where = tmp_path_factory.mktemp("small")
    tiny(where / "hf", "float32", "qwen3moe", hidden_size=128, head_dim=32, moe_intermediate_size=64,
         num_hidden_layers=1)  # fmt: skip
    quantkit.convert(where / "hf", where / "f32.gguf", "f32")
    file = gguf.open(where / "f32.gguf")
    specs = [TensorSpec(t.name, t.shape, t.type) for t in file.tensors.values()]
    with Writer(where / "small.gguf", file.metadata, specs) as writer:
        for t in file.tensors.values():
            factor = 0.1 if "_exps" in t.name or ".attn_v." in t.name else 1.0
            writer.write(t.name, (t.dequantize() * np.float32(factor)).reshape(-1).view(np.uint8))
    return where / "small.gguf"


def test_encoding_with_scales(small: Path, tmp_path: Path, capsys: Any) -> None:
    """Errors of small weights fall; the file runs, is planned to the byte, verified, resumed and replayed."""
    out, without = tmp_path / "q.gguf", tmp_path / "w.gguf"
    words = ["NVFP4", "--custom-q", "ffn_up_exps=q8_0", "--effort", "fast"]
    assert main(["quantize", str(small), str(out), *words, "--scale-nvfp4"]) == 0
    assert main(["quantize", str(small), str(without), *words]) == 0
    planned = quantkit.plan(small, "NVFP4", quantkit.PlanOptions(custom_q=["ffn_up_exps=q8_0"], scale_nvfp4=True)).plan
    found = gguf.open(out).tensors
    assert [(t.name, t.type, t.shape) for t in planned.tensors] == [(t.name, t.type, t.shape) for t in found.values()]
    matrices = "attn_q", "attn_output", "ffn_gate_exps", "ffn_down_exps"  # of which the mix makes nvfp4
    assert {name for name in found if "scale" in name} == {f"blk.0.{name}.scale" for name in matrices}
    assert found[SCALE].dequantize().tolist() == [2.0**-7] * 6
    original, plain = gguf.open(small).tensors[DOWN].dequantize(), gguf.open(without).tensors[DOWN].dequantize()
    errors = [np.square(x - original).mean() for x in (found[DOWN].dequantize(), plain)]
    assert errors[0] < 0.8 * errors[1]
    np.testing.assert_array_equal(  # encoded as values divided by the scale are
        found[DOWN].data, types.get("nvfp4").quantize(original.reshape(-1, 64) * np.float32(128), effort="fast")
    )
    expected, logits = (quantkit.load(path).logits(TOKENS) for path in (small, out))
    assert np.abs(logits - expected).mean() < 0.2 * np.abs(expected).mean()
    capsys.readouterr()
    for path in (out, without):
        assert main(["verify", str(path), "--source", str(small)]) == 0
        assert "a rerun would give the same bytes" in capsys.readouterr().out
    before = out.read_bytes()
    assert main(["quantize", str(small), str(out), *words, "--scale-nvfp4", "--partial-requant"]) == 0
    assert "reused: 19 of 19" in " ".join(capsys.readouterr().out.split())
    assert out.read_bytes() == before
    assert main(["quantize", str(small), str(without), *words, "--scale-nvfp4", "--partial-requant"]) == 0
    assert without.read_bytes() == before  # tensors without a scale were not taken for those with one
    document = quantkit.plan(small, "NVFP4", quantkit.PlanOptions(scale_nvfp4=True)).to_json()
    assert recipe.replay(document, gguf.open(small).tensors.values()).tensors[1].name == "blk.0.attn_norm.weight"
    assert len(recipe.replay(document, gguf.open(small).tensors.values()).tensors) == len(document["tensors"])


def test_scales_do_not_clip_in_silence(small: Path, tmp_path: Path, capsys: Any) -> None:
    large = tmp_path / "large.gguf"
    tensor = gguf.open(small).tensors["blk.0.attn_q.weight"]
    data = bytearray(small.read_bytes())
    data[tensor.offset : tensor.offset + 4] = np.array([-25], "<f4").tobytes()
    large.write_bytes(data)
    assert main(["quantize", str(large), str(tmp_path / "q.gguf"), "NVFP4", "--scale-nvfp4"]) == 1
    said = capsys.readouterr().err
    assert "blk.0.attn_q.weight: row 0, column 0 is -25.0; under --scale-nvfp4 nvfp4 ends at 21" in said


def test_new_scales_are_in_the_shard_of_their_tensor(small: Path, tmp_path: Path) -> None:
    assert main(["split", str(small), str(tmp_path / "s"), "--split-max-tensors", "6"]) == 0
    first = min(tmp_path.glob("s-*.gguf"))
    words = ["NVFP4", "--pure", "--scale-nvfp4", "--keep-split", "--effort", "fast"]
    assert main(["quantize", str(first), str(tmp_path / "q.gguf"), *words]) == 0
    shards = sorted(tmp_path.glob("q-*.gguf"))
    assert len(shards) == len(list(tmp_path.glob("s-*.gguf")))
    for path in shards:
        names = gguf.open_parts([path]).tensors.keys()
        assert {name for name in names if name.endswith(".scale")} == {
            name.replace(".weight", ".scale") for name, t in gguf.open_parts([path]).tensors.items()
            if t.type.name == "nvfp4" and name != "token_embd.weight"
        }  # fmt: skip
    assert gguf.open(first.with_name(shards[0].name)).tensors["blk.0.ffn_up_exps.weight"].scales is not None
