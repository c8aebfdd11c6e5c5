"""MTP layers and multimodal models: which tensors of a checkpoint a GGUF gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs
from quantkit.archs.common.mtp import RULES
from quantkit.cli import main
from quantkit.errors import FormatError, UnknownNameError, UnsupportedError
from quantkit.formats.gguf import open as open_gguf
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter, open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.conversion.plan import plan_conversion
from quantkit.pipelines.export import export_gguf
from tests.archs.checkpoints import byte_level, tiny, write_tokenizer

# ----------------------------------------------------------------------------------- MTP layers


def with_mtp_layer(directory: Path, arch: str, rng: np.random.Generator) -> Path:
    """A tiny checkpoint with an MTP layer after the main ones, a copy of the last, as DeepSeek and GLM publish it."""
    tiny(directory / "plain", "float32", arch)
    config = json.loads((directory / "plain" / "config.json").read_text())
    n_layer, n, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    found = {t.name: t.dequantize() for t in open_checkpoint(directory / "plain").tensors.values()}
    here, there = f"model.layers.{n_layer - 1}.", f"model.layers.{n_layer}."
    found |= {name.replace(here, there): x for name, x in found.items() if name.startswith(here)}
    shapes = {"eh_proj": (n, 2 * n), "embed_tokens": (vocab, n), "shared_head.head": (vocab, n)}
    for rule in RULES:
        part = rule.hf.removeprefix("model.layers.N.")
        found[f"{there}{part}.weight"] = rng.standard_normal(shapes.get(part, (n,)), np.float32)
    target = directory / "further"
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((directory / "plain" / name).read_bytes())
    (target / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with CheckpointWriter(target, [CheckpointSpec(name, x.shape, "F32") for name, x in found.items()]) as writer:
        for name, x in found.items():
            writer.write(name, np.ascontiguousarray(x, "<f4").reshape(-1).view(np.uint8))
    return target


@pytest.mark.parametrize(("arch", "usual"), [("deepseek2", "drop"), ("glm4moe", "keep")])
def test_kept_or_dropped(tmp_path: Path, rng: np.random.Generator, arch: str, usual: str) -> None:
    source = with_mtp_layer(tmp_path, arch, rng)
    convert_checkpoint(tmp_path / "plain", tmp_path / "plain.gguf", "f32")
    tokens = list(range(3, 40))
    expected = quantkit.load(tmp_path / "plain.gguf").logits(tokens)
    for policy in ("keep", "drop"):
        done = convert_checkpoint(source, tmp_path / f"{policy}.gguf", "f32", mtp=policy)
        made = open_gguf(tmp_path / f"{policy}.gguf")
        kept = policy == "keep"
        assert done.n_mtp_layers == made.metadata.get(f"{arch}.nextn_predict_layers", 0) == int(kept)
        assert ("blk.3.nextn.eh_proj.weight" in made.tensors) == kept
        assert list(done.left_out) == ([] if kept else ["MTP layer 3"])
        np.testing.assert_array_equal(quantkit.load(tmp_path / f"{policy}.gguf").logits(tokens), expected)
    made = plan_conversion(source, "f32")
    assert [s.name for s in made.specs] == list(open_gguf(tmp_path / f"{usual}.gguf").tensors)
    config = archs.language_model(json.loads((source / "config.json").read_text()))
    assert [t.name for t in archs.from_hf(config).tensors(config)] == [s.name for s in made.specs]
    export_gguf(tmp_path / "keep.gguf", tmp_path / "back")
    before, after = open_checkpoint(source).tensors, open_checkpoint(tmp_path / "back").tensors
    assert {name: t.raw().tobytes() for name, t in before.items()} == {
        name: t.raw().tobytes() for name, t in after.items()
    }


def test_keep_without_mtp_layers_is_an_error(tmp_path: Path, rng: np.random.Generator) -> None:
    """Re-uploads leave MTP layers out but keep config.json unchanged."""
    source = with_mtp_layer(tmp_path, "glm4moe", rng)
    stored = open_checkpoint(source)
    kept = [t for t in stored.tensors.values() if not t.name.startswith("model.layers.3.")]
    data = {t.name: t.raw().copy() for t in kept}
    with CheckpointWriter(source, [CheckpointSpec(t.name, t.shape, t.dtype) for t in kept]) as writer:
        for name, x in data.items():
            writer.write(name, x)
    with pytest.raises(FormatError, match=r"has 1 MTP layer.* --mtp drop"):
        plan_conversion(source, mtp="keep")
    assert plan_conversion(source).n_mtp_layers == 0


def test_architectures_without_mtp_names(tmp_path: Path) -> None:
    """qwen3 has no such layers; `mtp.` tensors in its checkpoint are dropped with a message."""
    tiny(tmp_path / "a", "float32", "qwen3")
    found = {t.name: (t.shape, t.raw().copy()) for t in open_checkpoint(tmp_path / "a").tensors.values()}
    found["mtp.fc.weight"] = ((4, 4), np.zeros(64, np.uint8))
    with CheckpointWriter(
        tmp_path / "a", [CheckpointSpec(name, shape, "F32") for name, (shape, _) in found.items()]
    ) as w:
        for name, (_, x) in found.items():
            w.write(name, x)
    assert plan_conversion(tmp_path / "a").left_out == {"MTP layers": ["model.mtp.fc.weight"]}
    with pytest.raises(UnsupportedError, match=r"cannot be kept: files of qwen3 .* --mtp drop"):
        plan_conversion(tmp_path / "a", mtp="keep")
    with pytest.raises(UnknownNameError, match="--mtp 'some'"):
        plan_conversion(tmp_path / "a", mtp="some")


# ---------------------------------------------------------------------------------------------------- multimodal models


def inside(name: str) -> tuple[Any, str]:
    """A tiny multimodal model of transformers with an image encoder, and the architecture of its language model."""
    import transformers

    text = {key: value for key, value in archs.get("gemma3" if name == "Gemma3" else "llama").EXAMPLE.items()
            if key not in ("architectures", "tie_word_embeddings")}  # fmt: skip
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14}  # fmt: skip
    if name == "Gemma3":
        vision = transformers.SiglipVisionConfig(**small)
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    else:
        vision = transformers.PixtralVisionConfig(**small, head_dim=16)
        config = transformers.Mistral3Config(
            text_config=text | {"model_type": "mistral", "sliding_window": None, "head_dim": 16}, vision_config=vision,
            tie_word_embeddings=False,
        )  # fmt: skip
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), "gemma3" if name == "Gemma3" else "llama"


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("name", ["Gemma3", "Mistral3"])
def test_the_language_model_of_a_multimodal_one(tmp_path: Path, name: str, old_names: bool, capsys: Any) -> None:
    """For a text it gives the multimodal model's logits; a message says that the encoder is left out."""
    import torch

    torch.manual_seed(3)
    model, arch = inside(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.eval().save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", byte_level(320), bos_token="<|begin|>", eos_token="<|end|>")
    renamed(tmp_path / "hf", old_names)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "m.gguf"), "--outtype", "f32"]) == 0
    assert "left out: image encoder: " in capsys.readouterr().out
    loaded = quantkit.load(tmp_path / "m.gguf")
    assert loaded.metadata["general.architecture"] == arch
    tokens = np.random.default_rng(3).integers(2, 320, 60).tolist()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()
    ours = torch.from_numpy(loaded.logits(tokens)).log_softmax(-1).numpy()
    assert np.abs(ours - expected).max() < 1e-3
    assert main(["plan", str(tmp_path / "hf"), "Q8_0"]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "n.gguf"), "--vision", "keep"]) == 1


def renamed(directory: Path, old: bool) -> None:
    """Tensors under model.language_model., or as older checkpoints have them, language_model.model."""
    found = {}
    for tensor in open_checkpoint(directory).tensors.values():
        inner = archs.get("llama").canonical(tensor.name)
        of_text = inner.startswith(("model.embed", "model.layers", "model.norm"))
        if of_text:
            inner = f"language_model.{inner}" if old else inner.replace("model.", "model.language_model.", 1)
        elif inner.startswith("lm_head."):
            inner = f"language_model.{inner}" if old else inner
        else:
            inner = inner.removeprefix("model.") if old else inner
        found[inner] = (tensor.shape, tensor.dtype, tensor.raw().copy())
    with CheckpointWriter(directory, [CheckpointSpec(name, *tensor[:2]) for name, tensor in found.items()]) as writer:
        for name, (_, _, x) in found.items():
            writer.write(name, x)


def test_which_class_a_text_config_is_of() -> None:
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"], "quantization_config": {"quant_method": "x"},
            "tie_word_embeddings": False, "vision_config": {}}  # fmt: skip
    found = archs.language_model(kimi | {"text_config": {"model_type": "kimi_k2", "hidden_size": 3}})
    assert found == {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": {"quant_method": "x"},
                     "tie_word_embeddings": False, "model_type": "kimi_k2", "hidden_size": 3,
                     "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}  # fmt: skip
    stated = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    assert archs.language_model(kimi | {"text_config": stated})["architectures"] == ["DeepseekV2ForCausalLM"]
    unknown = archs.language_model(kimi | {"text_config": {"model_type": "x"}})
    with pytest.raises(UnsupportedError, match="KimiK25ForConditionalGeneration is not an architecture"):
        archs.from_hf(unknown)
    small = archs.language_model({"architectures": ["Gemma3ForConditionalGeneration"],
                                  "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}})  # fmt: skip
    assert (small["vocab_size"], small["num_attention_heads"], small["hidden_size"]) == (262208, 8, 2560)
