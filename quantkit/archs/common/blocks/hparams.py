"""Hyperparameters of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.archs.common.blocks.compressed import EntrySizes
from quantkit.archs.common.blocks.feed_forward import FeedForward
from quantkit.archs.common.blocks.linear import Linear, Norm
from quantkit.archs.common.blocks.recurrence import Recurrence, StateShapes
from quantkit.archs.common.blocks.rope import Rope


@dataclass(frozen=True, kw_only=True)
class HParams:
    """Hyperparameters of a model, from its metadata. Architectures that need more of them derive a class."""

    arch: str
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_vocab: int
    norm_eps: float
    centred_norms: bool = False  # norms are LayerNorms
    rope: Rope
    window: int | None = None
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    normalises: bool = True  # weights of the selected experts are divided by their sum
    n_ff_shared: int = 0  # of all shared experts together
    n_leading_dense: int = 0  # layers before the first one with experts
    n_expert_groups: int = 1
    n_expert_groups_used: int = 1
    expert_scale: float = 1.0
    gating: str = "softmax"  # or "sigmoid"
    has_choice_bias: bool = False  # see Experts
    n_moe_latent: int = 0  # elements that the experts of a token get and give, where that is not n_embd
    recurrence: Recurrence | None = None
    recurrent: frozenset[int] = frozenset()  # the layers with a recurrence instead of attention
    n_mtp_layers: int = 0  # the last ones of n_layer, which are no part of the trunk
    kv_heads_of: tuple[int, ...] = ()  # of each layer, where they differ; n_head_kv is then the most
    head_dims_of: tuple[int, ...] = ()  # of keys and of values of each layer, where they differ; head_dim_k: the most
    kv_sources: tuple[int, ...] = ()  # the layer whose keys and values each layer attends to, where some share them
    unread: frozenset[str] = frozenset()  # tensors that a file may have and that no layer reads
    cached_dims_of: tuple[
        tuple[int, int], ...
    ] = ()  # of latents and of indexers' keys of each layer, where they differ
    tensors: frozenset[str] = frozenset()  # names in the file, which decide the optional parts

    @property
    def kv_shared(self) -> frozenset[int]:
        """Layers without keys and values of their own."""
        return frozenset(i for i, source in enumerate(self.kv_sources) if source != i)

    def head_dims(self, layer: int) -> tuple[int, int]:
        """Elements of a head's key and of its value in a layer."""
        if self.cached_dims_of:
            return self.cached_dims_of[layer]
        dim = self.head_dims_of[layer] if self.head_dims_of else 0
        return (dim, dim) if dim else (self.head_dim_k, self.head_dim_v)

    def entry_sizes(self, layer: int) -> EntrySizes | None:
        """The sizes of a layer's entries; None without compressed attention, and without blocks that it selects."""
        return None

    def block_index_dim(self, layer: int) -> int:
        """Elements of a token's key for an indexer of blocks in a layer, beside its keys and values; 0 without one."""
        return 0

    def further_states(self) -> dict[int, StateShapes]:
        """States beside those of recurrent layers, by their number in caches, from `n_layer` on."""
        return {}

    @property
    def has_own_head_dim(self) -> bool:
        """Whether n_head * head_dim differs from n_embd."""
        return self.head_dim_k * self.n_head != self.n_embd

    @property
    def n_main(self) -> int:
        """Layers without the MTP layers."""
        return self.n_layer - self.n_mtp_layers

    @property
    def rope_dim(self) -> int:
        """Elements of a head that get RoPE."""
        return self.rope.dim

    @property
    def rope_base(self) -> float:
        """The base of the RoPE frequencies (theta)."""
        return self.rope.base

    @property
    def rope_freq_factors(self) -> str | None:
        """The name of the tensor of frequency divisors, if there is one."""
        return self.rope.factors

    @property
    def tied(self) -> bool:
        """Whether the embedding is also the output matrix."""
        return "output.weight" not in self.tensors

    def linear(self, stem: str) -> Linear:
        """`stem`.weight, with `stem`.bias and `stem`.scale where the file has them."""
        bias, scale = (name if name in self.tensors else None for name in (f"{stem}.bias", f"{stem}.scale"))
        return Linear(f"{stem}.weight", bias, scale)

    def halves(self, stem: str) -> tuple[Linear, Linear]:
        """The two Linears whose rows are fused in the tensor `stem`."""
        whole = self.linear(stem)
        return replace(whole, half=0), replace(whole, half=1)

    def norm(self, stem: str) -> Norm:
        """The norm with weight `stem`.weight and the model's epsilon."""
        bias = f"{stem}.bias" if f"{stem}.bias" in self.tensors else None
        return Norm(f"{stem}.weight", self.norm_eps, self.centred_norms, bias)

    def feed_forward(self, i: int, norm: str = "ffn_norm", suffix: str = "", ff: int | None = None) -> FeedForward:
        """The feed-forward of layer `i`; `suffix` selects that of its shared experts."""
        gate, up, down = (self.linear(f"blk.{i}.ffn_{name}{suffix}") for name in ("gate", "up", "down"))
        return FeedForward(self.norm(f"blk.{i}.{norm}"), gate, up, down, ff=ff)
