"""MTP (multi-token prediction) layers: they come after the main layers and draft further tokens (`blocks.MtpLayer`).

In GGUF they are the last nextn_predict_layers of block_count layers, with tensors of their own under `nextn`. `convert
--mtp`, or by default the architecture's `mtp`, decides whether a file has them; the entry `MTP` ("keep" or "drop") of a
config holds the decision. A file of them alone ("only") has the same metadata, and the embedding, last norm and output
besides; that there is no blk.0 tells it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from quantkit.archs.common.blocks import Block, Head, HParams, MtpLayer
from quantkit.archs.common.tensors import TensorRule, split_name
from quantkit.errors import UnsupportedError
from quantkit.inputs.settings import integer

MTP = "mtp"
POLICIES = ("auto", "keep", "drop", "only")

_PARTS = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head.head", "shared_head.norm")
_SHARED = ("embed_tokens", "shared_head.head")  # GLM-4.6 and 4.7 have the main ones only
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_UNNUMBERED = ("model.mtp.", "model.mtp_")  # in checkpoints that do not number MTP layers with the main layers


def _is_mtp_layer(hp: HParams, layer: int) -> bool:
    return layer >= hp.n_main


def rules(names: Mapping[str, str] | None = None) -> tuple[TensorRule, ...]:
    """The rules of an MTP layer's own tensors. `names`: what checkpoints call parts otherwise than DeepSeek V3's do."""

    def rule(part: str) -> TensorRule:
        ours, theirs = part.replace(".", "_"), (names or {}).get(part, part)
        return TensorRule(
            f"blk.N.nextn.{ours}", f"model.layers.N.{theirs}", layers=_is_mtp_layer, f32=ours.endswith("norm"),
            often_shared=part in _SHARED,
        )  # fmt: skip

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


def in_head_file(name: str, n_main: int) -> bool:
    """Whether a file of MTP layers alone has a GGUF tensor: all but the trunk's blocks, as llama.cpp's --mtp does."""
    number = split_name(name)[1] if name.startswith("blk.") else None
    return number is None or number >= n_main


def layer(hp: HParams, block: Block, head: Head) -> MtpLayer:
    """The MTP layer around a block. The model's embedding, last norm and output stand for those that it lacks."""
    stem = f"blk.{block.layer}.nextn"
    if f"{stem}.eh_proj.weight" not in hp.tensors:
        raise UnsupportedError(
            f"there is no tensor {stem}.eh_proj.weight: MTP layers that share the first one's projection do not run"
        )

    def has(part: str) -> bool:
        return f"{stem}.{part}.weight" in hp.tensors

    own = hp.linear(f"{stem}.embed_tokens") if has("embed_tokens") else None
    return MtpLayer(
        embedding=own.weight if own else head.embedding,
        enorm=hp.norm(f"{stem}.enorm"),
        hnorm=hp.norm(f"{stem}.hnorm"),
        projection=hp.linear(f"{stem}.eh_proj"),
        block=block,
        norm=hp.norm(f"{stem}.shared_head_norm") if has("shared_head_norm") else head.norm,
        output=hp.linear(f"{stem}.shared_head_head") if has("shared_head_head") else head.output,
        embedding_scale=head.embedding_scale,
        embedding_factor=own.scale if own else head.embedding_factor,
    )
