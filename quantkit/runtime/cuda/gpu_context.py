"""`GpuContext`: what the modules of this package use of the worker of their GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quantkit.archs.common import blocks
from quantkit.formats.gguf import Tensor
from quantkit.placement.devices import Device
from quantkit.runtime.blocks.experts import Reduction
from quantkit.runtime.blocks.float_attention import Heads
from quantkit.runtime.blocks.indexer import AnyIndexer, Index
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.parallel.ledger import Ledger

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quantkit.runtime.kernels.cuda.device import Gpu, Matrices
    from quantkit.runtime.parallel.worker import Worker


class RopeTable(NamedTuple):
    """Angles of RoPE on a GPU: cos and sin float32[positions, pairs]. Pair p of a head is p step and p step + stride.

    `pairs` is 0 where nothing is rotated.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    pairs: int
    step: int
    stride: int


class Selection(NamedTuple):
    """The positions that each token of a sequence attends to, in sparse attention.

    positions   int64[tokens, n], different ones in each row up to its count; of a BlockIndexer
                int64[tokens, kv_heads, n]
    counts      int32[tokens]: so many of the first ones are selected
    """

    positions: torch.Tensor
    counts: torch.Tensor


class GpuContext(Protocol):
    """`gpu_worker.CudaWorker`. Activations are float32 tensors [tokens, n] on its GPU.

    `Any` stands for a tensor where the worker inherits a method of `BlockRunner`, which is annotated for arrays.

    exact        whether weights are decoded to float32
    device       of the placement
    selections   what the last indexer has selected here, for each span; None: all positions
    """

    gpu: Gpu
    exact: bool
    threads: int
    mla: int
    device: Device
    expert_reduction: Reduction | None
    selections: list[Any]

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The file's tensors by name."""

    @property
    def ledger(self) -> Ledger:
        """Counts time and bytes."""

    @property
    def host(self) -> Worker:
        """The CPU's worker."""

    @property
    def observes(self) -> bool:
        """Whether an observer wants what enters matrices."""

    def vector(self, name: str) -> torch.Tensor:
        """float32[n] of a tensor with one dimension, decoded."""

    def matrices(self, name: str, rows: int | None = None) -> Matrices:
        """The packed matrices of a tensor, of `rows` rows each where its shape does not say."""

    def stacked(self, names: tuple[str, ...]) -> Matrices:
        """The rows of tensors of one type and width as one matrix."""

    def scale_and_bias(self, linear: blocks.Linear) -> tuple[float, torch.Tensor | None]:
        """The factor of products, and float32[rows] that is added then."""

    def norm(self, norm: blocks.Norm | None, x: Any) -> Any:
        """x normed, checked; x itself without a norm."""

    def norm_weight(self, norm: blocks.Norm, n: int) -> Any:
        """float32[n] of a norm."""

    def linear(self, linear: blocks.Linear, x: Any) -> Any:
        """The product with a weight matrix."""

    def activate(
        self, name: blocks.Activation, gate: torch.Tensor, up: torch.Tensor, limit: float | None = None
    ) -> torch.Tensor:
        """act(gate) * up; overwrites `gate`."""

    def route(self, part: blocks.Experts, logits: Any) -> tuple[Any, Any]:
        """Selected experts int32[tokens, used], -1 for none, and their weights float32[tokens, used]."""

    def experts_on_host(self, part: blocks.Experts) -> bool:
        """Whether the CPU computes a token's routed experts, and all else is here."""

    def gated(self, part: blocks.FeedForward, y: Any) -> Any:
        """The gated feed-forward of y, which is normed."""

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise."""

    def scale_queries(self, q: torch.Tensor, temperature: blocks.Temperature, spans: list[Span]) -> None:
        """Scale queries by their position, in place."""

    def apply_rope(self, x: torch.Tensor, rope: blocks.Rope, dim: int, spans: list[Span]) -> None:
        """RoPE in place, of heads of `dim` elements."""

    def rope_table(self, rope: blocks.Rope, spans: list[Span]) -> RopeTable:
        """The angles of RoPE for all positions of the spans' next tokens."""

    def select_positions(self, part: AnyIndexer, layer: int, index: Index, spans: list[Span]) -> None:
        """Append an indexer's keys to the caches, and keep what it selects."""

    def selected(self, layer: int, spans: list[Span]) -> list[Span]:
        """The spans with what is kept."""

    def scale_heads(self, q: Any, scaling: blocks.HeadScaling, spans: list[Span]) -> None:
        """Scale queries by their position and head, in place."""

    def append_rows(self, k: torch.Tensor | None, v: torch.Tensor | None, cache: Cache, layer: int) -> None:
        """Append keys and values to a cache."""

    def attend(self, heads: Heads, layer: int, q: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        """Attention of all spans."""

    def attend_latents(
        self, part: blocks.LatentAttention, layer: int, q: torch.Tensor, latents: torch.Tensor, spans: list[Span]
    ) -> torch.Tensor:
        """Attention over latents, on the device of the layer's cache."""

    def check(self, what: str, y: Any) -> None:
        """DataError where y is not finite and each operation is checked."""

    def observe(self, name: str, x: np.ndarray, *which: int) -> None:
        """Call the observer, if there is one."""

    def run_part(self, part: blocks.Part, layer: int, x: Any, spans: list[Span]) -> Any:
        """What a part of a block adds."""

    def run_block(self, block: blocks.Block, x: Any, spans: list[Span]) -> Any:
        """What leaves a block."""

    def copy_to_cpu(self, x: torch.Tensor) -> np.ndarray:
        """A copy in the host's memory, counted as a transfer."""

    def copy_from_cpu(self, x: np.ndarray) -> torch.Tensor:
        """A copy on this GPU, counted as a transfer."""

    def next_positions(self, cache: Cache, tokens: int) -> torch.Tensor:
        """int32[tokens] on the GPU: the positions that a cache's next tokens get."""

    def position_bound(self, cache: Cache, tokens: int) -> int:
        """All positions of the next tokens are below this."""

    def reading_position(self, position: torch.Tensor, n_ctx: int) -> contextlib.AbstractContextManager[None]:
        """Context: kernels read the position of the one token from int32[1] on the GPU; it stays below `n_ctx`."""

    def held_matrices(self) -> list[Matrices]:
        """All matrices that are on this GPU."""

    def rope_tables(self) -> list[Any]:
        """The tables that `apply_rope` has used."""
