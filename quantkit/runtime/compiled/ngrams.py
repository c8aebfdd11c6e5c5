"""Embeddings of n-grams (archs.blocks.NGrams) in both plans: kernels/cpu/ngrams.py.

    one token   quantize, key, value | gate, add to the streams | convolution, add |
    batch       quantize | key, value | gate, add to the streams | convolution, add |

The plan looks up the rows of the table before its list runs, by the tokens in the caches' states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import BATCH_TOKENS
from quantkit.runtime.blocks import float_linear
from quantkit.runtime.blocks.ngrams import last_tokens, looked_up, rows_of
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, Array, BatchOps, ModelParts, PlanOps, TokenOps
from quantkit.runtime.kernels.cpu import ngrams, prefill_ops


class NGramRows:
    """The embeddings of n-grams that a plan's operations read, float32[tokens, hashes * width]; filled before a run."""

    def __init__(self, model: ModelParts, tokens: int):
        self._weights = model.weights
        parts = (numbered for block in model.block_list for numbered in block.numbered_parts)
        self._parts = {number: part for number, part in parts if isinstance(part, blocks.NGrams)}
        self.rows = {
            number: np.zeros((tokens, len(part.sizes) * part.width), np.float32) for number, part in self._parts.items()
        }

    def look_up(self, tokens: Array, spans: Sequence[Span]) -> None:
        """Fill in those of int64[tokens], after the tokens in the states of the spans' caches, which get the last ones.

        The states are to be changed: see `Cache.begin_update`.
        """
        for number, part in self._parts.items():
            for span in spans:
                kept = span.cache.states[number].heads
                history = np.concatenate([last_tokens(part, kept), tokens[span.start : span.stop]])
                kept[0, 0] = history[len(history) - part.longest + 1 :] + 1
                self.rows[number][span.start : span.stop] = looked_up(self._weights, part, rows_of(part, history))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(rows.nbytes for rows in self.rows.values())


def add_decode(ops: TokenOps, number: int, part: blocks.NGrams, rows: NGramRows, streams: int) -> None:
    """Append what n-grams add to the streams of one token."""
    embedded = int(ops.keep(rows.rows[number]).ctypes.data)
    keys, value = ops.buffer("ngram keys", 4 * part.streams * ops.n_embd), ops.buffer("ngram value", 4 * ops.n_embd)
    quantized = ops.norm_of(None, Activations(embedded, 0), len(part.sizes) * part.width, "ngrams")
    ops.matvec(part.key, quantized, keys)
    ops.matvec(part.value, quantized, value, barrier=True)
    state = ops.keep(np.array([*prefill_ops.BatchState(1, 0, 1), *prefill_ops.SpanState(0, 1, 0)], np.int64))
    _add(ops, number, part, state.ctypes.data, keys, value, streams)


def add_prefill(ops: BatchOps, number: int, part: blocks.NGrams, rows: NGramRows, streams: int) -> None:
    """Append what n-grams add to the streams of a batch."""
    embedded, width = rows.rows[number], len(part.sizes) * part.width
    assert len(embedded) == BATCH_TOKENS
    keys, value = ops.floats("ngram keys", part.streams * ops.n_embd), ops.floats("ngram value", ops.n_embd)
    quantized = ops.quantize(int(ops.keep(embedded).ctypes.data), width, (part.key, part.value))
    ops.multiply(part.key, quantized, keys)
    ops.multiply(part.value, quantized, value, barrier=True)
    _add(ops, number, part, ops.state, keys, value, streams)


def _add(
    ops: TokenOps | BatchOps, number: int, part: blocks.NGrams, state: int, keys: int, value: int, streams: int
) -> None:
    parameters = ngrams.NGramParameters(
        state=state,
        layer_states=ops.states_view(number),
        streams=streams,
        n=part.streams,
        width=ops.n_embd,
        keys=keys,
        value=value,
        key_weight=ops.vector(part.key_norm.weight),
        query_weight=ops.vector(part.query_norm.weight),
        conv_weight=ops.vector(part.conv_norm.weight),
        key_eps=ops.constant(part.key_norm.eps),
        query_eps=ops.constant(part.query_norm.eps),
        conv_eps=ops.constant(part.conv_norm.eps),
        taps=_taps(ops, part),
        kernel=part.kernel,
        dilation=part.longest,
        multiple=SPLIT_ROWS,
    )
    ops.add(ngrams.gate, parameters, barrier=True)
    ops.add(ngrams.convolve, parameters, barrier=True)


def _taps(ops: PlanOps, part: blocks.NGrams) -> int:
    """Address of the taps float32[kernel, channels]."""
    taps = float_linear.vector(ops.model.weights[part.conv]).reshape(-1, part.kernel)
    return int(ops.keep(np.ascontiguousarray(taps.T)).ctypes.data)
