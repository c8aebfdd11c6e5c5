"""qwen3vl: Qwen3-VL, its text model: Qwen3 with multimodal RoPE, and deepstack layers where images are.

A position has three numbers, of time, height and width, each for some of the pairs of elements (dimension_sections). In
text the three are equal, so it is ordinary RoPE. The features that the vision tower takes from its layers
`deepstack_visual_indexes` are added after the first n_deepstack_layers layers, at the positions of images only.

transformers has no class for the text model alone. It computes what Qwen3 does; it is exported as that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quantkit.archs.common.base import Config, rope_parameters
from quantkit.archs.common.tensors import LazyTensor
from quantkit.archs.qwen3 import Qwen3
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import sequence

_SECTIONS = [24, 20, 20]  # transformers' default
_THETA = 500000.0  # the same


def vision_entries(name: str, config: Config) -> Entries:
    """The GGUF keys of multimodal RoPE and of deepstack layers."""
    sections = [*(sequence(rope_parameters(config), "mrope_section") or _SECTIONS), 0, 0, 0, 0][:4]
    return {
        f"{name}.rope.dimension_sections": (sections, "i32"),
        f"{name}.n_deepstack_layers": (len(sequence(config, "deepstack_visual_indexes")), "u32"),
    }


class Qwen3VL(Qwen3):
    """Qwen3-VL, its text model."""

    name = "qwen3vl"
    hf: ClassVar[tuple[str, ...]] = ("Qwen3VLForConditionalGeneration",)
    model_type = "qwen3_vl_text"
    defaults: ClassVar[Mapping[str, object]] = {"rope_theta": _THETA}
    EXAMPLE: ClassVar[dict[str, Any]] = Qwen3.EXAMPLE | {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    }

    def metadata(self, config: Config) -> Entries:
        return super().metadata(config) | vision_entries(self.name, config)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        return super().config(metadata, tensors) | {
            "architectures": [Qwen3.hf[0]],
            "model_type": Qwen3.model_type,
        }
