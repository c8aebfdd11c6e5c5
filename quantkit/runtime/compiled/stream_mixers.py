"""Residual streams mixed by gates of low rank (archs.blocks.StreamMixer) in both plans: kernels/cpu/stream_mixers.py.

Operations, with barriers where | stands:

    start       every stream = x |
    part        norm, down, inject | SiLU | up | mix, x = 0 | the part, which adds to x | write |
    end         norm, down | SiLU | up | mix into x |

In a batch a barrier follows the norm too. Parts read `entering` in place of x.
"""

from __future__ import annotations

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import activation_bytes
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, BatchOps, TokenOps
from quantkit.runtime.kernels.cpu import decode_ops, hyper_connections, prefill_ops, stream_mixers
from quantkit.runtime.kernels.cpu.stream_mixers import MixerParameters


class TokenMixers:
    """The streams of one token, float32[n, width] at `streams`, in the operation list of the decode plan."""

    def __init__(self, ops: TokenOps, head: blocks.StreamMixer):
        self._ops, self._n = ops, head.streams
        self.streams = ops.buffer("streams", 4 * head.streams * ops.n_embd)
        ops.entering = ops.buffer("entering", 4 * ops.n_embd)
        spread = hyper_connections.TokenParameters(_spread(ops, head.streams, self.streams), 0, SPLIT_ROWS)
        ops.add(hyper_connections.spread_token, spread, barrier=True)
        self._parameters: MixerParameters | None = None

    def read(self, part: blocks.Connection | None) -> None:
        """Append what a part reads of the streams, and x = 0; or, of the head, what the output matrix reads."""
        assert isinstance(part, blocks.StreamMixer), "streams are mixed in one way"
        ops, wide, rank = self._ops, self._n * self._ops.n_embd, part.rank
        normed, stride = ops.private_buffer("streams normed", activation_bytes(wide))
        low, hidden = ops.buffer("low rank", 4 * rank), ops.buffer("low rank activated", activation_bytes(rank))
        gates, shares = ops.buffer("stream gates", 4 * wide), ops.buffer("stream shares", 4 * self._n)
        parameters = _parameters(ops, part, 0, self.streams, normed, stride, gates, shares)
        ops.add(stream_mixers.norm_token, parameters)
        ops.matvec(part.down, Activations(normed, stride), low)
        if part.inject is not None:
            multiple = max(4, ops.tensor(part.inject).type.interleave)
            ops.matvec(part.inject, Activations(normed, stride), shares, multiple=multiple)
        ops.add_barrier()
        silu = decode_ops.GatedParameters(
            activation=ops.activation("sigmoid"), gate=low, up=low, n=rank, multiple=SPLIT_ROWS, buffer=hidden,
            numbers=0,
        )  # fmt: skip
        ops.add(decode_ops.gated, silu, barrier=True)
        ops.matvec(part.up, Activations(hidden, 0), gates, barrier=True)
        ops.add(stream_mixers.mix_token, parameters, barrier=True)
        self._parameters = parameters

    def write(self) -> None:
        """Append what the part that was read for, which is x, does to the streams."""
        assert self._parameters is not None
        self._ops.add(stream_mixers.write_token, self._parameters, barrier=True)

    def end(self, head: blocks.Connection) -> None:
        """Append x = what the output matrix reads."""
        self.read(head)
        self._ops.entering = self._ops.x


class BatchMixers:
    """The streams of a batch, float32[tokens, n, width] at `streams`, in the operation list of the prefill plan."""

    def __init__(self, ops: BatchOps, head: blocks.StreamMixer):
        self._ops, self._n = ops, head.streams
        self.streams = ops.floats("streams", head.streams * ops.n_embd)
        ops.entering = ops.floats("entering", ops.n_embd)
        spread = hyper_connections.BatchParameters(ops.state, _spread(ops, head.streams, self.streams), 0)
        ops.add(hyper_connections.spread_batch, spread, barrier=True)
        self._parameters: MixerParameters | None = None

    def read(self, part: blocks.Connection | None) -> None:
        """As `TokenMixers.read`."""
        assert isinstance(part, blocks.StreamMixer), "streams are mixed in one way"
        ops, wide, rank = self._ops, self._n * self._ops.n_embd, part.rank
        normed, low, gates = (
            ops.floats("streams normed", wide),
            ops.floats("low rank", rank),
            ops.floats("stream gates", wide),
        )
        shares = ops.floats("stream shares", self._n)
        parameters = _parameters(ops, part, ops.state, self.streams, normed, 0, gates, shares)
        ops.add(stream_mixers.norm_batch, parameters)
        readers = [part.down, *([] if part.inject is None else [part.inject])]
        rows = ops.quantize(normed, wide, readers)
        ops.multiply(part.down, rows, low)
        if part.inject is not None:
            ops.multiply(part.inject, rows, shares)
        ops.add_barrier()
        silu = prefill_ops.GatedParameters(
            state=ops.state, activation=ops.activation("sigmoid"), gate=low, up=low, n=rank, out=low, numbers=0
        )
        ops.add(prefill_ops.gated, silu)
        ops.multiply(part.up, ops.quantize(low, rank, (part.up,)), gates, barrier=True)
        ops.add(stream_mixers.mix_batch, parameters, barrier=True)
        self._parameters = parameters

    def write(self) -> None:
        """As `TokenMixers.write`."""
        assert self._parameters is not None
        self._ops.add(stream_mixers.write_batch, self._parameters, barrier=True)

    def end(self, head: blocks.Connection) -> None:
        """As `TokenMixers.end`."""
        self.read(head)
        self._ops.entering = self._ops.x


def _spread(ops: TokenOps | BatchOps, n: int, streams: int) -> int:
    """Address of a Streams record, of which `spread_token` and `spread_batch` read the streams, n, width and x."""
    record = hyper_connections.Streams(streams, n, ops.n_embd, ops.x, ops.entering, 0, 0, 0)
    return ops.record(record).address


def _parameters(
    ops: TokenOps | BatchOps, part: blocks.StreamMixer, state: int, streams: int, normed: int, stride: int, gates: int,
    shares: int,
) -> MixerParameters:  # fmt: skip
    is_head = part.inject is None
    return MixerParameters(
        state=state,
        streams=streams,
        n=part.streams,
        width=ops.n_embd,
        weight=ops.vector(part.norm.weight),
        eps=ops.constant(part.norm.eps),
        normed=normed,
        normed_stride=stride,
        gates=gates,
        shares=shares,
        out=ops.x if is_head else ops.entering,
        x=ops.x,
        clears=int(not is_head),
        multiple=SPLIT_ROWS,
    )
