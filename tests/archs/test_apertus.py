"""Apertus: the numbers of xIELU from a checkpoint to GGUF keys and back, and settings that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs
from quantkit.archs.common import validate
from quantkit.archs.common.blocks import FeedForward, Xielu
from quantkit.errors import QuantkitError
from quantkit.formats import gguf
from quantkit.formats.safetensors import open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.export import export_gguf
from quantkit.pipelines.prune import plan_prune
from quantkit.recipe import from_config, read_config
from tests.archs.checkpoints import log_probabilities, tiny
from tests.archs.files import changed, written

TOKENS = np.random.default_rng(3).integers(2, 320, (1, 60))
NAMES = ("alpha_p", "alpha_n", "beta", "eps")
APERTUS_8B = {
    "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "vocab_size": 131072, "hidden_size": 4096,
    "intermediate_size": 21504, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 12000000, "hidden_act": "xielu",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "attention_bias": False, "mlp_bias": False, "qk_norm": True, "post_norm": False, "tie_word_embeddings": False,
}  # fmt: skip


def tensor_of(name: str, layer: int) -> str:
    return f"model.layers.{layer}.mlp.act_fn.{name}"


def stored(directory: Path, **change: np.ndarray | None) -> Path:
    """A tiny checkpoint, with other tensors of layer 1's activation; None leaves one out."""
    import torch
    from safetensors.torch import load_file, save_file

    tiny(directory, arch="apertus")
    tensors = load_file(directory / "model.safetensors")
    for name, value in change.items():
        del tensors[tensor_of(name, 1)]
        if value is not None:
            tensors[tensor_of(name, 1)] = torch.from_numpy(value)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_come_back(tmp_path: Path, dtype: str) -> None:
    """The keys have the checkpoint's own numbers, as llama.cpp's converter stores them; export gives them back."""
    import torch
    import transformers

    tiny(tmp_path / "hf", dtype, arch="apertus")
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "auto" if dtype == "bfloat16" else "f32")
    file, before = gguf.open(tmp_path / "m.gguf"), open_checkpoint(tmp_path / "hf").tensors
    for name in NAMES:
        values = [float(before[tensor_of(name, i)].dequantize().reshape(())) for i in range(2)]
        assert file.metadata[f"xielu.{name}"] == values
        assert values[0] != values[1]
    assert not any("act_fn" in name or "xielu" in name for name in file.tensors)
    export_gguf(tmp_path / "m.gguf", tmp_path / "back")
    after = open_checkpoint(tmp_path / "back").tensors
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    for name, tensor in before.items():
        assert np.array_equal(after[name].dequantize(), tensor.dequantize()), name
    with torch.no_grad():
        logits = [
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
            .eval()(torch.tensor(TOKENS))
            .logits.numpy()
            for name in ("hf", "back")
        ]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("rope", [None, {"rope_type": "default", "rope_theta": 10000.0}])
def test_rope_of_an_export_is_that_of_the_file(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    """Where config.json says nothing transformers takes llama3, so no scaling is said too."""
    import torch
    import transformers

    model = tiny(tmp_path / "hf", arch="apertus", rope_parameters=rope)
    config = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    if rope is None:
        del config["rope_parameters"]
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    assert ("rope_freqs.weight" in gguf.open(tmp_path / "m.gguf").tensors) is (rope is None)
    export_gguf(tmp_path / "m.gguf", tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted, found = (log_probabilities(m(torch.tensor(TOKENS)).logits.numpy()[0]) for m in (model, again))
    assert np.abs(found - wanted).max() < 1e-5
    assert np.abs(log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(TOKENS[0])) - wanted).max() < 1e-4


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_logits_of_transformers(tmp_path: Path, numerics: Any) -> None:
    """Prompt and steps, layer by layer and in plans, to 1e-4."""
    import torch

    model = tiny(tmp_path / "hf", arch="apertus")
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    with torch.no_grad():
        wanted = log_probabilities(model(torch.tensor(TOKENS)).logits.numpy()[0])
    ours = quantkit.load(tmp_path / "m.gguf", numerics=numerics, cache_type="f32")
    assert ours.fallback_reason is None
    state = ours.new_cache(len(TOKENS[0]))
    steps = np.concatenate([ours.forward([token], state) for token in TOKENS[0]])
    for found in (ours.logits(TOKENS[0]), steps):
        assert np.abs(log_probabilities(found) - wanted).max() < 1e-4


def test_keys_and_tensors_are_those_of_llama_cpp() -> None:
    arch = archs.from_hf(APERTUS_8B)
    keys = {key: value for key, (value, _) in arch.metadata(archs.language_model(APERTUS_8B)).items()}
    assert (keys["apertus.rope.freq_base"], keys["apertus.rope.dimension_count"]) == (12000000, 128)
    tensors = {t.name: (t.shape, t.f32) for t in arch.tensors(APERTUS_8B)}
    assert tensors["rope_freqs.weight"] == ((64,), True)
    assert tensors["blk.31.attn_q_norm.weight"] == ((128,), True)
    assert tensors["blk.0.ffn_up.weight"] == ((21504, 4096), False)
    assert "blk.0.ffn_gate.weight" not in tensors
    assert abs(sum(np.prod(shape) for shape, _ in tensors.values()) / 8.05e9 - 1) < 1e-3


def test_what_is_left_of_layers_has_their_numbers(tmp_path: Path) -> None:
    numbers = {f"xielu.{name}": ([0.1 + i, 0.2 + i, 0.3 + i], "f32") for i, name in enumerate(NAMES)}
    path = changed(written(tmp_path / "m.gguf", "apertus", num_hidden_layers=3), tmp_path / "x.gguf", numbers)
    left = plan_prune(gguf.open(path), drop_layers=[1]).metadata
    for i, name in enumerate(NAMES):
        np.testing.assert_allclose(left[f"xielu.{name}"], [0.1 + i, 0.3 + i], rtol=1e-6)


def test_one_number_stands_for_all_layers(tmp_path: Path) -> None:
    """As in llama.cpp. The numbers are those of the formula: softplus of 0 is ln 2."""
    numbers = {"xielu.alpha_p": (0.0, "f32"), "xielu.alpha_n": (0.0, "f32"), "xielu.beta": (0.25, "f32"),
               "xielu.eps": (-0.5, "f32")}  # fmt: skip
    file = gguf.open(changed(written(tmp_path / "m.gguf", "apertus"), tmp_path / "x.gguf", numbers))
    for block in validate.describe(file.metadata, file.tensors).blocks:
        part = block.parts[1]
        assert isinstance(part, FeedForward)
        assert part.activation == Xielu(np.log(2), 0.25 + np.log(2), 0.25, -0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act = 'silu' is not supported by quantkit; accepted: 'xielu'"),
        ({"hidden_act": ["xielu"]}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"qk_norm": False}, "qk_norm = False"),
        ({"post_norm": True}, "post_norm = True"),
        ({"rope_parameters": None, "rope_theta": 10000.0}, "rope_theta = 10000.0 without rope_scaling"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "llama3 has no"),
        ({"rope_parameters": "llama3"}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"intermediate_size": [96, 96, 96]}, "feed_forward_length"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"head_dim": 2**40}, "head_dim"),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**archs.get("apertus").EXAMPLE, **change}), encoding="utf-8")
    with pytest.raises(QuantkitError, match=message):
        from_config(read_config(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha_p": None}, r"lacks 1 tensor\(s\): model.layers.1.mlp.act_fn.alpha_p"),
        ({"eps": None, "beta": None}, r"lacks 2 tensor\(s\)"),
        ({"alpha_n": np.zeros(2, np.float32)}, r"act_fn.alpha_n has shape \(2,\); it has to have one element"),
        ({"alpha_n": np.zeros(0, np.float32)}, "act_fn.alpha_n has shape"),
        ({"beta": np.float32([np.nan])}, "act_fn.beta is nan; it has to be a number from -1000 to 1000"),
        ({"eps": np.float32([-np.inf])}, "act_fn.eps is -inf"),
        ({"alpha_p": np.float32([1e20])}, r"act_fn.alpha_p is 1e\+20"),
        ({"alpha_p": np.float64([0.5])}, "act_fn.alpha_p is F64"),
    ],
)
def test_wrong_tensors_of_activations_are_refused(
    tmp_path: Path, change: dict[str, np.ndarray | None], message: str
) -> None:
    with pytest.raises(QuantkitError, match=message):
        convert_checkpoint(stored(tmp_path / "hf", **change), tmp_path / "m.gguf", "f32")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("xielu.alpha_p", None, "xielu.alpha_p is missing"),
        ("xielu.eps", None, "xielu.eps is missing"),
        ("xielu.alpha_n", ([0.1, 0.2, 0.3], "f32"), "has 3 entries, the model has 2 layers"),
        ("xielu.alpha_n", ([], "f32"), r"xielu.alpha_n = \[\]; it has to be a number"),
        ("xielu.beta", ([0.5, float("nan")], "f32"), "xielu.beta = "),
        ("xielu.beta", ([0.5, 1e30], "f32"), "xielu.beta = "),
        ("xielu.beta", (["0.5", "0.5"], "str"), "xielu.beta = "),
        ("xielu.beta", ("0.5", "str"), "xielu.beta = '0.5'; it has to be a number from -1000 to 1000"),
        ("xielu.beta", (True, "bool"), "xielu.beta = True"),
    ],
)
def test_files_with_wrong_numbers_are_refused(
    tmp_path: Path, key: str, entry: tuple[Any, str] | None, message: str
) -> None:
    file = gguf.open(changed(written(tmp_path / "m.gguf", "apertus"), tmp_path / "x.gguf", {key: entry}))
    with pytest.raises(QuantkitError, match=message):
        validate.describe(file.metadata, file.tensors, file.path)
