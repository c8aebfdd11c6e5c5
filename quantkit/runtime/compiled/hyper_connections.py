"""Hyper-connections (archs.blocks.HyperConnection) in both plans: kernels/cpu/hyper_connections.py.

Operations, with barriers where | stands:

    start       every stream = x |
    part        norm | product with fn | weights, read, x = 0 | the part, which adds to x | write |
    end         norm | product with fn | weights, x = what the last norm reads |

For one token each thread norms the streams for itself, without a barrier. Parts read `entering` in place of x.
"""

from __future__ import annotations

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import BATCH_TOKENS, stream_record_bytes
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, BatchOps, PlanOps, TokenOps
from quantkit.runtime.kernels.cpu import hyper_connections
from quantkit.runtime.kernels.cpu.hyper_connections import BatchParameters, TokenParameters


class TokenStreams:
    """The streams of one token, n of them, in the operation list of the decode plan."""

    def __init__(self, ops: TokenOps, n: int):
        self._ops, self._wide = ops, n * ops.n_embd
        self.streams, self._logits = ops.buffer("streams", 4 * self._wide), ops.buffer("mixing", 4 * (2 + n) * n)
        ops.entering = ops.buffer("entering", 4 * ops.n_embd)
        weights = ops.private_buffer("stream weights", stream_record_bytes(n))
        record = hyper_connections.Streams(
            self.streams, n, ops.n_embd, ops.x, ops.entering, self._logits, *weights
        )  # fmt: skip
        self._parameters = TokenParameters(streams=ops.record(record).address, mixing=0, multiple=SPLIT_ROWS)
        ops.add(hyper_connections.spread_token, self._parameters, barrier=True)

    def read(self, part: blocks.Connection | None) -> None:
        """Append what a part reads of the streams, and x = 0; or what the last norm reads, which x becomes."""
        assert isinstance(part, (blocks.HyperConnection, blocks.StreamHead)), "streams are mixed in one way"
        ops = self._ops
        normed = ops.norm_of(part.norm, Activations(self.streams, 0), self._wide, "streams normed")
        ops.matvec(part.fn, normed, self._logits, barrier=True, multiple=max(4, ops.tensor(part.fn).type.interleave))
        ops.add(hyper_connections.read_token, self._parameters._replace(mixing=_mixing(ops, part)), barrier=True)

    def write(self) -> None:
        """Append what the part that was read for, which is x, does to the streams."""
        self._ops.add(hyper_connections.write_token, self._parameters, barrier=True)

    def end(self, head: blocks.Connection) -> None:
        """Append x = what the last norm reads."""
        self.read(head)
        self._ops.entering = self._ops.x


class BatchStreams:
    """The streams of a batch, n of each token, in the operation list of the prefill plan."""

    def __init__(self, ops: BatchOps, n: int):
        self._ops, self._wide = ops, n * ops.n_embd
        self.streams, self._logits = ops.floats("streams", self._wide), ops.floats("mixing", (2 + n) * n)
        ops.entering = ops.floats("entering", ops.n_embd)
        nbytes = stream_record_bytes(n)
        weights = ops.buffer("stream weights", BATCH_TOKENS * nbytes)
        record = hyper_connections.Streams(
            self.streams, n, ops.n_embd, ops.x, ops.entering, self._logits, weights, nbytes
        )  # fmt: skip
        self._parameters = BatchParameters(state=ops.state, streams=ops.record(record).address, mixing=0)
        ops.add(hyper_connections.spread_batch, self._parameters, barrier=True)

    def read(self, part: blocks.Connection | None) -> None:
        """As `TokenStreams.read`."""
        assert isinstance(part, (blocks.HyperConnection, blocks.StreamHead)), "streams are mixed in one way"
        ops, normed = self._ops, self._ops.floats("streams normed", self._wide)
        ops.norm_of(part.norm, self.streams, self._wide, normed)
        ops.multiply(part.fn, ops.quantize(normed, self._wide, (part.fn,)), self._logits, barrier=True)
        ops.add(hyper_connections.read_batch, self._parameters._replace(mixing=_mixing(ops, part)), barrier=True)

    def write(self) -> None:
        """As `TokenStreams.write`."""
        self._ops.add(hyper_connections.write_batch, self._parameters, barrier=True)

    def end(self, head: blocks.Connection) -> None:
        """As `TokenStreams.end`."""
        self.read(head)
        self._ops.entering = self._ops.x


def _mixing(ops: PlanOps, part: blocks.HyperConnection | blocks.StreamHead) -> int:
    """Address of the Mixing record of a connection or the head."""
    record = hyper_connections.Mixing(
        scale=ops.vector(part.scale),
        base=ops.vector(part.base),
        eps=ops.constant(part.eps),
        iterations=part.iterations if isinstance(part, blocks.HyperConnection) else 0,
    )
    return ops.record(record).address
