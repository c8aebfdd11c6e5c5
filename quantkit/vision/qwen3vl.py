"""qwen3vl_merger: the tower of Qwen3-VL and Qwen3.5, a ViT with axial RoPE whose patches are merged 2 by 2.

The patch convolution of two frames becomes two of one frame; an image is both. Patches are ordered by merged block. The
learned positions are a square grid that is resized to the image's, bilinearly with aligned corners. Beside the merged
patches of the last layer, the features of the layers `deepstack_visual_indexes` go to the language model: they follow
in the same row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common.base import refuse
from quantkit.archs.common.transforms import GatherRows
from quantkit.errors import FormatError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import mapping, real, sequence
from quantkit.vision.operations import Weights, attention, gelu, gelu_tanh, layer_norm, linear, patches
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

_BASE = 10000.0  # of RoPE
_PATCHES = "visual.patch_embed.proj.weight"
_EPS = 1e-6  # a constant in transformers


class Qwen3VLTower(Tower):
    """The tower of Qwen3-VL and Qwen3.5."""

    projector = "qwen3vl_merger"
    classes: ClassVar[tuple[str, ...]] = (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    )

    def entries(self, config: Config, preprocessor: Config) -> Entries:
        vision = mapping(config, "vision_config")
        refuse(vision, "hidden_act", ("gelu_pytorch_tanh",))
        refuse(vision, "temporal_patch_size", (2,))
        refuse(vision, "out_hidden_size", (count(mapping(config, "text_config"), "hidden_size"),))
        depth = layers(vision, "depth")
        positions = count(vision, "num_position_embeddings")
        side = math.isqrt(positions)
        if side * side != positions:
            raise FormatError(f"config.json: num_position_embeddings = {positions}; a square number is needed")
        deep = _deepstack(vision, depth)
        return super().entries(config, preprocessor) | {
            "clip.use_gelu": (True, "bool"),
            "clip.vision.block_count": (depth, "u32"),
            "clip.vision.attention.head_count": (count(vision, "num_heads"), "u32"),
            "clip.vision.attention.layer_norm_epsilon": (_EPS, "f32"),
            "clip.vision.image_size": (side * count(vision, "patch_size"), "u32"),
            "clip.vision.spatial_merge_size": (count(vision, "spatial_merge_size", 64, 2), "u32"),
            "clip.vision.is_deepstack_layers": ([i in deep for i in range(depth)], "bool"),
        }

    def shapes(self, keys: Sizes) -> dict[str, tuple[int, ...]]:
        found = common_shapes(keys)
        found["v.patch_embd.weight.1"] = found["v.patch_embd.weight"]
        found["v.position_embd.weight"] = ((keys.image // keys.patch) ** 2, keys.width)
        found |= dict.fromkeys(("v.deepstack.N.norm.weight", "v.deepstack.N.norm.bias"), (keys.merged,))
        for stem, rows in (("v.deepstack.N.fc1", keys.merged), ("v.deepstack.N.fc2", keys.projection),
                           ("mm.0", keys.merged), ("mm.2", keys.projection)):  # fmt: skip
            found |= {f"{stem}.weight": (rows, keys.merged), f"{stem}.bias": (rows,)}
        return found

    def parts(self, config: Config, shapes: Mapping[str, tuple[int, ...]], break_token: int | None) -> list[Part]:
        vision = mapping(config, "vision_config")
        n, size = count(vision, "hidden_size"), count(vision, "patch_size")
        stored = shapes.get(_PATCHES, kernel := (n, 3, 2, size, size))
        if stored != kernel:
            raise FormatError(f"tensor {_PATCHES} has shape {stored}; config.json makes it {kernel}")
        found = [
            Part(f"v.patch_embd.weight{suffix}", _PATCHES, _frame(n, size, frame), "f32")
            for frame, suffix in enumerate(("", ".1"))
        ]
        found.append(Part("v.patch_embd.bias", "visual.patch_embed.proj.bias"))
        found.append(Part("v.position_embd.weight", "visual.pos_embed.weight", kind="f32"))
        for i in range(layers(vision, "depth")):
            ours, theirs = f"v.blk.{i}", f"visual.blocks.{i}"
            for name, source in (("ln1", "norm1"), ("attn_qkv", "attn.qkv"), ("attn_out", "attn.proj"),
                                 ("ln2", "norm2"), ("ffn_up", "mlp.linear_fc1"),
                                 ("ffn_down", "mlp.linear_fc2")):  # fmt: skip
                found += linear_parts(f"{ours}.{name}", f"{theirs}.{source}")
        for number, layer in enumerate(_deepstack(vision, layers(vision, "depth"))):
            for name, source in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2")):
                found += linear_parts(f"v.deepstack.{layer}.{name}", f"visual.deepstack_merger_list.{number}.{source}")
        for name, source in (("v.post_ln", "norm"), ("mm.0", "linear_fc1"), ("mm.2", "linear_fc2")):
            found += linear_parts(name, f"visual.merger.{source}")
        return found

    def forward(self, weights: Weights, keys: Mapping[str, Any], image: np.ndarray) -> np.ndarray:
        merge, eps = int(keys["spatial_merge_size"]), real(keys, "attention.layer_norm_epsilon")
        require_multiple(image, int(keys["patch_size"]) * merge)
        grid = patches(image, weights["v.patch_embd.weight"] + weights["v.patch_embd.weight.1"])
        height, width, n = grid.shape
        x = grid + weights["v.patch_embd.bias"] + _resized(weights["v.position_embd.weight"], height, width)
        x = _by_block(x, merge).reshape(-1, n)
        where = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), axis=-1)
        cos, sin = _angles(_by_block(where, merge).reshape(-1, 2), n // int(keys["attention.head_count"]))
        deep = []
        for i in range(int(keys["block_count"])):
            blk = f"v.blk.{i}"
            qkv = linear(weights, f"{blk}.attn_qkv", layer_norm(weights, f"{blk}.ln1", x, eps))
            q, k, v = qkv.reshape(len(x), 3, int(keys["attention.head_count"]), -1).transpose(1, 0, 2, 3)
            x = x + linear(weights, f"{blk}.attn_out", attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v))
            y = linear(weights, f"{blk}.ffn_up", layer_norm(weights, f"{blk}.ln2", x, eps))
            x = x + linear(weights, f"{blk}.ffn_down", gelu_tanh(y))
            if f"v.deepstack.{i}.fc1.weight" in weights:
                stem = f"v.deepstack.{i}"
                y = layer_norm(weights, f"{stem}.norm", x.reshape(-1, merge * merge * n), eps)
                deep.append(linear(weights, f"{stem}.fc2", gelu(linear(weights, f"{stem}.fc1", y))))
        y = layer_norm(weights, "v.post_ln", x, eps).reshape(-1, merge * merge * n)
        return np.concatenate([linear(weights, "mm.2", gelu(linear(weights, "mm.0", y))), *deep], axis=1)


def _deepstack(vision: Config, depth: int) -> list[int]:
    """The layers whose features go to the language model. FormatError for others than layers, each once."""
    deep: list[Any] = list(sequence(vision, "deepstack_visual_indexes"))
    if wrong := [i for i in deep if type(i) is not int or not 0 <= i < depth or deep.count(i) > 1]:
        raise FormatError(
            f"config.json: deepstack_visual_indexes has {wrong[0]!r}; the tower has {depth} layers, each at most once"
        )
    return deep


def _frame(n: int, size: int, frame: int) -> GatherRows:
    """The kernel of one frame, [n, 3, size, size], of one of two, [n, 3, 2, size, size]."""
    return GatherRows([(0, (2 * i + frame) * size, size) for i in range(3 * n)], (n, 3, size))


def _by_block(x: np.ndarray, merge: int) -> np.ndarray:
    """float32[blocks, merge * merge, n] of [height, width, n]: the patches of each merged block together."""
    height, width, n = x.shape
    cut = x.reshape(height // merge, merge, width // merge, merge, n).transpose(0, 2, 1, 3, 4)
    return cut.reshape(-1, merge * merge, n)


def _resized(table: np.ndarray, height: int, width: int) -> np.ndarray:
    """float32[height, width, n] of a square grid of positions, by bilinear interpolation with aligned corners."""
    side = math.isqrt(len(table))
    grid = table.reshape(side, side, -1)
    for axis, length in ((0, height), (1, width)):
        at = np.linspace(0, side - 1, length, dtype=np.float32)
        low = at.astype(np.int64)
        share = (at - low).reshape([-1 if i == axis else 1 for i in range(3)])
        grid = np.take(grid, low, axis) * (1 - share) + np.take(grid, np.minimum(low + 1, side - 1), axis) * share
    return grid


def _angles(where: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin float32[tokens, 1, dim] of rows and columns int[tokens, 2]: half of the pairs turn with each."""
    rates = _BASE ** (-np.arange(0, dim // 2, 2) / (dim // 2))
    angles = (where[:, :, None] * rates).reshape(len(where), 1, -1)
    both = np.concatenate([angles, angles], axis=-1)
    return np.cos(both).astype(np.float32), np.sin(both).astype(np.float32)


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Pairs half a head apart, rotated."""
    half = x.shape[-1] // 2
    return np.asarray(x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin)
