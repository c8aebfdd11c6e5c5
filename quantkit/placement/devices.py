"""The devices that hold tensors: the CPU, CUDA devices, and simulated devices on the CPU.

CPU            the host
CUDA0, cuda:0  a GPU
cpu:0, cpu:1   simulated devices: each has its own share of host memory and its own threads. Layers are placed on them
               as on GPUs, so every split mode runs, and is tested, on any machine

parse_devices("cpu=256GiB,cpu:0=2GiB,cpu:1=2GiB")    a size is the device's memory; without one it is unknown
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from quantkit.errors import OptionError, UnsupportedError

_UNITS = {"": 1 << 30, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


@dataclass(frozen=True)
class Device:
    """A device that holds tensors and computes with them. Devices with equal names are equal, whatever their memory."""

    name: str  # as `-ot` spells it: "CPU", "CUDA0", "cpu:0"
    memory: int | None = field(default=None, compare=False)  # bytes

    @property
    def is_simulated(self) -> bool:
        """Whether it is simulated on the CPU."""
        return self.name.startswith("cpu:")

    @property
    def runs_here(self) -> bool:
        """Whether it computes on this machine's CPU."""
        return self.name == "CPU" or self.is_simulated

    @property
    def gpu(self) -> int | None:
        """The index of a GPU; None for the CPU and simulated devices."""
        return int(self.name.removeprefix("CUDA")) if self.name.startswith("CUDA") else None


CPU = Device("CPU")


def canonical(text: str) -> str:
    """The canonical name of a device: `CUDA0` for `cuda:0`. UnsupportedError for any other text."""
    found = re.fullmatch(r"(cpu|cuda):?(\d{1,2})?", text.strip(), re.IGNORECASE)
    if found is None or (found[1].lower() == "cuda" and found[2] is None):
        raise UnsupportedError(f"'{text}' is not a device; valid devices: CPU, CUDA0, CUDA1, …, cpu:0, cpu:1, …")
    if found[2] is None:
        return CPU.name
    return f"CUDA{int(found[2])}" if found[1].lower() == "cuda" else f"cpu:{int(found[2])}"


def parse_size(text: str) -> int:
    """Parse a size such as `2GiB`, `512MiB` or `1.5` (GiB by default) to bytes."""
    found = re.fullmatch(r"([\d.]+)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS or found[1].count(".") > 1:
        raise OptionError(f"'{text}' is not a memory size; write for example 24GiB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def parse_devices(text: str) -> tuple[Device, ...]:
    """Parse devices such as `cpu:0=2GiB,cuda:0`. The CPU comes first and is always included."""
    found: dict[str, Device] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        name, equals, size = part.partition("=")
        device = Device(canonical(name), parse_size(size) if equals else None)
        if device.name in found:
            raise OptionError(f"--devices '{text}': {device.name} is listed twice")
        found[device.name] = device
    return (found.pop(CPU.name, CPU), *found.values())


def find(name: str, available: Collection[Device], label: str) -> Device:
    """The device of `available` with this name. UnsupportedError if there is none; it begins with `label`."""
    valid = f"valid devices: {', '.join(device.name for device in available)}"
    try:
        wanted = canonical(name)
    except UnsupportedError:
        raise UnsupportedError(f"{label}: '{name}' is not a device; {valid}") from None
    for device in available:
        if device.name == wanted:
            return device
    raise UnsupportedError(f"{label}: device '{name}' is not available; {valid}")


def proportions(gpus: Iterable[Device], given: Iterable[float] = ()) -> tuple[float, ...]:
    """The share of each device; the shares add up to 1. They are `given` (-ts), else proportional to memory if all
    sizes are known, else even."""
    devices, shares = list(gpus), [float(share) for share in given]
    if not any(shares):
        sizes = [device.memory for device in devices]
        shares = [float(size or 0) for size in sizes] if all(sizes) else [1.0] * len(devices)
    shares = [*shares, *[0.0] * len(devices)][: len(devices)]
    if not sum(shares):
        raise OptionError(
            f"-ts: the shares of the {len(devices)} devices, {shares}, are all 0; give one a positive share"
        )
    return tuple(share / sum(shares) for share in shares)
