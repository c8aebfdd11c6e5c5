"""qwen3vlmoe: Qwen3-VL with experts, its text model: qwen3moe with the keys of qwen3vl.

Checkpoints stack the experts and transpose them: gate_up_proj is [experts, n_embd, 2 * ff], of each expert the columns
of gate, then of up; down_proj is [experts, ff, n_embd]. What transformers 5 saves is not transposed. The weights of the
selected experts are always divided by their sum. It is exported as Qwen3-MoE, which computes the same in text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from quantkit.archs.common.base import Config, need
from quantkit.archs.common.blocks import HParams
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule, Transform
from quantkit.archs.common.transforms import Chain, ExpertRows, GatherRows
from quantkit.archs.qwen3moe import Qwen3MoE
from quantkit.archs.qwen3vl import Qwen3VL, vision_entries
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer

_LAYOUT = "expert layout"  # entry that `to_gguf` adds to a config: "rows", or "columns" for transposed matrices


def _stacked(layout: str) -> dict[str, TensorRule]:
    """Rules of checkpoint tensors that hold all experts of a layer; `layout` is that of `ExpertRows`."""

    def half(second: bool) -> Callable[[HParams], Transform]:
        def transform(hp: HParams) -> Transform:
            ff = hp.n_ff_expert
            runs = ((0, (2 * expert + second) * ff, ff) for expert in range(hp.n_expert))
            return Chain(ExpertRows(2 * ff, hp.n_embd, layout), GatherRows(runs, (hp.n_expert, ff)))

        return transform

    def down(hp: HParams) -> Transform:
        return ExpertRows(hp.n_embd, hp.n_ff_expert, layout)

    sources = {"gate": ("gate_up_proj", half(False)), "up": ("gate_up_proj", half(True)), "down": ("down_proj", down)}
    return {
        f"blk.N.ffn_{ours}_exps": TensorRule(
            f"blk.N.ffn_{ours}_exps.weight", f"model.layers.N.mlp.experts.{theirs}", transform, full_names=True
        )
        for ours, (theirs, transform) in sources.items()
    }


class Qwen3VLMoE(Qwen3MoE):
    """Qwen3-VL with experts, its text model."""

    name = "qwen3vlmoe"
    hf: ClassVar[tuple[str, ...]] = ("Qwen3VLMoeForConditionalGeneration",)
    model_type = "qwen3_vl_moe_text"
    defaults: ClassVar[Mapping[str, object]] = Qwen3VL.defaults
    EXAMPLE: ClassVar[dict[str, Any]] = Qwen3MoE.EXAMPLE | {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe_text",
        "rope_parameters": Qwen3VL.EXAMPLE["rope_parameters"],
    }

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        stacked = _stacked(str(config.get(_LAYOUT, "columns")))
        return tuple(stacked.get(rule.gguf, rule) for rule in self.rules)

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_gguf`. The shapes of both expert tensors together tell whether they are transposed."""
        n_embd, ff = need(config, "hidden_size"), need(config, "moe_intermediate_size")
        stored = {
            name.rpartition(".")[2]: shape[1:] for name, shape in shapes.items() if ".layers.0.mlp.experts." in name
        }
        is_plain = stored == {"gate_up_proj": (2 * ff, n_embd), "down_proj": (n_embd, ff)}
        return super().to_gguf(dict(config) | {_LAYOUT: "rows" if is_plain else "columns"}, shapes)

    def head_dim(self, config: Config) -> int:
        return integer(config, "head_dim") or int(need(config, "hidden_size") // need(config, "num_attention_heads"))

    def metadata(self, config: Config) -> Entries:
        return super().metadata(dict(config) | {"norm_topk_prob": True}) | vision_entries(self.name, config)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        return super().config(metadata, tensors) | {
            "architectures": [Qwen3MoE.hf[0]],
            "model_type": Qwen3MoE.model_type,
        }
