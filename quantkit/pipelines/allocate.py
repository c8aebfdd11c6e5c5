"""`fit_recipe`: the recipe with the lowest predicted KL divergence that fits a size or a machine's memory.

    found = fit_recipe(open_model("config.json"), costs.read("costs.json"), FitOptions(ram=64, ctx_size=32768))
    found.recipe, found.plan, found.cost, found.gap, found.budget

The types are chosen by `placement.allocation`. The recipe is then planned like any other, and sizes are those of that
plan: what `quantize` will write is what was counted, or this module raises.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit import types
from quantkit.archs.common.checked import routed_experts
from quantkit.errors import DataError, OptionError, QuantkitError
from quantkit.formats.imatrix import Imatrix
from quantkit.pipelines.options import PlanOptions, texts
from quantkit.pipelines.planning import (
    PlanInput,
    complete_imatrix,
    context_size,
    memory_sizes,
    missing_imatrix,
    placement_flags,
)
from quantkit.pipelines.quantize import written_size
from quantkit.placement.allocation import groups as grouping
from quantkit.placement.allocation import solver
from quantkit.placement.allocation.costs import Costs
from quantkit.placement.allocation.groups import BITS, SECONDS, SIZE, Constraints, Speed
from quantkit.placement.allocation.pools import Memory, pools
from quantkit.placement.allocation.problem import Group, InfeasibleError, Option, Problem, Solution
from quantkit.placement.allocation.recipe import Allocated, file_type_for, recipe_of
from quantkit.placement.budget import GIB, Budget, CacheSettings, budget
from quantkit.placement.devices import CPU
from quantkit.placement.rules import Flags
from quantkit.placement.speed import ASSUMED, parse_rates
from quantkit.recipe import ImportanceError, Options, Plan, Recipe, parse
from quantkit.recipe import plan as decide
from quantkit.recipe.planning.dialects import checked, reads
from quantkit.recipe.planning.planned import PlannedTensor
from quantkit.recipe.rules.layers import listed
from quantkit.repack.eligible import looked_up

_MOST = 1e9  # of bits, tokens a second or seconds: more is a mistake
_ATTEMPTS = 6  # solutions whose header or working memory turned out larger than was reserved


@dataclass(frozen=True)
class FitOptions:
    """Options of `fit_recipe`: the flags of `quantkit recipe fit`.

    Limits:

        size, bpw          bytes of the file; bits per weight of all tensors
        vram, ram          GiB of each GPU, and of the CPU
        min_tg             tokens per second of generation that the predicted speed must reach
        fit_margin         MiB of each GPU to reserve for compute buffers

    Constraints:

        types              names of the types to choose from; empty: all that the costs file has
        min, max           texts "REGEX=TYPE": least and most bits per weight
        same               "gate-up", "experts" (also down) or "none": tensors of a layer that get one type
        layer_group        number of neighbouring layers that get the same types
        max_types          largest number of different types
        dialect            program that the file is for, "ik" or "llama.cpp": only types that it reads are chosen

    effort, the encoders' effort: "fast" and "best" are written to the header, whose bytes count

    Placement and cache, as of PlanOptions: placement, bandwidth, runtime, ctx_size, cache_type_k, cache_type_v, mla

    Solver: seconds and gap at which it ends
    """

    size: int | None = None
    bpw: float | None = None
    vram: Sequence[float] = ()
    ram: float | None = None
    min_tg: float | None = None
    fit_margin: float = 1024
    types: Sequence[str] = ()
    min: Sequence[str] = ()
    max: Sequence[str] = ()
    same: str = "gate-up"
    layer_group: int = 1
    max_types: int | None = None
    dialect: str | None = None
    effort: str = "normal"
    placement: Flags | str | None = None
    bandwidth: str | None = None
    runtime: str = PlanOptions.runtime
    ctx_size: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mla: int = 3
    allow_requantize: bool = False
    seconds: float = solver.SECONDS
    gap: float = solver.GAP

    @property
    def constraints(self) -> Constraints:
        """What is asked of types."""
        return Constraints(
            tuple(types.layout(name) for name in texts(self.types)),
            grouping.parse_bounds(texts(self.min), "--min"),
            grouping.parse_bounds(texts(self.max), "--max"),
            self.same,
            self.layer_group,
            self.max_types,
            self.runtime,
            self.dialect,
        )


@dataclass(frozen=True)
class RecipeFit:
    """The result of `fit_recipe`.

    recipe, plan, file_type   the rules, and what `quantize FILE_TYPE --recipe` makes of them
    tensors     the tensors whose types were free, with types, devices and predicted costs
    cost, error, gap   predicted KL divergence in nats per token, its standard error, the proven distance to the best
    size        bytes of the file; without a tokenizer (`is_exact` is False) those of its vocabulary are missing
    budget      loads of the devices; None without memory limits
    flags       placement flags that the recipe was made for
    notes       full sentences about what the costs do not say
    """

    recipe: Recipe
    plan: Plan
    file_type: str
    tensors: tuple[Allocated, ...]
    cost: float
    error: float
    gap: float
    size: int
    is_exact: bool
    budget: Budget | None
    flags: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document of `recipe fit --json`: a plan that `quantize --plan` executes, and `fit`."""
        figures = {"kld": self.cost, "kld_error": self.error, "gap": self.gap, "size": self.size,
                   "size_is_exact": self.is_exact, "flags": self.flags, "notes": list(self.notes),
                   "devices": self.budget and self.budget.to_json()}  # fmt: skip
        each = [{"name": t.name, "type": t.type.name, "device": t.device, "bytes": t.nbytes, "kld": t.cost} for t in
                self.tensors]  # fmt: skip
        return self.plan.to_json() | {"fit": figures | {"tensors": each}}


@dataclass(frozen=True)
class CurvePoint:
    """A size and the lowest predicted KL divergence at it: bits per weight, bytes of tensors, nats per token.

    label   the name of the type where all tensors have one; "" for an allocation
    """

    bits_per_weight: float
    nbytes: int
    cost: float
    label: str = ""

    def to_json(self) -> dict[str, Any]:
        """The point in the field `curve` of `recipe fit --json`."""
        return {"bits_per_weight": self.bits_per_weight, "bytes": self.nbytes, "kld": self.cost, "type": self.label}


def _of_dialect(options: FitOptions, costs: Costs) -> FitOptions:
    """The options with types that the program of the dialect reads. OptionError for others among those named."""
    if checked(options.dialect) is None:
        return options
    wanted = [kind.name for kind in options.constraints.types] or list(costs.types())
    read = tuple(name for name in wanted if reads(options.dialect, types.layout(name)))
    foreign = [name for name in wanted if name not in read]
    if foreign and (options.types or not read):
        raise OptionError(
            f"--types {','.join(foreign)}: --dialect {options.dialect} does not read them; `quantkit types` shows what "
            "it reads"
        )
    return dataclasses.replace(options, types=read)


class _Fit:
    """One model with its costs and options."""

    def __init__(self, model: PlanInput, costs: Costs, options: FitOptions, matrix: Imatrix | None, imatrix_file: str):
        self.model, self.costs, self.options = model, costs, _of_dialect(options, costs)
        self.matrix, self.imatrix_file = matrix, imatrix_file
        if options.same not in grouping.SAME:
            raise OptionError(f"--same {options.same}: choose one of {', '.join(grouping.SAME)}")
        if options.layer_group < 1:
            raise OptionError(f"--layer-group {options.layer_group}: a group has at least 1 layer")
        for flag, value in (("--bpw", options.bpw), ("--min-tg", options.min_tg), ("--seconds", options.seconds)):
            if value is not None and not 0 < value < _MOST:
                raise OptionError(f"{flag} {value:g}: a number above 0 and below {_MOST:g} is needed")
        rates = parse_rates(options.bandwidth or "", "--bandwidth", 1e9)
        n_ctx = context_size(options.ctx_size, model.metadata)
        self.cache = (
            None if n_ctx is None else CacheSettings(n_ctx, options.cache_type_k, options.cache_type_v, options.mla)
        )
        self.memory = Memory(*memory_sizes(options.vram, options.ram, options.fit_margin), self.cache)
        base = self.plan(parse(".*=q8_0"), "Q8_0")
        self.base = {t.name: t for t in base.tensors}
        self.free = [t for t in base.tensors if t.wanted is not None]
        self.kept = [t for t in base.tensors if t.wanted is None]
        flags = dataclasses.replace(placement_flags(options.placement), runtime=options.runtime)
        self.pools = pools(self.base, model.metadata, flags, self.memory)
        self.speed = self._speed(rates)

    def plan(self, recipe: Recipe, file_type: str) -> Plan:
        """The plan of a recipe; a complete importance matrix is assumed if none is given and a type needs one."""

        def planned(matrix: Imatrix | None) -> Plan:
            options = Options(allow_requantize=self.options.allow_requantize, dialect=self.options.dialect)
            return decide(
                self.model.tensors, file_type, recipe, metadata=self.model.metadata, imatrix=matrix, options=options
            )

        try:
            return planned(self.matrix)
        except ImportanceError:
            return planned(complete_imatrix(self.model.tensors))

    def _speed(self, rates: Mapping[str, float]) -> Speed | None:
        if self.options.min_tg is None:
            return None
        devices = {device for places in self.pools.devices.values() for device in places} | self.pools.caches.keys()
        count, used = routed_experts(self.model.metadata)
        seconds = {d: 1 / (rates.get(d) or ASSUMED["cuda" if d.startswith("CUDA") else "cpu"]) for d in devices}
        return Speed(seconds, used / count if count and used else 1.0, looked_up(self.base))

    def limits(self, header: int, more: Mapping[str, int]) -> dict[str, float]:
        """What is left for free tensors; `more` bytes by device are taken beside the estimate."""
        o, found = self.options, dict[str, float]()
        if o.size is not None:
            found[SIZE] = o.size - header - sum(grouping.padded(t.bytes_after) for t in self.kept)
        if o.bpw is not None:
            elements = sum(t.elements for t in self.base.values())
            found[BITS] = math.floor(o.bpw * elements / 8) - sum(t.bytes_after for t in self.kept)
        for device, limit in self.pools.limits.items():
            kept = sum(
                t.bytes_after for t in self.kept if device in self.pools.held_by(t.name, self.pools.devices[t.name][0])
            )
            found[device] = limit - self.pools.fixed.get(device, 0) - kept - more.get(device, 0)
        if o.min_tg is not None and self.speed is not None:
            fixed = sum(
                self.speed.seconds(t.name, self.pools.read_from(t.name, self.pools.devices[t.name][0]), t.bytes_after)
                for t in self.kept
            )
            fixed += sum(nbytes * self.speed.seconds_per_byte[d] for d, nbytes in self.pools.caches.items())
            found[SECONDS] = 1 / o.min_tg - fixed
        return found

    def result(self) -> RecipeFit:
        if not (self.options.size or self.options.bpw is not None or self.pools.limits):
            raise OptionError("recipe fit needs a limit: --size, --bpw, --vram, --ram or --devices with sizes")
        groups = self.groups()
        header, more = self._smallest_header(groups), dict[str, int]()
        for _ in range(_ATTEMPTS):
            limits = self.limits(header, more)
            try:
                problem = Problem(groups, limits, self.options.max_types)
                solution = solver.solve(problem, gap=self.options.gap, seconds=self.options.seconds)
            except InfeasibleError as error:
                raise DataError(self._infeasible(error)) from None
            chosen = _on_gpus(problem, solution.chosen) if self.pools.movable else solution.chosen
            found = self.made(groups, chosen, solution)
            excess = _excess(found.budget)
            if not excess and (self.options.size is None or found.size <= self.options.size):
                return found
            header = max(header, _header_bytes(found))
            more = {d: more.get(d, 0) + excess.get(d, 0) for d in more.keys() | excess.keys()}
        raise QuantkitError(
            f"after {_ATTEMPTS} solutions, header and working memory still exceed what is reserved for them; give a "
            "slightly larger limit"
        )

    def groups(self) -> tuple[Group, ...]:
        """The groups of tensors whose types are free."""
        return grouping.make_groups(self.free, self.costs, self.options.constraints, self.pools, self.speed)

    def curve(self, count: int) -> list[CurvePoint]:
        """The lowest costs at `count` sizes from the smallest to the largest, other limits left out."""
        groups = self.groups()
        sizes = [[option.uses[BITS] for option in group.options] for group in groups]
        low, high = sum(map(min, sizes)), sum(map(max, sizes))
        kept = sum(t.bytes_after for t in self.kept)
        elements = sum(t.elements for t in self.base.values())
        points = []
        for i in range(count):
            limit = low + (high - low) * i // max(1, count - 1)
            problem = Problem(groups, {BITS: limit}, self.options.max_types)
            try:
                solution = solver.solve(problem, gap=self.options.gap, seconds=self.options.seconds)
            except InfeasibleError:  # few types reach the smallest size only together with others
                continue
            nbytes = int(problem.used(solution.chosen)[BITS]) + kept
            points.append(CurvePoint(8 * nbytes / elements, nbytes, solution.cost))
        return points

    def single_types(self) -> list[CurvePoint]:
        """The size and cost of each type where all tensors have it, or their fallback."""
        found = []
        wanted = self.options.constraints.types or tuple(map(types.layout, self.costs.types()))
        for kind in wanted:
            plan = self.plan(parse(f".*={kind.name}"), "Q8_0")
            if (total := self.costs.predicted(plan.tensors)) is not None:
                found.append(CurvePoint(plan.bits_per_weight, plan.bytes_after, total, kind.name))
        return sorted(found, key=lambda point: point.nbytes)

    def _smallest_header(self, groups: Sequence[Group]) -> int:
        """Bytes of the header of the smallest file; the recipe is in the header, so others may have a longer one."""
        if self.options.size is None:
            return 0
        chosen = [min(group.options, key=lambda option: option.uses[SIZE]) for group in groups]
        return _header_bytes(self.made(groups, chosen, Solution(tuple(chosen), 0.0, 0.0)))

    def made(self, groups: Sequence[Group], chosen: Sequence[Option], solution: Solution) -> RecipeFit:
        """The recipe of a choice, planned."""
        tensors = [
            self._allocated(name, types.layout(kind), device)
            for group, option in zip(groups, chosen)
            for name, kind, device in zip(group.tensors, option.types, option.devices)
        ]
        order = {t.name: i for i, t in enumerate(self.free)}
        tensors.sort(key=lambda t: order[t.name])
        flags = self.pools.flags_for({t.name: t.device for t in tensors})
        error = math.sqrt(sum(self.costs.error(t.name, t.type) ** 2 for t in tensors if t.cost))
        file_type = file_type_for(tensors)
        recipe = parse(str(recipe_of(tensors, self._about(file_type, solution, error))), printed=True)
        plan = self.plan(recipe, file_type)
        self._require_as_planned(plan, tensors)
        placed = None
        if self.pools.limits:
            planned: dict[str, PlannedTensor] = {t.name: t for t in plan.tensors}
            memory = self.memory
            placed = budget(
                planned, self.model.metadata, flags, self.cache, memory.vram, memory.ram, memory.margin
            )  # fmt: skip
        size = written_size(self.model.metadata, plan, self.matrix, self.imatrix_file, self.options.effort)
        return RecipeFit(recipe, plan, file_type, tuple(tensors), solution.cost, error, solution.gap, size,
                         "tokenizer.ggml.tokens" in self.model.metadata, placed, _flags_text(flags),
                         self._notes(plan))  # fmt: skip

    def _allocated(self, name: str, kind: types.QuantType, device: str) -> Allocated:
        t = self.base[name]
        cost = self.costs.cost(name, t.shape, kind, t.source)
        return Allocated(name, kind, device, kind.tensor_bytes(t.shape), cost or 0.0)

    def _about(self, file_type: str, solution: Solution, error: float) -> str:
        o = self.options
        asked = [f"--size {o.size}" if o.size else "", f"--bpw {o.bpw:g}" if o.bpw else "",
                 f"--vram {','.join(f'{v:g}' for v in o.vram)}" if o.vram else "",
                 f"--ram {o.ram:g}" if o.ram is not None else ""]  # fmt: skip
        return (
            f"Made by quantkit recipe fit {' '.join(filter(None, asked))}; use it with TYPE {file_type}.\n"
            f"Predicted KL divergence {solution.cost:.5f} ± {error:.5f} nats per token; the best choice has at most "
            f"{100 * solution.gap:.3f} % less."
        )

    def _notes(self, plan: Plan) -> tuple[str, ...]:
        measured = {t.name: self.costs.tensors.get(t.name) for t in self.free}
        unused = [name for name, cost in measured.items() if cost is not None and cost.kld == cost.kld_error == 0]
        notes = [] if self.matrix is not None else [missing_imatrix(plan)]
        if unused:
            notes.append(
                f"{len(unused)} tensors cost nothing, because the model did not use them when costs were measured: "
                f"{listed(unused)}; give them a minimum with --min if your runtime uses them"
            )
        if absent := [name for name in self.costs.tensors if name not in self.base]:
            notes.append(
                f"{self.costs.where} has costs of {len(absent)} tensors that this model lacks, such as {listed(absent)}"
                "; if they are of another model, measure again with quantkit sensitivity"
            )
        used = self.costs.about.get("imatrix")
        if self.matrix is None and isinstance(used, str):
            notes.append(
                f"{self.costs.where} was measured with the importance matrix {used}, and none is given: without it the "
                "KL divergence is larger than predicted; pass --imatrix, here and to quantize"
            )
        return tuple(filter(None, notes))

    def _require_as_planned(self, plan: Plan, tensors: Sequence[Allocated]) -> None:
        planned = {t.name: t.type for t in plan.tensors}
        wrong = [t for t in tensors if planned[t.name] is not t.type]
        if wrong:
            raise QuantkitError(
                f"{wrong[0].name} was allocated as {wrong[0].type.name} and the recipe makes it "
                f"{planned[wrong[0].name].name}: a bug in recipe fit; report it with the command line"
            )

    def _infeasible(self, error: InfeasibleError) -> str:
        """The limits that are too small, by how much, and what would suffice."""
        lines = []
        for resource, amount in error.missing.items():
            if resource == SECONDS:
                needed = math.floor(100 / (1 / (self.options.min_tg or 1) + amount)) / 100
                lines.append(f"the smallest types reach {needed:.2f} tok/s, --min-tg asks for {self.options.min_tg:g}")
            elif resource == BITS:
                elements = sum(t.elements for t in self.base.values())
                needed = math.ceil(1000 * ((self.options.bpw or 0) + 8 * amount / elements)) / 1000
                lines.append(f"the smallest types need {needed:.3f} bits per weight, --bpw is {self.options.bpw:g}")
            elif resource == SIZE:
                size = self.options.size or 0
                lines.append(f"the smallest file has {size + amount:,.0f} bytes ({(size + amount) / GIB:.3f} GiB), "
                             f"--size is {size:,} ({size / GIB:.3f} GiB): {amount / GIB:.3f} GiB too much")  # fmt: skip
            else:
                lines.append(self._short_of_memory(resource, amount))
        return f"no choice of types fits: {'; '.join(lines)}"

    def _short_of_memory(self, device: str, amount: float) -> str:
        limit, fixed = self.pools.limits[device], self.pools.fixed.get(device, 0)
        margin = self.memory.margin if device != CPU.name else 0
        enough = f"{math.ceil(100 * (limit + margin + amount) / GIB) / 100:g}"
        flag = f"--ram {enough}" if device == CPU.name else f"--vram {enough}"
        if self.pools.flags.devices and not (device == CPU.name and self.memory.ram is not None):
            flag = f"--devices {device}={enough}GiB"
        reserved = f" less a margin of {margin / GIB:.3f}" if margin else ""
        return (
            f"{device} would need {(limit + amount) / GIB:.3f} GiB with the smallest types, {fixed / GIB:.3f} of it "
            f"for cache and working memory, and has {(limit + margin) / GIB:.3f}{reserved}: {amount / GIB:.3f} GiB too "
            f"much; give {flag} or more, smaller --types, or a shorter or quantized cache"
        )


def _on_gpus(problem: Problem, chosen: Sequence[Option]) -> tuple[Option, ...]:
    """The same types, with groups of the CPU moved to their GPU where it has free memory: a token reads them faster."""
    found = list(chosen)
    used = problem.used(found)
    for i, group in enumerate(problem.groups):
        now = found[i]
        for other in group.options:
            if other.types != now.types or other.devices.count(CPU.name) >= now.devices.count(CPU.name):
                continue
            changed = {r: used[r] + other.uses.get(r, 0) - now.uses.get(r, 0) for r in problem.limits}
            if all(changed[r] <= limit for r, limit in problem.limits.items()):
                found[i], used = other, changed
                break
    return tuple(found)


def _header_bytes(found: RecipeFit) -> int:
    return found.size - sum(grouping.padded(t.bytes_after) for t in found.plan.tensors)


def _excess(placed: Budget | None) -> dict[str, int]:
    """By how many bytes devices are too small."""
    left = {} if placed is None else {load.device: load.left or 0 for load in placed.loads}
    return {device: -free for device, free in left.items() if free < 0}


def _flags_text(flags: Flags) -> str:
    """The placement flags as typed on a command line; empty if everything is on the CPU."""
    from quantkit.placement.fit import Fitted
    from quantkit.placement.rules import Placement

    if not flags.gpu_layers and not flags.override_tensor:
        return ""
    return Fitted(dataclasses.replace(flags, gpu_layers=flags.gpu_layers or 0), Placement({})).text


def fit_recipe(
    model: PlanInput,
    costs: Costs,
    options: FitOptions,
    matrix: Imatrix | None = None,
    imatrix_file: str = "",
) -> RecipeFit:
    """Choose the type of every tensor of a model: the lowest predicted KL divergence within the limits of `options`.

    `matrix` is the importance matrix that the file will be quantized with; its name is in the file's header.
    DataError if nothing fits (what, by how much, the remedy), and for costs of another model.
    """
    types.effort_level(options.effort)
    return _Fit(model, costs, options, matrix, imatrix_file).result()


def cost_curve(model: PlanInput, costs: Costs, options: FitOptions, count: int = 16) -> list[CurvePoint]:
    """The lowest predicted KL divergence at `count` sizes between the smallest and the largest file.

    The limits of `options` are left out, its constraints hold.
    """
    return _Fit(model, costs, options, None, "").curve(count)


def single_types(model: PlanInput, costs: Costs, options: FitOptions | None = None) -> list[CurvePoint]:
    """Size and predicted KL divergence of files with one type for all tensors, smallest first."""
    return _Fit(model, costs, options or FitOptions(allow_requantize=True), None, "").single_types()
