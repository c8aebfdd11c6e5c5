"""gemma3: the tower of Gemma 3, SigLIP with learned positions for one size of image, and a projector that averages.

The states of the patches are averaged over squares until mm_tokens_per_image are left, normed and projected. The
projection is stored as in the checkpoint, a row for each input: the loader transposes it, and takes f16 or f32. Gemma's
norm is stored minus 1 in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common.base import refuse
from quantkit.archs.common.transforms import add
from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import mapping, real
from quantkit.vision.operations import Weights, attention, gelu_tanh, layer_norm, linear, patches, rms_norm
from quantkit.vision.tower import Config, Part, Sizes, Tower, common_shapes, count, epsilon, layers, linear_parts

_FACTOR = 4  # patches on a side of an averaged square, where the file does not say
_EPS = 1e-6


class Gemma3Tower(Tower):
    """The tower of Gemma 3."""

    projector = "gemma3"
    classes: ClassVar[tuple[str, ...]] = ("Gemma3ForConditionalGeneration",)
    unused: ClassVar[tuple[str, ...]] = ("vision_tower.head.",)

    def canonical(self, name: str) -> str:
        return super().canonical(name).replace("vision_tower.vision_model.", "vision_tower.")

    def entries(self, config: Config, preprocessor: Config) -> Entries:
        vision = mapping(config, "vision_config")
        refuse(vision, "hidden_act", ("gelu_pytorch_tanh",))
        side = count(vision, "image_size") // count(vision, "patch_size")
        tokens = math.isqrt(count(config, "mm_tokens_per_image", default=256))
        if side < tokens or side % tokens:
            raise UnsupportedError(
                f"config.json: {side} patches on a side for {tokens} tokens; the loader averages whole squares"
            )
        found: Entries = {
            "clip.use_gelu": (True, "bool"),
            "clip.vision.image_size": (count(vision, "image_size"), "u32"),
            "clip.vision.block_count": (layers(vision), "u32"),
            "clip.vision.attention.head_count": (count(vision, "num_attention_heads"), "u32"),
            "clip.vision.attention.layer_norm_epsilon": (epsilon(vision, _EPS), "f32"),
        }
        if side // tokens != _FACTOR:
            found["clip.vision.projector.scale_factor"] = (side // tokens, "u32")
        return super().entries(config, preprocessor) | found

    def shapes(self, keys: Sizes) -> dict[str, tuple[int, ...]]:
        n = keys.width
        return common_shapes(keys) | {
            "v.position_embd.weight": ((keys.image // keys.patch) ** 2, n),
            "mm.input_projection.weight": (n, keys.projection),
            "mm.soft_emb_norm.weight": (n,),
        }

    def parts(self, config: Config, shapes: Mapping[str, tuple[int, ...]], break_token: int | None) -> list[Part]:
        embeddings = "vision_tower.embeddings"
        found = [
            Part("v.patch_embd.weight", f"{embeddings}.patch_embedding.weight", kind="f32"),
            Part("v.patch_embd.bias", f"{embeddings}.patch_embedding.bias"),
            Part("v.position_embd.weight", f"{embeddings}.position_embedding.weight", kind="f32"),
        ]
        for i in range(layers(mapping(config, "vision_config"))):
            for name, source in (("ln1", "layer_norm1"), ("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"),
                                 ("attn_v", "self_attn.v_proj"), ("attn_out", "self_attn.out_proj"),
                                 ("ln2", "layer_norm2"), ("ffn_up", "mlp.fc1"), ("ffn_down", "mlp.fc2")):  # fmt: skip
                found += linear_parts(f"v.blk.{i}.{name}", f"vision_tower.encoder.layers.{i}.{source}")
        found += linear_parts("v.post_ln", "vision_tower.post_layernorm")
        projector = "multi_modal_projector"
        return [
            *found,
            Part("mm.input_projection.weight", f"{projector}.mm_input_projection_weight", kind="f16"),
            Part("mm.soft_emb_norm.weight", f"{projector}.mm_soft_emb_norm.weight", add(1), "f32"),
        ]

    def forward(self, weights: Weights, keys: Mapping[str, Any], image: np.ndarray) -> np.ndarray:
        size, eps = int(keys["image_size"]), real(keys, "attention.layer_norm_epsilon")
        if image.shape != (3, size, size):
            raise DataError(f"an image of {image.shape[2]} x {image.shape[1]} pixels; gemma3 takes {size} x {size}")
        grid = patches(image, weights["v.patch_embd.weight"]) + weights["v.patch_embd.bias"]
        side, n = grid.shape[0], grid.shape[2]
        x = grid.reshape(-1, n) + weights["v.position_embd.weight"]
        for i in range(int(keys["block_count"])):
            blk = f"v.blk.{i}"
            y = layer_norm(weights, f"{blk}.ln1", x, eps)
            q, k, v = (
                linear(weights, f"{blk}.attn_{part}", y).reshape(len(y), int(keys["attention.head_count"]), -1)
                for part in "qkv"
            )
            x = x + linear(weights, f"{blk}.attn_out", attention(q, k, v))
            y = linear(weights, f"{blk}.ffn_up", layer_norm(weights, f"{blk}.ln2", x, eps))
            x = x + linear(weights, f"{blk}.ffn_down", gelu_tanh(y))
        x = layer_norm(weights, "v.post_ln", x, eps)
        factor = keys.get("projector.scale_factor", _FACTOR)
        if type(factor) is not int or factor < 1 or side % factor:
            raise FormatError(f"clip.vision.projector.scale_factor = {factor!r}; it has to divide {side} patches")
        cut = x.reshape(side // factor, factor, side // factor, factor, n).mean(axis=(1, 3)).reshape(-1, n)
        normed = rms_norm(weights, "mm.soft_emb_norm", cut, eps)
        return np.asarray(normed @ weights["mm.input_projection.weight"])
