"""MTP (multi-token prediction) layers: they come after the main layers and are not run.

In GGUF they are the last nextn_predict_layers of block_count layers, with tensors of their own under `nextn`. `convert
--mtp`, or by default the architecture's `mtp`, decides whether a file has them; the entry `MTP` ("keep" or "drop") of a
config holds the decision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from quantkit.archs.common.blocks import HParams
from quantkit.archs.common.tensors import TensorRule, split_name
from quantkit.inputs.settings import integer

MTP = "mtp"
POLICIES = ("auto", "keep", "drop")

_PARTS = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head.head", "shared_head.norm")
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_UNNUMBERED = ("model.mtp.", "model.mtp_")  # in checkpoints that do not number MTP layers with the main layers


def _is_mtp_layer(hp: HParams, layer: int) -> bool:
    return layer >= hp.n_main


def rules(names: Mapping[str, str] | None = None) -> tuple[TensorRule, ...]:
    """The rules of an MTP layer's own tensors. `names`: what checkpoints call parts otherwise than DeepSeek V3's do."""

    def rule(part: str) -> TensorRule:
        ours, theirs = part.replace(".", "_"), (names or {}).get(part, part)
        norm = ours.endswith("norm")
        return TensorRule(f"blk.N.nextn.{ours}", f"model.layers.N.{theirs}", layers=_is_mtp_layer, f32=norm)

    return tuple(rule(part) for part in _PARTS)


RULES = rules()


def count(config: Mapping[str, object]) -> int:
    """The number of MTP layers in config.json."""
    return next((found for key in _COUNTS if (found := integer(config, key))), 0)


def tensors(config: Mapping[str, object], names: Collection[str]) -> dict[str, list[str]]:
    """A checkpoint's MTP tensors by layer. MTP layers are those that config.json counts or that have an eh_proj."""
    n_layer = integer(config, "num_hidden_layers")
    layers = {name: split_name(name)[1] or 0 for name in names}
    marked = {layers[name] for name in names if ".eh_proj." in name} | set(range(n_layer, n_layer + count(config)))
    found: dict[str, list[str]] = {}
    for name in names:
        layer = layers[name]
        if name.startswith(_UNNUMBERED):
            found.setdefault("MTP layers", []).append(name)
        elif n_layer <= layer and layer in marked:
            found.setdefault(f"MTP layer {layer}", []).append(name)
    return found
