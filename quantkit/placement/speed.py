"""How fast a placement can be, told from bytes and bandwidths: pure, for plans.

A token reads all weights, of the experts those used, and its cache: with B_d bytes on device d and a bandwidth W_d,

    layer   seconds = sum over devices of B_d / W_d           one after another
    graph   the largest B_d / W_d of those that share layers, plus what is not shared

A prompt in batches of `batch` tokens reads weights once a batch, an expert's with a probability of
1 - (1 - used / count)^batch, and computes 2 operations a weight and token at R_d; each device takes the longer of the
two. Without R_d only reading counts. Transfers, attention's arithmetic and waiting are not counted: these are upper
bounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import DataError
from quantkit.placement import sharding
from quantkit.placement.devices import CPU, canonical
from quantkit.placement.rules import Info, Placement

ASSUMED = {"cpu": 50e9, "cuda": 800e9}  # bytes a second: two channels of DDR5; a large consumer GPU


@dataclass(frozen=True)
class Speed:
    """Tokens a second, and what was assumed."""

    tokens: float
    prompt: float
    batch: int
    bound: str
    assumptions: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        return [
            f"predicted: at most {self.tokens:.1f} tok/s generated, {self.prompt:.0f} tok/s of prompts in batches of "
            f"{self.batch}; bound by {self.bound}",
            *(f"  {text}" for text in self.assumptions),
        ]

    def to_json(self) -> dict[str, Any]:
        return {"tg": self.tokens, "pp": self.prompt, "batch": self.batch, "bound": self.bound,
                "assumptions": list(self.assumptions)}  # fmt: skip


def parse_rates(text: str, flag: str, unit: float) -> dict[str, float]:
    """`cpu=80,cuda:0=900` by device, times `unit`."""
    found = {}
    for part in text.split(","):
        if part.strip():
            name, _, value = part.partition("=")
            try:
                found[canonical(name)] = float(value) * unit
            except ValueError:
                raise DataError(f"{flag} '{part}': write DEVICE=NUMBER, as cpu=80") from None
            if found[canonical(name)] <= 0:
                raise DataError(f"{flag} '{part}': a rate is above 0")
    return found


def predict(
    tensors: Mapping[str, Info],
    metadata: Mapping[str, Any],
    placement: Placement,
    caches: Mapping[str, int],
    bandwidth: Mapping[str, float],
    compute: Mapping[str, float],
    batch: int = 512,
) -> Speed:
    """What a placement's bytes allow. `caches`: bytes of each device's full cache; `bandwidth` bytes and `compute`
    operations a second by device."""
    arch = metadata.get("general.architecture")
    count, used = (int(metadata.get(f"{arch}.{key}") or 0) for key in ("expert_count", "expert_used_count"))
    share = used / count if count and used else 1.0
    once: dict[tuple[str, bool], float] = defaultdict(float)
    whole: dict[tuple[str, bool], float] = defaultdict(float)
    weights: dict[tuple[str, bool], float] = defaultdict(float)
    for name, device, nbytes, part in _pieces(tensors, metadata, placement):
        if name == "token_embd.weight" and "output.weight" in tensors:
            continue  # a row a token
        key, is_expert = (device, name in placement.sliced), "_exps." in name
        once[key] += nbytes * (share if is_expert else 1)
        whole[key] += nbytes * (1 - (1 - share) ** batch if is_expert else 1)
        weights[key] += part * math.prod(tensors[name].shape) * (share if is_expert else 1)
    for device, nbytes in caches.items():
        once[device, any(d.name == device for d in placement.graph)] += nbytes
    names = sorted({device for device, _ in once}, key=lambda name: (name != CPU.name, name))
    rates, assumptions = {}, []
    for name in names:
        rates[name] = bandwidth.get(name) or ASSUMED["cuda" if name.startswith("CUDA") else "cpu"]
        if name not in bandwidth:
            assumptions.append(f"{name} reads {rates[name] / 1e9:g} GB/s (assumed; --bandwidth {name}=…)")
    assumptions += [f"no bound by arithmetic on {name} (--compute {name}=…)" for name in names if name not in compute]
    reading = {key: size / rates[key[0]] for key, size in once.items()}
    prompts = {
        key: max(size / rates[key[0]], 2 * batch * weights[key] / compute[key[0]] if key[0] in compute else 0)
        for key, size in whole.items()
    }
    token, at = _total(reading)
    prompt, _ = _total(prompts)
    full = "a full cache" if any(caches.values()) else "an empty cache (-c tells its size)"
    assumptions.append(f"{full}; every token reads {sum(once.values()) / 1e9:.2f} GB")
    return Speed(
        1 / token if token else math.inf, batch / prompt if prompt else math.inf, batch, at, tuple(assumptions)
    )


def _pieces(
    tensors: Mapping[str, Info], metadata: Mapping[str, Any], placement: Placement
) -> Iterable[tuple[str, str, int, float]]:
    """(name, device, bytes there, which part of it that is)."""
    found = sharding.of_metadata(tensors, metadata, placement.sliced, placement.shares) if placement.graph else {}
    for name, tensor in tensors.items():
        nbytes = tensor.type.tensor_bytes(tensor.shape)
        if name not in placement.sliced:
            yield name, placement[name].name, nbytes, 1.0
            continue
        for device, size in zip(placement.graph, sharding.bytes_of(tensor, found.get(name), len(placement.graph))):
            yield name, device.name, size, size / max(1, nbytes)


def _total(seconds: Mapping[tuple[str, bool], float]) -> tuple[float, str]:
    """Seconds of all, of those that run together the longest; and where most of it goes."""
    alone = {device: s for (device, shared), s in seconds.items() if not shared}
    together = {device: s for (device, shared), s in seconds.items() if shared}
    total = sum(alone.values()) + max(together.values(), default=0.0)
    longest = max([*alone.items(), *together.items()], key=lambda item: item[1], default=("", 0.0))
    return total, f"{longest[0]} ({100 * longest[1] / total:.0f}% of the time)" if total else ""
