"""What tensors can live on: the CPU, CUDA devices, and virtual devices that the CPU plays.

CPU            the host
CUDA0, cuda:0  a GPU
cpu:0, cpu:1   virtual devices: each with a memory of its own, which is the host's, and threads of its own. Layers go
               to them as they go to GPUs, so that every way of splitting a model runs, and is tested, anywhere

parse_devices("cpu=256GiB,cpu:0=2GiB,cpu:1=2GiB")    a size is the memory that a device has; without one, unknown
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from quantkit.errors import DataError, UnsupportedError

_UNITS = {"": 1 << 30, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


@dataclass(frozen=True)
class Device:
    """Where tensors can live and be computed with. Two of one name are the same, whatever their memory."""

    name: str  # as `-ot` spells it: "CPU", "CUDA0", "cpu:0"
    memory: int | None = field(default=None, compare=False)  # bytes

    @property
    def is_virtual(self) -> bool:
        return self.name.startswith("cpu:")

    @property
    def runs_here(self) -> bool:
        """Whether it computes on this machine's CPU."""
        return self.name == "CPU" or self.is_virtual

    @property
    def gpu(self) -> int | None:
        """The number of a GPU; None of what the CPU plays."""
        return int(self.name.removeprefix("CUDA")) if self.name.startswith("CUDA") else None


CPU = Device("CPU")


def canonical(text: str) -> str:
    """The name of a device as it is listed: of `cuda:0`, `CUDA0`. UnsupportedError for what can be none."""
    found = re.fullmatch(r"(cpu|cuda):?(\d{1,2})?", text.strip(), re.IGNORECASE)
    if found is None or (found[1].lower() == "cuda" and found[2] is None):
        raise UnsupportedError(f"'{text}' is no device; valid devices: CPU, CUDA0, CUDA1, …, cpu:0, cpu:1, …")
    if found[2] is None:
        return CPU.name
    return f"CUDA{int(found[2])}" if found[1].lower() == "cuda" else f"cpu:{int(found[2])}"


def parse_size(text: str) -> int:
    """Bytes of `2GiB`, `512MiB`, `1.5`, which is GiB."""
    found = re.fullmatch(r"([\d.]+)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS or found[1].count(".") > 1:
        raise DataError(f"'{text}' is no size of memory; write 24GiB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def parse_devices(text: str) -> tuple[Device, ...]:
    """The devices of `cpu:0=2GiB,cuda:0`, the CPU first, which is there whether it is named or not."""
    found: dict[str, Device] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        name, equals, size = part.partition("=")
        device = Device(canonical(name), parse_size(size) if equals else None)
        if device.name in found:
            raise DataError(f"--devices '{text}': {device.name} is there twice")
        found[device.name] = device
    return (found.pop(CPU.name, CPU), *found.values())


def find(name: str, available: Collection[Device], said: str) -> Device:
    """The one of `available` that `name` spells; UnsupportedError where there is none, naming those there are."""
    valid = f"valid devices: {', '.join(device.name for device in available)}"
    try:
        wanted = canonical(name)
    except UnsupportedError:
        raise UnsupportedError(f"{said}: '{name}' is no device; {valid}") from None
    for device in available:
        if device.name == wanted:
            return device
    raise UnsupportedError(f"{said}: device '{name}' is not there; {valid}")


def proportions(gpus: Iterable[Device], given: Iterable[float] = ()) -> tuple[float, ...]:
    """The share of each device, all together 1: as `given` (-ts), else by memory where all have one, else even."""
    devices, shares = list(gpus), [float(share) for share in given]
    if not any(shares):
        sizes = [device.memory for device in devices]
        shares = [float(size or 0) for size in sizes] if all(sizes) else [1.0] * len(devices)
    shares = [*shares, *[0.0] * len(devices)][: len(devices)]
    if not sum(shares):
        raise DataError(f"-ts: the shares of the {len(devices)} devices there are, {shares}, are all 0")
    return tuple(share / sum(shares) for share in shares)
