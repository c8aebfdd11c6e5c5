"""AltUp and LAuReL (archs.blocks.AltUp, AltUpHead, Laurel) in both plans: kernels/cpu/altup.py.

Operations, with barriers where | stands:

    start      products with the matrices of the head | streams |
    block      norm | router | predict, x = p_0 |
               norm | attention with laurel_l beside q, k, v | laurel_r | add, scale x | feed-forward |
               norm | router | correct, x = 0 | per-layer embedding, which adds to x | add to streams |
    end        products with the matrices of the head | x = what the last norm reads |

For one token each thread norms for itself, without a barrier. The per-layer embedding reads `entering` in place of x.
"""

from __future__ import annotations

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import BATCH_TOKENS, altup_record_bytes
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, BatchOps, PlanOps, ProductRows, TokenOps
from quantkit.runtime.kernels.cpu import altup
from quantkit.runtime.kernels.cpu.altup import BatchParameters, TokenParameters


class TokenStreams:
    """The streams of one token in the operation list of the decode plan."""

    def __init__(self, ops: TokenOps, head: blocks.AltUpHead):
        self._ops, self._head = ops, head
        n, self._row = head.streams, 4 * ops.n_embd
        self._streams, self._products = ops.buffer("streams", n * self._row), ops.buffer("products", n * self._row)
        self._logits, self._entering = ops.buffer("router", 4 * n), ops.buffer("entering", self._row)
        weights = ops.private_buffer("stream weights", altup_record_bytes(n))
        record = altup.Streams(
            self._streams, self._row, n, ops.n_embd, ops.x, self._entering, self._logits, self._products,
            ops.constant(head.least), *weights,
        )  # fmt: skip
        self._parameters = TokenParameters(streams=ops.record(record).address, numbers=0, multiple=SPLIT_ROWS)
        normed = ops.norm(None)
        for i, linear in enumerate(head.project):
            ops.matvec(linear, normed, self._products + i * self._row)
        ops.add_barrier()
        ops.add(altup.spread_token, self._parameters, barrier=True)

    def predict(self, part: blocks.AltUp) -> None:
        """Append the streams become p, x = p_0."""
        ops = self._ops
        self._route(part, ops.norm_of(part.router_norm, Activations(self._streams, 0), ops.n_embd, "normed"))
        ops.add(altup.predict_token, self._parameters._replace(numbers=_coefficients(ops, part)), barrier=True)

    def project(self, part: blocks.Laurel, normed: Activations) -> None:
        """Append the product with laurel_l of the norm of p_0; attention with its barriers follows."""
        self._ops.matvec(part.left, normed, self._ops.buffer("laurel", 4 * part.rank))

    def add_laurel(self, part: blocks.Laurel, normed: Activations) -> None:
        """Append x = 2^-1/2 (x + what LAuReL makes of p_0), whose norm is given."""
        ops = self._ops
        low, added = ops.buffer("laurel", 4 * part.rank), ops.buffer("added", self._row)
        ops.matvec(
            part.right, ops.norm_of(None, Activations(low, 0), part.rank, "laurel quantized"), added, barrier=True
        )
        record = altup.LaurelSum(
            normed.address, normed.stride, added, ops.vector(part.post_norm.weight), ops.constant(part.post_norm.eps)
        )
        ops.add(altup.laurel_token, self._parameters._replace(numbers=ops.record(record).address), barrier=True)

    def correct(self, part: blocks.AltUp) -> None:
        """Append the streams are corrected by x; the operations up to `add` read `entering`, and add to x = 0."""
        ops = self._ops
        self._route(part, ops.norm(part.router_norm))
        ops.add(altup.correct_token, self._parameters._replace(numbers=_coefficients(ops, part)), barrier=True)
        ops.entering = self._entering

    def add(self) -> None:
        """Append streams but the first += x."""
        self._ops.add(altup.add_token, self._parameters, barrier=True)
        self._ops.entering = self._ops.x

    def end(self) -> None:
        """Append x = what the last norm reads."""
        ops = self._ops
        for i, linear in enumerate(self._head.merge):
            stream = Activations(self._streams + (i + 1) * self._row, 0)
            ops.matvec(linear, ops.norm_of(None, stream, ops.n_embd, "normed"), self._products + i * self._row)
        ops.add_barrier()
        ops.add(altup.merge_token, self._parameters, barrier=True)

    def _route(self, part: blocks.AltUp, normed: Activations) -> None:
        multiple = max(4, self._ops.tensor(part.router).type.interleave)
        self._ops.matvec(part.router, normed, self._logits, barrier=True, multiple=multiple)


class BatchStreams:
    """The streams of a batch in the operation list of the prefill plan: float32[n, BATCH_TOKENS, n_embd]."""

    def __init__(self, ops: BatchOps, head: blocks.AltUpHead):
        self._ops, self._head = ops, head
        n, self._rows = head.streams, 4 * BATCH_TOKENS * ops.n_embd  # bytes of a stream
        self._streams, self._products = ops.buffer("streams", n * self._rows), ops.buffer("products", n * self._rows)
        self._logits, self._entering = ops.floats("router", n), ops.floats("entering", ops.n_embd)
        weights = ops.private_buffer("stream weights", altup_record_bytes(n))
        record = altup.Streams(
            self._streams, self._rows, n, ops.n_embd, ops.x, self._entering, self._logits, self._products,
            ops.constant(head.least), *weights,
        )  # fmt: skip
        self._parameters = BatchParameters(state=ops.state, streams=ops.record(record).address, numbers=0)
        entering = ops.norm(None, head.project)
        for i, linear in enumerate(head.project):
            ops.multiply(linear, entering, self._products + i * self._rows)
        ops.add_barrier()
        ops.add(altup.spread_batch, self._parameters, barrier=True)

    def predict(self, part: blocks.AltUp) -> None:
        """As `TokenStreams.predict`."""
        ops = self._ops
        self._route(part, self._streams)
        ops.add(altup.predict_batch, self._parameters._replace(numbers=_coefficients(ops, part)), barrier=True)

    def project(self, part: blocks.Laurel, normed: ProductRows) -> None:
        """As `TokenStreams.project`."""
        self._ops.multiply(part.left, normed, self._ops.floats("laurel", part.rank), barrier=True)

    def add_laurel(self, part: blocks.Laurel, normed: ProductRows) -> None:
        """As `TokenStreams.add_laurel`."""
        ops, added = self._ops, self._ops.floats("added", self._ops.n_embd)
        low = ops.quantize(ops.floats("laurel", part.rank), part.rank, (part.right,))
        ops.multiply(part.right, low, added, barrier=True)
        record = altup.LaurelSum(
            normed.floats, 0, added, ops.vector(part.post_norm.weight), ops.constant(part.post_norm.eps)
        )
        ops.add(altup.laurel_batch, self._parameters._replace(numbers=ops.record(record).address), barrier=True)

    def correct(self, part: blocks.AltUp) -> None:
        """As `TokenStreams.correct`."""
        ops = self._ops
        self._route(part, ops.x)
        ops.add(altup.correct_batch, self._parameters._replace(numbers=_coefficients(ops, part)), barrier=True)
        ops.entering = self._entering

    def add(self) -> None:
        """As `TokenStreams.add`."""
        self._ops.add(altup.add_batch, self._parameters, barrier=True)
        self._ops.entering = self._ops.x

    def end(self) -> None:
        """As `TokenStreams.end`."""
        ops = self._ops
        for i, linear in enumerate(self._head.merge):
            stream = ops.quantize(self._streams + (i + 1) * self._rows, ops.n_embd, (linear,))
            ops.multiply(linear, stream, self._products + i * self._rows, barrier=True)  # the tiles are reused
        ops.add(altup.merge_batch, self._parameters, barrier=True)

    def _route(self, part: blocks.AltUp, x: int) -> None:
        ops, normed = self._ops, self._ops.floats("normed", self._ops.n_embd)
        ops.norm_of(part.router_norm, x, ops.n_embd, normed)
        ops.multiply(part.router, ops.quantize(normed, ops.n_embd, (part.router,)), self._logits, barrier=True)


def _coefficients(ops: PlanOps, part: blocks.AltUp) -> int:
    """Address of the Coefficients record of a block."""
    record = altup.Coefficients(*(ops.vector(name) for name in (part.predict, part.correct, part.correct_scale)))
    return ops.record(record).address
