"""What layers add to the residual beside attention and feed-forward: per-layer embeddings, LAuReL, n-grams."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.archs.common.blocks.linear import Linear, Norm


@dataclass(frozen=True)
class LayerInput:
    """A per-layer embedding: x + post_norm(out(act(gate(x)) * u)), with GELU in its tanh form as act.

    u float32[width] is what the layer has of a token. With e the token's row of the model's embedding, scaled, and t
    columns first ... first + width - 1 of its row of `table`:

        u         2^-1/2 (project_norm(project(e)) + table_scale t)

    The table holds the vectors of all layers side by side, as rows of the matrix of `project` do one below the other.
    """

    gate: Linear  # [width, n_embd]
    out: Linear  # [n_embd, width]
    post_norm: Norm
    table: str  # tensor [vocabulary, layers * width]
    first: int
    table_scale: float
    project: Linear  # rows first ... first + width of [layers * width, n_embd]
    project_norm: Norm  # weight float32[width]
    width: int
    embedding: str
    embedding_scale: float
    embedding_factor: str | None = None  # as in Head
    norm: Norm | None = None  # the gate reads x itself


@dataclass(frozen=True)
class Laurel:
    """A learned augmented residual of low rank (LAuReL): x + y + post_norm(right(left(y))) with y = norm(x)."""

    norm: Norm
    left: Linear  # [rank, n_embd]
    right: Linear  # [n_embd, rank]
    post_norm: Norm
    rank: int


TABLE_MULTIPLE = 128  # rows of a table of n-grams; files have no key for it


@dataclass(frozen=True)
class NGrams:
    """Embeddings of n-grams, added to all residual streams: x + v + silu(f), x float32[streams * n_embd].

    A hash of a token's n-gram is (t_0 m_0 xor … xor t_(n-1) m_(n-1)) mod size, where t_j is the token j places before
    and m are the `multipliers`. Where there is none, or one of t_1 … t_j is `end`, t_j is `end` itself. The hashes are
    of n = 2 to `longest` tokens, as many of each. With e the rows of the table at hash + offset, one after another:

        g    for each stream, s = key_norm(key(e)) . query_norm(x) / sqrt(n_embd); sigmoid(sign(s) sqrt(max(|s|, 1e-6)))
        v    g value(e), of each stream
        f    sum over j of conv[:, j] * conv_norm(v)[t - (kernel - 1 - j) longest]

    The three norms are RMS norms of each stream, with a weight float32[streams * n_embd].
    """

    table: str  # tensor [rows, width]
    width: int
    key: Linear  # [streams * n_embd, hashes * width]
    value: Linear  # [n_embd, hashes * width]
    key_norm: Norm
    query_norm: Norm
    conv_norm: Norm
    conv: str  # tensor float32[streams * n_embd, kernel]
    kernel: int
    streams: int
    multipliers: tuple[int, ...]  # of each place in an n-gram
    sizes: tuple[int, ...]  # of each hash
    offsets: tuple[int, ...]
    end: int
    norm: Norm | None = None  # the streams have norms of their own

    @property
    def longest(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def past(self) -> int:
        """Tokens before the current one that the convolution reads, not all of them."""
        return (self.kernel - 1) * self.longest

    @property
    def rows(self) -> int:
        """Rows of the table that hashes name."""
        return max(offset + size for offset, size in zip(self.offsets, self.sizes))
