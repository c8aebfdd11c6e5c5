"""Checks of a model over several devices: scales of matrices, and placements that `-sm graph` cannot follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.placement.rules import Placement


def require_shardable(parts: Sequence[blocks.Block], placement: Placement) -> None:
    """UnsupportedError for `-nkvo` and rules for tensors that `-sm graph` cannot follow."""
    if placement.kv_on_cpu:
        raise UnsupportedError(
            "-nkvo: with -sm graph each device has the keys and values of its heads; drop one of them"
        )
    experts_of = {
        linear.weight: part
        for block in parts
        for part in block.parts
        if isinstance(part, blocks.Experts)
        for linear in part.matrices
    }
    for block in parts:
        if placement.shares.keys().isdisjoint({block.layer, *block.layers}):
            continue
        added_later = [p for p in block.parts if isinstance(p, blocks.Experts) and (p.identity or p.deferred)]
        if added_later:
            raise UnsupportedError(
                f"-sm graph: blk.{block.layer} has experts without matrices, or added at the end of the block "
                f"({added_later[0].router.weight}), which this version does not split between devices; take -sm layer"
            )
        scaled = [p.scaling.scale for p in block.parts if isinstance(p, blocks.LatentAttention) and p.scaling]
        if scaled:
            raise UnsupportedError(
                f"-sm graph: blk.{block.layer} scales queries by position and head ({scaled[0]}), which this version "
                "does not split between devices; take -sm layer"
            )
        for name in tensor_names(block):
            if name not in placement.devices or name in placement.sharded:
                continue
            part = experts_of.get(name)
            three = [linear.weight for linear in part.matrices] if part else []
            if not part or len({placement[n].name for n in three}) > 1 or any(n in placement.sharded for n in three):
                raise UnsupportedError(
                    f"{placement.reasons.get(name, '-ot')}: {name} would go to {placement[name].name}; with "
                    "-sm graph only the three matrices of a layer's experts can go elsewhere, together; take -sm "
                    "layer for others"
                )


def tensor_names(block: blocks.Block) -> Iterator[str]:
    """The names of the matrices and norms of a block."""
    pending: list[Any] = list(block.parts)
    while pending:
        part = pending.pop()
        for value in vars(part).values():
            if isinstance(value, (blocks.Linear, blocks.Norm)) and value.weight:
                yield value.weight
            elif isinstance(value, (blocks.FeedForward, blocks.Indexer, blocks.BlockIndexer)):
                pending.append(value)


def require_scaled_here(parts: Sequence[blocks.Block], placement: Placement) -> None:
    """UnsupportedError for scales of matrices that no device applies."""
    for block in parts:
        for part in block.parts:
            if scaled := _scaled_apart(part, block.layer in placement.shares):
                raise UnsupportedError(
                    f"blk.{block.layer}: {scaled} scales matrices of latent attention, or of experts that devices "
                    "share, which this version does not; leave out --devices, -sm, --profile and rules for other "
                    "devices, or quantize to a type without scales of its own"
                )


def _scaled_apart(part: blocks.Part, is_shared: bool) -> str | None:
    """The name of a scale that no device applies in a layer that is shared, or not; None if there is none."""
    linears: tuple[blocks.Linear | None, ...] = ()
    if isinstance(part, blocks.LatentAttention):
        linears = part.kv_b, part.k_b, part.v_b
    elif isinstance(part, blocks.Experts) and is_shared:
        linears = part.matrices
    return next((linear.scale for linear in linears if linear is not None and linear.scale), None)
