"""--fit: fill the available devices, and return the placement as flags that reproduce it. Pure functions.

    found = fit(tensors, metadata, parse_devices("cpu=256GiB,cuda:0=24GiB"), caches)
    found.text       -ngl 62 -ot '^blk\\.(1[2-9]|2[0-9])\\.ffn_(down|gate|up)_exps\\.weight$=CPU'
    found.flags      the same as a Flags object

Attention, its cache, norms, routers, shared experts and the output come first, because every token reads them. It reads
only used / count of the routed experts. So the base of all layers goes to GPUs if it fits, else that of the last layers
that fit. The remaining memory takes experts (in dense models: feed-forwards), whole layers first, then single tensors.
The rest stays on the CPU.

    layer   the ranges of layers with which the GPUs hold the most bytes; among these, the most even loads
    graph   each device has its share of every layer; experts are placed from the last layer down, whole layers

ik_llama.cpp moves experts of whole layers and keeps the ranges of layers. Working memory is counted
(`workspace.device_bytes`), and `margin` further bytes of each GPU stay free. Tensors of types that `flags.runtime` has
no CUDA kernel for stay on the CPU.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.archs.common import checked
from quantkit.errors import DataError, OptionError
from quantkit.placement import sharding, workspace
from quantkit.placement.devices import CPU, Device, proportions
from quantkit.placement.rules import Flags, Placement, gpu_kernels, place_model
from quantkit.placement.tensor_info import TensorInfo
from quantkit.recipe.rules.layers import regex_of
from quantkit.repack.eligible import EMBEDDING, OUTPUT

GIB = 1 << 30
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_DENSE = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.weight$")


@dataclass(frozen=True)
class Fitted:
    """A placement that fits, and the flags that reproduce it."""

    flags: Flags
    placement: Placement

    @property
    def text(self) -> str:
        """The flags as typed on a command line."""
        flags = self.flags
        found = [f"-ngl {flags.gpu_layers}"]
        if flags.split_mode != "layer":
            found.append(f"-sm {flags.split_mode}")
        if flags.tensor_split:
            found.append(f"-ts {','.join(f'{share:g}' for share in flags.tensor_split)}")
        return " ".join([*found, *(f"-ot {shlex.quote(rule)}" for rule in flags.override_tensor)])


class _Model:
    """Sizes by layer: `base`, which every token reads, and `bulk`, experts or the feed-forwards of a dense model."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, Any],
        caches: Sequence[int],
        on_gpus: bool,
        runtime: str,
    ):
        if runtime == "ik_llama.cpp" and OUTPUT not in tensors and EMBEDDING in tensors:
            tensors = {**tensors, OUTPUT: tensors[EMBEDDING]}  # which it loads once more as the output matrix
        self.tensors, self.metadata, self.caches = tensors, metadata, caches
        self.used = checked.largest(metadata, "expert_used_count")
        self.size = {name: t.type.tensor_bytes(t.shape) for name, t in tensors.items()}
        has_experts = any("_exps." in name for name in tensors)
        self.layers = checked.largest(metadata, "block_count") or 1 + max(
            (int(found[1]) for found in map(_LAYER.match, tensors) if found), default=-1
        )
        self.bulk: dict[int, list[str]] = defaultdict(list)
        self.base: dict[int, list[str]] = defaultdict(list)
        self.without_kernel: list[str] = []  # stay on the CPU: their types have no CUDA kernel
        for name, tensor in tensors.items():
            layer = self.layer(name)
            if layer is not None and on_gpus and not gpu_kernels(tensor.type, tensor.shape[-1], runtime):
                self.without_kernel.append(name)
            elif layer is not None:
                is_bulk = "_exps." in name if has_experts else is_dense_feed_forward(name)
                (self.bulk if is_bulk else self.base)[layer].append(name)

    def layer(self, name: str) -> int | None:
        """The layer of a tensor; the output is the layer after the last; None for embeddings."""
        found = _LAYER.match(name)
        return int(found[1]) if found else self.layers if name.startswith("output") else None

    def cache(self, layer: int) -> int:
        return self.caches[layer] if layer < len(self.caches) else 0

    def work(self, names: Iterable[str]) -> int:
        return workspace.device_bytes({name: self.tensors[name].shape for name in names}, self.used)


def fit(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[str, object],
    devices: Sequence[Device],
    caches: Sequence[int] = (),
    *,
    margin: int = GIB,
    flags: Flags | None = None,
    mla: int = 3,
) -> Fitted:
    """Place a model's tensors and `caches` (bytes by layer) so that they fill the memory of `devices`.

    `flags` may contain the split mode and -nkvo. DataError if nothing fits: what, by how much, and the remedy.
    """
    flags = flags or Flags()
    if flags.override_tensor or flags.n_cpu_moe or flags.gpu_layers is not None or any(flags.tensor_split):
        raise OptionError("--fit decides -ngl, -ot, --n-cpu-moe and -ts itself; omit them, or omit --fit")
    gpus = [device for device in devices if device != CPU]
    unknown = [device.name for device in gpus if device.memory is None]
    if not gpus or unknown:
        missing = f"that of {', '.join(unknown)} is not known" if unknown else "there is none"
        raise OptionError(f"--fit needs the memory of GPUs, and {missing}; pass --vram GIB,… or --devices cuda:0=24GiB")
    on_gpus = any(not device.runs_here for device in gpus)
    model = _Model(tensors, metadata, () if flags.kv_on_cpu else caches, on_gpus, flags.runtime)
    if flags.split_mode == "none":
        gpus = gpus[flags.main_gpu or 0 :][:1]
    found = (_graph if flags.split_mode == "graph" else _ranges)(model, gpus, margin, flags, mla)
    fitted = Fitted(found, place_model(tensors, found, metadata, devices))
    _require_ram(fitted, model, devices, caches, flags.kv_on_cpu)
    return fitted


# ---------------------------------------------------------------------------------------------------------------- layer


def _ranges(model: _Model, gpus: Sequence[Device], margin: int, flags: Flags, mla: int) -> Flags:
    last = model.layers
    body = max((model.work([*model.base[i], *model.bulk[i]]) for i in range(last)), default=0)
    free_bytes = [(gpu.memory or 0) - margin - body for gpu in gpus]
    base = [sum(map(model.size.__getitem__, model.base[i])) + model.cache(i) for i in range(last)]
    out = sum(map(model.size.__getitem__, model.base[last]))
    base.append(out + max(0, model.work(name for name in model.tensors if model.layer(name) is not None) - body))
    bulk = [sum(map(model.size.__getitem__, model.bulk[i])) for i in range(last + 1)]
    first, counts = _partition(base, bulk, free_bytes)
    if first > 0:  # the output is on the GPUs only if all layers are
        first, counts = _partition(base[:last], bulk[:last], free_bytes)
        if first == last:
            _refuse(base[:last], free_bytes, gpus, margin)
    on_cpu = list(model.without_kernel)
    start = first
    for count, free in zip(counts, free_bytes):
        placed = _fill(model, range(start, start + count), free - sum(base[start : start + count]))
        on_cpu += [name for i in range(start, start + count) for name in model.bulk[i] if name not in placed]
        start += count
    split = tuple(float(count) for count in counts) if len(gpus) > 1 else ()
    layers = last + 1 if first == 0 and sum(counts) > last else last - first
    return replace(flags, gpu_layers=layers, override_tensor=cpu_rules(on_cpu), tensor_split=split)


def _partition(base: Sequence[int], bulk: Sequence[int], free_bytes: Sequence[int]) -> tuple[int, list[int]]:
    """Divide layers among devices, one range each. Returns (first layer, number of layers of each device).

    Minimizes `first`, then maximizes the bytes of `bulk` on devices, then evens the loads. `first` is len(base) if
    nothing fits. Dynamic programming over (device, first layer of its range).
    """
    n = len(base)
    prefix_sums = [[0] * (n + 1) for _ in range(2)]
    for sums, sizes in zip(prefix_sums, (base, bulk)):
        for i, size in enumerate(sizes):
            sums[i + 1] = sums[i] + size
    nothing = (-math.inf, 0.0)
    # best[d][i]: the best score of devices d … with layers i …, and the end of the range of device d
    best: list[list[tuple[tuple[float, float], int]]] = [[(nothing, n)] * n + [((0.0, 0.0), n)]]
    for free in reversed(free_bytes):
        row = []
        for i in range(n + 1):
            best_end = (nothing, i)
            for stop in range(i, n + 1):
                need = prefix_sums[0][stop] - prefix_sums[0][i]
                if need > free and stop > i:
                    break
                bulk_bytes = min(prefix_sums[1][stop] - prefix_sums[1][i], free - need) if stop > i else 0
                after = best[-1][stop][0]
                full = (need + bulk_bytes) / free if stop > i and free > 0 else 0.0
                best_end = max(best_end, ((after[0] + bulk_bytes, after[1] - full * full), stop))
            row.append(best_end)
        best.append(row)
    best.reverse()
    first = next((i for i in range(n) if best[0][i][0] > nothing), n)
    counts, at = [], first
    for d in range(len(free_bytes)):
        stop = best[d][at][1] if first < n else at
        counts.append(stop - at)
        at = stop
    return first, counts


def _fill(model: _Model, layers: Iterable[int], free: int) -> set[str]:
    """The bulk tensors of these layers that fit in `free` bytes: whole layers in order, then single tensors by size."""
    placed: set[str] = set()
    remaining: list[str] = []
    for layer in layers:
        names = model.bulk[layer]
        size = sum(model.size[name] for name in names)
        if size <= free:
            placed.update(names)
            free -= size
        else:
            remaining += names
    for name in sorted(remaining, key=lambda name: -model.size[name]):
        if model.size[name] <= free:
            placed.add(name)
            free -= model.size[name]
    return placed


# ---------------------------------------------------------------------------------------------------------------- graph


def _graph(model: _Model, gpus: Sequence[Device], margin: int, flags: Flags, mla: int) -> Flags:
    """Shard all layers that fit over all devices, and the experts of the last of them."""
    last, shares = model.layers, proportions(gpus)
    split = tuple(float(f"{share / max(shares):.6g}") for share in shares)
    shares = proportions(gpus, split)
    everything = [name for names in (*model.base.values(), *model.bulk.values()) for name in names]
    sliced = dict.fromkeys(range(last + 1), shares)
    found = sharding.of_metadata(model.tensors, model.metadata, everything, sliced)
    parts = {name: sharding.bytes_of(model.tensors[name], found.get(name), len(gpus)) for name in everything}
    work = model.work(everything)
    free = [(gpu.memory or 0) - margin - work for gpu in gpus]

    def needs(names: Iterable[str], cache_of: int | None = None) -> list[int]:
        total = [sum(parts[name][d] for name in names) for d in range(len(gpus))]
        if cache_of is not None:
            each = sharding.cache_shares(cache_of, found, len(gpus), mla)
            total = [size + math.ceil(share * model.cache(cache_of)) for size, share in zip(total, each)]
        return total

    def fitting(order: Iterable[int]) -> tuple[list[int], list[int]]:
        """The layers, in this order, whose base fits, and the free bytes of each device after them."""
        found, left = [], free
        for layer in order:
            need = needs(model.base[layer], layer if layer < last else None)
            if any(size > room for size, room in zip(need, left)):
                break
            left = [room - size for room, size in zip(left, need)]
            found.append(layer)
        return found, left

    layers, left_over = fitting(range(last, -1, -1))
    if len(layers) <= last:  # the output is on the GPUs only if all layers are
        layers, left_over = fitting(range(last - 1, -1, -1))
    if not layers:
        _refuse([sum(map(model.size.__getitem__, model.base[i])) for i in range(last)], free, gpus, margin)
    free = left_over
    on_cpu = list(model.without_kernel)
    for layer in layers:
        need = needs(model.bulk[layer])
        if all(size <= room for size, room in zip(need, free)):
            free = [room - size for room, size in zip(free, need)]
        else:
            on_cpu += model.bulk[layer]
    return replace(flags, gpu_layers=len(layers), override_tensor=cpu_rules(on_cpu), tensor_split=split)


# ----------------------------------------------------------------------------------------------------- rules and errors


def is_dense_feed_forward(name: str) -> bool:
    """Whether a tensor is a matrix of the feed-forward of a dense layer."""
    return _DENSE.match(name) is not None


def cpu_rules(names: Iterable[str]) -> tuple[str, ...]:
    """The -ot rules that put exactly these tensors on the CPU. Kinds of tensors with the same layers share a rule."""
    layers: dict[str, list[int]] = defaultdict(list)
    alone = []
    for name in names:
        if found := _LAYER.match(name):
            layers[found[2]].append(int(found[1]))
        else:
            alone.append(name)
    kinds: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for kind, numbers in layers.items():
        kinds[tuple(sorted(numbers))].append(kind)
    return tuple(f"^{re.escape(name)}$={CPU.name}" for name in alone) + tuple(
        rf"^blk\.({regex_of(numbers)})\.({'|'.join(re.escape(kind) for kind in sorted(kinds_of_layers))})$={CPU.name}"
        for numbers, kinds_of_layers in sorted(kinds.items())
    )


def _refuse(base: Sequence[int], free_bytes: Sequence[int], gpus: Sequence[Device], margin: int) -> None:
    smallest, largest = min(base), max(free_bytes)
    names = ", ".join(f"{gpu.name} {(gpu.memory or 0) / GIB:.3f} GiB" for gpu in gpus)
    raise DataError(
        f"--fit: not even the smallest layer fits: its attention and cache take {smallest / GIB:.3f} GiB, and of "
        f"{names} {max(0, largest) / GIB:.3f} GiB remain after working memory and a margin of {margin / GIB:.3f} GiB; "
        f"{(smallest - largest) / GIB:.3f} GiB are missing; take a smaller --fit-margin, a shorter or quantized cache "
        "(-c, -ctk, -ctv), or -ngl 0"
    )


def _require_ram(
    found: Fitted, model: _Model, devices: Sequence[Device], caches: Sequence[int], kv_on_cpu: bool
) -> None:
    """Raise DataError if the CPU cannot hold the tensors that are not on GPUs."""
    ram = next((device.memory for device in devices if device == CPU), None)
    if ram is None:
        return
    names = [name for name in found.placement.devices if found.placement.on_cpu(name)]
    weights = sum(model.size[name] for name in names)
    cache = sum(size for layer, size in enumerate(caches) if kv_on_cpu or found.placement.of_cache(layer) == CPU)
    work = model.work(names)
    if weights + cache + work > ram:
        raise DataError(
            f"--fit: with the GPUs full, the CPU would hold {weights / GIB:.3f} GiB of weights, {cache / GIB:.3f} of "
            f"cache and {work / GIB:.3f} of working memory, and has {ram / GIB:.3f}: "
            f"{(weights + cache + work - ram) / GIB:.3f} GiB too much; take smaller types for the experts, or a "
            "shorter context (-c)"
        )
