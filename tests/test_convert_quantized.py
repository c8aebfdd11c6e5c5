"""Quantized checkpoints through the pipelines: values in the GGUF, straight to final types, memory, plans."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.cli import main
from quantkit.errors import FormatError
from quantkit.formats.gguf import open as open_gguf
from quantkit.formats.safetensors import open_checkpoint
from quantkit.formats.safetensors.quantized import unscaled
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.conversion.plan import plan_conversion
from quantkit.pipelines.output import write_gguf
from tests.archs.checkpoints import Coded, coded_checkpoint, tiny
from tests.archs.quantized import KINDS, quantized


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small qwen2, whose q, k and v have biases, and whose other layers have none."""
    directory = tmp_path_factory.mktemp("plain") / "hf"
    tiny(directory, "bfloat16", "qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_the_way_straight_to_a_final_type(kind: str, plain: Path, tmp_path: Path) -> None:
    """A GGUF has each value as the format's own programs round it; IQ4_K of it is IQ4_K of the checkpoint.

    Of NVFP4, `stored` keeps codes (test_nvfp4_stored.py), so that its detour is bf16.
    """
    source = quantized(kind, plain, tmp_path / "hf")
    outtype = "bf16" if kind in ("nvfp4", "modelopt") else "stored"
    assert main(["convert", str(source), str(tmp_path / "stored.gguf"), "--outtype", outtype]) == 0
    read = unscaled(open_checkpoint(source), json.loads((source / "config.json").read_text())).tensors
    made = open_gguf(tmp_path / "stored.gguf").tensors
    for ours, theirs in (("attn_output", "self_attn.o_proj"), ("ffn_down", "mlp.down_proj")):
        tensor, expected = made[f"blk.0.{ours}.weight"], read[f"model.layers.0.{theirs}.weight"]
        assert tensor.type.name == ("mxfp4" if kind == "mxfp4" else "f16" if kind in ("gptq", "awq") else "bf16")
        values = expected.dequantize()
        if kind != "mxfp4":
            values = tensor.type.dequantize(tensor.type.quantize(values), values.shape[1])
        np.testing.assert_array_equal(tensor.dequantize(), values)
    assert "blk.0.attn_output.bias" not in made
    assert "blk.0.attn_q.bias" in made
    for path, out in ((source, "straight.gguf"), (tmp_path / "stored.gguf", "detour.gguf")):
        assert main(["quantize", str(path), str(tmp_path / out), "IQ4_K", "--pure", "--allow-requantize"]) == 0
    straight, detour = ((tmp_path / name).read_bytes() for name in ("straight.gguf", "detour.gguf"))
    assert open_gguf(tmp_path / "straight.gguf").tensors["blk.0.ffn_down.weight"].type.name == "iq4_k"
    assert straight == detour


def test_a_file_of_one_type(plain: Path, tmp_path: Path) -> None:
    """`auto` is the type of the embedding, here bf16; f32 has the exact values."""
    source = quantized("gptq", plain, tmp_path / "hf")
    assert convert_checkpoint(source, tmp_path / "auto.gguf").outtype.name == "bf16"
    convert_checkpoint(source, tmp_path / "f32.gguf", "f32")
    read = unscaled(open_checkpoint(source), json.loads((source / "config.json").read_text())).tensors
    values = read["model.layers.0.mlp.up_proj.weight"].dequantize()
    made = [open_gguf(tmp_path / f"{name}.gguf").tensors["blk.0.ffn_up.weight"] for name in ("auto", "f32")]
    np.testing.assert_array_equal(made[0].data, types.get("bf16").quantize(values))
    np.testing.assert_array_equal(made[1].dequantize(), values)


def test_a_bias_that_is_not_zero_is_not_dropped(plain: Path, tmp_path: Path) -> None:
    make, settings = KINDS["gptq"]
    rng = np.random.default_rng(3)

    def coded(name: str, rows: int, n: int) -> Coded:
        return [(part, kind, x + 1 if part.endswith(".bias") else x) for part, kind, x in make(rng, name, rows, n)]

    source = coded_checkpoint(plain, tmp_path / "hf", "o_proj.weight", coded, settings)
    with pytest.raises(Exception, match=r"self_attn\.o_proj\.bias"):
        convert_checkpoint(source, tmp_path / "m.gguf")


def test_a_contradiction_ends_the_command(plain: Path, tmp_path: Path, capsys: Any) -> None:
    """Found while rows are written, it leaves no file."""
    source = quantized("gptq", plain, tmp_path / "hf", sym=True)
    assert main(["quantize", str(source), str(tmp_path / "m.gguf"), "Q8_0"]) == 1
    said = capsys.readouterr().err
    assert "model.safetensors: tensor model.layers.0." in said
    assert ".qzeros has the zero point" in said
    assert "for which it is 8" in said
    assert not list(tmp_path.glob("m.gguf"))


def test_memory_does_not_grow_with_a_matrix(tmp_path: Path) -> None:
    """A matrix of 8 Mi values takes 32 MiB as float32; pieces of 1 Mi are decoded at a time."""
    tiny(tmp_path / "plain", "bfloat16", "llama", hidden_size=1024, intermediate_size=8192, num_hidden_layers=1)
    for kind in ("gptq", "nvfp4"):
        source = quantized(kind, tmp_path / "plain", tmp_path / kind)
        plan = plan_conversion(source, "stored")
        tracemalloc.start()
        write_gguf(tmp_path / "m.gguf", plan.metadata, plan.specs, plan.tasks, inputs=plan.checkpoint.paths, threads=1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 20 << 20, kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_needs_no_weights(kind: str, plain: Path, tmp_path: Path, capsys: Any) -> None:
    """From config.json of a quantized model: the sizes of the same model in floats."""
    config = json.loads((plain / "config.json").read_text())
    plans = []
    for name, stated in (("floats", config), (kind, config | {"quantization_config": KINDS[kind][1]})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(stated))
        assert main(["plan", str(tmp_path / name / "config.json"), "IQ4_K", "--pure", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out.replace(str(tmp_path / name), "")))
    assert plans[0] == plans[1]


def test_a_file_that_contradicts_config_json(plain: Path, tmp_path: Path) -> None:
    source = quantized("awq", plain, tmp_path / "hf", version="gemv")
    with pytest.raises(FormatError, match=r"model.safetensors: tensor model.layers.0.*qzeros is .*layout gemv"):
        convert_checkpoint(source, tmp_path / "m.gguf")
