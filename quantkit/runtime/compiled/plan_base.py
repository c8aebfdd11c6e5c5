"""What the decode plan and the prefill plan share: building an operation list for a model, pointing it to KV caches.

A plan builds its list when it first runs, and again for caches of another type. Operations on a cache read the layer's
`LayerView` record (kernels/cpu/kv_rows.py), so running with other caches of the same type only rewrites these records.

Weights are read as they are in the file. Activations are quantized before each product with a quantized matrix
(kernels/cpu/activations.py); products with F32, F16 and BF16 matrices take them in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.codegen import jit
from quantkit.formats.gguf import Tensor
from quantkit.runtime.blocks import experts, float_attention, float_linear, float_ops
from quantkit.runtime.blocks.experts import Reduction
from quantkit.runtime.blocks.float_attention import AttentionOptions
from quantkit.runtime.kernels import dispatch
from quantkit.runtime.kernels.cpu import gated_activations
from quantkit.runtime.kernels.cpu.decode_experts import SIGMOID, SOFTMAX, SQRT_SOFTPLUS, Routing
from quantkit.runtime.kernels.cpu.delta_net import LayerStates, StatesView
from quantkit.runtime.kernels.cpu.entries import EntryCache
from quantkit.runtime.kernels.cpu.kv_rows import KernelHeads, LayerCache, LayerView
from quantkit.runtime.kernels.cpu.op_list import Buffers, OpList
from quantkit.runtime.kernels.cpu.operation import StoredRecord
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.kv.saved_state import LayerState

_GATINGS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "sqrtsoftplus": SQRT_SOFTPLUS}
SPLIT_ROWS = 32  # threads split matrices at multiples of this: whole sub-blocks of what is quantized next

Array = np.ndarray[Any, Any]
AnyAttention = blocks.Attention | blocks.LatentAttention | blocks.CompressedAttention | blocks.Indexer


class ExpertOptions(NamedTuple):
    """How experts run: `fused` as in `load`; `reduction` leaves experts out (runtime/blocks/experts.py)."""

    fused: bool = True
    reduction: Reduction | None = None


@dataclass(frozen=True)
class ModelParts:
    """What plans are built from."""

    weights: Mapping[str, Tensor]
    block_list: Sequence[blocks.Block]
    head: blocks.Head
    threads: int
    attending: AttentionOptions
    expert_options: ExpertOptions
    mla: int = 0  # how latent attention runs, as in blocks/latent.py

    @property
    def attends_plainly(self) -> bool:
        """Whether an operation's softmax takes all positions of a cache at once, so that lists depend on its size."""
        return not self.attending.flash or self.mla == 2

    @property
    def depends_on_context(self) -> bool:
        """Whether buffers of operations grow with the positions that a cache has room for."""
        parts = [part for block in self.block_list for part in block.parts]
        sparse = any(part.sparse for part in parts if isinstance(part, blocks.LatentAttention))
        selects = any(part.indexer is not None for part in parts if isinstance(part, blocks.CompressedAttention))
        pools = any(part.indexer is not None for part in parts if isinstance(part, blocks.Attention))
        return self.attends_plainly or sparse or selects or pools

    @property
    def recurrent(self) -> list[int]:
        """The layers of the blocks that have a state."""
        parts = (numbered for block in self.block_list for numbered in block.numbered_parts)
        return [layer for layer, part in parts if isinstance(part, (*blocks.RECURRENT, blocks.NGrams))]

    @property
    def vocab(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.weights[self.head.embedding].shape[0]

    @property
    def n_embd(self) -> int:
        """Length of a hidden state."""
        return self.weights[self.head.embedding].shape[1]

    def embed(self, tokens: Array) -> Array:
        """float32[tokens, n_embd]: rows of the embedding, times its scale."""
        return float_linear.embed(self.weights, self.head, tokens)


class PlannedCaches(NamedTuple):
    """What the caches that a list is built for have in common."""

    type: CacheType
    n_ctx: int  # of the largest cache; only plain and sparse attention, and indexers depend on it

    def heads(self, part: blocks.Attention) -> KernelHeads:
        """The shape that attention kernels are compiled for."""
        k, v = (types.get(name).ggml_type for name in (self.type.k, self.type.v))
        rotations = self.type.rotations(part.head_dim_k, part.head_dim_v)
        return KernelHeads(part.heads // part.kv_heads, part.head_dim_k, part.head_dim_v, k, v, *rotations)

    def span(self, attending: AttentionOptions, flash: int) -> int:
        """Positions per softmax step: `flash` for flash attention, all positions for plain attention."""
        return (
            flash
            if attending.flash
            else -(-self.n_ctx // float_attention.KEYS_TOGETHER) * float_attention.KEYS_TOGETHER
        )


class GivenExperts:
    """The experts of a run's tokens by the tables of layers, int64[tokens, used] of each; filled before a run."""

    def __init__(self, model: ModelParts, tokens: int):
        self._weights = model.weights
        parts = (part for block in model.block_list for part in block.parts)
        self._parts = [part for part in parts if isinstance(part, blocks.Experts) and part.table]
        self._rows = [np.zeros((tokens, part.used), np.int64) for part in self._parts]

    def look_up(self, tokens: Array) -> None:
        """Fill in what int64[tokens] name. DataError where a table has wrong experts."""
        for part, rows in zip(self._parts, self._rows):
            rows[: len(tokens)] = experts.of_tokens(part, self._weights, tokens)

    def address(self, part: blocks.Experts) -> int:
        """Address of the experts of a layer."""
        return int(self._rows[self._parts.index(part)].ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(rows.nbytes for rows in self._rows)


class Activations(NamedTuple):
    """A quantized activation buffer. stride: bytes from one thread's copy to the next, 0 if all threads share it."""

    address: int
    stride: int


class ProductRows(NamedTuple):
    """Input of products: addresses of float32 rows, and of their tiles (0 if no product reads tiles)."""

    floats: int
    tiles: int


class ExpertTensor(NamedTuple):
    """The matrices of all experts: the tensor that holds them, the first one's address, bytes from one expert to the
    next, bytes of a row, and rows of each."""

    tensor: Tensor
    address: int
    expert_bytes: int
    row_bytes: int
    rows: int


class PlanOps(OpList):
    """An operation list for a model, with what operations of all blocks need: weights, constants, records."""

    def __init__(self, model: ModelParts, given_experts: GivenExperts, buffers: Buffers | None = None):
        super().__init__(model.threads, buffers)
        self.model, self.given_experts = model, given_experts
        self.views: list[tuple[int, AnyAttention, StoredRecord]] = []  # a LayerView per attention layer
        self.states_views: list[tuple[int, StoredRecord]] = []  # a StatesView per recurrent layer
        self.index_views: list[tuple[int, blocks.Rope, StoredRecord]] = []  # a LayerView per indexer of blocks

    def tensor(self, linear: blocks.Linear) -> Tensor:
        """The matrix of a product: a tensor, or some rows of one."""
        return float_linear.matrix(self.model.weights, linear)

    def rows(self, linear: blocks.Linear) -> int:
        """Output features of a matrix."""
        return self.tensor(linear).shape[0]

    def data(self, linear: blocks.Linear) -> int:
        """Address of a matrix as it is in the file."""
        return self.keep(self.tensor(linear).data).ctypes.data

    def vector(self, name: str | None) -> int:
        """Address of a norm's weight, a bias, sinks or a scale as float32; 0 for None."""
        return self.keep(float_linear.vector(self.model.weights[name])).ctypes.data if name else 0

    def bias(self, linear: blocks.Linear) -> int:
        """Address of the bias of a product, or 0."""
        bias = float_linear.bias(self.model.weights, linear)
        return 0 if bias is None else self.keep(bias).ctypes.data

    def scale(self, linear: blocks.Linear) -> int:
        """Address of the number that a product is multiplied by, or 0."""
        return self.constant(float_linear.scale(self.model.weights, linear)) if linear.is_scaled else 0

    def norm_weight(self, norm: blocks.Norm, n: int) -> int:
        """Address of a norm's weight float32[n]; ones where it has none."""
        if norm.factor != 1:
            weight = float_linear.vector(self.model.weights[norm.weight]) * np.float32(norm.factor)
            return int(self.keep(jit.readonly(weight)).ctypes.data)
        return self.vector(norm.weight) if norm.weight else self.keep(np.ones(n, np.float32)).ctypes.data

    def head_scaling(self, scaling: blocks.HeadScaling | None) -> dict[str, int]:
        """Parameters of operations that scale queries by position and head: addresses of float32[heads], or 0."""
        return {
            "head_scale": self.vector(scaling.scale if scaling else None),
            "head_bias": self.vector(scaling.bias if scaling else None),
        }

    def activation(self, name: blocks.Activation, limit: float | None = None) -> int:
        """Address of the function of kernels/cpu/gated_activations.py for the activation of a block."""
        if isinstance(name, blocks.Xielu):
            assert limit is None, f"xIELU with a limit of {limit}"
            return gated_activations.xielu.address
        return gated_activations.activation(name, limit).address

    def activation_numbers(self, kind: blocks.Activation) -> int:
        """Address of the numbers that the function of an activation reads, or 0."""
        return self.keep(kind.numbers).ctypes.data if isinstance(kind, blocks.Xielu) else 0

    def matvec_function(self, linear: blocks.Linear) -> int:
        """Address of the function of kernels/cpu/matvec.py for a matrix."""
        function = dispatch.product(self.tensor(linear).type)
        assert function is not None
        return function.address

    def experts_of(self, linear: blocks.Linear) -> ExpertTensor:
        """A tensor that stacks the matrices of all experts."""
        tensor = self.tensor(linear)
        data, (count, rows, _) = self.keep(tensor.data), tensor.shape
        first = 0
        if linear.half is not None:
            rows //= 2
            first = linear.half * rows * data.shape[1]
        return ExpertTensor(tensor, data.ctypes.data + first, data.nbytes // count, data.shape[1], rows)

    def expert_biases(self, linear: blocks.Linear) -> int:
        """Address of the biases of all experts, float32[experts, rows]; 0 if there are none."""
        if linear.bias is None or linear.half is None:
            return self.vector(linear.bias)
        both = self.model.weights[linear.bias].dequantize()
        rows = both.shape[1] // 2
        half = jit.readonly(np.ascontiguousarray(both[:, linear.half * rows : (linear.half + 1) * rows]))
        return int(self.keep(half).ctypes.data)

    def expert_scales(self, linear: blocks.Linear) -> int:
        """Address of the numbers that products of experts are multiplied by, float32[experts]; 0 if there are none."""
        return self.vector(linear.scale)

    def routing(self, part: blocks.Experts) -> int:
        """Address of the Routing record of a block with experts."""
        min_used, min_share = self.model.expert_options.reduction or (part.used, 0.0)
        record = Routing(
            experts=part.count,
            used=part.used,
            min_used=min_used,
            min_share=self.constant(min_share),
            normalize=int(part.normalise),
            scale=self.constant(part.scale),
            bias=self.vector(part.choice_bias),
            gating=_GATINGS[part.gating],
            groups=part.groups,
            groups_used=part.groups_used,
            identity=part.identity,
            given=self.given_experts.address(part) if part.table else 0,
        )
        return self.record(record).address

    def layer_view(self, layer: int, part: AnyAttention) -> int:
        """Address of the layer's LayerView record, which `Plan._point_to` fills."""
        if isinstance(part, blocks.Attention) and part.source is not None:
            layer = part.source
        view = self.record(LayerView(cos=0, sin=0, caches=0, window=0))
        self.views.append((layer, part, view))
        return view.address

    def index_view(self, layer: int, rope: blocks.Rope) -> int:
        """Address of the LayerView record of an indexer of blocks, of EntryCaches, which `Plan._point_to` fills."""
        view = self.record(LayerView(cos=0, sin=0, caches=0, window=0))
        self.index_views.append((layer, rope, view))
        return view.address

    def states_view(self, layer: int) -> int:
        """Address of the StatesView record of a recurrent layer, or of n-grams, which `Plan._point_to` fills."""
        view = self.record(StatesView(states=0))
        self.states_views.append((layer, view))
        return view.address


class TokenOps(PlanOps, ABC):
    """An operation list for one token, as the files of blocks see it: operations on its residual stream."""

    position: int  # address of an int64
    n_embd: int
    x: int  # float32[n_embd], to which parts add
    entering: int  # float32[n_embd], which parts read: x, except with several streams

    @abstractmethod
    def norm(self, norm: blocks.Norm | None) -> Activations:
        """Append the norm of x, or x itself, as products take it."""

    @abstractmethod
    def norm_of(self, norm: blocks.Norm | None, x: Activations, n: int, name: str) -> Activations:
        """Append the norm of float32[n], or x itself, quantized, in a buffer of that name for each thread."""

    @abstractmethod
    def matvec(
        self, linear: blocks.Linear, x: Activations, out: int, *, barrier: bool = False, claimed: bool = False,
        multiple: int = SPLIT_ROWS, residual: int = 0,
    ) -> None:  # fmt: skip
        """Append out = W x (+ bias), split between threads at a multiple of rows; `claimed`: see `DecodeOps.matvec`."""

    @abstractmethod
    def add_to_residual(self, linear: blocks.Linear, x: Activations, post_norm: blocks.Norm | None = None) -> None:
        """Append x += W x', the end of a block, or x += norm(W x')."""


class BatchOps(PlanOps, ABC):
    """An operation list for a batch, as the files of blocks see it: operations on its tokens' residual streams."""

    state: int  # address of a BatchState
    token_count: int  # address of the number of tokens
    n_embd: int
    x: int  # float32[tokens, n_embd], to which parts add
    entering: int  # float32[tokens, n_embd], which parts read: x, except with several streams

    @abstractmethod
    def floats(self, name: str, n: int) -> int:
        """Address of a buffer float32[BATCH_TOKENS, n]."""

    @abstractmethod
    def norm(self, norm: blocks.Norm | None, readers: Sequence[blocks.Linear]) -> ProductRows:
        """Append the norm of x, or x itself, and a barrier, as the matrices `readers` multiply it."""

    @abstractmethod
    def norm_of(self, norm: blocks.Norm, x: int, n: int, out: int) -> None:
        """Append out = norm(x), float32[tokens, n]; out may be x."""

    @abstractmethod
    def quantize(self, x: int, n: int, readers: Sequence[blocks.Linear]) -> ProductRows:
        """Append a barrier, and before it the quantization of x float32[tokens, n] if a reader multiplies tiles."""

    @abstractmethod
    def multiply(
        self, linear: blocks.Linear, x: ProductRows, out: int, *, add: bool = False, barrier: bool = False
    ) -> None:
        """Append out (+)= W x (+ bias)."""

    @abstractmethod
    def add_to_residual(self, linear: blocks.Linear, x: ProductRows, post_norm: blocks.Norm | None = None) -> None:
        """Append x += W x', the end of a block, or x += norm(W x')."""


def rope_fields(part: AnyAttention, *, is_applied: bool = False) -> dict[str, int]:
    """Parameters of operations that apply RoPE: which elements of a head are rotated together.

    With `is_applied`, none: an operation before has applied RoPE already.
    """
    adjacent = part.rope.style == "norm"
    return {
        "rope_dim": 0 if is_applied else part.rope.dim,
        "pair_step": 2 if adjacent else 1,
        "pair_stride": 1 if adjacent else part.rope.dim // 2,
    }


def _record_of(cache: Cache, layer: int) -> LayerCache | EntryCache | LayerStates:
    """Where a layer's rows or states are in a cache."""
    state = cache.states.get(layer)
    if state is not None:
        return LayerStates(state.inputs.ctypes.data, state.heads.ctypes.data)
    rows = LayerCache(cache.k[layer].ctypes.data, cache.v[layer].ctypes.data, cache.n_ctx)
    if cache.entries is None or cache.index:
        return rows
    entries, keys = (each.ctypes.data for each in cache.entries.arrays(layer))
    return EntryCache(*rows, entries, keys, cache.entries.made.ctypes.data)


def _index_of(cache: Cache, layer: int) -> EntryCache:
    """Where the rows of an indexer of blocks, and the keys of blocks if there are any, are in a cache."""
    rows = cache.index[layer].ctypes.data
    if cache.entries is None:
        return EntryCache(0, rows, cache.n_ctx, 0, 0, 0)
    _, keys = (each.ctypes.data for each in cache.entries.arrays(layer))
    return EntryCache(0, rows, cache.n_ctx, 0, keys, cache.entries.made.ctypes.data)


class CompiledPlan(ABC):
    """An operation list that is built on first use and pointed to the caches of each run."""

    def __init__(self, model: ModelParts):
        self.model = model
        self._recurrent = model.recurrent
        self._ops: PlanOps | None = None  # the whole list, for caches of `_shape`
        self._shape: PlannedCaches | None = None
        self._caches: list[Cache] = []  # that the list points to; none while it is being pointed elsewhere
        self._states: list[LayerState] = []  # of their recurrent layers: `Cache.state` may exchange one
        self._cache_records: list[Array] = []  # per layer, a LayerCache or LayerStates per cache
        self._index_records: dict[int, Array] = {}  # per indexer of blocks, an EntryCache per cache
        self._rope_tables: dict[blocks.Rope, tuple[Array, Array]] = {}
        self._query_factors: dict[blocks.Temperature | None, Array] = {}  # None: logarithms

    @abstractmethod
    def _build(self, shape: PlannedCaches) -> PlanOps:
        """The whole list."""

    def _point_to(self, caches: list[Cache]) -> PlanOps:
        """The list, pointed to these caches; it is built first if needed.

        The states of recurrent layers are then those of no length, until `Cache.extend`. An interrupt in between leaves
        no state that the next call takes for complete.
        """
        return self._point(caches, [state for cache in caches for state in cache.begin_update(self._recurrent)])

    def _point(self, caches: list[Cache], states: list[LayerState]) -> PlanOps:
        """As `_point_to`, with the states that `Cache.begin_update` has given for all caches."""
        pairs = zip([*caches, *states], [*self._caches, *self._states])
        unchanged = len(caches) == len(self._caches) and all(a is b for a, b in pairs)
        if self._ops is not None and unchanged:
            return self._ops
        self._caches, self._states = [], []
        n_ctx = max(cache.n_ctx for cache in caches)
        ops = self._ops
        if ops is None or not self._fits(caches[0].type, n_ctx):
            self._ops = None
            self._shape = PlannedCaches(caches[0].type, n_ctx)
            ops = self._ops = self._build(self._shape)
        count = max(len(caches[0].k), 1 + max(caches[0].states, default=-1))
        self._cache_records = [
            np.array([_record_of(cache, layer) for cache in caches], np.int64) for layer in range(count)
        ]
        self._index_records = {
            layer: np.array([_index_of(cache, layer) for cache in caches], np.int64) for layer, *_ in ops.index_views
        }
        for layer, part, view in ops.views:
            cos, sin = self._tables(part.rope.of_context(n_ctx), n_ctx)
            factors = self._factors(part, n_ctx)
            view.set(
                cos=cos.ctypes.data,
                sin=sin.ctypes.data,
                caches=self._cache_records[layer].ctypes.data,
                window=part.window or n_ctx if isinstance(part, blocks.Attention) else n_ctx,
                query_factors=0 if factors is None else factors.ctypes.data,
                chunk=(part.chunk or 0) if isinstance(part, blocks.Attention) else 0,
            )
        for layer, rope, view in ops.index_views:
            cos, sin = self._tables(rope.of_context(n_ctx), n_ctx)
            view.set(cos=cos.ctypes.data, sin=sin.ctypes.data, caches=self._index_records[layer].ctypes.data)
        for layer, states_view in ops.states_views:
            states_view.set(states=self._cache_records[layer].ctypes.data)
        self._caches, self._states = caches, states
        return ops

    def _fits(self, kind: CacheType, n_ctx: int) -> bool:
        """Whether the list was built for such caches."""
        assert self._shape is not None
        return kind == self._shape.type and (not self.model.depends_on_context or n_ctx <= self._shape.n_ctx)

    def _tables(self, rope: blocks.Rope, n_ctx: int) -> tuple[Array, Array]:
        """cos and sin float32[positions, dim / 2] for at least n_ctx positions."""
        tables = self._rope_tables.get(rope)
        if tables is None or len(tables[0]) < n_ctx:
            factors = float_linear.vector(self.model.weights[rope.factors])[: rope.dim // 2] if rope.factors else None
            tables = self._rope_tables[rope] = float_ops.rope_tables(rope, n_ctx, factors)
        return tables

    def _factors(self, part: AnyAttention, n_ctx: int) -> Array | None:
        """float32[positions]: factors of queries, for at least n_ctx positions; None where queries have none.

        With a HeadScaling they are the logarithms that it multiplies.
        """
        temperature = part.temperature if isinstance(part, (blocks.Attention, blocks.LatentAttention)) else None
        has_logarithms = isinstance(part, (blocks.LatentAttention, blocks.Indexer)) and part.scaling is not None
        if temperature is None and not has_logarithms:
            return None
        assert temperature is None or not has_logarithms, "queries have a temperature and a scaling by head"
        factors = self._query_factors.get(temperature)
        if factors is None or len(factors) < n_ctx:
            positions = np.arange(n_ctx)
            factors = self._query_factors[temperature] = (
                float_ops.position_logarithms(positions)
                if temperature is None
                else float_ops.query_factors(temperature, positions)
            )
        return factors

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that depend on positions, so far."""
        tables = sum(table.nbytes for pair in self._rope_tables.values() for table in pair)
        return tables + sum(factors.nbytes for factors in self._query_factors.values())

    @property
    def work_bytes(self) -> int:
        """Bytes of working memory allocated so far, beside weights and caches."""
        return self.table_bytes + (0 if self._ops is None else self._ops.nbytes)
