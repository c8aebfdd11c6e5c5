"""Language models inside multimodal models: their part of a config.json and of a checkpoint.

Classes named …ForConditionalGeneration hold a language model and image or audio encoders. Their config.json has the
language model's config in `text_config`, often without the class's defaults. Their tensors are named
`model.language_model.…` or `language_model.model.…`. The GGUF of the language model leaves the encoders out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.inputs.settings import mapping

_PARTS = ("text_config", "llm_config", "language_config")
_WHOLE = ("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id",
          "_name_or_path")  # fmt: skip
_PREFIX = re.compile(r"^(model\.)?language_model\.(model\.)?")
_ENCODERS = {
    "image encoder": r"vision|visual|image|patch_merg|pre_mm_projector|multi_modal_projector|mm_projector"
    r"|embed_vision|mlp1\.|vit_large_projector",
    "audio encoder": r"audio|speech|sound|embed_audio",
}


def text_config(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The config of the language model in a multimodal one; None if config.json has none."""
    parts = (config.get(key) for key in _PARTS)
    return next((part for part in parts if isinstance(part, dict)), None)


def merge_text_config(config: Mapping[str, object], text: Mapping[str, object]) -> dict[str, Any]:
    """The language model's config with settings that only the outer config has. The outer tie_word_embeddings wins.

    Of the image encoder's config it has `deepstack_visual_indexes`: as many layers take features of images.
    """
    found = {key: config[key] for key in _WHOLE if key in config} | dict(text)
    if deepstack := mapping(config, "vision_config").get("deepstack_visual_indexes"):
        found["deepstack_visual_indexes"] = deepstack
    tied = [part["tie_word_embeddings"] for part in (config, text) if part.get("tie_word_embeddings") is not None]
    return found | ({"tie_word_embeddings": tied[0]} if tied else {})


def inner_name(name: str) -> str:
    """The name that a tensor has in a checkpoint of the language model alone."""
    if not (match := _PREFIX.match(name)):
        return name
    rest = name[match.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def encoder_tensors(names: Iterable[str]) -> dict[str, list[str]]:
    """Tensors of the encoders, by encoder."""
    found: dict[str, list[str]] = {}
    for name in names:
        for what, pattern in _ENCODERS.items():
            if re.match(rf"(model\.)?({pattern})", name):
                found.setdefault(what, []).append(name)
                break
    return found
