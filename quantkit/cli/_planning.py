"""What `plan`, `quantize` and `recipe` share: options that decide types and places, the plan they make, its tables."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from quantkit.cli._runtime import PLACEMENT, Fit, OffloadPolicy, OffloadThreshold, placement_flags
from quantkit.cli._shared import RepackPattern, comma_separated, gib, mib, table, with_options
from quantkit.cli._terminal import message
from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUF
    from quantkit.formats.imatrix import Imatrix
    from quantkit.pipelines.convert import Conversion
    from quantkit.placement.budget import Budget
    from quantkit.recipe import Options, Plan, Recipe

Type = Annotated[str | None, typer.Option(metavar="T", show_default=False)]
ImatrixFile = Annotated[Path | None, typer.Option(help="Importance matrix.", metavar="FILE")]
CustomQ = Annotated[
    list[str] | None,
    typer.Option(metavar="RULES", help="Rules 're=type,…', or a file of them. Repeatable; the first match decides."),
]
TensorType = Annotated[
    list[str] | None, typer.Option(metavar="RE=TYPE", help="One such rule, after those of --custom-q. Repeatable.")
]
TensorTypeFile = Annotated[Path | None, typer.Option(metavar="FILE", help="A file of such rules, after them.")]
RecipeName = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="A recipe, or the GGUF made by it; after the rules of --custom-q."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Another value for a setting of the --recipe. Repeatable."),
]
Pure = Annotated[bool, typer.Option("--pure", help="TYPE for every tensor, no mix.")]
LeaveOutput = Annotated[bool, typer.Option("--leave-output-tensor", help="Keep output.weight as it is.")]
AllowRequantize = Annotated[
    bool, typer.Option("--allow-requantize", help="Also quantize tensors that are quantized already.")
]
IgnoreRules = Annotated[
    bool, typer.Option("--ignore-imatrix-rules", help="Allow very low-bit types without importance.")
]
IncludeWeights = Annotated[
    list[str] | None, typer.Option(metavar="S", help="Use only imatrix entries whose name holds S. Repeatable.")
]
ExcludeWeights = Annotated[
    list[str] | None, typer.Option(metavar="S", help="Use no imatrix entry whose name holds S. Repeatable.")
]
Repack = Annotated[
    bool, typer.Option("--repack", help="Interleave every tensor that can be, in the type that was decided.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Take warnings about the plan for errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every tensor and why it has its type.")]
Context = Annotated[
    int | None, typer.Option("--ctx-size", "-c", help="Count the cache of so many tokens.", min=1, show_default=False)
]
CacheTypeK = Annotated[str, typer.Option("--cache-type-k", "-ctk", metavar="T", help="Type of cached keys.")]
CacheTypeV = Annotated[str, typer.Option("--cache-type-v", "-ctv", metavar="T", help="Type of cached values.")]
Mla = Annotated[
    int, typer.Option("-mla", help="How latent attention caches: 0 full heads, 1 to 3 the latent.", min=0, max=3)
]
Vram = Annotated[str | None, typer.Option(metavar="GIB,…", help="Memory of each GPU, for telling whether it fits.")]
Ram = Annotated[float | None, typer.Option(metavar="GIB", help="Memory of the CPU.", show_default=False)]
FitMargin = Annotated[
    float, typer.Option(metavar="MIB", help="Of each GPU's memory, left for buffers of intermediate results.")
]
Bandwidth = Annotated[
    str | None,
    typer.Option(metavar="cpu=N,cuda:0=N", help="GB/s that devices read, for predicted speeds.", show_default=False),
]
Compute = Annotated[
    str | None,
    typer.Option(metavar="cpu=N,cuda:0=N", help="TFLOP/s of devices, for those of prompts.", show_default=False),
]

_CLASSES = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_down", "ffn_up")
_CHOOSING = ("custom_q", "tensor_type", "tensor_type_file", "recipe", "settings", "pure", "output_tensor_type",
             "token_embedding_type", "ffn_gate_inp_type", "leave_output_tensor",
             *(f"{name}_type" for name in _CLASSES))  # fmt: skip
_OPTION = {"settings": "set"}  # options whose name is not that of their field


@dataclass(frozen=True)
class Asked:
    """What options say about a plan, beside its file type; `asks` gives them to a command.

    placement   the values of PLACEMENT
    """

    imatrix: ImatrixFile = None
    custom_q: CustomQ = None
    tensor_type: TensorType = None
    tensor_type_file: TensorTypeFile = None
    recipe: RecipeName = None
    settings: Set = None
    pure: Pure = False
    output_tensor_type: Type = None
    token_embedding_type: Type = None
    ffn_gate_inp_type: Type = None
    attn_q_type: Type = None
    attn_k_type: Type = None
    attn_v_type: Type = None
    attn_qkv_type: Type = None
    attn_output_type: Type = None
    ffn_gate_type: Type = None
    ffn_down_type: Type = None
    ffn_up_type: Type = None
    leave_output_tensor: LeaveOutput = False
    allow_requantize: AllowRequantize = False
    ignore_imatrix_rules: IgnoreRules = False
    include_weights: IncludeWeights = None
    exclude_weights: ExcludeWeights = None
    repack: Repack = False
    repack_pattern: RepackPattern = None
    placement: Mapping[str, Any] = field(
        default_factory=lambda: {name: usual for name, (_, usual) in PLACEMENT.items()}
    )
    fit: Fit = False
    bandwidth: Bandwidth = None
    compute: Compute = None
    offload_threshold: OffloadThreshold = 32
    offload_policy: OffloadPolicy = None
    ctx_size: Context = None
    cache_type_k: CacheTypeK = "f16"
    cache_type_v: CacheTypeV = "f16"
    mla: Mla = 3
    vram: Vram = None
    ram: Ram = None
    fit_margin: FitMargin = 1024

    def refuse_choices(self) -> None:
        """Bad usage for options that choose types, beside a plan that has chosen them."""
        if chosen := self._given(*_CHOOSING, "repack", "repack_pattern"):
            raise decided(chosen)

    def require_no_choice(self) -> None:
        """Bad usage for options that choose types where no TYPE says what the other tensors become."""
        if chosen := self._given(*_CHOOSING):
            raise typer.BadParameter(
                f"TYPE is missing: what tensors become that {chosen} does not decide, as Q8_0; without TYPE the types "
                "that are there are shown"
            )

    def _given(self, *names: str) -> str:
        """The first of these options that was given, as typed."""
        return next((f"--{_OPTION.get(name, name).replace('_', '-')}" for name in names if getattr(self, name)), "")

    # -------------------------------------------------------------------------------------------------------- the plan

    def read_imatrix(self) -> Imatrix | None:
        include, exclude = self.include_weights, self.exclude_weights
        if include and exclude:
            raise typer.BadParameter("--include-weights and --exclude-weights contradict each other")
        if self.imatrix is None:
            if include or exclude:
                raise typer.BadParameter(
                    "--include-weights and --exclude-weights filter an importance matrix: pass --imatrix"
                )
            return None
        from quantkit.formats import imatrix

        matrix = imatrix.read(self.imatrix)
        if include:
            matrix.entries = {k: v for k, v in matrix.entries.items() if any(s in k for s in include)}
        if exclude:
            matrix.entries = {k: v for k, v in matrix.entries.items() if not any(s in k for s in exclude)}
        policy = f"; experts that saw no token: {matrix.policy}" if matrix.policy else ""
        about = f"{len(matrix)} entries, {matrix.chunks} chunks of {matrix.dataset or 'a text not named'}{policy}"
        print(f"importance matrix {self.imatrix}: {about}", file=sys.stderr)
        return matrix

    def rules(self) -> Recipe:
        """The rules of all --custom-q in order, of --tensor-type, of its file, then those of --recipe."""
        from quantkit.recipe import Recipe, find, parse

        found = Recipe()
        for text in self.custom_q or []:
            found += find(text, where="--custom-q")
        for text in self.tensor_type or []:
            found += parse(text, "--tensor-type")
        if self.tensor_type_file:
            found += find(self.tensor_type_file)
        values = read_settings(self.settings)
        if values and not self.recipe:
            raise typer.BadParameter("--set changes a setting of a recipe: pass --recipe")
        return found + find(self.recipe, values, "--recipe") if self.recipe else found

    def options(self) -> Options:
        from quantkit import types
        from quantkit.recipe import Options

        named = (self.output_tensor_type, self.token_embedding_type, self.ffn_gate_inp_type)
        output, embedding, router = (types.layout(name) if name else None for name in named)
        of_class = {name: getattr(self, f"{name}_type") for name in _CLASSES}
        chosen = {name: types.layout(t) for name, t in of_class.items() if t}
        switches = (self.leave_output_tensor, self.allow_requantize, self.ignore_imatrix_rules, self.repack)
        return Options(
            self.pure, output, embedding, router, chosen, *switches, tuple(comma_separated(self.repack_pattern))
        )

    def plan(self, model: Model, file_type: str, matrix: Imatrix | None) -> Plan:
        from quantkit.recipe import plan

        return plan(
            model.tensors,
            file_type,
            self.rules(),
            metadata=model.metadata,
            imatrix=matrix,
            options=self.options(),
        )

    def plan_only(self, model: Model, file_type: str) -> Plan:
        """The plan, which nobody executes: where a type needs an importance matrix and none is given, one that lacks
        nothing is taken to be there, with a warning."""
        from quantkit.recipe import ImportanceError

        try:
            return self.plan(model, file_type, self.read_imatrix())
        except ImportanceError:
            made = self.plan(model, file_type, complete_imatrix(model))
            return dataclasses.replace(made, warnings=(*made.warnings, missing_imatrix(made)))

    # ------------------------------------------------------------------------------------------------------- the places

    def budget(self, plan: Plan, metadata: Mapping[str, Any]) -> Budget | None:
        """Where the plan's tensors go and what a cache takes; None where nothing was asked about that."""
        from quantkit.placement.budget import GIB, Cache, budget, experts_to_keep
        from quantkit.placement.devices import CPU, Device
        from quantkit.placement.offload import parse_ops
        from quantkit.placement.rules import Flags

        offload = parse_ops(self.offload_policy or "", self.offload_threshold)
        flags = placement_flags(self.placement)
        asked = (flags != Flags(), self.ctx_size, self.vram, self.ram, self.fit, self.bandwidth, self.compute)
        if not any(asked):
            return None
        cache = Cache(self.ctx_size, self.cache_type_k, self.cache_type_v, self.mla) if self.ctx_size else None
        vram = [int(size * GIB) for size in _numbers("--vram", self.vram)]
        if vram and flags.devices:
            raise typer.BadParameter(
                "--vram gives CUDA0, CUDA1, … their memory, and so does --devices; drop one of them"
            )
        ram = next((device.memory for device in flags.devices if device == CPU), None)
        ram = ram if self.ram is None else int(self.ram * GIB)
        margin, tensors = int(self.fit_margin * 2**20), {t.name: t for t in plan.tensors}
        notes = []
        if self.fit:
            from quantkit.placement.fit import fit

            gpus = flags.devices[1:] or tuple(Device(f"CUDA{i}", size) for i, size in enumerate(vram))
            there = (Device(CPU.name, ram), *gpus)
            caches = cache.of_layers(metadata) if cache else ()
            fitted = fit(tensors, metadata, there, caches, margin=margin, flags=flags, mla=self.mla)
            flags, vram = dataclasses.replace(fitted.flags, devices=there), []
            notes.append(f"--fit: the same as {fitted.text}")
        about = (tensors, metadata, flags, cache, vram, ram, margin)
        found = budget(*about, offload=offload)
        if found.fits is False and vram and (count := experts_to_keep(*about)):
            found = dataclasses.replace(found, warnings=(*found.warnings, f"all fits with --n-cpu-moe {count}"))
        return dataclasses.replace(found, notes=(*notes, *found.notes), speed=self._speed(found, tensors, metadata))

    def _speed(self, found: Budget, tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
        """What the placement's bytes allow; None where neither rates nor a context were given."""
        if not (self.bandwidth or self.compute or self.fit):
            return None
        from quantkit.placement.speed import parse_rates, predict

        caches = {load.device: load.cache for load in found.loads if load.cache}
        bandwidth = parse_rates(self.bandwidth or "", "--bandwidth", 1e9)
        compute = parse_rates(self.compute or "", "--compute", 1e12)
        return predict(tensors, metadata, found.placement, caches, bandwidth, compute)


def asks(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: give a command the options of Asked, but for some, in place of its parameter `asked`."""
    kinds, options = get_type_hints(Asked, include_extras=True), dict[str, tuple[Any, Any]]()
    for f in dataclasses.fields(Asked):
        if f.name == "placement":
            options |= PLACEMENT
        elif f.name not in without:
            options[f.name] = kinds[f.name], f.default

    def make(given: dict[str, Any]) -> Asked:
        return Asked(placement={name: given.pop(name) for name in PLACEMENT}, **given)

    return lambda command: with_options(command, "asked", options, make)


def decided(option: str) -> typer.BadParameter:
    return typer.BadParameter(f"--plan has decided every type, so {option} would do nothing; drop one of them")


def read_settings(texts: Sequence[str] | None) -> dict[str, str]:
    """The NAME=VALUE of --set."""
    found = {}
    for text in texts or ():
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name or not value:
            raise typer.BadParameter(f"--set '{text}' is not NAME=VALUE")
        found[name] = value
    return found


def _numbers(flag: str, text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{flag} '{text}': numbers of GiB parted by commas, one a GPU, as 24,24") from None


@dataclass(frozen=True)
class Model:
    """What is planned: the tensors of a GGUF file or a checkpoint, or of a config.json alone (`file` is None then)."""

    tensors: list[Any]
    metadata: Mapping[str, Any]
    file: GGUF | Conversion | None


def open_source(path: Path, weights: bool = False, pre: str | None = None) -> Model:
    """A GGUF file, a checkpoint's directory or its config.json; of the latter two no weight is looked at.

    With `weights` those of a directory are found, to be read as `convert` would write them; `pre` as of `convert`.
    """
    from quantkit.recipe import from_config, is_config, read_config

    if weights and path.is_dir():
        from quantkit.pipelines.convert import STORED, prepare

        checkpoint = prepare(path, STORED, pre)
        return Model(list(checkpoint.tensors.values()), checkpoint.metadata, checkpoint)
    if is_config(path):
        tensors, metadata = from_config(read_config(path), str(path))
        return Model(list(tensors), metadata, None)
    from quantkit.archs.common import validate
    from quantkit.formats import gguf

    file = gguf.require_model(gguf.open(path))
    validate.check_sizes(file.metadata, path)
    return Model(list(file.tensors.values()), file.metadata, file)


def complete_imatrix(model: Model) -> Imatrix:
    """An importance matrix that has an entry for every matrix of a model; it takes no memory."""
    import numpy as np

    from quantkit.formats.imatrix import Entry, Imatrix

    entries = {}
    for t in model.tensors:
        if len(t.shape) > 1:
            matrices = math.prod(t.shape[:-2])
            ones = np.broadcast_to(np.float32(1), (matrices, t.shape[-1]))
            entries[t.name] = Entry(ones, np.full(matrices, 1 << 20), 1)
    return Imatrix(entries, 1, "", 1 << 20)


def missing_imatrix(plan: Plan) -> str:
    """A warning about the tensors that need an importance matrix, for a plan without one; empty where none does."""
    from quantkit.recipe.planner import is_very_low

    needing = [
        t
        for t in plan.tensors
        if not (t.copied or t.relaid) and (t.type.requires_imatrix or is_very_low(t.name, t.type, plan.file_type))
    ]
    if not needing:
        return ""
    kinds = ", ".join(dict.fromkeys(t.type.name for t in needing))
    return (
        f"{len(needing)} tensors, as {needing[0].name}, become {kinds}, which needs an importance matrix; pass "
        "--imatrix FILE to see whether yours serves"
    )


def document(plan: Plan, budget: Budget | None) -> dict[str, Any]:
    """A plan as JSON."""
    return plan.to_json() | ({"budget": budget.to_json()} if budget else {})


def require_clean(plan: Plan, budget: Budget | None) -> None:
    """A QuantkitError that tells all warnings, if there are any."""
    plan.require_clean()
    if budget and budget.warnings:
        raise QuantkitError("; ".join(budget.warnings))


# ------------------------------------------------------------------------------------------------------------- printing


def print_plan(plan: Plan, verbose: bool = False, budget: Budget | None = None, explain: bool = False) -> None:
    """Classes of tensors by type, what each rule did, the types, the devices, warnings, sizes."""
    if verbose:
        each = [(t.name, "x".join(map(str, t.shape)), t.source.name, t.type.name, t.reason, mib(t.bytes_after))
                for t in plan.tensors]  # fmt: skip
        print(table(("tensor", "shape", "from", "to", "why", "size"), each, left=5), end="\n\n")
    print(table(("tensors", "from", "to", "why", "count", "size"), _classes(plan), left=4), end="\n\n")
    if plan.rules:
        rows = [
            (i, str(use.rule), _some(use.decided), len(use.matched), len(use.decided))
            for i, use in enumerate(plan.rules, 1)
        ]
        print(table(("rule", "regex=type", "takes", "matches", "decides"), rows, left=3), end="\n\n")
    if plan.fallbacks:
        print(table(("does not fit", "type", "columns", "becomes", "count"), _fallbacks(plan), left=2), end="\n\n")
    if len(plan.types()) > 1:
        print(table(("type", "count", "size", "bpw"), _types(plan)), end="\n\n")
    if budget:
        print_budget(budget, explain)
    for note in plan.notes:
        print(f"note: {note}")
    for warning in (*plan.warnings, *(budget.warnings if budget else ())):
        print(f"warning: {message(warning)}")
    print(
        f"{_names(plan)}: {len(plan.tensors)} tensors, {gib(plan.bytes_before)} -> {gib(plan.bytes_after)}, "
        f"{plan.bits_per_weight:.3f} bits per weight"
    )


def print_budget(budget: Budget, explain: bool = False) -> None:
    """What each device holds, what the cache is for, whether all fits, how fast it could be."""
    rows = []
    for load in budget.loads:
        limits = ("", "") if load.limit is None else (gib(load.limit), gib(load.left or 0))
        sizes = (mib(load.weights), mib(load.cache), mib(load.buffers) if load.buffers else "", gib(load.total))
        rows.append((load.device, load.tensors, *sizes, *limits))
    print(table(("device", "tensors", "weights", "cache", "buffers", "total", "of", "left"), rows), end="\n\n")
    if len(budget.loads) > 1:
        kinds = [
            (load.device, *(f"{what} {gib(size)}" for what, size in load.classes.items())) for load in budget.loads
        ]
        print("\n".join(f"{device}: {', '.join(parts)}" for device, *parts in kinds if parts), end="\n\n")
    if explain:
        print(table(("tensors", "device", "why", "count"), _reasons(budget), left=3), end="\n\n")
    for rule, count in zip(budget.placement.rules, budget.placement.decided):
        print(f"{rule.said} places {count} tensors")
    for note in budget.notes:
        print(note)
    if budget.speed is not None:
        print("\n".join(budget.speed.lines))
    margin = max((load.margin for load in budget.loads), default=0)
    if budget.fits is not None:
        reserve = f", with {mib(margin)} of each GPU left for buffers" if margin else ""
        print(f"{'fits' if budget.fits else 'does not fit'}{reserve}")
    print()


def _reasons(budget: Budget) -> list[tuple[Any, ...]]:
    """Tensors of one kind, device and reason but for its layer, as one line each."""
    from quantkit.recipe.layers import summarised

    placement = budget.placement
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, device in placement.devices.items():
        where = "/".join(d.name for d in placement.graph) if name in placement.sliced else device.name
        why = re.sub(r"layer \d+", "layer", placement.reasons[name])
        grouped[where, why if len(why) < 80 else f"{why[:78]} …"].append(name)
    return [(kind, where, why, count) for (where, why), names in grouped.items()
            for kind, count in summarised(names).items()]  # fmt: skip


def _some(names: Sequence[str]) -> str:
    """A few of the tensors that a rule decided, layers as ranges."""
    from quantkit.recipe.layers import summarised

    classes = list(summarised(names))
    shown = classes if len(classes) < 4 else classes[:2]
    return ", ".join(shown) + (f" and {len(classes) - 2} more classes" if len(classes) > len(shown) else "")


def _fallbacks(plan: Plan) -> list[tuple[Any, ...]]:
    from quantkit.recipe.layers import summarised

    found: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for t in plan.fallbacks:
        found[(t.wanted or t.type).name, t.shape[-1], t.row_type.name].append(t.name)
    return [(name, *key, count) for key, names in found.items() for name, count in summarised(names).items()]


def _types(plan: Plan) -> list[tuple[Any, ...]]:
    return [(use.type.name, use.count, mib(use.bytes), f"{use.bits_per_weight:.3f}") for use in plan.by_type()]


def _names(plan: Plan) -> str:
    """The file type asked for, and the one that the output names where that is another."""
    name, written = plan.file_type.name, plan.written_type.name
    return name if name == written else f"{name}, written as {written}"


def _classes(plan: Plan) -> list[tuple[Any, ...]]:
    """Tensors that differ only in their layer, source, type and reason, as one line each; * stands for all layers."""
    from quantkit.recipe.layers import ranges

    grouped: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    layers: dict[Any, set[int]] = defaultdict(set)
    for t in plan.tensors:
        found = re.match(r"blk\.(\d+)\.(.*)", t.name)
        name = f"blk.#.{found[2]}" if found else t.name
        key = (name, t.source.name, t.type.name, t.reason)
        grouped[key].append(t.bytes_after)
        if found:
            layers[key].add(int(found[1]))
            layers[name].add(int(found[1]))
    rows = []
    for key, sizes in grouped.items():
        which = "*" if layers[key] == layers[key[0]] else f"{{{ranges(layers[key])}}}"
        rows.append((key[0].replace("#", which), *key[1:], len(sizes), mib(math.fsum(sizes))))
    return rows
