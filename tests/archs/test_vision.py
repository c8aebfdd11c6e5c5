"""Vision towers: what a converted file computes against transformers, its keys and tensors against the loader's."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quantkit.cli import main
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats import gguf
from quantkit.pipelines.conversion.mmproj import plan_mmproj
from quantkit.vision import embed
from quantkit.vision.operations import patches
from quantkit.vision.tower import of_config
from tests.archs.checkpoints import byte_level, write_tokenizer
from tests.cli.running import refused
from tests.refusals import Refusals

# What llama.cpp's clip loader reads (clip-impl.h and load_tensors in clip.cpp), by projector.
_BLOCK = r"v\.blk\.\d+\.(attn_out|ln1|ln2|ffn_up|ffn_down{})\.weight"
_BIASES = r"v\.blk\.\d+\.({})\.bias"
LOADER = {
    "qwen3vl_merger": (
        [r"v\.patch_embd\.(weight|bias|weight\.1)", r"v\.position_embd\.weight", _BLOCK.format("|attn_qkv"),
         _BIASES.format("attn_out|ln1|ln2|ffn_up|ffn_down|attn_qkv"), r"v\.post_ln\.(weight|bias)",
         r"v\.deepstack\.\d+\.(norm|fc1|fc2)\.(weight|bias)", r"mm\.[02]\.(weight|bias)"],
        ["use_gelu", "vision.spatial_merge_size", "vision.is_deepstack_layers"],
    ),
    "gemma3": (
        [r"v\.patch_embd\.(weight|bias)", r"v\.position_embd\.weight", _BLOCK.format("|attn_q|attn_k|attn_v"),
         _BIASES.format("attn_out|ln1|ln2|ffn_up|ffn_down|attn_q|attn_k|attn_v"), r"v\.post_ln\.(weight|bias)",
         r"mm\.(input_projection|soft_emb_norm)\.weight"],
        ["use_gelu", "vision.projector.scale_factor"],
    ),
    "pixtral": (
        [r"v\.patch_embd\.weight", r"v\.pre_ln\.weight", _BLOCK.format("|ffn_gate|attn_q|attn_k|attn_v"),
         r"mm\.(input_norm|patch_merger|1|2)\.weight", r"v\.token_embd\.img_break"],
        ["use_silu", "vision.spatial_merge_size"],
    ),
}  # fmt: skip
KEYS = ["has_vision_encoder", "projector_type", *(f"vision.{name}" for name in (
    "embedding_length", "feed_forward_length", "block_count", "projection_dim", "attention.head_count",
    "attention.layer_norm_epsilon", "image_size", "patch_size", "image_mean", "image_std"))]  # fmt: skip


def built(projector: str) -> Any:
    """A tiny multimodal model of transformers with random weights."""
    import torch
    import transformers

    text = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    if projector == "qwen3vl_merger":
        config = transformers.Qwen3VLConfig(
            text_config=text, tie_word_embeddings=False,
            vision_config={"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
                           "out_hidden_size": 48, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
                           "spatial_merge_size": 2, "temporal_patch_size": 2},
        )  # fmt: skip
        kind = transformers.Qwen3VLForConditionalGeneration
    elif projector == "gemma3":
        config = transformers.Gemma3Config(
            text_config=text, mm_tokens_per_image=9,
            vision_config={"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
                           "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 24, "patch_size": 4,
                           "vision_use_head": False},
        )  # fmt: skip
        kind = transformers.Gemma3ForConditionalGeneration
    else:
        config = transformers.Mistral3Config(
            text_config=text | {"model_type": "mistral", "rms_norm_eps": 1e-5}, spatial_merge_size=2,
            vision_config={"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "head_dim": 16, "image_size": 24, "patch_size": 4,
                           "hidden_act": "silu"},
        )  # fmt: skip
        kind = transformers.Mistral3ForConditionalGeneration
    torch.manual_seed(2)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 2 * parameter[0].numel() ** -0.5)
            else:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def checkpoint(directory: Path, projector: str) -> tuple[Path, Any]:
    model = built(projector)
    model.save_pretrained(directory)
    tokenizer = byte_level(300)
    write_tokenizer(directory, tokenizer, bos_token="<|begin|>", eos_token="<|end|>")
    path = directory / "tokenizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    found["added_tokens"][0]["content"] = "[IMG_BREAK]"  # any id will do
    path.write_text(json.dumps(found), encoding="utf-8")
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    return directory, model


def expected(model: Any, projector: str, image: np.ndarray, row: np.ndarray) -> np.ndarray:
    """What transformers gives the language model; the break token's embedding after each row but the last."""
    import torch

    pixels = torch.from_numpy(image)[None]
    with torch.no_grad():
        if projector == "qwen3vl_merger":
            height, width = image.shape[1] // 4, image.shape[2] // 4
            cut = image.reshape(3, height // 2, 2, 4, width // 2, 2, 4).transpose(1, 4, 2, 5, 0, 3, 6)
            cut = np.broadcast_to(cut[:, :, :, :, :, None], (*cut.shape[:5], 2, 4, 4)).reshape(height * width, -1)
            found = model.model.visual(torch.from_numpy(cut.copy()), torch.tensor([[1, height, width]]))
            return np.concatenate([x.numpy() for x in (found.pooler_output, *found.deepstack_features)], axis=1)
        if projector == "gemma3":
            return np.asarray(model.model.get_image_features(pixels).pooler_output[0].numpy())
        sizes = torch.tensor([image.shape[1:]])
        found = model.model.get_image_features(pixels, image_sizes=sizes, vision_feature_layer=-1).pooler_output[0]
    rows = found.numpy().reshape(image.shape[1] // 8, image.shape[2] // 8, -1)
    ends = np.broadcast_to(row, (len(rows), 1, rows.shape[2]))
    return np.concatenate([rows, ends], axis=1).reshape(-1, rows.shape[2])[:-1]


@pytest.mark.parametrize("projector", list(LOADER))
def test_embeddings_are_those_of_transformers(tmp_path: Path, projector: str) -> None:
    directory, model = checkpoint(tmp_path / "hf", projector)
    plan_mmproj(directory, "f32").write(tmp_path / "mmproj.gguf")
    file = gguf.open(tmp_path / "mmproj.gguf")
    patterns, more = LOADER[projector]
    assert [name for name in file.tensors if not any(re.fullmatch(p, name) for p in patterns)] == []
    assert all(any(re.fullmatch(p, name) for name in file.tensors) for p in patterns)
    assert {k for k in file.metadata if k.startswith("clip.")} == {f"clip.{k}" for k in [*KEYS, *more]}
    assert (file.metadata["general.architecture"], file.metadata["general.type"]) == ("clip", "mmproj")
    size = (24, 24) if projector == "gemma3" else (24, 40)
    image = np.random.default_rng(0).standard_normal((3, *size), np.float32)
    token = json.loads((directory / "tokenizer.json").read_text())["added_tokens"][0]["id"]
    embedding = model.get_input_embeddings().weight[token].detach().numpy()
    wanted = expected(model, projector, image, embedding)
    assert wanted.shape[1] == 48 * (3 if projector == "qwen3vl_merger" else 1)
    found = embed(file, image)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 2e-3 * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("projector", list(LOADER))
def test_the_command_and_quantizing_by_recipe(
    tmp_path: Path, projector: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = checkpoint(tmp_path / "hf", projector)
    out = tmp_path / "mmproj.gguf"
    assert main(["convert", str(directory), str(out), "--mmproj", "--outtype", "f16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["projector"] == projector
    quantized = tmp_path / "q.gguf"
    rules = r"v\.blk=q8_0,^mm\.[012]=q5_0,.*=f16"
    assert main(["quantize", str(out), str(quantized), "Q8_0", "--custom-q", rules]) == 0
    types = {name: t.type.name for name, t in gguf.open(quantized).tensors.items()}
    assert types["v.blk.0.ffn_up.weight"] == "q8_0"
    assert main(["quantize", str(out), str(tmp_path / "preset.gguf"), "Q4_K_M"]) == 0
    assert gguf.open(tmp_path / "preset.gguf").tensors["v.blk.0.ffn_up.weight"].type.block_size > 1
    kept = ("v.patch_embd.weight", "v.position_embd.weight", "mm.input_projection.weight", "mm.patch_merger.weight")
    assert {types[name] for name in kept if name in types} <= {"f32", "f16"}
    assert types["v.patch_embd.weight"] == "f32"
    for options in (["--dialect", "llama.cpp"], ["--mtp", "only"], ["--pre", "llama-bpe"], ["--disk", "1G"]):
        said = refused(capsys, "convert", directory, tmp_path / "x.gguf", "--mmproj", *options)
        assert "leave out options of the language model" in said
    image = np.random.default_rng(0).standard_normal((3, 24, 24), np.float32)
    close, whole = embed(gguf.open(quantized), image), embed(gguf.open(out), image)
    assert 0 < np.abs(close - whole).max() < 0.3 * np.abs(whole).max()


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    directory, _ = checkpoint(tmp_path / "hf", "gemma3")
    config = json.loads((directory / "config.json").read_text())
    with pytest.raises(UnsupportedError, match=r"image encoder of Gemma9ForConditionalGeneration .*siglip"):
        of_config(config | {"architectures": ["Gemma9ForConditionalGeneration"]})
    with pytest.raises(UnsupportedError, match="no vision_config"):
        of_config({"architectures": ["LlamaForCausalLM"]})
    (directory / "config.json").write_text(json.dumps(config | {"mm_tokens_per_image": 16}))
    with pytest.raises(UnsupportedError, match="whole squares"):
        plan_mmproj(directory)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(FormatError, match=r"no preprocessor_config\.json, .* fetch it with"):
        plan_mmproj(directory)


def test_an_unknown_tensor_comes_with_the_directory(tmp_path: Path) -> None:
    directory, _ = checkpoint(tmp_path / "hf", "gemma3")
    stored = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(stored.replace(b"patch_embedding.weight", b"patch_embeddinx.weight"))
    with pytest.raises(UnsupportedError, match=rf"{directory}: 1 tensor.*patch_embeddinx"):
        plan_mmproj(directory)


def test_pixtrals_text_model_has_the_epsilon_of_the_projector(tmp_path: Path) -> None:
    """The loader has one epsilon, 1e-5; a config.json without it means 1e-6, that of Ministral 3 1e-5."""
    directory, _ = checkpoint(tmp_path / "hf", "pixtral")
    config, images = (json.loads((directory / f"{name}config.json").read_text()) for name in ("", "preprocessor_"))
    text = {key: value for key, value in config["text_config"].items() if key != "rms_norm_eps"}
    with pytest.raises(UnsupportedError, match="rms_norm_eps = 1e-06"):
        of_config(config).entries(config | {"text_config": text}, images)
    of_config(config).entries(config | {"text_config": text | {"model_type": "ministral3"}}, images)


def test_pixels_beyond_the_last_patch() -> None:
    """A convolution leaves them out, for example 384 pixels in patches of 14."""
    rng = np.random.default_rng(1)
    image, kernel = rng.standard_normal((3, 13, 10), np.float32), rng.standard_normal((5, 3, 4, 4), np.float32)
    np.testing.assert_array_equal(patches(image, kernel), patches(image[:, :12, :8], kernel))


def contradictions(projector: str) -> list[tuple[str, Any, str]]:
    """Settings of a checkpoint, vision_config's with a dot before them, that its tensors or its loader contradict."""
    found: list[tuple[str, Any, str]] = [
        (".hidden_size", 64, "shape|head_dim = 16"), (".intermediate_size", 32, "shape"), (".patch_size", 8, "shape"),
        (".patch_size", None, "no patch_size, which the image encoder needs"),
        ("do_normalize", False, "do_normalize = false"), ("rescale_factor", 1, "the loader divides by 255"),
        ("image_mean", [10**400, 0, 0], "three numbers"), ("image_std", [0.5, 0, 0.5], "each a number above 0"),
    ]  # fmt: skip
    if projector == "gemma3":
        return [*found, ("mm_tokens_per_image", -1, "mm_tokens_per_image = -1"), (".layer_norm_eps", -1, "above 0"),
                (".num_attention_heads", 3, "hidden_size = 32 is not a multiple of the 3 heads")]  # fmt: skip
    if projector == "pixtral":
        return [
            *found,
            (".head_dim", 8, "head_dim = 8 is not supported by quantkit; accepted: 16"),
            (".hidden_act", None, "hidden_act = 'gelu'"),
            (".num_attention_heads", 3, "head_dim = 16"),
            ("spatial_merge_size", 3, r"patch_merger.weight .* \(32, 128\); config.json makes it \(32, 288\)"),
        ]
    return [*found, (".deepstack_visual_indexes", [0, 0], "at most once"), (".num_position_embeddings", 37, "square")]


@pytest.mark.parametrize("projector", list(LOADER))
def test_a_config_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, projector: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = checkpoint(tmp_path / "hf", projector)
    config, images = (json.loads((directory / f"{name}config.json").read_text()) for name in ("", "preprocessor_"))
    for key, value, message in contradictions(projector):
        of_images, vision = (
            key.startswith(("image_", "do_", "rescale_")),
            {key[1:]: value} if key.startswith(".") else {},
        )
        own = {key: value} if not vision and not of_images else {}
        changed = config | own | {"vision_config": config["vision_config"] | vision}
        (directory / "config.json").write_text(json.dumps(changed))
        (directory / "preprocessor_config.json").write_text(json.dumps(images | ({key: value} if of_images else {})))
        assert main(["convert", str(directory), str(tmp_path / "o.gguf"), "--mmproj"]) == 1, key
        said = capsys.readouterr().err
        assert re.search(message, said), (key, said)
        assert str(directory) in said
        assert not (tmp_path / "o.gguf").exists()


@pytest.mark.parametrize("projector", list(LOADER))
def test_settings_of_other_types_end_in_errors_of_ours(tmp_path: Path, projector: str) -> None:
    directory, _ = checkpoint(tmp_path / "hf", projector)
    config, images = (json.loads((directory / f"{name}config.json").read_text()) for name in ("", "preprocessor_"))
    tower, shapes, tried = of_config(config), {}, Refusals()
    for value in (0, 1, -1, 1 << 31, 0.5, "x", True, [], [1], [[1]], {}, None):
        for key in config["vision_config"]:
            changed = config | {"vision_config": config["vision_config"] | {key: value}}
            tried.call(tower.entries, changed, images)
            tried.call(tower.parts, changed, shapes, 5)
        for key in images:
            tried.call(tower.entries, config, images | {key: value})
    tried.check_both()


@pytest.mark.parametrize("projector", list(LOADER))
def test_files_that_contradict_themselves_end_in_errors_of_ours(tmp_path: Path, projector: str) -> None:
    """Keys of other values and types, and tensors that are missing or have another's shape."""
    directory, _ = checkpoint(tmp_path / "hf", projector)
    plan_mmproj(directory, "f32").write(tmp_path / "mmproj.gguf")
    file, tried = gguf.open(tmp_path / "mmproj.gguf"), Refusals()
    image = np.random.default_rng(0).standard_normal((3, 24, 24), np.float32)

    def attempt(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        tried.call(embed, SimpleNamespace(path=file.path, metadata=metadata, tensors=tensors), image)

    metadata, tensors = dict(file.metadata), dict(file.tensors)
    attempt(metadata, tensors)
    for key in (key for key in metadata if key.startswith("clip.vision.")):
        for value in (0, 1, 7, -1, 1 << 31, 0.5, math.nan, "x", True, [], [1], None):
            attempt(metadata | {key: value}, tensors)
        attempt({name: value for name, value in metadata.items() if name != key}, tensors)
    for name in tensors:
        attempt(metadata, {other: tensor for other, tensor in tensors.items() if other != name})
        attempt(metadata, tensors | {name: tensors["v.patch_embd.weight"]})
        attempt(metadata, tensors | {name: tensors["v.blk.0.ln1.weight"]})
    tried.check_both()
