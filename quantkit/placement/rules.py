"""Place tensors on devices: pure functions of the tensors, the flags and the available devices.

    place(names, parse_rules("ffn_.*=CPU"), devices())   place tensor names on devices by rules
    place_model(file.tensors, flags, metadata, devices)  the same with all flags, and the layer counts of the metadata
    place_by_flags(file.tensors, flags, metadata)        on the devices that the flags name, which need not be present
    plan(file.tensors, flags, metadata, path)            and check that the GPUs have kernels for the types

    flags = parse_flags("-ngl 99 -ot exps=CPU")

    -ngl N             put the last N layers on the GPU, and the output too if N exceeds their number; embeddings stay
                       on the CPU. Default: all layers if there is a GPU
    -sm layer          layer (pipeline) parallel: each GPU has a range of layers, in proportion to -ts, else to memory,
                       else evenly
    -sm graph          tensor parallel: each GPU has a shard of every layer, in the same proportions
                       (placement/sharding.py). With --max-gpu N, N GPUs share each layer, in rotation
    -sm none           a single device, selected by -mg
    -nkvo              keep the KV cache and attention on the CPU; by default they are on the layer's device
    -ot REGEX=DEVICE   search the regex anywhere in a tensor's name; the first matching rule decides, and overrides -ngl
    --n-cpu-moe N      keep the experts of the last N layers with experts on the CPU (with several GPUs, of the last
                       layers of each GPU, in proportion); -ot rules take precedence. --cpu-moe: those of all layers

The result has every tensor's device and the number of tensors that each rule decided, because a rule that decides
nothing is a mistake. With -ngl 0 other tools ignore -ot; here it still applies.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import itertools
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.errors import OptionError, UnknownNameError, UnsupportedError
from quantkit.inputs.safe_regex import Pattern, compile
from quantkit.placement.devices import CPU, Device, canonical, find, parse_devices, proportions
from quantkit.placement.tensor_info import TensorInfo
from quantkit.recipe.rules.layers import ranges, regex_of
from quantkit.repack.eligible import EMBEDDING, OUTPUT
from quantkit.types import QuantType

MODES = ("none", "layer", "graph")
ALL_LAYERS = 999  # --cpu-moe is --n-cpu-moe ALL_LAYERS

RUNTIMES = ("ik_llama.cpp", "quantkit")  # --runtime: programs that run the model

# Interleaved types that ik_llama.cpp has CUDA kernels for; the first two need a multiple of 256 columns.
# quantkit has CUDA kernels for all interleaved types.
_IK_LLAMA_KERNELS = ("iq1_s_r4", "iq1_m_r4", "iq2_k_r4", "iq3_k_r4", "iq4_k_r4", "iq5_k_r4", "iq4_ks_r4", "iq5_ks_r4")
_ROWS_OF_256 = ("iq1_s_r4", "iq1_m_r4")

_LARGEST_SHARE = 1e12  # of -ts, which may be bytes
_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_exps\.(weight|scale)"


# ---------------------------------------------------------------------------------------------------------------- flags


@dataclass(frozen=True)
class PlacementRule:
    """A rule that places tensors whose name matches `pattern` on `device`."""

    pattern: str
    device: str
    flag: str = ""  # the command line flag, if it is not -ot

    def __post_init__(self) -> None:
        _ = self._regex

    @functools.cached_property
    def _regex(self) -> Pattern:
        return compile(self.pattern, f"-ot {self}" if len(str(self)) < 80 else "-ot")

    def __str__(self) -> str:
        return f"{self.pattern}={self.device}"

    def matches(self, name: str) -> bool:
        """Whether the pattern is found in a tensor's name."""
        return self._regex.search(name) is not None

    @property
    def text(self) -> str:
        """The rule as the user wrote it."""
        return self.flag or f"-ot {self}"


def parse_rules(text: str) -> list[PlacementRule]:
    """Parse `RE=DEVICE,RE=DEVICE`. A comma within a regex's braces or brackets does not end a rule."""
    rules = []
    for part in re.split(r",(?![^{\[]*[}\]])", text):
        if not part.strip():
            continue
        pattern, equals, device = part.strip().rpartition("=")
        if not equals or not pattern or not device:
            raise OptionError(f"-ot '{part}': a rule is REGEX=DEVICE, for example 'ffn_.*_exps=CPU'")
        rules.append(PlacementRule(pattern, device))
    return rules


@dataclass(frozen=True)
class Flags:
    """The placement flags of a command line."""

    gpu_layers: int | None = None  # -ngl; None: all layers if there is a GPU
    override_tensor: tuple[str, ...] = ()  # -ot, repeatable
    n_cpu_moe: int = 0  # --n-cpu-moe; ALL_LAYERS for --cpu-moe
    tensor_split: tuple[float, ...] = ()  # -ts: the share of each GPU; empty: by memory if known, else even
    split_mode: str = "layer"  # -sm
    main_gpu: int | None = None  # -mg
    max_gpus: int | None = None  # --max-gpu
    kv_on_cpu: bool = False  # -nkvo
    devices: tuple[Device, ...] = ()  # --devices; empty: the machine's devices
    runtime: str = RUNTIMES[0]  # --runtime: the program whose CUDA kernels count

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise UnknownNameError("runtime, --runtime", self.runtime, RUNTIMES)
        if self.split_mode not in MODES:
            raise UnknownNameError("split mode, -sm", self.split_mode, MODES)
        if self.split_mode == "none" and self.tensor_split:
            raise OptionError("-ts shares a model among GPUs, but -sm none uses a single one; omit one of them")
        if self.split_mode != "none" and self.main_gpu is not None:
            raise OptionError(f"-mg {self.main_gpu} needs -sm none, but the mode is {self.split_mode}; omit -mg")
        if self.split_mode != "graph" and self.max_gpus is not None:
            raise OptionError(f"--max-gpu {self.max_gpus} needs -sm graph, but the mode is {self.split_mode}")
        if (self.main_gpu or 0) < 0 or (self.max_gpus is not None and self.max_gpus < 1):
            raise OptionError("-mg must be 0 or more, --max-gpu 1 or more")
        shares = self.tensor_split
        if shares and not (all(0 <= share <= _LARGEST_SHARE for share in shares) and any(shares)):
            raise OptionError(f"-ts {shares}: shares must be from 0 to {_LARGEST_SHARE:g}, and not all 0")
        for flag, number in (("-ngl", self.gpu_layers or 0), ("--n-cpu-moe", self.n_cpu_moe)):
            if number < 0:
                raise OptionError(f"{flag} {number}: the number of layers must be 0 or more")

    @property
    def rules(self) -> list[PlacementRule]:
        """The parsed -ot rules, in order."""
        return [rule for text in self.override_tensor for rule in parse_rules(text)]


def parse_split(text: str) -> tuple[float, ...]:
    """Parse `-ts 3,1` (or 3/1): one share per GPU."""
    try:
        return tuple(float(part) for part in re.split("[,/]", text) if part.strip())
    except ValueError:
        raise OptionError(f"-ts '{text}': shares must be numbers, for example 3,1") from None


def parse_flags(text: str) -> Flags:
    """Parse placement flags such as `-ngl 99 -ot exps=CPU`. DataError for any other flag."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-ngl", "--gpu-layers", "--n-gpu-layers", type=int, dest="gpu_layers")
    parser.add_argument("-ot", "--override-tensor", action="append", default=[], dest="rules")
    parser.add_argument("-ncmoe", "--n-cpu-moe", type=int, default=0, dest="n_cpu_moe")
    parser.add_argument("-cmoe", "--cpu-moe", action="store_const", const=ALL_LAYERS, dest="n_cpu_moe")
    parser.add_argument("-ts", "--tensor-split", default="", dest="split")
    parser.add_argument("-sm", "--split-mode", default="layer", dest="mode")
    parser.add_argument("-mg", "--main-gpu", type=int, dest="main")
    parser.add_argument("--max-gpu", type=int, dest="most")
    parser.add_argument("-nkvo", "--no-kv-offload", action="store_true", dest="nkvo")
    parser.add_argument("--devices", default="")
    try:
        parsed = parser.parse_args(shlex.split(text))
    except ValueError as error:
        raise OptionError(f"placement '{text}': {error}") from None
    named = parse_devices(parsed.devices) if parsed.devices else ()
    split = parse_split(parsed.split)
    return Flags(
        parsed.gpu_layers,
        tuple(parsed.rules),
        parsed.n_cpu_moe,
        split,
        parsed.mode,
        parsed.main,
        parsed.most,
        parsed.nkvo,
        named,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(
            f"{message}; supported: -ngl N, -ot REGEX=DEVICE, --cpu-moe, --n-cpu-moe N, -ts N,N, -sm none|layer|graph, "
            "-mg N, --max-gpu N, -nkvo and --devices"
        )


# ------------------------------------------------------------------------------------------------------------ placement


@dataclass(frozen=True)
class Placement:
    """The device of every tensor with the reason, and the number of tensors that each rule decided.

    of_layer   the GPU of each layer, before rules; layer `n_layers` is the output
    mode       none, layer or graph
    graph      with -sm graph the GPUs that share layers, else empty
    sharded    names of the sharded tensors; `devices` has the first GPU for them
    shares     for each layer the share of each GPU in `graph`; they add up to 1
    kv_on_cpu  the KV cache stays on the CPU
    output_copy   the GPU to which ik_llama.cpp loads the embedding once more as the output matrix, where the two are
               tied; None: there is no such copy
    """

    devices: dict[str, Device]
    rules: tuple[PlacementRule, ...] = ()
    decided: tuple[int, ...] = ()
    of_layer: Mapping[int, Device] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    mode: str = "layer"
    graph: tuple[Device, ...] = ()
    sharded: frozenset[str] = frozenset()
    shares: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    kv_on_cpu: bool = False
    output_copy: Device | None = None

    @property
    def output_copies(self) -> dict[str, float]:
        """The share of that copy on each device; with `graph` all have a part."""
        if self.output_copy is None:
            return {}
        if self.graph:
            return {device.name: share for device, share in zip(self.graph, self.shares[max(self.shares)])}
        return {self.output_copy.name: 1.0}

    def __getitem__(self, name: str) -> Device:
        return self.devices[name]

    @property
    def idle(self) -> list[PlacementRule]:
        """Rules that decided nothing: no name matches, or earlier rules match all of the names."""
        return [rule for rule, count in zip(self.rules, self.decided) if count == 0]

    @property
    def is_cpu_only(self) -> bool:
        """Whether all tensors and layers are on the CPU."""
        return all(device == CPU for device in (*self.devices.values(), *self.of_layer.values()))

    def on_cpu(self, name: str) -> bool:
        """Whether a tensor is on the CPU."""
        return self.devices[name] == CPU

    def of_activations(self, layer: int) -> Device:
        """The device of a layer's activations; rules may put some of its tensors elsewhere."""
        return self.of_layer.get(layer, CPU)

    def of_cache(self, layer: int) -> Device:
        """The device of a layer's KV cache; with `graph` the first of the devices that share it."""
        return CPU if self.kv_on_cpu else self.of_activations(layer)


def place(
    tensors: Iterable[str],
    rules: Sequence[PlacementRule] = (),
    available: Collection[Device] = (CPU,),
    gpu_layers: int | None = None,
    *,
    n_layers: int | None = None,
    n_cpu_moe: int = 0,
    mtp_layers: int = 0,
    tensor_split: Sequence[float] = (),
    split_mode: str = "layer",
    main_gpu: int | None = None,
    max_gpus: int | None = None,
    kv_on_cpu: bool = False,
    copies_tied: bool = False,
) -> Placement:
    """Place every tensor on one of the `available` devices, which include the CPU.

    n_layers      number of layers of the model; by default derived from the names
    mtp_layers    number of MTP (multi-token prediction) layers at the end; `n_cpu_moe` does not count them
    tensor_split  each GPU's share of the layers, or of each layer; by default in proportion to memory, or even
    split_mode, main_gpu, max_gpus, kv_on_cpu   as in Flags
    copies_tied   a tied embedding is loaded once more where the output matrix would be

    Raises UnsupportedError if a rule names a device that is not available, or -ngl needs a GPU and there is none.
    """
    names = list(tensors)
    gpus = [device for device in available if device != CPU]
    _require_gpus(gpus, available, gpu_layers, split_mode, main_gpu, tensor_split)
    targets = [find(rule.device, available, rule.text) for rule in rules]
    if n_layers is None:
        n_layers = 1 + max((layer for layer in map(_layer, names) if layer is not None), default=-1)
    wanted = (ALL_LAYERS if gpus else 0) if gpu_layers is None else gpu_layers
    graph = tuple(gpus) if split_mode == "graph" and wanted else ()
    if split_mode == "none":
        gpus = gpus[main_gpu or 0 :][:1]
    of_layer = _layer_devices(n_layers, wanted, gpus[:1] if graph else gpus, tensor_split)
    if n_cpu_moe:
        rules = [*rules, _experts_rule(names, n_cpu_moe, of_layer, n_layers - mtp_layers)]
        targets.append(CPU)
    decided = [0] * len(rules)
    devices, reasons, sharded = {}, {}, set()
    for name in names:
        layer = _layer(name)
        if layer is None and name.startswith("output"):
            layer = n_layers
        gpu = of_layer.get(layer) if layer is not None else None
        for i, rule in enumerate(rules):
            if rule.matches(name):
                devices[name], reasons[name] = targets[i], rule.text
                decided[i] += 1
                break
        else:
            devices[name] = gpu or CPU
            reasons[name] = _reason(layer, gpu, n_layers, wanted, graph, split_mode)
            if graph and gpu is not None:
                sharded.add(name)
    shares = _shares(graph, sorted(of_layer), tensor_split, max_gpus) if graph else {}
    is_ruled = any(rule.matches(EMBEDDING) for rule in rules)  # then both are where the rule says
    tied = copies_tied and EMBEDDING in devices and OUTPUT not in devices and not is_ruled
    return Placement(
        devices,
        tuple(rules),
        tuple(decided),
        of_layer,
        reasons,
        split_mode,
        graph,
        frozenset(sharded),
        shares,
        kv_on_cpu,
        of_layer.get(n_layers) if tied else None,
    )


def _require_gpus(
    gpus: Sequence[Device],
    available: Collection[Device],
    gpu_layers: int | None,
    mode: str,
    main: int | None,
    split: Sequence[float],
) -> None:
    """Raise UnsupportedError if the flags need GPUs that are not available."""
    valid = f"valid devices: {', '.join(device.name for device in available)}"
    if gpu_layers and not gpus:
        raise UnsupportedError(f"-ngl {gpu_layers}: there is no GPU device to put layers on; {valid}; use -ngl 0")
    if mode == "graph" and len(gpus) < 2 and gpu_layers != 0:
        raise UnsupportedError(f"-sm graph shares every layer among at least 2 GPUs, there are {len(gpus)}; {valid}")
    if main is not None and main >= len(gpus):
        raise UnsupportedError(f"-mg {main}: there are {len(gpus)} GPUs, counted from 0; {valid}")
    if len(split) > len(gpus) > 0:
        raise UnsupportedError(f"-ts has {len(split)} shares, there are {len(gpus)} GPUs; {valid}")


def _reason(layer: int | None, gpu: Device | None, layers: int, wanted: int, graph: Sequence[Device], mode: str) -> str:
    if layer is None:
        return "not in a layer: embeddings stay on the CPU"
    what = "the output" if layer == layers else f"layer {layer}"
    asked = "all layers" if wanted >= ALL_LAYERS else f"-ngl {wanted}"
    if gpu is None:
        return f"{what} is not included in {asked}" if wanted else "no layer goes to a GPU"
    if graph:
        return f"{what}, {asked}, is shared by {', '.join(device.name for device in graph)} (-sm graph)"
    return f"{what}, {asked}, is on {gpu.name} (-sm {mode})"


def _shares(
    gpus: Sequence[Device], layers: Iterable[int], split: Sequence[float], gpus_per_layer: int | None
) -> dict[int, tuple[float, ...]]:
    """Each GPU's share of each layer. With `most`, that many GPUs share a layer, in rotation."""
    whole = proportions(gpus, split)
    gpus_per_layer = min(gpus_per_layer or len(gpus), len(gpus))
    shares = {}
    for i, layer in enumerate(layers):
        chosen = {(i * gpus_per_layer + j) % len(gpus) for j in range(gpus_per_layer)}
        total = sum(whole[j] for j in chosen)
        layer_shares = [whole[j] / total if j in chosen and total else 0.0 for j in range(len(gpus))]
        shares[layer] = tuple(layer_shares) if total else whole
    return shares


def _layer(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def _layer_devices(n_layers: int, gpu_layers: int, gpus: Sequence[Device], split: Sequence[float]) -> dict[int, Device]:
    """The GPU of each offloaded layer; layer `n_layers` is the output."""
    count = min(gpu_layers, n_layers + 1) if gpus else 0
    first = max(0, n_layers - gpu_layers)
    ends = list(itertools.accumulate(_exact(gpus, split))) if gpus else []
    return {first + i: gpus[bisect.bisect_right(ends, i * ends[-1] / count)] for i in range(count)}


def _exact(gpus: Sequence[Device], split: Sequence[float]) -> list[float]:
    """Like `proportions`, but not normalized: integer -ts values (numbers of layers) stay integers."""
    if any(split):
        return [float(share) for share in [*split, *[0.0] * len(gpus)][: len(gpus)]]
    return list(proportions(gpus)) if all(gpu.memory for gpu in gpus) else [1.0] * len(gpus)


def _experts_rule(names: Iterable[str], count: int, of_layer: Mapping[int, Device], n_layers: int) -> PlacementRule:
    """The rule for --n-cpu-moe, over the first `n_layers` layers."""
    with_experts = {int(match[1]) for match in (re.match(rf"blk\.(\d+){_EXPERTS}", name) for name in names) if match}
    shares: dict[Device, list[int]] = defaultdict(list)
    for layer in sorted(of_layer.keys() & range(n_layers)):
        shares[of_layer[layer]].append(layer)
    parts = list(shares.values()) if len(shares) > 1 else [list(range(n_layers))]
    total, before, chosen = sum(map(len, parts)) or 1, 0, []
    for part in parts:
        after = before + len(part)
        part_count = count * after // total - count * before // total
        chosen += [layer for layer in reversed(part) if layer in with_experts][:part_count]
        before = after
    flag = "--cpu-moe" if count == ALL_LAYERS else f"--n-cpu-moe {count}"
    return PlacementRule(rf"^blk\.({regex_of(chosen)}){_EXPERTS}", CPU.name, flag)


# ------------------------------------------------------------------------------------ plans for GPUs of other machines


def plan(tensors: Mapping[str, TensorInfo], flags: Flags, metadata: Mapping[str, Any], path: object) -> Placement:
    """`place_by_flags`, and check that the GPUs have kernels for the types. Messages name the model by `path`.

    UnsupportedError for a tensor on a GPU whose type has no CUDA kernel in `flags.runtime`, and as from `place`.
    """
    placement = place_by_flags(tensors, flags, metadata)
    if unsupported := without_kernels(placement, tensors, flags.runtime):
        raise UnsupportedError(f"{path}: {unsupported}, or undo the interleaving: quantkit unpack {path} OUT")
    return placement


def place_by_flags(
    tensors: Mapping[str, TensorInfo], flags: Flags, metadata: Mapping[str, Any], n_gpus: int = 1
) -> Placement:
    """Place a model's tensors by `flags`, on a machine with the devices that the flags name.

    Without --devices, these are the GPUs in rules and -ts, at least `n_gpus`.
    """
    available = flags.devices or _declared(flags.rules, max(n_gpus, len(flags.tensor_split)))
    return place_model(tensors, flags, metadata, available)


def place_model(
    tensors: Iterable[str], flags: Flags, metadata: Mapping[str, object], available: Collection[Device]
) -> Placement:
    """Call `place` with the flags and the layer counts of the metadata."""
    arch = metadata.get("general.architecture")
    n_layers, mtp_layers = (metadata.get(f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
    return place(
        tensors,
        flags.rules,
        available,
        flags.gpu_layers,
        n_layers=n_layers if isinstance(n_layers, int) else None,
        n_cpu_moe=flags.n_cpu_moe,
        mtp_layers=mtp_layers if isinstance(mtp_layers, int) else 0,
        tensor_split=flags.tensor_split,
        split_mode=flags.split_mode,
        main_gpu=flags.main_gpu,
        max_gpus=flags.max_gpus,
        kv_on_cpu=flags.kv_on_cpu,
        copies_tied=flags.runtime == "ik_llama.cpp",
    )


def _declared(rules: Iterable[PlacementRule], n_gpus: int) -> list[Device]:
    """The CPU, CUDA0 to the last GPU that a rule names (at least `n_gpus`), and the simulated devices of the rules."""
    count, simulated = n_gpus, set()
    for rule in rules:
        try:
            name = canonical(rule.device)
        except UnsupportedError as error:
            raise UnsupportedError(f"{rule.text}: {error}") from None
        if name.startswith("CUDA"):
            count = max(count, int(name.removeprefix("CUDA")) + 1)
        elif name != CPU.name:
            simulated.add(name)
    return [CPU, *(Device(f"CUDA{i}") for i in range(count)), *map(Device, sorted(simulated))]


def gpu_kernels(kind: QuantType, columns: int = 256, runtime: str = RUNTIMES[0]) -> bool:
    """Whether a runtime's CUDA kernels take a tensor of this type and this number of columns."""
    if kind.interleave == 1 or runtime == "quantkit":
        return True
    return kind.name in _IK_LLAMA_KERNELS and not (kind.name in _ROWS_OF_256 and columns % 256)


def without_kernels(placement: Placement, tensors: Mapping[str, TensorInfo], runtime: str = RUNTIMES[0]) -> str:
    """A message about interleaved tensors that a runtime cannot use on their GPUs, with the remedy; "" for none."""
    unsupported = [
        name
        for name, tensor in tensors.items()
        if not placement.on_cpu(name) and not gpu_kernels(tensor.type, tensor.shape[-1], runtime)
    ]
    if not unsupported:
        return ""
    classes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for name in unsupported:
        classes[_form(name), tensors[name].type.name, placement[name].name].append(_layer(name) or 0)
    lines = (
        f"\n  {form.replace('#', f'({ranges(layers)})')}  {kind}  {device}"
        for (form, kind, device), layers in classes.items()
    )
    return (
        f"{len(unsupported)} row-interleaved tensors would go to a GPU, and ik_llama.cpp has no CUDA kernel for their "
        f"types (quantkit has one: --runtime quantkit plans for it):{''.join(lines)}\n"
        f"  For ik_llama.cpp, keep them on the CPU with this first rule: -ot '{_cpu_rule(unsupported, tensors)}'"
    )


def _form(name: str) -> str:
    """A tensor name without its layer number: blk.#.ffn_down.weight."""
    return _LAYER.sub("blk.#.", name)


def _cpu_rule(names: Iterable[str], all_names: Iterable[str]) -> str:
    """An -ot rule that puts exactly these tensors of a model on the CPU."""
    layers: dict[str, list[int]] = defaultdict(list)
    for name in names:
        if (layer := _layer(name)) is not None:
            layers[_form(name)].append(layer)
        else:
            layers[name] = []
    layer_counts = Counter(map(_form, all_names))
    patterns = [
        re.escape(form).replace(r"\#", r"\d+" if len(numbers) == layer_counts[form] else f"({regex_of(numbers)})")
        for form, numbers in layers.items()
    ]
    return f"^({'|'.join(patterns)})$={CPU.name}"
