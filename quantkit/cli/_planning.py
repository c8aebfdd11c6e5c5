"""Shared parts of `plan`, `quantize` and `recipe`: options for types and placement, the plan, its tables."""

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

Type = Annotated[str | None, typer.Option(metavar="TYPE", show_default=False)]
ImatrixFile = Annotated[Path | None, typer.Option(help="Importance matrix.", metavar="FILE")]
CustomQ = Annotated[
    list[str] | None,
    typer.Option(metavar="RULES", help="Rules 'REGEX=TYPE,…' or a file of them. Repeatable; the first match decides."),
]
TensorType = Annotated[
    list[str] | None,
    typer.Option(metavar="REGEX=TYPE", help="One rule, applied after those of --custom-q. Repeatable."),
]
TensorTypeFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file of rules, applied after --tensor-type.")
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE", help="A recipe, or a GGUF file that contains one; applied after all other rules."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of the --recipe. Repeatable."),
]
Pure = Annotated[bool, typer.Option("--pure", help="Use TYPE for every tensor, without a mix.")]
LeaveOutput = Annotated[bool, typer.Option("--leave-output-tensor", help="Do not quantize output.weight.")]
AllowRequantize = Annotated[
    bool, typer.Option("--allow-requantize", help="Allow quantized tensors to be quantized again.")
]
IgnoreRules = Annotated[
    bool, typer.Option("--ignore-imatrix-rules", help="Allow very low-bit types without an importance matrix.")
]
IncludeWeights = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Use only imatrix entries whose name contains TEXT. Repeatable."),
]
ExcludeWeights = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Ignore imatrix entries whose name contains TEXT. Repeatable.")
]
Repack = Annotated[
    bool, typer.Option("--repack", help="Also interleave the rows of every tensor whose type has an interleaved form.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Treat warnings about the plan as errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every tensor with the reason for its type.")]
Context = Annotated[
    int | None,
    typer.Option("--ctx-size", "-c", metavar="N", help="Include a KV cache for N tokens.", min=1, show_default=False),
]
CacheTypeK = Annotated[str, typer.Option("--cache-type-k", "-ctk", metavar="TYPE", help="Type of the K cache.")]
CacheTypeV = Annotated[str, typer.Option("--cache-type-v", "-ctv", metavar="TYPE", help="Type of the V cache.")]
Mla = Annotated[
    int, typer.Option("-mla", help="KV cache of MLA: 0 stores full heads, 1 to 3 the latent.", min=0, max=3)
]
Vram = Annotated[str | None, typer.Option(metavar="GIB,…", help="Memory of each GPU, to check whether the model fits.")]
Ram = Annotated[float | None, typer.Option(metavar="GIB", help="Main memory of the CPU.", show_default=False)]
Runtime = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Program that will run the model, ik_llama.cpp or quantkit: which interleaved types its GPUs take.",
    ),
]
FitMargin = Annotated[float, typer.Option(metavar="MIB", help="Memory of each GPU to reserve for compute buffers.")]
Bandwidth = Annotated[
    str | None,
    typer.Option(metavar="cpu=N,cuda:0=N", help="Memory bandwidth in GB/s, to predict speeds.", show_default=False),
]
Compute = Annotated[
    str | None,
    typer.Option(metavar="cpu=N,cuda:0=N", help="Compute in TFLOP/s, to predict prompt speeds.", show_default=False),
]

_CLASSES = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_down", "ffn_up")
_TYPE_OPTIONS = ("custom_q", "tensor_type", "tensor_type_file", "recipe", "settings", "pure", "output_tensor_type",
             "token_embedding_type", "ffn_gate_inp_type", "leave_output_tensor",
             *(f"{name}_type" for name in _CLASSES))  # fmt: skip
_OPTION_NAMES = {"settings": "set"}  # options whose name is not that of their field


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan besides its file type. `takes_plan_options` adds them to a command.

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
    runtime: Runtime = "ik_llama.cpp"

    def refuse_type_options(self) -> None:
        """Bad usage for options that choose types together with --plan, which has chosen them."""
        if chosen := self._given(*_TYPE_OPTIONS, "repack", "repack_pattern"):
            raise conflicts_with_plan(chosen)

    def require_no_type_options(self) -> None:
        """Bad usage for options that choose types without TYPE, which the other tensors need."""
        if chosen := self._given(*_TYPE_OPTIONS):
            raise typer.BadParameter(
                f"TYPE is missing: the type of tensors that {chosen} does not decide, for example Q8_0; to see the "
                f"current types, leave {chosen} out"
            )

    def _given(self, *names: str) -> str:
        """The first of these options that the user gave, as typed."""
        return next(
            (f"--{_OPTION_NAMES.get(name, name).replace('_', '-')}" for name in names if getattr(self, name)), ""
        )

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
        policy = f"; experts without tokens: {matrix.policy}" if matrix.policy else ""
        about = f"{len(matrix)} entries, {matrix.chunks} chunks of {matrix.dataset or 'an unnamed text'}{policy}"
        print(f"importance matrix {self.imatrix}: {about}", file=sys.stderr)
        return matrix

    def rules(self) -> Recipe:
        """The rules of --custom-q, --tensor-type, --tensor-type-file and --recipe, in this order."""
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
        """A plan to show, not to execute.

        If a type needs an importance matrix and none is given, a complete one is assumed, with a warning.
        """
        from quantkit.recipe import ImportanceError

        try:
            return self.plan(model, file_type, self.read_imatrix())
        except ImportanceError:
            made = self.plan(model, file_type, complete_imatrix(model))
            return dataclasses.replace(made, warnings=(*made.warnings, missing_imatrix(made)))

    # ------------------------------------------------------------------------------------------------------- placement

    def budget(self, plan: Plan, metadata: Mapping[str, Any]) -> Budget | None:
        """The devices of the plan's tensors and the size of the cache; None without an option about either."""
        from quantkit.placement.budget import GIB, Cache, budget, experts_to_keep
        from quantkit.placement.devices import CPU, Device
        from quantkit.placement.offload import parse_ops
        from quantkit.placement.rules import Flags

        offload = parse_ops(self.offload_policy or "", self.offload_threshold)
        flags = placement_flags(self.placement)
        given = (flags != Flags(), self.ctx_size, self.vram, self.ram, self.fit, self.bandwidth, self.compute)
        flags = dataclasses.replace(flags, runtime=self.runtime)
        if not any(given):
            return None
        cache = Cache(self.ctx_size, self.cache_type_k, self.cache_type_v, self.mla) if self.ctx_size else None
        vram = [int(size * GIB) for size in _numbers("--vram", self.vram)]
        if vram and flags.devices:
            raise typer.BadParameter("--vram and --devices both set the memory of CUDA0, CUDA1, …; drop one of them")
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
            notes.append(f"--fit for {flags.runtime}: equivalent to {fitted.text}")
        about = (tensors, metadata, flags, cache, vram, ram, margin)
        found = budget(*about, offload=offload)
        if found.fits is False and vram and (count := experts_to_keep(*about)):
            found = dataclasses.replace(found, warnings=(*found.warnings, f"the model fits with --n-cpu-moe {count}"))
        return dataclasses.replace(found, notes=(*notes, *found.notes), speed=self._speed(found, tensors, metadata))

    def _speed(self, found: Budget, tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
        """The predicted speed of the placement; None without --bandwidth, --compute and --fit."""
        if not (self.bandwidth or self.compute or self.fit):
            return None
        from quantkit.placement.speed import parse_rates, predict

        caches = {load.device: load.cache for load in found.loads if load.cache}
        bandwidth = parse_rates(self.bandwidth or "", "--bandwidth", 1e9)
        compute = parse_rates(self.compute or "", "--compute", 1e12)
        return predict(tensors, metadata, found.placement, caches, bandwidth, compute)


def takes_plan_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: replace a command's parameter `options` by the options of PlanOptions, except those named."""
    kinds, options = get_type_hints(PlanOptions, include_extras=True), dict[str, tuple[Any, Any]]()
    for f in dataclasses.fields(PlanOptions):
        if f.name == "placement":
            options |= PLACEMENT
        elif f.name not in without:
            options[f.name] = kinds[f.name], f.default

    def make(given: dict[str, Any]) -> PlanOptions:
        return PlanOptions(placement={name: given.pop(name) for name in PLACEMENT}, **given)

    return lambda command: with_options(command, "options", options, make)


def conflicts_with_plan(option: str) -> typer.BadParameter:
    return typer.BadParameter(f"--plan decides every type, so {option} has no effect; drop one of them")


def read_settings(texts: Sequence[str] | None) -> dict[str, str]:
    """The values of --set NAME=VALUE."""
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
        raise typer.BadParameter(
            f"{flag} '{text}': write the GiB of each GPU, comma-separated, for example 24,24"
        ) from None


@dataclass(frozen=True)
class Model:
    """The input of a plan: the tensors of a GGUF file or a checkpoint, or of a config.json (then `file` is None)."""

    tensors: list[Any]
    metadata: Mapping[str, Any]
    file: GGUF | Conversion | None


def open_source(path: Path, weights: bool = False, pre: str | None = None) -> Model:
    """Open a GGUF file, a checkpoint directory or its config.json; of the latter two, no weight file is opened.

    With `weights`, the weight files of a directory are opened too, to read tensors as `convert` would write them. `pre`
    is the option of `convert`.
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
    """A placeholder importance matrix with an entry for every matrix of a model; it takes no memory."""
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
    """The warning for tensors of a plan that need an importance matrix; empty if there are none."""
    from quantkit.recipe.planner import is_very_low

    needing = [
        t
        for t in plan.tensors
        if not (t.copied or t.reordered) and (t.type.requires_imatrix or is_very_low(t.name, t.type, plan.file_type))
    ]
    if not needing:
        return ""
    kinds = ", ".join(dict.fromkeys(t.type.name for t in needing))
    return (
        f"{len(needing)} tensors, for example {needing[0].name}, become {kinds}, which needs an importance matrix; "
        "pass --imatrix FILE to check yours"
    )


def document(plan: Plan, budget: Budget | None) -> dict[str, Any]:
    """A plan as JSON."""
    return plan.to_json() | ({"budget": budget.to_json()} if budget else {})


def require_clean(plan: Plan, budget: Budget | None) -> None:
    """Raise a QuantkitError with all warnings, if there are any."""
    plan.require_clean()
    if budget and budget.warnings:
        raise QuantkitError("; ".join(budget.warnings))


# ------------------------------------------------------------------------------------------------------------- printing


def print_plan(plan: Plan, verbose: bool = False, budget: Budget | None = None, explain: bool = False) -> None:
    """Print tensors by class, the effect of each rule, types, devices, warnings and sizes."""
    if verbose:
        each = [(t.name, "x".join(map(str, t.shape)), t.source.name, t.type.name, t.reason, mib(t.bytes_after))
                for t in plan.tensors]  # fmt: skip
        print(table(("tensor", "shape", "from", "to", "why", "size"), each, left=5), end="\n\n")
    print(table(("tensors", "from", "to", "why", "count", "size"), _classes(plan), left=4), end="\n\n")
    if plan.rules:
        rows = [
            (i, str(use.rule), _examples(use.decided), len(use.matched), len(use.decided))
            for i, use in enumerate(plan.rules, 1)
        ]
        print(table(("rule", "regex=type", "tensors", "matches", "decides"), rows, left=3), end="\n\n")
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
    """Print the contents of each device, the cache, whether the model fits, and the predicted speed."""
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
        print(f"{rule.text} places {count} tensors")
    for note in budget.notes:
        print(note)
    if budget.speed is not None:
        print("\n".join(budget.speed.lines))
    margin = max((load.margin for load in budget.loads), default=0)
    if budget.fits is not None:
        reserve = f", with {mib(margin)} of each GPU reserved for buffers" if margin else ""
        print(f"{'fits' if budget.fits else 'does not fit'}{reserve}")
    print()


def _reasons(budget: Budget) -> list[tuple[Any, ...]]:
    """One row per class of tensors with the same device and reason, layers as ranges."""
    from quantkit.recipe.layers import summarised

    placement = budget.placement
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, device in placement.devices.items():
        where = "/".join(d.name for d in placement.graph) if name in placement.sharded else device.name
        why = re.sub(r"layer \d+", "layer", placement.reasons[name])
        grouped[where, why if len(why) < 80 else f"{why[:78]} …"].append(name)
    return [(kind, where, why, count) for (where, why), names in grouped.items()
            for kind, count in summarised(names).items()]  # fmt: skip


def _examples(names: Sequence[str]) -> str:
    """Up to three classes of the tensors that a rule decided, layers as ranges."""
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
    return [(use.type.name, use.tensors, mib(use.bytes), f"{use.bits_per_weight:.3f}") for use in plan.by_type()]


def _names(plan: Plan) -> str:
    """The requested file type, and general.file_type of the output if it is another."""
    name, written = plan.file_type.name, plan.written_type.name
    return name if name == written else f"{name}, written as {written}"


def _classes(plan: Plan) -> list[tuple[Any, ...]]:
    """One row per class of tensors with the same source, type and reason; * stands for all layers."""
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
