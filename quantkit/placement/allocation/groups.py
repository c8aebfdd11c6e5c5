"""Groups of an allocation problem from tensors, costs and the user's constraints.

a tensor      may have every type of the list that its shape allows; where the shape does not allow one, the type
              that a plan falls back to, so that the recipe gives what was counted
--min, --max  REGEX=TYPE: the matching tensors get at least, or at most, the bits per weight of TYPE
--same        tensors of a layer that get one type: gate and up (kernels compute them together), or all its experts
--layer-group N   neighbouring layers, N at a time, get the same types
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quantkit import types
from quantkit.errors import DataError, UnsupportedError
from quantkit.placement.allocation.costs import Costs, measured_name
from quantkit.placement.allocation.pools import Pools
from quantkit.placement.allocation.problem import Group, Option
from quantkit.placement.devices import CPU
from quantkit.placement.rules import gpu_kernels
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.planning.planned import PlannedTensor
from quantkit.recipe.planning.planner import fitted_type
from quantkit.recipe.rules.ecmascript import compile_pattern
from quantkit.recipe.rules.layers import listed
from quantkit.types import QuantType

SAME = ("gate-up", "experts", "none")
SIZE, BITS, SECONDS = "--size", "--bpw", "--min-tg"  # resources beside the devices
_ALIGNMENT = 32  # bytes to which a GGUF file pads a tensor
_GATE_OR_UP = re.compile(r"\.ffn_(?:gate|up)(?=[._](?!inp))")


@dataclass(frozen=True)
class Constraints:
    """What the user asks of types.

    types        the types to choose from; empty: all with costs
    at_least, at_most   (regex, type) of --min and --max
    same         an item of SAME
    layer_group  number of neighbouring layers with the same types
    max_types    largest number of different types; None: any
    runtime      as in Flags: whose CUDA kernels count
    dialect      the program that has to read all types; None: any
    """

    types: tuple[QuantType, ...] = ()
    at_least: tuple[tuple[str, QuantType], ...] = ()
    at_most: tuple[tuple[str, QuantType], ...] = ()
    same: str = SAME[0]
    layer_group: int = 1
    max_types: int | None = None
    runtime: str = "ik_llama.cpp"
    dialect: str | None = None


@dataclass(frozen=True)
class Speed:
    """What generation of a token reads: seconds per byte by device, the share of an expert tensor, tensors not read."""

    seconds_per_byte: Mapping[str, float]
    expert_share: float = 1.0
    unread: frozenset[str] = field(default_factory=frozenset)

    def seconds(self, name: str, device: str, nbytes: int) -> float:
        """Seconds that a token spends on reading a tensor."""
        if name in self.unread:
            return 0.0
        return nbytes * (self.expert_share if "_exps." in name else 1.0) * self.seconds_per_byte[device]


def parse_bounds(texts: Iterable[str], flag: str) -> tuple[tuple[str, QuantType], ...]:
    """(regex, type) of each text REGEX=TYPE."""
    found = []
    for text in texts:
        pattern, equals, name = text.rpartition("=")
        if not equals or not pattern:
            raise RecipeError(f"{flag} '{text}' is not REGEX=TYPE, for example 'attn_.*=q6_K'")
        found.append((pattern, types.layout(name)))
    return tuple(found)


def padded(nbytes: int) -> int:
    """Bytes that a tensor takes in a GGUF file."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def make_groups(
    tensors: Sequence[PlannedTensor],
    costs: Costs,
    constraints: Constraints,
    pools: Pools,
    speed: Speed | None = None,
) -> tuple[Group, ...]:
    """The groups of the tensors whose types are free. DataError for a tensor that no type suits, and as from Costs."""
    wanted = constraints.types or tuple(map(types.layout, costs.types()))
    if not wanted:
        raise DataError(f"{costs.where}: has errors of no type; measure some with quantkit sensitivity --types")
    for kind in wanted:
        codec = types.get(kind.name)
        if codec.encode_rows is None or codec.activation:
            raise UnsupportedError(f"--types {kind.name}: quantkit cannot encode this type; drop it")
    _require_measured(tensors, costs, constraints.types)
    bounds = _Bounds(constraints, [t.name for t in tensors])
    members: dict[str, list[PlannedTensor]] = defaultdict(list)
    for t in tensors:
        members[_key(t.name, constraints)].append(t)
    return tuple(
        Group(tuple(t.name for t in group), _options(group, wanted, costs, bounds, pools, constraints, speed))
        for group in members.values()
    )


def _require_measured(tensors: Sequence[PlannedTensor], costs: Costs, named: Sequence[QuantType]) -> None:
    """DataError for a type of --types that no tensor has an error for."""
    measured = frozenset(costs.types())
    for kind in named:
        name = measured_name(kind)
        fits = (t.name for t in tensors if t.source is not kind and measured_name(fitted_type(kind, t)[0]) == name)
        if kind.block_size > 1 and name not in measured and (first := next(fits, None)):
            base = kind.base or kind.name
            raise DataError(
                f"{costs.where}: {first} has no error for {base}, nor has any other tensor; measure it with quantkit "
                f"sensitivity --types {base}, or drop it from --types"
            )


def _key(name: str, constraints: Constraints) -> str:
    """Tensors with the same key are a group."""
    found = re.match(r"blk\.(\d+)\.", name)
    if constraints.same != "none":
        name = _GATE_OR_UP.sub(".ffn_gate_and_up", name)
    if constraints.same == "experts" and "_exps." in name and found:
        name = f"blk.{found[1]}.experts"
    if found is None:
        return name
    return f"blk.{int(found[1]) // constraints.layer_group}.{name[found.end() :]}"


class _Bounds:
    """--min and --max; RecipeError for a pattern that matches no tensor."""

    def __init__(self, constraints: Constraints, names: Sequence[str]):
        self._rules = []
        for flag, rules in (("--min", constraints.at_least), ("--max", constraints.at_most)):
            for text, kind in rules:
                pattern = compile_pattern(text, flag)
                if not any(pattern.search(name) for name in names):
                    raise RecipeError(f"{flag} '{text}={kind.name}' matches none of the {len(names)} tensors with a "
                                      "free type")  # fmt: skip
                self._rules.append((flag, text, pattern, kind))

    def allow(self, name: str, kind: QuantType) -> bool:
        """Whether a tensor may have a type."""
        bits = kind.bits_per_weight()
        return all(
            bits >= limit.bits_per_weight() if flag == "--min" else bits <= limit.bits_per_weight()
            for flag, _, pattern, limit in self._rules
            if pattern.search(name)
        )

    def text(self, names: Sequence[str]) -> str:
        """The bounds of tensors, for a message."""
        return ", ".join(f"{flag} {text}={kind.name}" for flag, text, pattern, kind in self._rules if
                         any(map(pattern.search, names)))  # fmt: skip


def _options(
    group: Sequence[PlannedTensor],
    wanted: Sequence[QuantType],
    costs: Costs,
    bounds: _Bounds,
    pools: Pools,
    constraints: Constraints,
    speed: Speed | None,
) -> tuple[Option, ...]:
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], Option] = {}
    unmeasured: dict[str, str] = {}
    for kind in wanted:
        chosen = [fitted_type(kind, t)[0] for t in group]
        priced = [costs.cost(t.name, t.shape, kind, t.source) for t, kind in zip(group, chosen)]
        for t, own, cost in zip(group, chosen, priced):
            if cost is None:
                unmeasured[own.base or own.name] = t.name
        if None in priced:
            continue
        if not all(bounds.allow(t.name, own) for t, own in zip(group, chosen)):
            continue
        if any(constraints.dialect not in (None, *own.readers) for own in chosen):  # what rows that do not fit become
            continue
        names = tuple(own.name for own in chosen)
        for places in _places(group, pools):
            if not all(
                device == CPU.name or gpu_kernels(own, t.shape[-1], constraints.runtime)
                for t, own, device in zip(group, chosen, places)
            ):
                continue
            uses = _uses(group, chosen, places, pools, speed)
            found[names, places] = Option(names, places, sum(cost or 0.0 for cost in priced), uses)
    if not found:
        _refuse(group, bounds, unmeasured, wanted, constraints, costs.where)
    return tuple(found.values())


def _places(group: Sequence[PlannedTensor], pools: Pools) -> list[tuple[str, ...]]:
    """The devices that the tensors of a group may be on: each on its preferred one, or all that may on the CPU."""
    devices = [pools.devices[t.name] for t in group]
    return list(dict.fromkeys(tuple(places[i] for places in devices) for i in (0, -1)))


def _uses(
    group: Sequence[PlannedTensor],
    chosen: Sequence[QuantType],
    places: Sequence[str],
    pools: Pools,
    speed: Speed | None,
) -> dict[str, float]:
    sizes = [kind.tensor_bytes(t.shape) for t, kind in zip(group, chosen)]
    uses: dict[str, float] = {SIZE: sum(map(padded, sizes)), BITS: sum(sizes)}
    for t, place, size in zip(group, places, sizes):
        for device in pools.held_by(t.name, place):
            uses[device] = uses.get(device, 0) + size
    if speed is not None:
        uses[SECONDS] = sum(
            speed.seconds(t.name, pools.read_from(t.name, place), size) for t, place, size in zip(group, places, sizes)
        )
    return uses


def _refuse(
    group: Sequence[PlannedTensor],
    bounds: _Bounds,
    unmeasured: Mapping[str, str],
    wanted: Sequence[QuantType],
    constraints: Constraints,
    where: str,
) -> None:
    """Raise DataError: why none of the wanted types suits a group."""
    if unmeasured:
        kind, of = next(iter(unmeasured.items()))
        raise DataError(
            f"{where}: {of} has no error for {kind}, and none of the other types suits; measure it with "
            f"quantkit sensitivity --types {','.join(unmeasured)}"
        )
    alike = " that get one type (--same, --layer-group)" if len(group) > 1 else ""
    what = f"{listed(t.name for t in group)}{alike}: none of the types {', '.join(kind.name for kind in wanted)}"
    if text := bounds.text([t.name for t in group]):
        raise DataError(f"{what} is within {text}; allow more --types{', or join fewer tensors' if alike else ''}")
    if constraints.dialect is not None:
        columns = " and ".join(dict.fromkeys(str(t.shape[-1]) for t in group))
        raise DataError(
            f"{what} becomes one that --dialect {constraints.dialect} reads, with rows of {columns} columns; allow "
            "more --types"
        )
    raise DataError(f"{what} has a kernel on its device; allow more --types")
