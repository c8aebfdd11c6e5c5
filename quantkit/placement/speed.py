"""Predict upper bounds of a placement's speed from bytes and bandwidths. Pure functions, for plans.

Generating a token reads all weights (of the experts only the selected ones) and the KV cache. With B_d bytes on device
d and a bandwidth W_d:

    layer   seconds = sum over devices of B_d / W_d           one after another
    graph   the largest B_d / W_d of the devices that share layers, plus the time of all that is not shared

A prompt in batches of `batch` tokens reads the weights once per batch, those of an expert with a probability of
1 - (1 - used / count)^batch, and computes 2 operations per weight and token at R_d operations/s. Each device takes the
longer of the two times; without R_d only reading counts. Transfers, the arithmetic of attention and synchronization are
not counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.archs.common import checked
from quantkit.errors import OptionError
from quantkit.placement import sharding
from quantkit.placement.devices import CPU, canonical
from quantkit.placement.rules import Placement
from quantkit.placement.tensor_info import TensorInfo
from quantkit.repack.eligible import EMBEDDING, looked_up

ASSUMED = {"cpu": 50e9, "cuda": 800e9}  # bytes/s: two channels of DDR5; a large consumer GPU


@dataclass(frozen=True)
class PredictedSpeed:
    """Predicted tokens/s of generation and prompt, and the assumptions."""

    tokens: float
    prompt: float
    batch: int
    bound: str
    assumptions: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The prediction as printed, then one line per assumption."""
        return [
            f"predicted: at most {self.tokens:.1f} tok/s generation, {self.prompt:.0f} tok/s prompt in batches of "
            f"{self.batch}; bound by {self.bound}",
            *(f"  {text}" for text in self.assumptions),
        ]

    def to_json(self) -> dict[str, Any]:
        """The prediction as in the JSON of `plan`; rates in tokens/s."""
        return {"tg": self.tokens, "pp": self.prompt, "batch": self.batch, "bound": self.bound,
                "assumptions": list(self.assumptions)}  # fmt: skip


def parse_rates(text: str, flag: str, unit: float) -> dict[str, float]:
    """Parse `cpu=80,cuda:0=900` to values by device, multiplied by `unit`."""
    found = {}
    for part in text.split(","):
        if part.strip():
            name, _, value = part.partition("=")
            try:
                found[canonical(name)] = float(value) * unit
            except ValueError:
                raise OptionError(f"{flag} '{part}': write DEVICE=NUMBER, for example cpu=80") from None
            if not 0 < found[canonical(name)] < math.inf:
                raise OptionError(f"{flag} '{part}': a rate must be a finite number above 0")
    return found


def predict(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[str, Any],
    placement: Placement,
    caches: Mapping[str, int],
    bandwidth: Mapping[str, float],
    compute: Mapping[str, float],
    batch: int = 512,
) -> PredictedSpeed:
    """Predict the speed of a placement.

    caches     bytes of each device's full KV cache
    bandwidth  bytes/s by device
    compute    operations/s by device
    """
    count, used = checked.routed_experts(metadata)
    share = used / count if count and used else 1.0
    unread = looked_up(tensors)
    token_bytes: dict[tuple[str, bool], float] = defaultdict(float)
    prompt_bytes: dict[tuple[str, bool], float] = defaultdict(float)
    weights: dict[tuple[str, bool], float] = defaultdict(float)
    for name, device, nbytes, part in _pieces(tensors, metadata, placement):
        if name in unread:
            continue
        key, is_expert = (device, name in placement.sharded), "_exps." in name
        token_bytes[key] += nbytes * (share if is_expert else 1)
        prompt_bytes[key] += nbytes * (1 - (1 - share) ** batch if is_expert else 1)
        weights[key] += part * math.prod(tensors[name].shape) * (share if is_expert else 1)
    for device, nbytes in caches.items():
        token_bytes[device, any(d.name == device for d in placement.graph)] += nbytes
    names = sorted({device for device, _ in token_bytes}, key=lambda name: (name != CPU.name, name))
    rates, assumptions = {}, []
    for name in names:
        rates[name] = bandwidth.get(name) or ASSUMED["cuda" if name.startswith("CUDA") else "cpu"]
        if name not in bandwidth:
            assumptions.append(f"{name} reads {rates[name] / 1e9:g} GB/s (assumed; --bandwidth {name}=…)")
    assumptions += [
        f"arithmetic on {name} is not counted (--compute {name}=…)" for name in names if name not in compute
    ]
    reading = {key: size / rates[key[0]] for key, size in token_bytes.items()}
    prompts = {
        key: max(size / rates[key[0]], 2 * batch * weights[key] / compute[key[0]] if key[0] in compute else 0)
        for key, size in prompt_bytes.items()
    }
    token, bottleneck = _total(reading)
    prompt, _ = _total(prompts)
    full = "a full cache" if any(caches.values()) else "an empty cache (-c sets its size)"
    assumptions.append(f"{full}; every token reads {sum(token_bytes.values()) / 1e9:.2f} GB")
    return PredictedSpeed(
        1 / token if token else math.inf, batch / prompt if prompt else math.inf, batch, bottleneck, tuple(assumptions)
    )


def _pieces(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, object], placement: Placement
) -> Iterable[tuple[str, str, int, float]]:
    """Yield (tensor name, device, bytes on the device, share of the tensor)."""
    found = sharding.of_metadata(tensors, metadata, placement.sharded, placement.shares) if placement.graph else {}
    for name, tensor in tensors.items():
        nbytes = tensor.type.tensor_bytes(tensor.shape)
        if name == EMBEDDING and placement.output_copies:  # tokens read this one, as the output matrix
            for where, share in placement.output_copies.items():
                yield name, where, round(share * nbytes), share
            continue
        if name not in placement.sharded:
            yield name, placement[name].name, nbytes, 1.0
            continue
        for device, size in zip(placement.graph, sharding.bytes_of(tensor, found.get(name), len(placement.graph))):
            yield name, device.name, size, size / max(1, nbytes)


def _total(seconds: Mapping[tuple[str, bool], float]) -> tuple[float, str]:
    """Total seconds, with the longest of the devices that run in parallel, and the device that takes most of it."""
    alone = {device: s for (device, shared), s in seconds.items() if not shared}
    together = {device: s for (device, shared), s in seconds.items() if shared}
    total = sum(alone.values()) + max(together.values(), default=0.0)
    longest = max([*alone.items(), *together.items()], key=lambda item: item[1], default=("", 0.0))
    return total, f"{longest[0]} ({100 * longest[1] / total:.0f}% of the time)" if total else ""
