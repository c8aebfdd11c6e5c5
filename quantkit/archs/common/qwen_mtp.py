"""MTP (multi-token prediction) layers of Qwen3-Next and Qwen3.5, which checkpoints name `mtp.`, without numbers.

They have attention. If they are kept, GGUF numbers them after the main layers; tensors outside their blocks belong to
the first. Their norms are stored minus 1, like the others. config.json of Qwen3-Next does not count them: the names do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quantkit.archs.common import mtp as mtp_layers
from quantkit.archs.common.base import Config
from quantkit.archs.common.blocks import HParams
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.hybrid import norm_rule
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule
from quantkit.inputs.settings import integer

_COUNT = "mtp_num_hidden_layers"


def _is_first_mtp_layer(hp: HParams, layer: int) -> bool:
    return layer == hp.n_main


_MTP_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
MTP_RULES = (
    TensorRule("blk.N.nextn.eh_proj", "model.layers.N.eh_proj", layers=_is_first_mtp_layer),
    *(
        norm_rule(f"blk.N.nextn.{name.replace('.', '_')}", f"model.layers.N.{name}", layers=_is_first_mtp_layer)
        for name in list(_MTP_NAMES.values())[1:]
    ),
)


def numbered_name(name: str, n_main: int) -> str:
    """The numbered layer name of a checkpoint's `model.mtp.…` tensor; other names are returned unchanged."""
    start, _, rest = name.partition("model.mtp.")
    if start or not rest:
        return name
    if found := re.match(r"layers\.(\d+)\.", rest):
        return f"model.layers.{n_main + int(found[1])}.{rest[found.end() :]}"
    stem, _, suffix = rest.rpartition(".")
    return f"model.layers.{n_main}.{_MTP_NAMES[stem]}.{suffix}" if stem in _MTP_NAMES else name


def checkpoint_name(name: str, n_main: int) -> str:
    """The inverse of `numbered_name`, without the leading `model.`, as checkpoints have it."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    if not found or int(found[1]) < n_main:
        return name
    stem, _, suffix = name[found.end() :].rpartition(".")
    theirs = next(
        (mine for mine, ours in _MTP_NAMES.items() if ours == stem), f"layers.{int(found[1]) - n_main}.{stem}"
    )
    return f"mtp.{theirs}.{suffix}"


class QwenMtp(Decoder):
    """The base of architectures whose checkpoints name MTP layers so."""

    mtp: ClassVar[str] = "drop"

    def with_mtp(self, config: Config, policy: str, names: Collection[str] | None = None) -> dict[str, Any]:
        layers = {found[1] for name in names or () if (found := re.match(r"model\.mtp\.layers\.(\d+)\.", name))}
        if layers and not mtp_layers.count(config):
            config = {**config, _COUNT: len(layers)}
        return super().with_mtp(config, policy, names)

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_gguf`, with MTP layers numbered."""
        if not self.n_mtp_layers(config):
            return super().to_gguf(config, shapes)
        given = {numbered_name(self.canonical(name), integer(config, "num_hidden_layers")): name for name in shapes}
        found = super().to_gguf(config, {ours: shapes[theirs] for ours, theirs in given.items()})
        return [replace(piece, sources=tuple(given[source] for source in piece.sources)) for piece in found]

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        return [
            replace(piece, name=checkpoint_name(piece.name, hparams.n_main)) for piece in super().to_hf(hparams, shapes)
        ]

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        found = super().config(metadata, tensors)
        if extra := found.pop("num_nextn_predict_layers", 0):
            found[_COUNT] = extra
        return found
