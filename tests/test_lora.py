"""LoRA adapters of PEFT: merged into a model, and converted to adapters in GGUF."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs
from quantkit.cli import main
from quantkit.errors import FormatError, OptionError, QuantkitError, UnsupportedError
from quantkit.formats import gguf
from quantkit.formats.safetensors import open_checkpoint
from quantkit.formats.safetensors.peft_adapter import check_fits, open_adapter
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.conversion.lora import merged
from tests.archs.adapters import save_adapter
from tests.archs.checkpoints import tiny
from tests.archs.quantized import quantized
from tests.archs.test_hybrid import rewritten
from tests.cli.running import printed, refused

TOKENS = np.random.default_rng(3).integers(2, 300, 40).tolist()


def peft_logits(model: Any, adapter: Path, scale: dict[str, float]) -> np.ndarray:
    """Log-probabilities of the model with PEFT's formula: W + scale B A, in float32."""
    import torch

    found = open_adapter(adapter).products
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in found:
                a, b = (torch.from_numpy(t.dequantize().copy()) for t in (found[name].a, found[name].b))
                parameter += (b @ a) * scale.get(name.split(".")[-2], scale[""])
        return np.asarray(model(torch.tensor([TOKENS])).logits[0])


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"init_lora_weights": "gaussian"}, {"": 6 / 4}),
        ({"use_rslora": True}, {"": 6 / math.sqrt(4)}),
        ({"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}}, {"": 6 / 4, "v_proj": 3 / 2}),
    ],
)
def test_merged_logits_are_those_of_peft(tmp_path: Path, changes: dict[str, Any], scale: dict[str, float]) -> None:
    model = tiny(tmp_path / "hf", "float32", "llama")
    adapter = save_adapter(tmp_path / "adapter", model, changes)
    convert_checkpoint(tmp_path / "hf", tmp_path / "plain.gguf", "f32")
    convert_checkpoint(tmp_path / "hf", tmp_path / "merged.gguf", "f32", merge_lora=adapter)
    plain, made = (quantkit.load(tmp_path / f"{name}.gguf").logits(TOKENS) for name in ("plain", "merged"))
    expected = peft_logits(model, adapter, scale)
    assert np.abs(made - expected).max() < 1e-4
    assert np.abs(plain - expected).max() > 0.1
    assert {t.type.name for t in gguf.open(tmp_path / "merged.gguf").tensors.values()} == {"f32"}


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}])
def test_adapter_in_gguf(tmp_path: Path, changes: dict[str, Any]) -> None:
    """What llama.cpp adds, alpha / r b a, to the GGUF's rows is what merging adds."""
    model = tiny(tmp_path / "hf", "float32", "llama")
    adapter = save_adapter(tmp_path / "adapter", model, changes)
    out = tmp_path / "lora.gguf"
    words = ["convert", str(tmp_path / "hf"), str(out), "--lora", str(adapter)]
    assert main([*words, "--cluster", "local:1"]) == 1
    assert not out.exists()
    assert main(words) == 0
    merged = tmp_path / "merged.gguf"
    assert main(["convert", str(tmp_path / "hf"), str(merged), "--merge-lora", str(adapter), "--outtype", "f32"]) == 0
    convert_checkpoint(tmp_path / "hf", tmp_path / "plain.gguf", "f32")
    plain, made, file = (gguf.open(path) for path in (tmp_path / "plain.gguf", merged, out))
    assert [file.metadata[key] for key in ("general.type", "adapter.type", "general.architecture")] == [
        "adapter", "lora", "llama",
    ]  # fmt: skip
    names = {name.rpartition(".")[0] for name in file.tensors}
    assert len(file.tensors) == 2 * len(names) == 2 * 3 * 2
    for name in names:
        a, b = (file.tensors[f"{name}.lora_{part}"].dequantize() for part in "ab")
        added = file.metadata["adapter.lora.alpha"] / len(a) * (b @ a)
        np.testing.assert_allclose(plain.tensors[name].dequantize() + added, made.tensors[name].dequantize(), atol=1e-5)
    assert {name.split(".")[2] for name in names} == {"attn_q", "attn_v", "ffn_down"}


@pytest.mark.parametrize(
    ("dtype", "outtype", "kind"),
    [("bfloat16", "auto", "bf16"), ("float16", "auto", "f16"), ("float16", "stored", "f16"),
     ("float32", "stored", "f32")],
)  # fmt: skip
def test_merged_matrices_have_the_type_of_the_others(tmp_path: Path, dtype: str, outtype: str, kind: str) -> None:
    model = tiny(tmp_path / "hf", dtype, "llama")
    adapter = save_adapter(tmp_path / "adapter", model)
    convert_checkpoint(tmp_path / "hf", tmp_path / "merged.gguf", outtype, merge_lora=adapter)
    tensors = gguf.open(tmp_path / "merged.gguf").tensors
    assert tensors["blk.0.attn_q.weight"].type.name == tensors["blk.0.attn_k.weight"].type.name == kind


def test_codes_with_scales_and_biases_of_zeros(tmp_path: Path) -> None:
    """AutoGPTQ gives every matrix a bias of zeros; those that llama has not are left out of a merged model, too."""
    model = tiny(tmp_path / "plain", "bfloat16", "llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    source = quantized("gptq", tmp_path / "plain", tmp_path / "hf")
    adapter = save_adapter(tmp_path / "adapter", model, modules=["o_proj"])
    convert_checkpoint(source, tmp_path / "plain.gguf", "f32")
    convert_checkpoint(source, tmp_path / "merged.gguf", "f32", merge_lora=adapter)
    plain, made = (gguf.open(tmp_path / f"{name}.gguf").tensors for name in ("plain", "merged"))
    assert list(plain) == list(made)
    (product,) = open_adapter(adapter).products.values()
    added = 1.5 * product.b.dequantize() @ product.a.dequantize()
    name = "blk.0.attn_output.weight"
    np.testing.assert_allclose(made[name].dequantize(), plain[name].dequantize() + added, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias"), ({"peft_type": "LOHA"}, "peft_type"),
     ({"modules_to_save": ["lm_head"]}, "modules_to_save.*; merge the adapter in PEFT"),
     ({"r": 8}, "makes the rank 8"),
     ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa_niter_16' changed the weights of the base"),
     ({"init_lora_weights": "OLoRA"}, "save it as a plain LoRA"), ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
     ({"lora_alpha": 0}, "adapter_config.json: lora_alpha = 0; it has to be a number other than 0"),
     ({"lora_alpha": 1e308}, "lora_alpha = 1e[+]308; it has to be"),
     ({"alpha_pattern": {"v_proj": 0}}, "alpha_pattern = 0"),
     ({"use_rslora": "no"}, "adapter_config.json: use_rslora = 'no'; it has to be true or false"),
     ({"rank_pattern": {"(": 4}}, "adapter_config.json: rank_pattern: pattern '[(]' is not a regular expression"),
     ({"rank_pattern": {"q_proj|down_proj": 2}}, "q_proj: .* makes the rank 2")],
)  # fmt: skip
def test_other_adapters_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = tiny(tmp_path / "hf", "float32", "llama")
    with pytest.raises((FormatError, UnsupportedError), match=message):
        open_adapter(save_adapter(tmp_path / "adapter", model, changes))


def test_adapter_of_another_model(tmp_path: Path) -> None:
    model = tiny(tmp_path / "hf", "float32", "llama")
    adapter = save_adapter(tmp_path / "adapter", model)
    for name, config in (("fewer", {"num_hidden_layers": 1}), ("narrow", {"intermediate_size": 128})):
        tiny(tmp_path / name, "float32", "llama", **config)
        with pytest.raises(FormatError, match="the adapter is of another model"):
            convert_checkpoint(tmp_path / name, tmp_path / "x.gguf", "f32", merge_lora=adapter)
        assert main(["convert", str(tmp_path / name), str(tmp_path / "x.gguf"), "--lora", str(adapter)]) == 1
        assert not (tmp_path / "x.gguf").exists()
    with pytest.raises(FormatError, match=r"no adapter_config\.json"):
        open_adapter(tmp_path / "hf")


def test_matrices_that_the_gguf_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter of the image encoder too: merging says what it leaves out, an adapter in GGUF is refused."""
    import torch

    model = tiny(tmp_path / "text", "float32", "llama")
    model.vision_tower = torch.nn.Module()
    model.vision_tower.proj = torch.nn.Linear(8, 8)
    adapter = save_adapter(tmp_path / "adapter", model, modules=["q_proj", "vision_tower.proj"])
    encoder = {"vision_tower.proj.weight": np.zeros((8, 8), np.float32)}
    source = rewritten(tmp_path / "text", tmp_path / "hf", lambda tensors: tensors | encoder)
    made = convert_checkpoint(source, tmp_path / "x.gguf", "f32", merge_lora=adapter)
    (warning,) = made.warnings
    assert warning == (
        "1 matrices of the adapter are of tensors that are left out, so they change nothing: vision_tower.proj.weight"
    )
    with pytest.raises(
        UnsupportedError, match=r"1 of 3 matrices are of an image or audio encoder, .*: vision_tower\.proj"
    ):
        convert_checkpoint(tmp_path / "text", tmp_path / "x.gguf", "f32", merge_lora=adapter)
    said = refused(capsys, "convert", source, tmp_path / "y.gguf", "--lora", adapter)
    assert "1 of its 3 matrices are of tensors that the GGUF leaves out: vision_tower.proj.weight" in said


def test_an_lm_head_that_is_the_embedding(tmp_path: Path) -> None:
    model = tiny(tmp_path / "hf", "float32", "llama", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", model, modules=["q_proj", "lm_head"])
    with pytest.raises(UnsupportedError, match=r"adapter changes lm_head\.weight, which .* tie_word_embeddings=False"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "x.gguf", "f32", merge_lora=adapter)


def test_codes_without_scales_are_not_merged(tmp_path: Path) -> None:
    model = tiny(tmp_path / "hf", "float32", "llama")
    product = next(iter(open_adapter(save_adapter(tmp_path / "adapter", model)).products.values()))
    base = next(t for t in open_checkpoint(tmp_path / "hf").tensors.values() if t.name.endswith("q_proj.weight"))
    base.dtype = "F8_E4M3"
    with pytest.raises(UnsupportedError, match="is F8_E4M3; an adapter is added to F32, F16, BF16, or to codes"):
        check_fits(base, product)


def test_an_adapter_is_an_input(tmp_path: Path) -> None:
    model = tiny(tmp_path / "hf", "float32", "llama")
    adapter = save_adapter(tmp_path / "adapter", model)
    with pytest.raises(QuantkitError, match="this is the input; write to another name"):
        convert_checkpoint(tmp_path / "hf", adapter / "adapter_model.safetensors", "f32", merge_lora=adapter)
    options = quantkit.ConvertOptions(merge_lora=adapter)
    with pytest.raises(OptionError, match="run it without --cluster"):  # of workers without the adapter
        quantkit.convert("hf://org/Tiny-Llama", tmp_path / "x.gguf", options=options, client=object())


def test_two_products_of_one_matrix_are_refused(tmp_path: Path) -> None:
    """Names with and without `model.` are of one matrix; only one of the products would be in the GGUF."""
    model = tiny(tmp_path / "hf", "float32", "llama")
    adapter = open_adapter(save_adapter(tmp_path / "adapter", model, modules=["0.self_attn.q_proj"]))
    name = "model.layers.0.self_attn.q_proj.weight"
    adapter.products[name.removeprefix("model.")] = adapter.products[name]
    with pytest.raises(FormatError, match=rf"adapter: {name} and .* are both of {name}; leave out one"):
        merged(open_checkpoint(tmp_path / "hf"), adapter, archs.get("llama"))


def test_values_and_options_that_an_adapter_does_not_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny(tmp_path / "hf", "float32", "llama")
    adapter = save_adapter(tmp_path / "adapter", model)
    words = ["convert", tmp_path / "hf", tmp_path / "x.gguf", "--lora", adapter]
    assert "6 matrices" in printed(capsys, *words, "--dry-run")
    printed(capsys, "convert", tmp_path / "hf", tmp_path / "{name}-{ftype}.gguf", "--lora", adapter)
    assert (tmp_path / "adapter-f32.gguf").exists()
    for options in (["--outtype", "stored"], ["--fuse-gate-up"], ["--split-max-size", "1G"], ["--model-name", "x"]):
        assert "--lora" in refused(capsys, *words, *options)
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + np.float32(np.nan).tobytes())
    message = refused(capsys, *words)
    assert f"{adapter}: tensor blk." in message
    assert "is nan; 1 value(s) are not finite" in message
    assert not (tmp_path / "x.gguf").exists()
