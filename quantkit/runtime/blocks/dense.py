"""Models with sparse attention as far as it is the same as attention to all positions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from quantkit.archs.common import blocks


def attending_to_all(parts: Sequence[blocks.Block]) -> tuple[list[blocks.Block], int]:
    """The blocks without indexers, and the positions up to which these select all of them."""
    bounds = [sys.maxsize]

    def attending(part: blocks.Part) -> blocks.Part:
        if isinstance(part, blocks.LatentAttention) and part.sparse:
            bounds.extend([part.indexer.top_k] if part.indexer is not None else [])
            return replace(part, sparse=False, indexer=None)
        if isinstance(part, blocks.Attention) and isinstance(part.indexer, blocks.BlockIndexer):
            bounds.append(part.indexer.rate * part.indexer.top_blocks)
            return replace(part, indexer=None)
        return part

    found = [replace(block, parts=tuple(map(attending, block.parts))) for block in parts]
    return found, min(bounds)
