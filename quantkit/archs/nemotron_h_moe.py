"""nemotron_h_moe: Nemotron 3 Nano and Super. `nemotron_h` with routed and shared experts, neither with a gate, in the
layers E.

In Super, whose config.json has a `moe_latent_size`, ffn_latent_down projects what enters a layer's routed experts to so
many elements, and ffn_latent_up the sum of their outputs back. The router and the shared experts get it as it is.

The router takes sigmoids, and adds a bias to choose experts. llama.cpp's converter writes no expert_gating_func, so
files without it have sigmoids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quantkit.archs import nemotron_h
from quantkit.archs.common import experts
from quantkit.archs.common.base import Config, Keys, refuse
from quantkit.archs.common.blocks import HParams, Part
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.nemotron_h import MLP, MOE, NemotronH, has_experts, is_feed_forward, layer_kinds, rows_of, ungated
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries


def _has_latents(hp: HParams, layer: int) -> bool:
    return hp.n_moe_latent > 0 and is_feed_forward(hp, layer)


def _rule(ours: str, theirs: str, layers: Callable[[Any, int], bool] = is_feed_forward, **given: Any) -> TensorRule:
    return TensorRule(f"blk.N.{ours}", f"model.layers.N.mixer.{theirs}", layers=layers, **given)


class NemotronHMoe(NemotronH):
    """Nemotron 3 Nano and Super."""

    name = "nemotron_h_moe"
    feed_forward_kind = MOE
    defaults: ClassVar[Mapping[str, object]] = dict(NemotronH.defaults) | {
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    }  # fmt: skip
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *nemotron_h.INPUT_RULES,
        *nemotron_h.LAYER_RULES,
        _rule("ffn_gate_inp", "gate", f32=True),
        _rule("exp_probs_b.bias", "gate.e_score_correction_bias", full_names=True, f32=True),
        _rule("ffn_latent_down", "fc1_latent_proj", _has_latents),
        _rule("ffn_latent_up", "fc2_latent_proj", _has_latents),
        *(_rule(f"ffn_{name}_exps", f"experts.E.{name}_proj") for name in ("up", "down")),
        *(_rule(f"ffn_{name}_shexp", f"shared_experts.{name}_proj") for name in ("up", "down")),
        *nemotron_h.OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = NemotronH.EXAMPLE | {
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    }

    def accepts(self, config: Config) -> bool:
        return has_experts(config)

    def width(self, config: Config) -> int:
        return rows_of(config, "moe_intermediate_size")

    def metadata(self, config: Config) -> Entries:
        if MLP in layer_kinds(config):
            raise UnsupportedError(
                "config.json: layers of both kinds, mlp (-) and moe (E), which nemotron_h_moe files cannot express"
            )
        refuse(config, "mlp_bias", (False,))
        shared = rows_of(config, "moe_shared_expert_intermediate_size")
        named = dict(config) | {"shared_expert_intermediate_size": shared}
        found = super().metadata(config) | experts.entries(self.name, named)
        if config.get("moe_latent_size") is not None:
            found[f"{self.name}.moe_latent_size"] = (rows_of(config, "moe_latent_size"), "u32")
        return found

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found = super().config(metadata, tensors) | experts.config(hp)
        del found["first_k_dense_replace"]
        if hp.n_moe_latent:
            found["moe_latent_size"] = hp.n_moe_latent
        count = Keys(self.name, metadata).number("expert_shared_count", 1)
        return found | {"n_shared_experts": count, "moe_shared_expert_intermediate_size": hp.n_ff_shared}

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        sigmoid = experts.GATING_NUMBERS["sigmoid"]
        keys = Keys(self.name, {f"{self.name}.expert_gating_func": sigmoid} | dict(keys.metadata))
        found = super().numbers(keys, tensors) | experts.numbers(keys, tensors, biased=True)
        if found["n_ff_shared"] < 1:
            raise FormatError(f"metadata key {self.name}.expert_shared_feed_forward_length is missing")
        return found | {"n_moe_latent": keys.number("moe_latent_size", 0)}

    def feed_forward(self, hp: HParams, i: int) -> Part:
        up = hp.linear(f"blk.{i}.ffn_up_exps")
        shared = ungated(hp, i, "_shexp", hp.n_ff_shared)
        part = experts.routed(hp, i, "attn_norm")
        part = replace(part, gate=up, up=up, activation="reglu", shared=shared)
        if not hp.n_moe_latent:
            return part
        down, up = (hp.linear(f"blk.{i}.ffn_latent_{name}") for name in ("down", "up"))
        return replace(part, latent_down=down, latent_up=up, latent=hp.n_moe_latent)
