"""Plan a model by options: open it, read importance matrix and rules, decide types, place tensors on devices.

    model = open_model("HF_DIR", weights=True)         or a GGUF file, or a config.json without weights
    matrix = read_imatrix(options)
    type_plan = plan_types(model, "Q4_K_M", options, matrix)
    devices = plan_devices(options, type_plan, model.metadata)

The decisions are made by `recipe` and `placement`; this module reads the files that options name.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import types
from quantkit.archs.common import validate
from quantkit.errors import OptionError, QuantkitError
from quantkit.formats import gguf, imatrix
from quantkit.formats.gguf import GGUF
from quantkit.formats.imatrix import Entry, Imatrix
from quantkit.hub import models
from quantkit.inputs import json_input
from quantkit.pipelines.options import PathLike, PlanOptions, QuantizeOptions, TypeOptions, comma_separated, texts
from quantkit.placement.budget import GIB, Budget, CacheSettings, budget, experts_to_keep
from quantkit.placement.devices import CPU, Device
from quantkit.placement.fit import fit
from quantkit.placement.offload import parse_ops
from quantkit.placement.rules import Flags, parse_flags
from quantkit.placement.speed import PredictedSpeed, parse_rates, predict
from quantkit.recipe import (
    ImportanceError,
    Options,
    Plan,
    Recipe,
    find,
    from_config,
    is_config,
    parse,
    read_config,
    replay,
)
from quantkit.recipe import plan as decide
from quantkit.recipe.planning.dialects import checked
from quantkit.recipe.planning.planner import Tensor, is_very_low

if TYPE_CHECKING:
    from quantkit.pipelines.conversion.plan import CheckpointView, Conversion

CLASSES = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_down", "ffn_up")
# Options that choose types, in the order in which a message names them.
CHOOSING = ("custom_q", "tensor_type", "tensor_type_file", "recipe", "settings", "pure", "output_tensor_type",
            "token_embedding_type", "per_layer_token_embedding_type", "ffn_gate_inp_type", "leave_output_tensor",
            *(f"{name}_type" for name in CLASSES))  # fmt: skip
_MOST = 1e9  # GiB or MiB of a device: more is a mistake, and the bytes are a 64-bit number
_MOST_TOKENS = 1 << 31
_FLAGS = {"settings": "set"}  # options whose flag has another name


# --------------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class PlanInput:
    """The input of a plan: a GGUF file, a checkpoint, or a config.json alone.

    tensors   name, shape and type of each tensor
    metadata  GGUF keys
    file      the opened weights; None without weights
    """

    tensors: Sequence[Tensor]
    metadata: Mapping[str, Any]
    file: GGUF | CheckpointView | None

    @classmethod
    def of(cls, file: GGUF | CheckpointView) -> PlanInput:
        """An opened input."""
        return cls(list(file.tensors.values()), file.metadata, file)


def open_model(
    source: PathLike | GGUF | Conversion | PlanInput,
    weights: bool = False,
    options: QuantizeOptions | None = None,
    mtp: str = "auto",
    in_any_order: bool = False,
) -> PlanInput:
    """Open a GGUF file, a checkpoint directory or its config.json; of the latter two, no weight file is opened.

    All three may be on the Hub. There, a GGUF file is fetched if its weights are wanted, and only its header if not.

    With `weights`, the weight files of a directory are opened too, to read tensors as `convert` would write them. The
    `options` pre, metadata and model_name are those of `convert`; the latter two are an OptionError for a GGUF file.
    `mtp` says what becomes of a checkpoint's MTP layers, as in `convert`; of a GGUF file `quantkit mtp split` takes
    them. What is open already is only wrapped. `in_any_order`: tensors of a checkpoint on the Hub are read at any
    time.
    """
    options = options or QuantizeOptions()
    if isinstance(source, PlanInput):
        return source
    address = models.checkpoint_address(source)
    if address is not None and weights:
        from quantkit.pipelines.conversion.plan import VALUES
        from quantkit.pipelines.conversion.remote import plan_remote

        return PlanInput.of(plan_remote(address, VALUES, options, mtp, in_any_order).as_gguf)
    if address is None and (options.disk is not None or options.keep_shards):
        raise OptionError(f"{source} is not a checkpoint on the Hub, which --disk and --keep-shards are about")
    if isinstance(source, (str, os.PathLike)):
        source = models.model_file(source) if weights else models.header_file(source, config=True)
    if isinstance(source, (str, os.PathLike)) and weights and Path(source).is_dir():
        from quantkit.pipelines.conversion.plan import VALUES, plan_conversion

        made = plan_conversion(source, VALUES, options.pre, mtp, options.metadata, options.model_name)
        return PlanInput.of(made.as_gguf)
    if options.metadata is not None or options.model_name is not None:
        raise OptionError(
            "--metadata and --model-name describe the model of a checkpoint directory; a file has its description: "
            "change it with --override-kv general.name=str:NAME"
        )
    is_checkpoint = isinstance(source, (str, os.PathLike)) and is_config(Path(source))
    if mtp != "auto" and not is_checkpoint:
        raise OptionError(
            f"--mtp {mtp} is about the MTP layers of a checkpoint; for a GGUF file use `quantkit mtp split`"
        )
    if not isinstance(source, (str, os.PathLike)):
        return PlanInput.of(source if isinstance(source, GGUF) else source.as_gguf)
    path = Path(source)
    if is_config(path):
        tensors, metadata = from_config(read_config(path), str(path), mtp)
        return PlanInput(list(tensors), metadata, None)
    file = gguf.require_model(gguf.open(path))
    validate.check_sizes(file.metadata, path)
    return PlanInput.of(file)


def read_imatrix(options: TypeOptions) -> Imatrix | None:
    """The importance matrix of the options, with the entries that they select; None if they name none."""
    include, exclude = texts(options.include_weights), texts(options.exclude_weights)
    if include and exclude:
        raise OptionError("--include-weights and --exclude-weights contradict each other")
    if options.imatrix is None:
        if include or exclude:
            raise OptionError("--include-weights and --exclude-weights filter an importance matrix: pass --imatrix")
        if options.no_second_moments:
            raise OptionError("--no-second-moments is about an importance matrix: pass --imatrix")
        return None
    matrix = options.imatrix if isinstance(options.imatrix, Imatrix) else imatrix.read(options.imatrix)
    entries = matrix.entries
    if include:
        entries = {k: v for k, v in entries.items() if any(s in k for s in include)}
    if exclude:
        entries = {k: v for k, v in entries.items() if not any(s in k for s in exclude)}
    moments = {} if options.no_second_moments else {k: v for k, v in matrix.second_moments.items() if k in entries}
    return dataclasses.replace(matrix, entries=entries, second_moments=moments)


# ---------------------------------------------------------------------------------------------------------------- types


def rules(options: TypeOptions) -> Recipe:
    """The rules of `custom_q`, `tensor_type`, `tensor_type_file` and `recipe`, in this order."""
    found = Recipe()
    for text in texts(options.custom_q):
        found += find(text, where="--custom-q")
    for text in texts(options.tensor_type):
        found += parse(text, "--tensor-type")
    if options.tensor_type_file:
        found += find(options.tensor_type_file)
    if options.settings and not options.recipe:
        raise OptionError("--set changes a setting of a recipe: pass --recipe")
    return found + find(options.recipe, options.settings, "--recipe") if options.recipe else found


def planner_options(options: TypeOptions) -> Options:
    """The options as `recipe.plan` takes them."""
    named = (options.output_tensor_type, options.token_embedding_type, options.ffn_gate_inp_type,
             options.per_layer_token_embedding_type)  # fmt: skip
    output, embedding, router, of_layers = (types.layout(name) if name else None for name in named)
    of_class = {name: getattr(options, f"{name}_type") for name in CLASSES}
    chosen = {name: types.layout(t) for name, t in of_class.items() if t}
    switches = (options.leave_output_tensor, options.allow_requantize, options.ignore_imatrix_rules, options.repack)
    patterns = tuple(comma_separated(options.repack_pattern))
    program = options.dialect, options.replace_types, options.scale_nvfp4
    return Options(options.pure, output, embedding, router, chosen, *switches, patterns, *program, of_layers)


def plan_types(model: PlanInput, target: str, options: TypeOptions, matrix: Imatrix | None) -> Plan:
    """The type of every tensor for the file type `target`. Raises ImportanceError if a type needs a matrix."""
    return decide(
        model.tensors,
        target,
        rules(options),
        metadata=model.metadata,
        imatrix=matrix,
        options=planner_options(options),
    )


def plan_types_assuming_imatrix(model: PlanInput, target: str, options: TypeOptions, matrix: Imatrix | None) -> Plan:
    """As `plan_types`, to show. If a type needs an importance matrix, a complete one is assumed, with a warning."""
    try:
        return plan_types(model, target, options, matrix)
    except ImportanceError:
        type_plan = plan_types(model, target, options, complete_imatrix(model.tensors))
        return dataclasses.replace(type_plan, warnings=(*type_plan.warnings, missing_imatrix(type_plan)))


def replay_plan(model: PlanInput, options: QuantizeOptions, matrix: Imatrix | None) -> Plan:
    """The plan of `options.plan`, a document or its file, which decides every type."""
    assert options.plan is not None
    if chosen := first_given(options, *CHOOSING, "repack", "repack_pattern", "replace_types", "scale_nvfp4"):
        raise conflicts_with_plan(chosen)
    document, where = (options.plan, "plan") if isinstance(options.plan, Mapping) else (
        json_input.read(Path(options.plan)), str(options.plan))  # fmt: skip
    dialect = checked(options.dialect)
    return replay(
        document, model.tensors, matrix, allow_requantize=options.allow_requantize, where=where, dialect=dialect
    )


def conflicts_with_plan(option: str) -> OptionError:
    """The error of an option that --plan, which decides it, excludes."""
    return OptionError(f"--plan decides every type, so {option} has no effect; drop one of them")


def require_file_type(options: TypeOptions, target: str | None) -> str:
    """The file type of `plan`, COPY by default; OptionError for options that choose types without one."""
    if target is None and (chosen := first_given(options, *CHOOSING)):
        raise OptionError(
            f"TYPE is missing: the type of tensors that {chosen} does not decide, for example Q8_0; to see the "
            f"current types, leave {chosen} out"
        )
    return target or "COPY"


def first_given(options: TypeOptions, *names: str) -> str:
    """The flag of the first of these options that differs from its default; "" if none does."""
    return next((f"--{_FLAGS.get(name, name).replace('_', '-')}" for name in names if getattr(options, name)), "")


def complete_imatrix(tensors: Sequence[Tensor]) -> Imatrix:
    """A placeholder importance matrix with an entry for every matrix of a model; it takes no memory."""
    entries = {}
    for t in tensors:
        if len(t.shape) > 1:
            matrices = math.prod(t.shape[:-2])
            ones = np.broadcast_to(np.float32(1), (matrices, t.shape[-1]))
            entries[t.name] = Entry(ones, np.full(matrices, 1 << 20), 1)
    return Imatrix(entries, 1, "", 1 << 20)


def missing_imatrix(plan: Plan) -> str:
    """The warning for tensors of a plan that need an importance matrix; empty if there are none."""
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


# -------------------------------------------------------------------------------------------------------------- devices


def placement_flags(given: Flags | str | None) -> Flags:
    """Placement flags, parsed if they are text."""
    return parse_flags(given) if isinstance(given, str) else given or Flags()


def context_size(given: int | None, metadata: Mapping[str, object]) -> int | None:
    """Tokens of the KV cache: for 0, the model's context length."""
    if given is not None and given > _MOST_TOKENS:
        raise OptionError(f"-c {given}: a context has at most {_MOST_TOKENS} tokens")
    if given != 0:
        return given
    found = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if not isinstance(found, int) or found < 1:
        raise OptionError(
            "-c 0 is the model's context length, and the model does not state it; write a number of tokens"
        )
    return found


def plan_devices(options: PlanOptions, plan: Plan, metadata: Mapping[str, object]) -> Budget | None:
    """The devices of the plan's tensors and the size of the cache; None without an option about either."""
    offload = parse_ops(options.offload_policy or "", options.offload_threshold)
    flags = placement_flags(options.placement)
    vram, memory, margin = memory_sizes(options.vram, options.ram, options.fit_margin)
    given = (flags != Flags(), options.ctx_size is not None, vram, memory is not None, options.fit, options.bandwidth,
             options.compute)  # fmt: skip
    flags = dataclasses.replace(flags, runtime=options.runtime)
    if not any(given):
        return None
    cache = None
    if (n_ctx := context_size(options.ctx_size, metadata)) is not None:
        cache = CacheSettings(n_ctx, options.cache_type_k, options.cache_type_v, options.mla, options.mtp_cache)
    if vram and flags.devices:
        raise OptionError("--vram and --devices both set the memory of CUDA0, CUDA1, …; drop one of them")
    ram = next((device.memory for device in flags.devices if device == CPU), None)
    ram = ram if memory is None else memory
    notes, tensors = [], {t.name: t for t in plan.tensors}
    if options.fit:
        gpus = flags.devices[1:] or tuple(Device(f"CUDA{i}", size) for i, size in enumerate(vram))
        devices = (Device(CPU.name, ram), *gpus)
        caches = cache.of_layers(metadata) if cache else ()
        fitted = fit(tensors, metadata, devices, caches, margin=margin, flags=flags, mla=options.mla)
        flags, vram = dataclasses.replace(fitted.flags, devices=devices), []
        notes.append(f"--fit for {flags.runtime}: equivalent to {fitted.text}")
    about = (tensors, metadata, flags, cache, vram, ram, margin)
    found = budget(*about, offload=offload)
    if found.fits is False and vram and (count := experts_to_keep(*about)):
        found = dataclasses.replace(found, warnings=(*found.warnings, f"the model fits with --n-cpu-moe {count}"))
    speed = _speed(options, found, tensors, metadata)
    return dataclasses.replace(found, notes=(*notes, *found.notes), speed=speed)


def memory_sizes(vram: Sequence[float], ram: float | None, margin: float) -> tuple[list[int], int | None, int]:
    """Bytes of --vram and --ram in GiB and --fit-margin in MiB. OptionError for values that are no sizes."""
    for flag, value in (*(("--vram", size) for size in vram), ("--ram", ram)):
        if value is not None and not 0 < value < _MOST:
            raise OptionError(f"{flag} {value:g}: a number of GiB above 0 and below {_MOST:g} is needed")
    if not 0 <= margin < _MOST:
        raise OptionError(f"--fit-margin {margin:g}: a number of MiB from 0 to below {_MOST:g} is needed")
    return [int(size * GIB) for size in vram], None if ram is None else int(ram * GIB), int(margin * 2**20)


def _speed(
    options: PlanOptions, found: Budget, tensors: Mapping[str, Any], metadata: Mapping[str, Any]
) -> PredictedSpeed | None:
    """The predicted speed of the placement; None without `bandwidth`, `compute` and `fit`."""
    if not (options.bandwidth or options.compute or options.fit):
        return None
    caches = {load.device: load.cache for load in found.loads if load.cache}
    bandwidth = parse_rates(options.bandwidth or "", "--bandwidth", 1e9)
    compute = parse_rates(options.compute or "", "--compute", 1e12)
    return predict(tensors, metadata, found.placement, caches, bandwidth, compute)


def require_clean(plan: Plan, devices: Budget | None) -> None:
    """Raise a QuantkitError with all warnings, if there are any."""
    plan.require_clean()
    if devices and devices.warnings:
        raise QuantkitError("; ".join(devices.warnings))
