"""pixtral: the tower of Mistral Small 3.1 and later: RMS norms, SwiGLU, axial RoPE, and patches that are merged.

Rows and columns turn every second pair of a head: rows the even rates, columns the odd ones. In files pairs are
neighbours ("norm" RoPE), first those of rows. The projector norms the patches, merges squares of them, a channel's
values together, and has two matrices with GELU between. After each row of merged patches but the last comes the
embedding of the token [IMG_BREAK], which the file takes from the language model. The loader has one epsilon for all
norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common.base import refuse, rope_parameters
from quantkit.archs.common.tensors import ReadRows, Shape, Transform, interleave_halves
from quantkit.errors import FormatError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import mapping, real
from quantkit.vision.operations import Weights, attention, gelu, linear, patches, rms_norm, silu
from quantkit.vision.tower import (
    Config,
    Part,
    Sizes,
    Tower,
    common_shapes,
    count,
    layers,
    linear_parts,
    require_multiple,
)

_BASE, _EPS = 10000.0, 1e-5  # of RoPE, a constant in the loader; a constant in transformers
_ACTIVATION, _TEXT_EPS = "gelu", {"ministral3": 1e-5}  # where config.json has none; other text models: 1e-6


class _Row(Transform):
    """One row of a matrix, as a vector."""

    copies_rows = False

    def __init__(self, number: int):
        self.number = number

    def shape(self, *sources: Shape) -> Shape:
        if len(sources[0]) != 2 or not 0 <= self.number < sources[0][0]:
            raise FormatError(f"token [IMG_BREAK] is number {self.number}, the embedding has shape {sources[0]}")
        return sources[0][-1:]

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        return sources[0](self.number, self.number + 1).reshape(-1, 1)[start:stop]


class PixtralTower(Tower):
    """The tower of Mistral Small 3.1 and later."""

    projector = "pixtral"
    classes: ClassVar[tuple[str, ...]] = ("Mistral3ForConditionalGeneration",)

    def entries(self, config: Config, preprocessor: Config) -> Entries:
        vision, text = mapping(config, "vision_config"), mapping(config, "text_config")
        refuse({"hidden_act": vision.get("hidden_act") or _ACTIVATION}, "hidden_act", ("silu",))
        heads = count(vision, "num_attention_heads")
        refuse(vision, "head_dim", (count(vision, "hidden_size") // heads,))
        refuse(config, "projector_hidden_act", ("gelu",))
        refuse(config, "vision_feature_layer", (-1, [-1]))
        refuse(rope_parameters(vision), "rope_theta", (_BASE,))
        eps = text.get("rms_norm_eps") or _TEXT_EPS.get(str(text.get("model_type")), 1e-6)
        refuse({"rms_norm_eps": eps}, "rms_norm_eps", (_EPS,))
        return super().entries(config, preprocessor) | {
            "clip.use_silu": (True, "bool"),
            "clip.vision.image_size": (count(vision, "image_size"), "u32"),
            "clip.vision.block_count": (layers(vision), "u32"),
            "clip.vision.attention.head_count": (heads, "u32"),
            "clip.vision.attention.layer_norm_epsilon": (_EPS, "f32"),
            "clip.vision.spatial_merge_size": (count(config, "spatial_merge_size", 64, 2), "u32"),
        }

    def shapes(self, keys: Sizes) -> dict[str, tuple[int, ...]]:
        n, rows = keys.width, keys.projection
        return common_shapes(keys) | {
            "mm.input_norm.weight": (n,),
            "mm.patch_merger.weight": (n, keys.merged),
            "mm.1.weight": (rows, n),
            "mm.1.bias": (rows,),
            "mm.2.weight": (rows, rows),
            "mm.2.bias": (rows,),
            "v.token_embd.img_break": (rows,),
        }

    def parts(self, config: Config, shapes: Mapping[str, tuple[int, ...]], break_token: int | None) -> list[Part]:
        vision = mapping(config, "vision_config")
        if break_token is None:
            raise FormatError("the tokenizer has no token [IMG_BREAK], whose embedding the file needs")
        width, heads = count(vision, "hidden_size"), count(vision, "num_attention_heads")
        interleaved = interleave_halves(count(vision, "head_dim", default=max(1, width // heads)))
        found = [
            Part("v.patch_embd.weight", "vision_tower.patch_conv.weight", kind="f32"),
            Part("v.pre_ln.weight", "vision_tower.ln_pre.weight"),
        ]
        for i in range(layers(vision)):
            ours, theirs = f"v.blk.{i}", f"vision_tower.transformer.layers.{i}"
            for part in "qk":
                found += linear_parts(f"{ours}.attn_{part}", f"{theirs}.attention.{part}_proj", interleaved, bias=False)
            for name, source in (("attn_v", "attention.v_proj"), ("attn_out", "attention.o_proj"),
                                 ("ln1", "attention_norm"), ("ln2", "ffn_norm"), ("ffn_gate", "feed_forward.gate_proj"),
                                 ("ffn_up", "feed_forward.up_proj"),
                                 ("ffn_down", "feed_forward.down_proj")):  # fmt: skip
                found += linear_parts(f"{ours}.{name}", f"{theirs}.{source}", bias=False)
        projector = "multi_modal_projector"
        found += [
            Part("mm.input_norm.weight", f"{projector}.norm.weight"),
            Part("mm.patch_merger.weight", f"{projector}.patch_merger.merging_layer.weight", kind="f32"),
        ]
        for number in (1, 2):
            has_bias = f"{projector}.linear_{number}.bias" in shapes
            found += linear_parts(f"mm.{number}", f"{projector}.linear_{number}", bias=has_bias)
        return [*found, Part("v.token_embd.img_break", "language_model.embed_tokens.weight", _Row(break_token))]

    def canonical(self, name: str) -> str:
        return super().canonical(name).replace("language_model.model.", "language_model.")

    def forward(self, weights: Weights, keys: Mapping[str, Any], image: np.ndarray) -> np.ndarray:
        merge, eps = int(keys["spatial_merge_size"]), real(keys, "attention.layer_norm_epsilon")
        require_multiple(image, int(keys["patch_size"]) * merge)
        grid = patches(image, weights["v.patch_embd.weight"])
        height, width, n = grid.shape
        x = rms_norm(weights, "v.pre_ln", grid.reshape(-1, n), eps)
        where = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), axis=-1).reshape(-1, 2)
        for i in range(int(keys["block_count"])):
            blk = f"v.blk.{i}"
            y = rms_norm(weights, f"{blk}.ln1", x, eps)
            q, k, v = (
                linear(weights, f"{blk}.attn_{part}", y).reshape(len(y), int(keys["attention.head_count"]), -1)
                for part in "qkv"
            )
            x = x + linear(weights, f"{blk}.attn_out", attention(_rotated(q, where), _rotated(k, where), v))
            y = rms_norm(weights, f"{blk}.ln2", x, eps)
            gated = silu(linear(weights, f"{blk}.ffn_gate", y)) * linear(weights, f"{blk}.ffn_up", y)
            x = x + linear(weights, f"{blk}.ffn_down", gated)
        x = rms_norm(weights, "mm.input_norm", x, eps)
        cut = x.reshape(height // merge, merge, width // merge, merge, n).transpose(0, 2, 4, 1, 3)
        x = linear(weights, "mm.patch_merger", cut.reshape(-1, n * merge * merge))
        x = linear(weights, "mm.2", gelu(linear(weights, "mm.1", x)))
        rows = x.reshape(height // merge, width // merge, -1)
        ends = np.broadcast_to(weights["v.token_embd.img_break"], (len(rows), 1, rows.shape[2]))
        return np.concatenate([rows, ends], axis=1).reshape(-1, rows.shape[2])[:-1]


def _rotated(x: np.ndarray, where: np.ndarray) -> np.ndarray:
    """float32[tokens, heads, dim] with its pairs of neighbours rotated, by the row and then by the column."""
    dim = x.shape[-1]
    rates = _BASE ** (-2 * np.arange(dim // 2) / dim)
    angles = np.concatenate([where[:, :1] * rates[::2], where[:, 1:] * rates[1::2]], axis=1)[:, None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., ::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
