"""The KV cache of one sequence: keys and values of its tokens for each attention layer, states of recurrent layers.

An attention layer has two arrays of encoded rows; RoPE is applied to the keys already:

    k[layer]   uint8[n_head_kv, n_ctx, row bytes of head_dim_k]
    v[layer]   uint8[n_head_kv, n_ctx, row bytes of head_dim_v]

Layers may differ in heads and dimensions (`HParams.kv_heads_of`, `head_dims_of`).

Layers that attend to the keys and values of an earlier one (`HParams.kv_sources`) have none of their own.

MTP layers have none: their caches are with the layers (runtime/mtp.py).

With latent attention (runtime/blocks/latent.py) k has one row per token, its latent, and v none.

A row is one head's key or value in the K or V type, rounded as runtime/kernels/kv_rounding.py says. Positions of a
head follow each other, so that attention reads memory in order. With khad or vhad the rows were rotated before
(`kv_rounding.rotation`).

Layers with an indexer of blocks have a third array, of the indexer's keys before norm and RoPE
(runtime/blocks/pooled_indexer.py) or after both (runtime/blocks/block_indexer.py), in the V type and never rotated:

    index[layer]   uint8[1, n_ctx, row bytes of the indexer's keys]

With compressed attention (runtime/blocks/compressed_attention.py) v has what compressors read of a token. What they
make of it is in `entries` (entries.py), which follow from the rows.

A recurrent layer (runtime/blocks/recurrent.py) has a state of one size instead, which holds all positions at once:

    states[layer]   LayerState: the last inputs of the convolution, and the state of each value head

A part that looks up n-grams (runtime/blocks/ngrams.py) has a state too, with a number after those of all layers.

Keys and values are truncated by setting `length`. A state cannot be truncated to any position, only to 0, to the last
`mark()`, or to what `save()` copied:

    saved = cache.save()     a copy of the whole sequence, keys and values too
    cache.restore(saved)     into this cache or another of the same model and type
    cache.mark()             a copy of the states alone; truncate() can return to this length any number of times
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from quantkit import types
from quantkit.archs.common.blocks import HParams, Recurrence, StateShapes
from quantkit.errors import DataError
from quantkit.inputs import arguments
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.kv.entries import Entries
from quantkit.runtime.kv.saved_state import INCOMPLETE, LayerState, State, Zeros

_MAX_TOKENS = 1 << 31  # of a cache


class CacheShape(NamedTuple):
    """What decides the sizes of a cache's arrays, apart from `n_ctx` and the type. A model needs caches of its shape.

    devices   of a model over several devices: what each has, see `sharded_cache.sharded_shape`
    """

    n_layer: int
    n_head_kv: int | tuple[int, ...]  # of all layers, or of each
    head_dims: tuple[tuple[int, int], ...]  # of keys and of values, of each layer
    recurrent: frozenset[int]
    recurrence: Recurrence | None
    devices: tuple[Any, ...] = ()
    further_states: tuple[tuple[int, StateShapes], ...] = ()
    index_dims: tuple[int, ...] = ()  # of each layer, where some have an indexer of blocks

    @classmethod
    def of(cls, hparams: HParams, devices: tuple[Any, ...] = ()) -> CacheShape:
        """The shape of a model's caches."""
        kv_heads = hparams.kv_heads_of or hparams.n_head_kv
        dims = tuple(hparams.head_dims(i) for i in range(hparams.n_layer))
        further, index = hparams.further_states(), tuple(hparams.block_index_dim(i) for i in range(hparams.n_layer))
        return cls(
            hparams.n_layer, kv_heads, dims, hparams.recurrent, hparams.recurrence, devices,
            tuple(sorted(further.items())), index if any(index) else (),
        )  # fmt: skip

    @property
    def states(self) -> dict[int, StateShapes]:
        """The shapes of all states, by their number."""
        found = dict.fromkeys(sorted(self.recurrent), self.recurrence.state_shapes) if self.recurrence else {}
        return found | dict(self.further_states)

    def __str__(self) -> str:
        states = f", {len(self.recurrent)} of them recurrent" if self.recurrent else ""
        devices = f" on {', '.join(name for name, *_ in self.devices)}" if self.devices else ""
        heads = (self.n_head_kv,) if isinstance(self.n_head_kv, int) else self.n_head_kv
        keys, values = zip(*self.head_dims)
        return (
            f"{self.n_layer} layers{states} of {_range(heads)} KV heads, keys of {_range(keys)} and values of "
            f"{_range(values)} elements{devices}"
        )


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{most}" if least == most else f"{least} to {most}"


class Cache:
    """A cache of one sequence with room for `n_ctx` tokens, of which `length` are filled.

    type         CacheType
    shape        CacheShape: a model takes caches of its own shape only
    rotations    of keys and of values of each layer: elements rotated together, 0 for none
    k, v, index  tuples of arrays: native code has their addresses, so they are never replaced
    entries      Entries of compressed attention; None for other models
    state_bytes  of the states of recurrent layers
    nbytes       of all arrays, without the spare state that the running layer writes
    """

    k: tuple[Any, ...]
    v: tuple[Any, ...]
    index: tuple[np.ndarray, ...] = ()
    entries: Entries | None = None

    def __init__(self, hparams: HParams, n_ctx: int, cache_type: str | CacheType, *, one_layer: bool = False):
        """`one_layer` makes all layers share one pair of arrays, and one state: enough for a sequence that is run once,
        as a whole. Layers whose keys and values later ones read keep arrays of their own."""
        kind = cache_type if isinstance(cache_type, CacheType) else CacheType.parse(cache_type)
        self._describe(CacheShape.of(hparams), n_ctx, kind, one_layer)
        kv_heads = hparams.kv_heads_of or (hparams.n_head_kv,) * hparams.n_layer
        of_mtp = set(range(hparams.n_main, hparams.n_layer))  # see runtime/mtp.py
        without = hparams.recurrent | hparams.kv_shared | of_mtp
        kept = {hparams.kv_sources[i] for i in hparams.kv_shared}
        heads = [0 if i in without else kv_heads[i] for i in range(hparams.n_layer)]
        self.k, self.v = (
            _rows(
                heads,
                self.n_ctx,
                [types.layout(name).row_bytes(dims[side]) for dims in self.shape.head_dims],
                kept if one_layer else None,
            )
            for side, name in enumerate((self.type.k, self.type.v))
        )
        if self.shape.index_dims:
            kept_rows = [types.layout(self.type.v).row_bytes(dim) for dim in self.shape.index_dims]
            self.index = _rows([min(n, 1) for n in kept_rows], self.n_ctx, kept_rows, set() if one_layer else None)
        self._make_states(self.shape.states)
        self.state_bytes = sum(x.nbytes for x in {id(x): x for x in self.states.values()}.values())
        rows = {id(x): x for x in (*self.k, *self.v, *self.index)}
        self.nbytes = self.state_bytes + sum(x.nbytes for x in rows.values())
        self._make_entries(hparams, range(hparams.n_layer))

    def _make_entries(self, hparams: HParams, layers: Iterable[int], zeros: Zeros = np.zeros) -> None:
        """Entries of these layers, where they have any; counts their bytes."""
        sizes = {i: hparams.entry_sizes(i) for i in layers}
        compressed = {i: each for i, each in sizes.items() if each is not None}
        if compressed:
            self.entries = Entries(compressed, self.n_ctx, zeros)
            self.nbytes += self.entries.nbytes

    def _make_states(self, shapes: Mapping[int, StateShapes], zeros: Zeros = np.zeros) -> None:
        """States of these shapes before the first token, and one more of each shape for `advance`."""
        self.states: dict[int, LayerState] = {}
        self._spares = {each: LayerState.zero(each, zeros) for each in dict.fromkeys(shapes.values())}
        self._spare_of: dict[StateShapes, int] = {}  # the layer that was advanced last, of each shape
        self._mark: tuple[int, dict[int, LayerState]] | None = None
        shared: dict[StateShapes, LayerState] = {}
        for number, each in shapes.items():
            state = LayerState.zero(each, zeros) if each not in shared or not self.one_layer else shared[each]
            self.states[number] = shared[each] = state

    def _describe(self, shape: CacheShape, n_ctx: int, kind: CacheType, one_layer: bool = False) -> None:
        """Set all but the arrays. DataError where `n_ctx` is not from 1 to `_MAX_TOKENS`."""
        self.shape, self.type, self.one_layer = shape, kind, one_layer
        self._n_ctx, self._length = arguments.integer(n_ctx, "the context of a cache (-c)", 1, _MAX_TOKENS), 0
        self.rotations = [kind.rotations(*dims) for dims in shape.head_dims]

    @property
    def n_ctx(self) -> int:
        """Tokens that fit."""
        return self._n_ctx

    @property
    def length(self) -> int:
        """Number of tokens in the cache. It can be set to any number from 0 to `n_ctx`; see `truncate`."""
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        """Tokens that are filled."""
        if type(value) is not int or not 0 <= value <= self._n_ctx:
            value = arguments.integer(value, f"the length of a cache of {self._n_ctx} tokens", 0, self._n_ctx)
        self._forget_entries(value)
        self._length = value

    def _forget_entries(self, length: int) -> None:
        """Forget the entries of windows that end after the first `length` tokens."""
        if self.entries is not None:
            self.entries.truncate(length)

    @property
    def cache_type(self) -> str:
        """The text of `type`."""
        return str(self.type)

    def rows_of(self, layer: int) -> tuple[Any, Any]:
        """The arrays of a layer's keys and values, on their device."""
        return self.k[layer], self.v[layer]

    def reserve(self, tokens: int) -> None:
        """DataError unless there is room for `tokens` more tokens."""
        if self.length + tokens > self.n_ctx:
            raise DataError(
                f"the cache holds {self.length} of {self.n_ctx} tokens, {tokens} more do not fit; "
                "make it larger (-c) or the text shorter"
            )

    def truncate(self, length: int) -> None:
        """Remove all tokens after the first `length`.

        DataError where recurrent layers have no state of that length.
        """
        length = arguments.integer(length, "the length to truncate a cache to")
        if not 0 <= length <= self.length:
            raise DataError(f"cannot truncate a cache of {self.length} tokens to {length}")
        if self.states and length:
            is_marked = self._mark is not None and self._mark[0] == length
            if not is_marked and length != self.length:
                available = f"0 and the mark at {self._mark[0]}" if self._mark else "0"
                raise DataError(
                    f"cannot truncate a cache of {self.length} tokens to {length}: recurrent layers have no state of "
                    f"each length, only of {available}; call mark() or save() at that length first"
                )
            for i, state in self._mark[1].items() if is_marked and self._mark else ():
                self.states[i].take(state)  # also at this length: a failed pass has advanced some of the states
        self.length = length
        if self._mark and self._mark[0] > length:
            self._mark = None

    def clear(self) -> None:
        """Remove all tokens and the mark."""
        self.length, self._mark = 0, None

    def mark(self) -> None:
        """Copy the states of recurrent layers as they are now; replaces an earlier mark."""
        if self.states:
            self._mark = self.length, {i: copy.deepcopy(self.state(i)) for i in self.states}

    def save(self) -> State:
        """A copy of the sequence: keys, values and states of all layers."""
        if self.one_layer:
            raise DataError("a cache whose layers share their arrays cannot be saved: it holds the last layer only")
        k, v = ([self._copy(x[:, : self.length]) for x in side] for side in (self.k, self.v))
        index = [self._copy(x[:, : self.length]) for x in self.index]
        return State(self.type, self.length, k, v, {i: copy.deepcopy(self.state(i)) for i in self.states}, index)

    def _copy(self, x: np.ndarray) -> np.ndarray:
        return x.copy()

    def restore(self, state: State) -> None:
        """Replace the content by a saved state. DataError where it is of another kind of cache, or does not fit."""
        if self.one_layer or not isinstance(state, State) or self.type != state.type or not self._fits(state):
            kind = type(state).__name__
            described = (
                f"of {state.length} tokens saved from a cache of {state.type}" if kind == "State" else f"({kind})"
            )
            raise DataError(
                f"a state {described} does not fit this one of {self.type}; both must be of one model and one type"
            )
        if state.length > self.n_ctx:
            raise DataError(f"a state of {state.length} tokens does not fit a cache of {self.n_ctx}; make it larger")
        self.clear()  # until all is there
        for into, rows in zip((*self.k, *self.v, *self.index), (*state.k, *state.v, *state.index)):
            into[:, : state.length] = rows
        for i, layer in state.states.items():
            self.states[i].take(layer)
        self._spare_of.clear()
        self.length = state.length

    def _fits(self, state: State) -> bool:
        """Whether a state has the arrays that this cache would save at its length."""
        n = state.length
        own_arrays, saved_arrays = (*self.k, *self.v, *self.index), (*state.k, *state.v, *state.index)
        rows = [(x.shape[0], min(n, x.shape[1]), x.shape[2]) for x in own_arrays]
        if len(state.k) != len(self.k) or n < 0 or (n <= self.n_ctx and rows != [tuple(x.shape) for x in saved_arrays]):
            return False
        pairs = [(self.states[i], state.states.get(i)) for i in self.states]
        return len(state.states) == len(pairs) and all(
            saved is not None and saved.position == n and own_arrays.shapes == saved.shapes
            for own_arrays, saved in pairs
        )

    # ------------------------------------------------------------------------------------------------ recurrent layers

    def state(self, layer: int) -> LayerState:
        """The state of a recurrent layer after `length` tokens, for reading; zero at length 0.

        DataError where the state is of another length, because the layer was advanced or a pass was interrupted.
        """
        result = self.states[layer]
        shapes = result.shapes
        if self.length and result.position != self.length and self._spare_of.get(shapes) == layer:
            del self._spare_of[shapes]
            self.states[layer], self._spares[shapes] = self._spares[shapes], result  # the layer is run once more
            result = self.states[layer]
        if not self.length:
            result.position = INCOMPLETE
            result.inputs[:], result.heads[:] = 0, 0
            result.position = 0
        if result.position != self.length:
            raise DataError(
                f"the state of recurrent layer {layer} is that after {result.position} tokens, the cache holds "
                f"{self.length}: a pass ended early; clear() it, truncate() to the mark, or restore() what save() gave"
            )
        return result

    def begin_update(self, layers: Iterable[int]) -> list[LayerState]:
        """The states of these recurrent layers after `length` tokens, to be changed in place.

        Until `end_update`, or `extend`, they are states of no length. DataError as `state`.
        """
        found = [self.state(layer) for layer in layers]
        self._spare_of.clear()
        for state in found:
            state.position = INCOMPLETE
        return found

    def end_update(self, layers: Iterable[int], tokens: int) -> None:
        """The states of these layers, changed since `begin_update`, are those after `tokens` more than `length`."""
        for layer in layers:
            self.states[layer].position = self.length + tokens

    def extend(self, tokens: int) -> None:
        """Add `tokens` to `length`: their keys and values, changed states of `begin_update`, and entries are there."""
        self.end_update(self.states, tokens)
        self.length += tokens
        if self.entries is not None:
            self.entries.made[0] = self.length

    def advance(self, layer: int, tokens: int) -> tuple[LayerState, LayerState]:
        """(state now, state to write): advance a layer by `tokens`. The old state stays valid until the next call."""
        before = self.state(layer)
        shapes = before.shapes
        after = self._spares[shapes]
        if after is before:  # an interrupt came between two steps of their exchange
            after = copy.deepcopy(before)
        after.position = INCOMPLETE
        if self.one_layer:
            for i, state in self.states.items():
                self.states[i] = after if state is before else state
        self.states[layer], self._spares[shapes], self._spare_of[shapes] = after, before, layer
        after.position = before.position + tokens
        return before, after


def shared_key_bytes(hparams: HParams, kind: CacheType) -> int:
    """Bytes of a token's keys and values in the layers that later ones read."""
    kv_heads = hparams.kv_heads_of or (hparams.n_head_kv,) * hparams.n_layer
    layouts = [types.layout(name) for name in (kind.k, kind.v)]
    return sum(
        kv_heads[i] * layout.row_bytes(dim)
        for i in {hparams.kv_sources[shared] for shared in hparams.kv_shared}
        for layout, dim in zip(layouts, hparams.head_dims(i))
    )


def _rows(heads: list[int], n_ctx: int, row_bytes: list[int], kept: set[int] | None) -> tuple[np.ndarray, ...]:
    """An array [heads, n_ctx, row bytes] for each layer; with `kept`, one for all layers of one shape, except for those
    in `kept`."""
    shared: dict[tuple[int, ...], np.ndarray] = {}
    shapes = [(count, n_ctx, nbytes) if count else (1, 0, nbytes) for count, nbytes in zip(heads, row_bytes)]
    found = []
    try:
        for layer, shape in enumerate(shapes):
            if kept is None or layer in kept:
                found.append(np.zeros(shape, np.uint8))
            else:
                found.append(shared[shape] if shape in shared else np.zeros(shape, np.uint8))
                shared[shape] = found[-1]
    except (MemoryError, ValueError):
        size = sum(map(math.prod, shapes if kept is None else set(shapes)))
        raise DataError(
            f"a cache of {n_ctx} tokens takes about {2 * size / (1 << 30):.0f} GiB, more than there is; take a "
            "smaller context (-c) or type (-ctk, -ctv)"
        ) from None
    return tuple(found)
