"""Attention over compressed entries, one for some positions each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from quantkit.archs.common.blocks.linear import Linear, Norm
from quantkit.archs.common.blocks.rope import Rope


class EntrySizes(NamedTuple):
    """The sizes of the entries of a layer with compressed attention.

    rate        tokens of an entry; 0 without entries
    dim         elements of an entry
    index_dim   elements of a key of the indexer; 0 without one
    """

    rate: int
    dim: int
    index_dim: int


@dataclass(frozen=True)
class Compressor:
    """Entries that stand for windows of `rate` tokens each: those of a layer's cache, or the keys of its indexer.

    With y the normed input, c = kv(y) and z = gate(y) + ape[position % rate], of each element by itself, entry w is

        norm(sum over its tokens of softmax(z) c)

    and gets the RoPE of position w rate. Its tokens are those of window w. With `overlapping`, kv and gate have twice
    as many elements as an entry: the second half is that of window w, the first half that of window w - 1, and the
    softmax is over the tokens of both. Window 0 has none before it.
    """

    kv: Linear
    gate: Linear
    ape: str  # tensor float32[rate, columns]
    norm: Norm  # weight float32[dim]
    dim: int
    rate: int
    overlapping: bool

    @property
    def columns(self) -> int:
        """Elements of kv(y), and of gate(y)."""
        return self.dim * (2 if self.overlapping else 1)


@dataclass(frozen=True)
class EntryIndexer:
    """Lightning indexer over entries: the `top_k` ones with the largest scores, of those that a token may see.

    With y the normed input and u the queries' latent: q = q_b(u) split into heads, keys k_w are the entries of
    `compressor`, w = weights(y). RoPE is that of the attention. Scores are those of `Indexer`.
    """

    q_b: Linear
    weights: Linear
    compressor: Compressor
    heads: int
    top_k: int

    @property
    def dim(self) -> int:
        """Elements of a query and of a key."""
        return self.compressor.dim


@dataclass(frozen=True)
class CompressedAttention:
    """x + out(attention) over the last `window` tokens and over entries for windows of tokens; one key for all heads.

    With y = norm(x): u = q_a_norm(q_a(y)), q = q_b(u), each head divided by its root mean square; the key, which is the
    value too, is kv_norm(kv(y)). The last rope.dim elements of a head are rotated; those of what a head gets are
    rotated back by the token's position. A token at position p attends to the entries w with (w + 1) rate <= p + 1, of
    which `indexer` selects some. `sinks` is an extra score per head, as in Attention.

    The heads are in `groups` of adjacent ones; out_a [groups * rank, heads * dim / groups] has a matrix for each group,
    and out_b [n_embd, groups * rank] reads what they give.
    """

    norm: Norm
    q_a: Linear
    q_a_norm: Norm
    q_b: Linear
    q_norm: Norm  # of each head, without a weight
    kv: Linear
    kv_norm: Norm
    sinks: str
    out_a: Linear
    out_b: Linear
    compressor: Compressor | None
    indexer: EntryIndexer | None
    heads: int
    dim: int
    q_lora: int
    window: int
    groups: int
    rank: int
    scale: float
    rope: Rope

    @property
    def group_matrices(self) -> tuple[Linear, ...]:
        """The matrix of each group in out_a."""
        return tuple(replace(self.out_a, rows=(i * self.rank, (i + 1) * self.rank)) for i in range(self.groups))

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """That of the entries and that of the indexer's keys."""
        found = (self.compressor, self.indexer.compressor if self.indexer else None)
        return tuple(part for part in found if part is not None)

    @property
    def widest(self) -> int:
        """Elements of the longest entry or key of the indexer."""
        return max((part.dim for part in self.compressors), default=0)

    @property
    def kept(self) -> int:
        """Elements that the cache holds of a token where values would be: kv(y) and gate(y) of each compressor."""
        return sum(2 * part.columns for part in self.compressors)
