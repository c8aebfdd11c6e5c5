"""Compute the memory of each device (weights, KV cache, buffers) and whether it fits, before the file exists.

    tensors = {t.name: t for t in plan.tensors}
    found = budget(tensors, metadata, flags, CacheSettings(32768), vram=[24 * GIB], ram=128 * GIB)
    found.loads, found.warnings, found.fits

If the whole model is on the CPU and the context is known, the buffers for intermediate results are those of quantkit's
own runtime (`placement/workspace.py`). On GPUs they depend on the program that runs the model. So they are estimated,
and `margin` further bytes of each GPU stay free: 1 GiB by default, like ik_llama.cpp's --fit-margin.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quantkit import types
from quantkit.archs.common import checked, validate
from quantkit.codegen import thread_pool
from quantkit.errors import DataError, OptionError, UnknownNameError
from quantkit.placement import kv_size, sharding, workspace
from quantkit.placement.devices import CPU, Device, canonical
from quantkit.placement.kernel_sizes import BATCH_TOKENS
from quantkit.placement.offload import Offload
from quantkit.placement.rules import RUNTIMES, Flags, Placement, place_by_flags, without_kernels
from quantkit.placement.tensor_info import TensorInfo
from quantkit.recipe.rules.layers import expand
from quantkit.recipe.rules.patterns import Advice, advice
from quantkit.recipe.rules.shadows import OrderedRule, shadow
from quantkit.repack.eligible import EMBEDDING, OUTPUT

GIB = 1 << 30
_KINDS = (("experts", "_exps."), ("attention", ".attn_"), ("recurrent", ".ssm_"), ("recurrent", ".shortconv."),
          ("shared experts", "_shexp."), ("feed-forward", ".ffn_"),
          ("per-layer embedding", "per_layer_"), ("embedding", "token_embd"),
          ("output", "output"))  # fmt: skip


@dataclass(frozen=True)
class CacheSettings:
    """The KV cache to allocate: context in tokens, types of keys and values, and the latent attention mode (-mla).

    mtp   the MTP layers draft, and have a cache too
    """

    n_ctx: int
    keys: str = "f16"
    values: str = "f16"
    mla: int = 3
    mtp: bool = False

    def __post_init__(self) -> None:
        if self.n_ctx < 1:
            raise OptionError(f"-c {self.n_ctx}: a context has 1 token or more")
        for flag, name in (("-ctk", self.keys), ("-ctv", self.values)):
            if name not in kv_size.TYPES:
                raise UnknownNameError(f"cache type, {flag}", name, kv_size.TYPES)

    def of_layers(self, metadata: Mapping[str, object]) -> list[int]:
        """Bytes of the cache of each layer."""
        keys, values = types.layout(self.keys), types.layout(self.values)
        return kv_size.of_layers(metadata, self.n_ctx, keys, values, self.mla, self.mtp)


@dataclass(frozen=True)
class Load:
    """The memory use of one device, in bytes.

    weights, cache  sizes of the weights and of the KV cache
    limit, margin   memory of the device (None if not given), and how much of it stays free
    buffers         intermediate results; 0 if not known
    classes         the weights by purpose: experts, attention, …
    """

    device: str
    tensors: int
    weights: int
    cache: int
    limit: int | None
    margin: int
    buffers: int = 0
    classes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Weights, cache and buffers."""
        return self.weights + self.cache + self.buffers

    @property
    def left(self) -> int | None:
        """Free bytes beside the margin, negative if the load does not fit; None without a limit."""
        return None if self.limit is None else self.limit - self.margin - self.total

    def to_json(self) -> dict[str, Any]:
        """The load as in the JSON of `plan`; sizes in bytes."""
        names = ("device", "tensors", "weights", "cache", "buffers", "limit", "margin", "classes")
        return {name: getattr(self, name) for name in names} | {"total": self.total, "left": self.left}


class Predicted(Protocol):
    """The interface of a speed prediction (`placement/speed.py`)."""

    @property
    def lines(self) -> list[str]:
        """The prediction as lines of text."""

    def to_json(self) -> dict[str, Any]:
        """The prediction as in the JSON of `plan`."""


@dataclass(frozen=True)
class Budget:
    """The loads of all devices. `warnings` name rules that look like mistakes and devices that are too small, `notes`
    describe consequences, `speed` is the predicted speed if it was requested, `runtime` as in Flags."""

    loads: tuple[Load, ...]
    placement: Placement
    cache: CacheSettings | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    speed: Predicted | None = None
    runtime: str = RUNTIMES[0]

    @property
    def fits(self) -> bool | None:
        """Whether every load fits its device; None if no limit was given."""
        left = [load.left for load in self.loads if load.left is not None]
        return all(free >= 0 for free in left) if left else None

    def to_json(self) -> dict[str, Any]:
        """The field `devices` of the JSON of `plan`: loads, cache, rules, speed; sizes in bytes."""
        rules = zip(self.placement.rules, self.placement.decided)
        cache = self.cache and {name: getattr(self.cache, name) for name in ("n_ctx", "keys", "values", "mla", "mtp")}
        return {
            "runtime": self.runtime,
            "devices": [load.to_json() for load in self.loads],
            "cache": cache,
            "rules": [{"rule": rule.text, "decided": count} for rule, count in rules],
            "fits": self.fits,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "speed": self.speed and self.speed.to_json(),
            "placement": {name: device.name for name, device in self.placement.devices.items()},
            "reasons": dict(self.placement.reasons),
            "split": {
                "mode": self.placement.mode,
                "devices": [device.name for device in self.placement.graph],
                "shared": sorted(self.placement.sharded),
            },
        }


def budget(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[str, Any],
    flags: Flags,
    cache: CacheSettings | None = None,
    vram: Sequence[int] = (),
    ram: int | None = None,
    margin: int = GIB,
    threads: int | None = None,
    offload: Offload | None = None,
) -> Budget:
    """The load of every device under the placement flags.

    `vram` has one entry per GPU; without entries and without flags everything is on the CPU. `threads` is the number of
    CPU threads of the run, None for this machine's default.
    """
    validate.check_sizes(metadata)
    if not vram and replace(flags, runtime=Flags.runtime) == Flags():
        flags = replace(flags, gpu_layers=0)
    if vram and not flags.devices:
        gpus = (Device(f"CUDA{i}", size) for i, size in enumerate(vram))
        named = {canonical(rule.device) for rule in flags.rules} - {CPU.name, *(f"CUDA{i}" for i in range(len(vram)))}
        flags = replace(flags, devices=(Device(CPU.name, ram), *gpus, *map(Device, sorted(named))))
    placement = place_by_flags(tensors, flags, metadata, len(vram) or 1)
    held, caches = _bytes_by_device(tensors, placement, metadata, cache)
    only_cpu, threads = {device for device, _ in held} <= {CPU.name}, threads or thread_pool.default_threads()
    buffers = (
        workspace.work_bytes(tensors, metadata, cache.n_ctx, threads, cache.mla) if cache and only_cpu else 0
    ) or 0
    limits = {device.name: device.memory for device in flags.devices} | ({CPU.name: ram} if ram else {})
    used = checked.largest(metadata, "expert_used_count")
    loads = []
    for device in sorted({CPU.name, *(d for d, _ in held), *caches, *limits}, key=_order):
        mine = {name: nbytes for (where, name), nbytes in held.items() if where == device}
        work = buffers if device == CPU.name else 0
        if not only_cpu:
            shapes = {name: tensors[EMBEDDING if name not in tensors else name].shape for name in mine}
            work = workspace.device_bytes(shapes, used)
        loads.append(
            Load(device, len(mine), sum(mine.values()), caches.get(device, 0), limits.get(device),
                 0 if device == CPU.name else margin, work, _classes(mine))
        )  # fmt: skip
    warnings, notes = (
        _warnings(placement, tensors, loads, flags.runtime),
        _notes(placement, metadata, cache, offload or Offload(), flags.runtime),
    )
    if buffers:
        notes.append(f"buffers: quantkit's runtime with batches of {BATCH_TOKENS} tokens, {threads} threads")
    return Budget(tuple(loads), placement, cache, tuple(warnings), tuple(notes), runtime=flags.runtime)


def _order(device: str) -> tuple[bool, int, str]:
    return device != CPU.name, len(device), device


def _bytes_by_device(
    tensors: Mapping[str, TensorInfo], placement: Placement, metadata: Mapping[str, Any], cache: CacheSettings | None
) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """Bytes of weights by (device, tensor), and bytes of KV cache by device.

    A tied embedding that is loaded once more is there as the output matrix.
    """
    graph = [device.name for device in placement.graph]
    found = sharding.of_metadata(tensors, metadata, placement.sharded, placement.shares) if graph else {}
    held: dict[tuple[str, str], int] = {}
    for name, tensor in tensors.items():
        if name in placement.sharded:
            held |= {(d, name): size for d, size in zip(graph, sharding.bytes_of(tensor, found.get(name), len(graph)))}
        else:
            held[placement[name].name, name] = tensor.type.tensor_bytes(tensor.shape)
    for device, share in placement.output_copies.items():
        held[device, OUTPUT] = math.ceil(share * tensors[EMBEDDING].type.tensor_bytes(tensors[EMBEDDING].shape))
    caches: dict[str, int] = {}
    for layer, size in enumerate(cache.of_layers(metadata) if cache else ()):
        parts = {placement.of_cache(layer).name: 1.0}
        if layer in placement.shares and not placement.kv_on_cpu:
            parts = dict(zip(graph, sharding.cache_shares(layer, found, len(graph), cache.mla if cache else 3)))
        for device, share in parts.items():
            caches[device] = caches.get(device, 0) + math.ceil(share * size)
    return held, caches


def _classes(held: Mapping[str, int]) -> dict[str, int]:
    """Bytes by the purpose of the tensors."""
    found: dict[str, int] = {}
    for name, nbytes in held.items():
        what = next((what for what, part in _KINDS if part in name), "other")
        found[what] = found.get(what, 0) + nbytes
    return found


def require_memory(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, object], flags: Flags, cache: CacheSettings, path: object
) -> None:
    """Raise DataError if a device has too little memory for what the flags place on it: by how much, and the remedy."""
    ram = next((device.memory for device in flags.devices if device == CPU), None)
    loads = budget(tensors, metadata, flags, cache, ram=ram, margin=0).loads
    if excess := [_too_much(load) for load in loads if (load.left or 0) < 0]:
        raise DataError(f"{path}: with a context of {cache.n_ctx} tokens, {'; '.join(excess)}")


def experts_to_keep(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[str, object],
    flags: Flags,
    cache: CacheSettings | None,
    vram: Sequence[int],
    ram: int | None,
    margin: int = GIB,
) -> int | None:
    """The smallest --n-cpu-moe with which everything fits; None if there is none, or the model has no experts."""
    layers = len({name.split(".")[1] for name in tensors if "_exps." in name})

    def found(count: int) -> Budget:
        return budget(tensors, metadata, replace(flags, n_cpu_moe=count), cache, vram, ram, margin)

    def fits_gpus(count: int) -> bool:
        return all((load.left or 0) >= 0 for load in found(count).loads if load.device != CPU.name)

    count = bisect.bisect_left(range(layers + 1), True, key=fits_gpus)
    return count if 0 < count <= layers and found(count).fits else None


def _notes(
    placement: Placement, metadata: Mapping[str, Any], cache: CacheSettings | None, offload: Offload, runtime: str
) -> list[str]:
    """Describe the KV cache, the bound of sparse attention, and the minimum batch size for offload of the CPU's
    experts."""
    found = []
    count, used = checked.routed_experts(metadata)
    latent, selected = (checked.largest(metadata, f"attention.{key}") for key in ("kv_lora_rank", "indexer.top_k"))
    if cache:
        kinds = f"latent {cache.keys}" if latent and cache.mla else f"keys {cache.keys}, values {cache.values}"
        found.append(f"cache for {cache.n_ctx} tokens, {kinds}")
        if latent and selected and selected < cache.n_ctx and runtime == "quantkit" and placement.graph:
            found.append(
                f"quantkit runs texts of up to {selected} tokens with -sm graph, as far as sparse attention selects "
                "all positions; -sm layer runs longer ones"
            )
    if placement.output_copies:
        found.append(
            "ik_llama.cpp loads the embedding once more as the output matrix, on "
            f"{', '.join(placement.output_copies)}; a first rule -ot 'token_embd=CPU' keeps both on the CPU"
        )
    devices = placement.devices.values()
    experts = {placement[name] for name in placement.devices if "_exps." in name}
    if count and used and CPU in experts and any(device != CPU for device in devices):
        least = offload.min_tokens_of_experts(count, used)
        found.append(
            "experts on the CPU are never offloaded (-op)"
            if least is None
            else f"batches (-b, -ub) of fewer than {least} tokens run the CPU's experts on the CPU; larger ones "
            "offload them to a GPU"
        )
    return found


def _warnings(
    placement: Placement, tensors: Mapping[str, TensorInfo], loads: Sequence[Load], runtime: str
) -> list[str]:
    found = []
    free, names = list(tensors), list(tensors)  # free: tensors that no earlier rule matches
    ordered = [
        OrderedRule(rule.text, frozenset(name for name in names if rule.matches(name)), canonical(rule.device))
        for rule in placement.rules
    ]
    for index, rule in enumerate(placement.rules):
        taken = [name for name in free if name in ordered[index].names]
        if not ordered[index].names:
            found.append(f"{rule.text} matches none of the {len(names)} tensors{_plain(advice(rule.pattern, names))}")
        elif late := shadow(ordered, index):
            found += [] if late.harmless else [f"{rule.text} {late.text}"]
        elif text := advice(rule.pattern, names, taken):
            found.append(f"{rule.text}{_plain(text)}")
        free = [name for name in free if name not in ordered[index].names]
    if wrong := without_kernels(placement, tensors, runtime):
        found.append(wrong)
    for load in loads:
        if load.left is not None and load.left < 0:
            found.append(_too_much(load))
    return found


def _too_much(load: Load) -> str:
    reserve = f" less {load.margin / GIB:.1f} for buffers" if load.margin else ""
    parts = ((load.weights, "weights"), (load.cache, "cache"), (load.buffers, "working memory"))
    of = ", ".join(f"{size / GIB:.3f} {what}" for size, what in parts if size)
    return (
        f"{load.device} holds {load.total / GIB:.3f} GiB ({of}) and has {(load.limit or 0) / GIB:.3f}{reserve}: "
        f"{-(load.left or 0) / GIB:.3f} GiB too much; {_remedy(load)}"
    )


def _plain(found: Advice) -> Advice:
    """Expand the recipe shorthand in an advice, because -ot does not support it."""
    return replace(found, better=expand(found.better))


def _remedy(load: Load) -> str:
    if load.device == CPU.name:
        return "use smaller types for the experts, or put more layers on a GPU"
    return (
        "keep more layers or their experts on the CPU (-ngl, --n-cpu-moe, -ot, or --fit), or shorten or quantize the "
        "cache (-c, -ctk, -ctv)"
    )
