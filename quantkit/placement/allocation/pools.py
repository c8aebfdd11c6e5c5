"""Pools of memory: the devices that may hold each tensor, and what every device holds besides tensors.

    --size, --bpw      one pool, the file: devices do not matter
    --ram              one pool, the CPU
    --vram             and no placement flags: every layer is on a GPU, its experts (of dense models: its feed-forward)
                       there or on the CPU, as the allocation decides; embeddings stay on the CPU
    -ngl, -ot, …       the flags place every tensor

The KV cache is where attention is. Working memory is that of the planner (`workspace`), for all tensors that a device
may hold. Layers are divided among GPUs in proportion to -ts or memory, as ik_llama.cpp does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.archs.common import checked
from quantkit.codegen import thread_pool
from quantkit.errors import OptionError, UnsupportedError
from quantkit.placement import fit, workspace
from quantkit.placement.budget import GIB, CacheSettings
from quantkit.placement.devices import CPU, Device
from quantkit.placement.rules import ALL_LAYERS, Flags, Placement, place_by_flags, place_model
from quantkit.placement.tensor_info import TensorInfo
from quantkit.repack.eligible import EMBEDDING, OUTPUT


@dataclass(frozen=True)
class Pools:
    """Devices of tensors, limits and what is taken.

    devices   of each tensor, the names of the devices that may hold it, the preferred one first
    limits    bytes of each device with a limit, margin taken off
    caches    bytes of each device that are taken by the cache
    fixed     the same with working memory
    flags     the placement flags without the tensors that the allocation moves to the CPU
    movable   whether the allocation decides devices
    copies    tensors that another device holds too, by name: the embedding as the output matrix
    """

    devices: Mapping[str, tuple[str, ...]]
    limits: Mapping[str, int]
    caches: Mapping[str, int]
    fixed: Mapping[str, int]
    flags: Flags
    movable: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)

    def held_by(self, name: str, device: str) -> tuple[str, ...]:
        """The devices that hold a tensor which is on `device`."""
        return (device, self.copies[name]) if name in self.copies else (device,)

    def read_from(self, name: str, device: str) -> str:
        """The device where a token reads a tensor that is on `device`."""
        return self.copies.get(name, device)

    def flags_for(self, device_of: Mapping[str, str]) -> Flags:
        """The flags that place tensors on the chosen devices."""
        moved = [name for name, device in device_of.items() if device == CPU.name and len(self.devices[name]) > 1]
        return replace(self.flags, override_tensor=(*self.flags.override_tensor, *fit.cpu_rules(moved)))


@dataclass(frozen=True)
class Memory:
    """Memory of the machine: bytes of each GPU, of the CPU (None: not limited), reserved on each GPU; cache or None."""

    vram: Sequence[int] = ()
    ram: int | None = None
    margin: int = GIB
    cache: CacheSettings | None = None
    threads: int | None = None


def pools(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any], flags: Flags, memory: Memory) -> Pools:
    """The pools of a machine.

    UnsupportedError for -sm graph, where a device holds parts of tensors; OptionError for memory that is given twice.
    """
    if flags.split_mode == "graph":
        raise UnsupportedError("recipe fit places whole tensors; use -sm layer or -sm none, not -sm graph")
    if memory.vram and flags.devices:
        raise OptionError("--vram and --devices both set the memory of CUDA0, CUDA1, …; drop one of them")
    gpus = tuple(Device(f"CUDA{i}", size) for i, size in enumerate(memory.vram))
    bare = replace(flags, runtime=Flags().runtime)
    movable = bool(gpus) and bare == Flags()
    if movable:
        # Stated, because ik_llama.cpp divides layers by the memory that is free when it starts.
        split = tuple(float(f"{size / GIB:g}") for size in memory.vram) if len(gpus) > 1 else ()
        flags = replace(flags, gpu_layers=ALL_LAYERS, tensor_split=split)
    elif not gpus and bare == Flags():
        flags = replace(flags, gpu_layers=0)
    if gpus and not flags.devices:
        placement = place_model(tensors, flags, metadata, [Device(CPU.name, memory.ram), *gpus])
    else:
        placement = place_by_flags(tensors, flags, metadata)
    bulk = _bulk(tensors) if movable else frozenset()
    devices = {
        name: (placement[name].name, CPU.name)
        if name in bulk and placement[name] != CPU
        else (placement[name].name,)
        for name in tensors
    }  # fmt: skip
    limits = {
        device.name: device.memory - (memory.margin if device != CPU else 0)
        for device in (*flags.devices, *gpus, Device(CPU.name, memory.ram))
        if device.memory is not None
    }
    caches, copy = _caches(metadata, placement, memory), placement.output_copy
    held = devices if copy is None else {**devices, OUTPUT: (copy.name,)}
    shapes = {name: tensors[EMBEDDING if name not in tensors else name].shape for name in held}
    fixed = _fixed(tensors, metadata, caches, held, shapes, memory)
    return Pools(devices, limits, caches, fixed, flags, movable, {} if copy is None else {EMBEDDING: copy.name})


def _bulk(tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """The tensors that may stay on the CPU: experts, or the feed-forwards of a model without experts."""
    experts = frozenset(name for name in tensors if "_exps." in name)
    return experts or frozenset(name for name in tensors if fit.is_dense_feed_forward(name))


def _caches(metadata: Mapping[str, Any], placement: Placement, memory: Memory) -> dict[str, int]:
    """Bytes of cache by device."""
    taken: dict[str, int] = defaultdict(int)
    for layer, size in enumerate(memory.cache.of_layers(metadata) if memory.cache else ()):
        taken[placement.of_cache(layer).name] += size
    return dict(taken)


def _fixed(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[str, Any],
    caches: Mapping[str, int],
    devices: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    memory: Memory,
) -> dict[str, int]:
    """Bytes of cache and working memory by device."""
    taken: dict[str, int] = defaultdict(int, caches)
    names = {device for places in devices.values() for device in places}
    if names <= {CPU.name}:
        if memory.cache is not None:
            threads = memory.threads or thread_pool.default_threads()
            taken[CPU.name] += (
                workspace.work_bytes(tensors, metadata, memory.cache.n_ctx, threads, memory.cache.mla) or 0
            )
        return dict(taken)
    used = checked.largest(metadata, "expert_used_count")
    for device in names:
        held = {name: shapes[name] for name, places in devices.items() if device in places}
        taken[device] += workspace.device_bytes(held, used)
    return dict(taken)
