"""The profile of a model over devices: seconds of each device by kind of work, and bytes moved between devices.

products    matrices times activations        experts     the same of routed experts, activation included
attention   scores, softmax and values        latents     matrices between latents and heads
norms       norms                             transfer    bringing activations to the device
waiting     all-reduce, and waiting for the slowest device
other       RoPE, routing, activations, appending to the KV cache, Python: a device's time less all of these
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

KINDS = ("products", "experts", "attention", "latents", "recurrent", "norms", "transfer", "waiting", "other")


class Ledger:
    """Sums since the last `clear`. Several threads may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Set all sums to zero."""
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.bytes: dict[tuple[str, str], int] = defaultdict(int)
        self.transfers: dict[tuple[str, str], int] = defaultdict(int)
        self.weights: dict[str, int] = defaultdict(int)
        self.passes = self.tokens = 0

    def spent(self, device: str, kind: str, seconds: float) -> None:
        """Add seconds of a device to a kind of work, one of KINDS."""
        with self._lock:
            self.seconds[device][kind] += seconds

    def total(self, device: str | None = None) -> float:
        """Seconds of one device, or of all."""
        with self._lock:
            rows = self.seconds.values() if device is None else [self.seconds[device]]
            return sum(sum(kinds.values()) for kinds in rows)

    def moved(self, source: str, target: str, nbytes: int) -> None:
        """Count a transfer of `nbytes` bytes of activations from one device to another."""
        with self._lock:
            self.bytes[source, target] += nbytes
            self.transfers[source, target] += 1

    def read(self, device: str, nbytes: int) -> None:
        """Count `nbytes` bytes of weights that a device read."""
        with self._lock:
            self.weights[device] += nbytes

    def ran(self, tokens: int) -> None:
        """Count a forward pass of `tokens` tokens."""
        with self._lock:
            self.passes += 1
            self.tokens += tokens

    @property
    def moved_bytes(self) -> int:
        """Bytes moved between all devices."""
        return sum(self.bytes.values())

    def bound(self) -> str:
        """A sentence that names the device and kind of work that take the most time; "" before anything ran."""
        rows = [(seconds, device, kind) for device, kinds in self.seconds.items() for kind, seconds in kinds.items()]
        if not rows:
            return ""
        seconds, device, kind = max(rows)
        total = sum(self.seconds[device].values())
        said = {
            "waiting": "the all-reduce, and waiting for the slowest device; shares (-ts) may be uneven",
            "transfer": "moving activations; put what a layer needs on one device",
            "experts": "the products of routed experts; more of them on a faster device (-ot, --fit) would help",
            "attention": "attention over the cache; a shorter or quantized one (-c, -ctk, -ctv) would help",
        }.get(kind, f"{kind} there")
        return f"{device} spends {100 * seconds / total:.0f}% of its time on {kind}: the run is bound by {said}"

    def to_json(self) -> dict[str, Any]:
        """All sums, as the commands' --json prints them."""
        return {
            "passes": self.passes,
            "tokens": self.tokens,
            "seconds": {device: dict(kinds) for device, kinds in self.seconds.items()},
            "weight_bytes": dict(self.weights),
            "moved": [
                {"from": source, "to": target, "bytes": count, "transfers": self.transfers[source, target]}
                for (source, target), count in self.bytes.items()
            ],
            "bound": self.bound(),
        }
