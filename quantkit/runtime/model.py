"""`Model`: an open GGUF file with its forward passes.

    m = load("model.gguf")
    cache = m.new_cache(4096)
    m.forward([1, 2, 3], cache)          float32[3, vocab]; the three tokens are appended to the cache
    m.forward_sequences(chunks, rows)    many fresh sequences at once, logits of the positions `rows` only

This module runs a model layer by layer: Python around multi-threaded kernels and BLAS. With `fast` numerics `forward`
uses runtime/compiled, where the model is one operation list; where that is not possible, `fallback_reason` says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quantkit.archs.common import blocks, validate
from quantkit.archs.common.required_tensors import required
from quantkit.codegen import blas, thread_pool
from quantkit.errors import DataError, UnknownNameError, UnsupportedError
from quantkit.formats import gguf
from quantkit.inputs import arguments
from quantkit.placement.offload import Offload
from quantkit.placement.rules import Placement
from quantkit.runtime import repacking
from quantkit.runtime.blocks import dense, experts, float_linear, float_ops, latent
from quantkit.runtime.blocks.block_runner import BlockRunner
from quantkit.runtime.blocks.float_attention import AttentionOptions
from quantkit.runtime.blocks.spans import Span, batches
from quantkit.runtime.generate import Generated, Sampling, generate
from quantkit.runtime.kernels.kv_rounding import FLOATS, QUANTIZED
from quantkit.runtime.kv.cache import Cache, CacheShape, shared_key_bytes
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.locking import Locked, one_at_a_time, restore_lengths
from quantkit.runtime.repacking import Repacked
from quantkit.runtime.residency import LockedWeights, ReadWeights
from quantkit.runtime.scale_check import ScaleChecks

if TYPE_CHECKING:
    from quantkit.runtime.compiled.compiled_model import CompiledModel
    from quantkit.runtime.parallel.split import Split
    from quantkit.tokenizers.tokenizer import Tokenizer

BATCH_TOKENS = 1024  # of a prompt, computed at a time; on a CPU, more only costs memory
GPU_BATCH_TOKENS = 2048  # the same on GPUs that have the memory: they decode their weights for each batch
SEQUENCE_TOKENS = 2048  # of several fresh sequences, computed at a time layer by layer
TOGETHER_TOKENS = 512  # of several sequences that continue, and with `fast` numerics: computed at a time
NUMERICS = ("exact", "fast")
TRIPWIRES = ("layer", "full", "off")


def cache_type_of(chosen: str | CacheType | None, numerics: str, attention: AttentionOptions) -> CacheType:
    """The cache type: `chosen`, or f32 for exact and f16 for fast numerics.

    UnsupportedError for quantized values without flash attention.
    """
    if numerics not in NUMERICS:
        raise UnknownNameError("numerics", numerics, NUMERICS)
    if chosen is None:
        chosen = "f32" if numerics == "exact" else "f16"
    kind = chosen if isinstance(chosen, CacheType) else CacheType.parse(chosen)
    if not attention.flash and kind.v in QUANTIZED:
        raise UnsupportedError(
            f"-ctv {kind.v} needs flash attention (-fa 1); without, values can be {', '.join(FLOATS)}"
        )
    return kind


def _pairs(parts: Iterable[tuple[Sequence[int] | np.ndarray, Cache]]) -> list[tuple[Sequence[int] | np.ndarray, Cache]]:
    """The (tokens, cache) pairs of `forward_batch` as a list. DataError for anything else."""
    try:
        return [(tokens, cache) for tokens, cache in parts]
    except (TypeError, ValueError):
        raise DataError("forward_batch takes pairs of a list of tokens, at least one, and a cache") from None


class ModelFile(Protocol):
    """What a Model needs of a file: an open GGUF file, or a checkpoint seen as one."""

    @property
    def path(self) -> Path:
        """What messages call the model."""

    @property
    def metadata(self) -> gguf.Metadata:
        """The metadata of the GGUF file."""

    @property
    def tensors(self) -> dict[str, gguf.Tensor]:
        """The tensors by their names in GGUF."""

    @property
    def size(self) -> int:
        """Bytes of all tensors as stored."""


class Model(BlockRunner, Locked):
    """An open model.

    Python threads can share a model, and use different models at the same time, with the results of one thread. Calls
    on one model wait for each other, from forward pass to forward pass: `generate` in two threads takes turns token by
    token. Give each sequence a cache of its own. `observer` and other attributes that are set are for all threads.

    After an exception or an interrupt, `forward` and `forward_batch` leave caches with the length they had, so the same
    call can be repeated. States of recurrent layers cannot be taken back: if such a cache was not empty, the next call
    raises DataError until it is cleared, truncated to its mark or restored.

    hparams, blocks, head   the architecture's hyperparameters, blocks and output head
    weights                 dict name -> formats.gguf.Tensor; repacked tensors are in memory
    numerics, threads, placement   as given to `load`
    cache_type              text of the CacheType that `new_cache` uses by default
    attention               AttentionOptions: how attention is computed
    repacked                what -rtr did; None without it
    fused_experts, expert_reduction   as given to `load`
    has_latents, mla        whether attention is latent; `mla` as given, 0 for other models
    tripwire                as given to `load`
    split                   the parallel.split.Split that runs it; None on one device without profiling
    fitted                  the flags that `fit` chose; None without it
    read, locked            what --no-mmap or -thp, and --mlock did (runtime/residency.py); None without them
    fallback_reason         why a model with `fast` numerics runs layer by layer; None where it does not
    observer                called with (name, float32[tokens, n]) for what enters each weight matrix, and of experts
                            with (name, float32[tokens, n], expert, experts); None by default
    """

    def __init__(
        self,
        file: ModelFile,
        described: validate.Description,
        placement: Placement,
        *,
        numerics: str = "exact",
        threads: int | None = None,
        cache_type: str | CacheType | None = None,
        attention: AttentionOptions | None = None,
        n_ctx: int | None = None,
        repack: bool = False,
        fused_experts: bool = True,
        expert_reduction: tuple[int, float] | None = None,
        mla: int = 3,
        tripwire: str = "layer",
        reduce_type: str = "f32",
        experts_by: str = "number",
        profile: bool = False,
        offload: Offload | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        attention = attention or AttentionOptions()
        kind = cache_type_of(cache_type, numerics, attention)
        self.path = file.path
        self.metadata = file.metadata
        self.size_bytes = file.size
        self.placement = placement
        self.cache_type = str(kind)
        self.hparams, self.blocks, self.head = described.hparams, described.blocks, described.head
        if mla not in latent.MODES:
            raise UnsupportedError(f"-mla {mla}: known are {', '.join(map(str, latent.MODES))}")
        self.has_latents = latent.is_latent(self.blocks)
        is_split, self._max_positions = profile or not placement.is_cpu_only, sys.maxsize
        if placement.graph:  # its devices do not select positions: they attend to all, as far as that is the same
            self.blocks, self._max_positions = dense.attending_to_all(self.blocks)
        count = thread_pool.check_threads(arguments.threads(threads) or thread_pool.default_threads())
        super().__init__(
            file.path, file.tensors, numerics=numerics, threads=count,
            attention=attention, mla=mla if self.has_latents else 0, fused_experts=fused_experts, tripwire=tripwire,
        )  # fmt: skip
        Locked.__init__(self)
        self._cached = latent.cached(self.hparams, self.blocks, self.mla)
        n_ctx = None if n_ctx is None else arguments.integer(n_ctx, "the context (-c)", 0)
        self.n_ctx = min(n_ctx or self.hparams.n_ctx_train, self._max_positions)
        self._tokenizer = tokenizer
        if tripwire not in TRIPWIRES:
            raise UnknownNameError("tripwire", tripwire, TRIPWIRES)
        self._check_attention(kind, n_ctx)
        self._check_weights()
        self.expert_reduction = experts.reduction(self.blocks, expert_reduction, self.path)
        self.repacked: Repacked | None = None
        if repack:
            self.weights, self.repacked = repacking.repack(self.weights, placement, self.threads)
        self._of_each_file = {tensor.path: tensor for tensor in self.weights.values()}.values()
        lookups = (part for block in self.blocks for part in block.parts if isinstance(part, blocks.NGrams))
        unread = {part.table for part in lookups}  # of most rows; the check would read all of them
        checked = {name: t for name, t in self.weights.items() if name not in unread}
        self._scales = ScaleChecks(checked if tripwire != "off" else {}, self.threads)
        self.split: Split | None = None
        if is_split:
            from quantkit.runtime.parallel import workers
            from quantkit.runtime.parallel.split import Split

            self.split = Split(
                self, self.blocks, self.head, self._cached, placement, reduce=reduce_type, experts_by=experts_by,
                profile=profile, offload=offload, new_worker=workers.new_worker, new_rank=workers.new_rank,
            )  # fmt: skip
            self.split.caches.require(kind)
        self._cache_shape = CacheShape.of(self._cached) if self.split is None else self.split.caches.shape
        self.fitted: str | None = None
        self.read: ReadWeights | None = None
        self.locked: LockedWeights | None = None
        self._fast: CompiledModel | None = None
        self.fallback_reason: str | None = None
        if numerics == "fast":
            self._fast, self.fallback_reason = self._compiled()

    def __repr__(self) -> str:
        return f"<model {self.path}: {self.hparams.arch}, {self.numerics}, {self.threads} threads>"

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return self.hparams.n_vocab

    @property
    def n_ctx_train(self) -> int:
        """The context length that the model was trained with."""
        return self.hparams.n_ctx_train

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the metadata describe."""
        with self._lock:
            if self._tokenizer is None:
                from quantkit.tokenizers.tokenizer import Tokenizer

                self._tokenizer = Tokenizer.from_gguf(self.metadata, self.path)
            return self._tokenizer

    def new_cache(self, n_ctx: int | None = None, cache_type: str | CacheType | None = None) -> Cache:
        """An empty cache for one sequence of up to `n_ctx` tokens."""
        return self._empty_cache(self.n_ctx if n_ctx is None else n_ctx, self._kind(cache_type))

    def _empty_cache(self, n_ctx: int, kind: CacheType, one_layer: bool = False) -> Cache:
        if self.split is not None:
            return self.split.caches.new(n_ctx, kind, one_layer)
        return Cache(self._cached, n_ctx, kind, one_layer=one_layer)

    def _kind(self, cache_type: str | CacheType | None) -> CacheType:
        return cache_type_of(cache_type or self.cache_type, self.numerics, self.attention)

    # ------------------------------------------------------------------------------------------------- forward passes

    @one_at_a_time
    def forward(self, tokens: Sequence[int] | np.ndarray, cache: Cache, logits: str = "all") -> np.ndarray:
        """float32[k, vocab]: logits after each of the tokens ("all") or after the last one ("last"; k = 1).

        The tokens continue what the cache holds and are added to it.
        """
        if logits not in ("all", "last"):
            raise UnknownNameError("choice of logits", logits, ("all", "last"))
        ids = self._checked(tokens)
        if ids.ndim != 1 or not len(ids):
            raise DataError(f"forward takes a list of tokens, at least one; got shape {ids.shape}")
        self._require_own(cache)
        self._require_positions(cache.length + len(ids))
        cache.reserve(len(ids))
        with restore_lengths([cache]):
            return self._forward(ids, cache, logits)

    def _forward(self, ids: np.ndarray, cache: Cache, logits: str) -> np.ndarray:
        if self._fast is not None and self.observer is None:
            before = cache.length
            result = self._forward_fast(self._fast, ids, cache, logits)
            if result is not None:
                return result
            cache.length = before  # layer by layer, to name the bad tensor
            self._diagnose_states(ids, [Span(0, len(ids), cache)])
        rows = []
        with blas.single_threaded():
            step = self._batch_tokens(len(ids))
            for start in range(0, len(ids), step):
                part = ids[start : start + step]
                x = self._run(part, [Span(0, len(part), cache)])
                if logits == "all" or len(x) == 1:
                    rows.append(self._project(x))
                elif start + len(part) == len(ids):
                    rows.append(self._project(x[-1:]))
                cache.length += len(part)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _batch_tokens(self, count: int) -> int:
        """How many tokens of a prompt of `count` are computed at a time."""
        if self.split is None or count <= BATCH_TOKENS or not self.split.has_room(min(count, GPU_BATCH_TOKENS)):
            return BATCH_TOKENS
        return GPU_BATCH_TOKENS

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32[len, vocab] of a fresh sequence."""
        ids = self._checked(tokens)
        return self.forward(ids, self.new_cache(max(1, ids.size)))

    @one_at_a_time
    def forward_batch(self, parts: Sequence[tuple[Sequence[int] | np.ndarray, Cache]]) -> np.ndarray:
        """float32[parts, vocab]: logits after the last token of each of several sequences (tokens, cache).

        Each sequence has one token or more, and a cache of its own; all caches have one type. The tokens are multiplied
        by each weight together and appended to the caches.
        """
        checked = [(self._checked(tokens), cache) for tokens, cache in _pairs(parts)]
        if not checked or any(ids.ndim != 1 or not len(ids) for ids, _ in checked):
            raise DataError("forward_batch takes pairs of a list of tokens, at least one, and a cache")
        caches = [cache for _, cache in checked]
        for cache in caches:
            self._require_own(cache)
        if len({id(cache) for cache in caches}) < len(caches) or len({cache.type for cache in caches}) > 1:
            raise DataError("forward_batch: each sequence needs a cache of its own, and all of them one type")
        for ids, cache in checked:
            self._require_positions(cache.length + len(ids))
            cache.reserve(len(ids))
        ends = np.empty((len(checked), self.hparams.n_embd), np.float32)
        with blas.single_threaded(), restore_lengths(caches):
            for ids, spans, part_of in batches(checked, TOGETHER_TOKENS):
                x = self._forward_spans(ids, spans)
                for i, span in zip(part_of, spans):
                    ends[i] = x[span.stop - 1]
            return self._project(ends)

    def _forward_spans(self, ids: np.ndarray, spans: list[Span]) -> np.ndarray:
        """float32[tokens, n_embd] before the output norm; the caches then hold the tokens."""
        before = [span.cache.length for span in spans]
        if self._fast is not None and self.observer is None:
            self._scales.require_all()
            x = self._fast.prefill(ids, spans)
            if self.is_finite(x):
                return x
            for span, length in zip(spans, before):  # layer by layer, to name the bad tensor
                span.cache.length = length
            self._diagnose_states(ids, spans)
        x = self._to_host(self._run(ids, spans))
        for span in spans:
            span.cache.length += span.stop - span.start
        return x

    def forward_sequences(self, tokens: np.ndarray, rows: slice, cache_type: str | None = None) -> np.ndarray:
        """float32[n_seq, k, vocab]: logits at the positions `rows` of fresh sequences int[n_seq, len].

        Each weight is multiplied by the tokens of all sequences together. For large vocabularies `hidden_sequences` and
        `project` give the same in pieces.
        """
        hidden = self.hidden_sequences(tokens, rows, cache_type)
        n_seq, k, n_embd = hidden.shape
        return self.project(hidden.reshape(n_seq * k, n_embd)).reshape(n_seq, k, self.vocab_size)

    @one_at_a_time
    def hidden_sequences(self, tokens: np.ndarray, rows: slice, cache_type: str | None = None) -> np.ndarray:
        """float32[n_seq, k, n_embd]: hidden states for `project`, at the positions `rows` of fresh sequences."""
        ids = self._checked(tokens)
        if ids.ndim != 2 or not ids.size:
            raise DataError(f"expected tokens int[n_seq, len], got shape {ids.shape}")
        if not isinstance(rows, slice):
            raise DataError(f"rows are a slice of positions, not a {type(rows).__name__}")
        n_seq, length = ids.shape
        self._require_positions(length)
        kind = self._kind(cache_type)
        compiled = self._fast is not None and self.observer is None
        sequences_at_once = min(n_seq, max(1, (TOGETHER_TOKENS if compiled else SEQUENCE_TOKENS) // length))
        caches = [self._empty_cache(length, kind, not compiled) for _ in range(sequences_at_once)]
        hidden = []
        with blas.single_threaded():
            for start in range(0, n_seq, sequences_at_once):
                part = ids[start : start + sequences_at_once]
                run = self._sequences_compiled if compiled else self._sequences
                hidden.append(run(part, caches[: len(part)])[:, rows])
        return np.concatenate(hidden)

    def _sequences(self, ids: np.ndarray, caches: list[Cache]) -> np.ndarray:
        """float32[n_seq, len, n_embd] before the output norm of int64[n_seq, len], layer by layer, all at once."""
        n_seq, length = ids.shape
        spans = [Span(i * length, (i + 1) * length, cache) for i, cache in enumerate(caches)]
        return self._to_host(self._run(ids.reshape(-1), spans)).reshape(n_seq, length, -1)

    def _sequences_compiled(self, ids: np.ndarray, caches: list[Cache]) -> np.ndarray:
        """As `_sequences`, by the compiled model."""
        hidden = np.empty((*ids.shape, self.hparams.n_embd), np.float32)
        for cache in caches:
            cache.clear()
        for tokens, spans, sequence_of in batches(list(zip(ids, caches)), TOGETHER_TOKENS):
            begin = [span.cache.length for span in spans]
            x = self._forward_spans(tokens, spans)
            for i, first, span in zip(sequence_of, begin, spans):
                hidden[i, first : first + span.stop - span.start] = x[span.start : span.stop]
        return hidden

    def generate(
        self,
        prompt: str | Sequence[int],
        n_predict: int = 128,
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Generated:
        """Continue a prompt in a fresh sequence; see `runtime.generate`. `.text` of the result is the reply."""
        return generate(self, prompt, n_predict, sampling, on_text=on_text)

    @one_at_a_time
    def project(self, hidden: np.ndarray) -> np.ndarray:
        """float32[k, vocab]: logits of float32[k, n_embd] from `hidden_sequences`."""
        with blas.single_threaded():
            return self._project(self._checked_hidden(hidden))

    # ------------------------------------------------------------------------------------------ compiled, or by layers

    def _compiled(self) -> tuple[CompiledModel | None, str | None]:
        """The model as a CompiledModel, or None and the reason."""
        from quantkit.runtime.compiled import compiled_model, plan_base, unsupported

        if self.split is not None:
            return None, (
                "a model on several devices, or one that is profiled, runs layer by layer but for what is compiled on "
                "the CPU: neighbouring layers that are there whole, and experts"
            )
        reason = unsupported.unsupported_feature(self.weights, self.blocks, self.head)
        if reason is not None:
            return None, reason
        options = plan_base.ExpertOptions(self.fused_experts, self.expert_reduction)
        parts = plan_base.ModelParts(
            self.weights, self.blocks, self.head, self.threads, self.attention, options, self.mla
        )
        return compiled_model.CompiledModel(parts), None

    def _forward_fast(self, fast: CompiledModel, ids: np.ndarray, cache: Cache, logits: str) -> np.ndarray | None:
        """What `forward` gives; None when something on the way is not finite."""
        self._scales.require_all()
        if logits == "last" or len(ids) == 1:
            last = fast.last_logits(ids, cache)
            return last if self.is_finite(last) else None
        rows = []
        for x in fast.hidden_states(ids, cache):
            if not self.is_finite(x):
                return None
            rows.append(self.project(x))
        return np.concatenate(rows)

    def _run(self, tokens: np.ndarray, spans: list[Span]) -> np.ndarray:
        """float32[tokens, n_embd] before the output norm, on its device; keys and values go into the spans' caches."""
        spans = [span._replace(tokens=tokens[span.start : span.stop]) for span in spans]
        if self.split is not None and self.observer is None:
            self._scales.require_all()
            x = self.split.run(tokens, spans)
            if self.split.is_finite(x):
                return x
            self._diagnose_states(tokens, spans)
        x = self.embed_checked(tokens)
        for block in self.blocks:  # each checked, to name the bad tensor
            x = self._run_block(block, x, spans)
        return x if self.head.streams is None else self.merge_streams(self._to_host(x))

    @one_at_a_time
    def merge_streams(self, x: np.ndarray) -> np.ndarray:
        """float32[tokens, n_embd] before the output norm, of what leaves the last block: x itself without streams."""
        return self.collapse(self.head, x)

    @one_at_a_time
    def embed_checked(self, tokens: np.ndarray) -> np.ndarray:
        """`embed`, with the non-finite check. DataError that names the tensor."""
        self._scales.require(None)
        x = self.embed(tokens)
        self._require_finite(self.head.embedding, x)
        return x

    @one_at_a_time
    def run_block_checked(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """`run_block`, with the non-finite check, and a diagnosis where it fails."""
        self._require_positions(max(span.cache.length + span.stop - span.start for span in spans))
        return self._to_host(self._run_block(block, x, spans))

    def _run_block(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """As `run_block_checked`, with the result left on its device."""
        self._scales.require(block.layer)
        y = super().run_block(block, x, spans) if self.split is None else self.split.run_block(block, x, spans)
        if not (self if self.split is None else self.split).is_finite(y):
            self._diagnose(block, self._to_host(x), spans)
        return y

    def _to_host(self, x: np.ndarray) -> np.ndarray:
        """The output of a block as an array in the host's memory."""
        return x if self.split is None else self.split.host(x)

    @one_at_a_time
    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """float32[tokens, state_width] that enters the first block."""
        x = self.spread(self.head, float_linear.embed(self.weights, self.head, tokens))
        return x if self.split is None else self.split.embedded(x)

    @property
    def state_width(self) -> int:
        """Elements of a token's hidden state between blocks: n_embd, times the residual streams."""
        return self.hparams.n_embd * (1 if self.head.streams is None else self.head.streams.streams)

    @property
    def shared_key_bytes(self) -> int:
        """Bytes of a token's keys and values that later layers read, in caches of `layer_cache`."""
        return shared_key_bytes(self._cached, self._kind(None))

    def layer_cache(self, n_ctx: int) -> Cache:
        """An empty cache for one sequence and one layer at a time. Layers that later ones read keep their rows."""
        return self._empty_cache(n_ctx, self._kind(None), one_layer=True)

    @one_at_a_time
    def run_block(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """float32[tokens, state_width] that leaves a block, in the host's memory, wherever it is computed."""
        self._require_positions(max(span.cache.length + span.stop - span.start for span in spans))
        if self.split is None:
            return super().run_block(block, x, spans)
        return self._to_host(self.split.run_block(block, x, spans))

    def last_selections(self, spans: list[Span]) -> list[np.ndarray | None]:
        """For each span bool[tokens, positions] that the last block with an indexer has selected; None: all of them."""
        return self.selections if self.split is None else self.split.last_selections(spans)

    def set_selections(self, selections: list[np.ndarray | None]) -> None:
        """Let the next block attend to what `last_selections` gave, if it has no indexer."""
        if self.split is None:
            self.selections = selections
        else:
            self.split.set_selections(selections)

    @one_at_a_time
    def drop_cached(self, names: Iterable[str]) -> None:
        """Drop what is cached of these tensors: decoded vectors, products, copies on devices."""
        names = list(names)
        super().drop_cached(names)
        if self.split is not None:
            self.split.drop_cached(names)

    def _project(self, x: np.ndarray) -> np.ndarray:
        if self.split is None:
            y = self.linear(self.head.output, self.norm(self.head.norm, x))
        else:
            y = self.split.project(x)
        if self.head.softcap is not None:
            float_ops.soft_cap(y, self.head.softcap, self.threads)
        self._require_finite(self.head.output.weight, y)
        return y

    # --------------------------------------------------------------------------------------------- checks of arguments

    def _checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Tokens as int64 of any shape. DataError for what is no integer, or not in the vocabulary."""
        if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < self.vocab_size:
            return np.array(tokens, np.int64)  # what a step of generation passes, at half the price
        for tensor in self._of_each_file:  # plans hold addresses in these files
            _ = tensor.stored
        return arguments.integers(tokens, f"{self.path}: tokens of a vocabulary of {self.vocab_size}", self.vocab_size)

    def _checked_hidden(self, hidden: np.ndarray) -> np.ndarray:
        """float32[k, n_embd] for `project`; DataError for another shape."""
        x = arguments.real_numbers(hidden, f"{self.path}: hidden states")
        if x.ndim != 2 or x.shape[1] != self.hparams.n_embd:
            raise DataError(f"{self.path}: project takes float32[k, {self.hparams.n_embd}], got shape {x.shape}")
        return x

    def _require_own(self, cache: Cache) -> None:
        """DataError unless the cache is one of this model's: kernels use its addresses and sizes without checks."""
        if not isinstance(cache, Cache):
            raise DataError(f"{self.path}: a cache from new_cache() is needed, not a {type(cache).__name__}")
        if cache.shape is not self._cache_shape and cache.shape != self._cache_shape:
            raise DataError(
                f"{self.path}: this cache is of another model: {cache.shape}; this model needs {self._cache_shape}; "
                "make one with new_cache()"
            )
        if cache.one_layer:
            raise DataError(f"{self.path}: layer_cache() is for one layer at a time; make a cache with new_cache()")
        if not self.attention.flash:
            cache_type_of(cache.type, self.numerics, self.attention)

    def _require_positions(self, count: int) -> None:
        """UnsupportedError where attention would have to select among that many positions."""
        if count > self._max_positions:
            raise UnsupportedError(
                f"{self.path}: {self.hparams.arch} attends to selected ones of more than {self._max_positions} "
                f"positions, which this version does not select with -sm graph; got {count}: take -sm layer or shorter "
                "texts"
            )

    def _check_attention(self, kind: CacheType, n_ctx: int | None) -> None:
        """UnsupportedError or DataError where caches of this type, or the bound on attention's memory, do not fit."""
        hp = self._cached
        for layer in range(hp.n_layer):
            kind.rotations(*hp.head_dims(layer))
        self.attention.query_rows(
            hp.n_head // min(n for n in hp.kv_heads_of or (hp.n_head_kv,) if n), n_ctx or 1, self.threads
        )

    def _check_weights(self) -> None:
        """UnsupportedError for a tensor of a type that cannot be decoded."""
        tables = {part.table for block in self.blocks for part in block.parts if isinstance(part, blocks.Experts)}
        for name in tables - {None}:
            if (kind := self.weights[str(name)].type.name) != "i32":
                raise UnsupportedError(f"{self.path}: tensor {name} is {kind}; a table of experts has to be i32")
        for name, _ in required(self.hparams, self.blocks, self.head, self.weights):
            tensor = self.weights[name]
            if not tensor.type.has_codec and name not in tables:
                raise UnsupportedError(
                    f"{tensor.path}: tensor {tensor.name}: quantkit cannot decode {tensor.type.name} yet"
                )

    # ------------------------------------------------------------------------------------------------ non-finite values

    def _diagnose_states(self, tokens: np.ndarray, spans: list[Span]) -> None:
        """DataError after a compiled pass that was not finite, if it changed states of recurrent layers in place.

        The spans cannot be run again then. Their tokens are run from empty caches, to name the bad tensor.
        """
        if not any(span.cache.state_bytes and span.cache.length for span in spans):
            return
        for span in spans:
            ids, cache = tokens[span.start : span.stop], self._empty_cache(span.stop - span.start, span.cache.type)
            for start in range(0, len(ids), BATCH_TOKENS):
                part = ids[start : start + BATCH_TOKENS]
                self._run(part, [Span(0, len(part), cache)])
                cache.length += len(part)
        raise DataError(
            f"{self.path}: the logits of {len(tokens)} tokens are not finite, from an empty cache they are: a state "
            "of a recurrent layer is beyond float32; clear() the cache, or truncate() it to the mark"
        )

    def _diagnose(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> None:
        """Repeat a block whose result is not finite, checking each operation: DataError that names the bad tensor."""
        self._checking = True
        try:
            self.run_block(block, x, spans)
        finally:
            self._checking = False
        raise DataError(f"{self.path}: blk.{block.layer}: the sum of its parts is beyond float32")
