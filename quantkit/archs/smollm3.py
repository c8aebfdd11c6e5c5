"""smollm3: SmolLM3. Llama without RoPE in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantkit.archs.common.base import Config, need, refuse
from quantkit.archs.common.blocks import Attention, HParams
from quantkit.archs.common.tensors import LazyTensor
from quantkit.archs.llama import Llama
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, sequence

_NO_ROPE_INTERVAL = 4  # every fourth layer has no RoPE; all runtimes fix this number


class SmolLM3(Llama):
    """SmolLM3."""

    name = "smollm3"
    hf = ("SmolLM3ForCausalLM",)
    model_type = "smollm3"
    ties_by_default = True
    defaults = {"rope_theta": 2000000.0}  # noqa: RUF012  data
    EXAMPLE = Llama.EXAMPLE | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 5,
        "rope_theta": 2000000.0,
        "no_rope_layer_interval": _NO_ROPE_INTERVAL,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }

    def metadata(self, config: Config) -> Entries:
        refuse(config, "use_sliding_window", (False,))
        layers = need(config, "num_hidden_layers")
        if stated := sequence(config, "no_rope_layers"):
            with_rope = [bool(flag) for flag in stated]
        else:
            interval = integer(config, "no_rope_layer_interval") or _NO_ROPE_INTERVAL
            with_rope = [(i + 1) % interval != 0 for i in range(layers)]
        if with_rope != [(i + 1) % _NO_ROPE_INTERVAL != 0 for i in range(layers)]:
            raise UnsupportedError(
                f"config.json: no_rope_layers differs from no RoPE in every {_NO_ROPE_INTERVAL}th layer, which "
                f"{self.name} files cannot express"
            )
        return {key.replace("llama.", "smollm3.", 1): entry for key, entry in super().metadata(config).items()}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        return super().config(metadata, tensors) | {"no_rope_layer_interval": _NO_ROPE_INTERVAL}

    def attention(self, hp: HParams, i: int) -> Attention:
        part = super().attention(hp, i)
        return part if (i + 1) % _NO_ROPE_INTERVAL else replace(part, rope=hp.rope.without_rotation())
