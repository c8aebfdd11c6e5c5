"""Shared parts of the commands that run a model: loading by the options of `run_options`, --profile."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantkit.cli.common import bench_lists, refused, without_effect
from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.options import with_options
from quantkit.cli.common.output import mib, print_table
from quantkit.cli.common.run_options import PLACEMENT, RUN_OPTIONS
from quantkit.errors import printable

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUF
    from quantkit.placement.rules import Flags
    from quantkit.runtime.kv.cache_type import CacheType
    from quantkit.runtime.model import Model
    from quantkit.runtime.parallel.ledger import Ledger
    from quantkit.runtime.repacking import Repacked
    from quantkit.tokenizers.tokenizer import Tokenizer

_FLASH = {"on": True, "auto": True, "1": True, "off": False, "0": False}


class Launch:
    """The parsed options of `runs_a_model`: how a command runs its models. `given` are the values by name."""

    def __init__(self, given: Mapping[str, Any]):
        from quantkit.placement.offload import parse_ops

        self.given = given
        self._profiled: list[Ledger] = []
        self._check_cache_type()  # an impossible cache type fails before any file is read
        self._options = {
            "repack": given["run_time_repack"],
            "fused_experts": given["fused_moe"],
            "expert_reduction": _reduction(given["smart_expert_reduction"]),
            "flash_attention": _FLASH[given["flash_attn"]],
            "tripwire": given["tripwire"],
            "attention_mib": given["attention_max_batch"],
            "mla": given["mla"],
            "mmap": given["mmap"],
            "huge_pages": given["huge_pages"],
            "mlock": given["mlock"],
            "offload": parse_ops(given["offload_policy"] or "", given["offload_threshold"]),
        }
        _require_gpus(device_text(given))

    def open(
        self,
        path: Path,
        *,
        numerics: str,
        threads: int | None,
        n_ctx: int | None,
        cache_type: CacheType | None = None,
        repack: bool | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Model:
        """Load a model (`runtime.loading.load`); print to stderr what was repacked and which rules decide nothing.

        n_ctx: tokens of the longest sequence, which must fit in memory; None: the model's context length.
        cache_type, repack: override the options. tokenizer: the file's, if the command has built it already.
        """
        from quantkit.runtime.loading import load

        flags = self._placement_flags()
        model = load(
            path,
            numerics=numerics,
            threads=threads,
            n_ctx=n_ctx,
            cache_type=cache_type or self._cache_type(numerics),
            override_tensor=flags.override_tensor,
            gpu_layers=flags.gpu_layers,
            n_cpu_moe=flags.n_cpu_moe,
            devices=flags.devices,
            split_mode=flags.split_mode,
            tensor_split=flags.tensor_split,
            main_gpu=flags.main_gpu,
            max_gpus=flags.max_gpus,
            kv_on_cpu=flags.kv_on_cpu,
            fit=self.given["fit"],
            fit_margin=int(self.given["fit_margin"] * 2**20),
            reduce_type=self.given["reduce_type"],
            profile=self.given["profile"],
            tokenizer=tokenizer,
            **(self._options if repack is None else self._options | {"repack": repack}),
        )
        if model.fitted is not None:
            on_message(f"--fit: equivalent to {model.fitted}")
        if self.given["profile"] and model.split is not None:
            self._profiled.append(model.split.ledger)  # not the model: the next one may need its memory
        for rule in model.placement.idle:
            print(f"warning: {printable(rule.text)} decides no tensor", file=sys.stderr)
        if model.repacked is not None:
            _print_repacked(model.repacked, model.numerics)
        _print_residency(model)
        return model

    def _placement_flags(self) -> Flags:
        """The placement. Without a device there is no GPU, and -ngl is ignored, as in llama.cpp (`_print_notes`)."""
        given = {name: self.given[name] for name in PLACEMENT}
        return placement_flags(given if device_text(given) else given | {"gpu_layers": None})

    def print_profiles(self) -> None:
        """Print the tables of --profile to stderr."""
        for ledger in self._profiled:
            _print_profile(ledger)

    def _check_cache_type(self) -> None:
        """Raise UnsupportedError or UnknownNameError for a cache type that attention cannot read."""
        kind = self._cache_type("exact")
        if kind is not None:
            from quantkit.runtime.blocks.float_attention import AttentionOptions
            from quantkit.runtime.model import cache_type_of

            cache_type_of(kind, "exact", AttentionOptions(_FLASH[self.given["flash_attn"]], 0))

    def _cache_type(self, numerics: str) -> CacheType | None:
        """The CacheType; None if no option sets it."""
        both, k, v = (self.given[name] for name in ("cache_type", "cache_type_k", "cache_type_v"))
        khad, vhad = self.given["k_cache_hadamard"], self.given["v_cache_hadamard"]
        if not (both or k or v or khad or vhad):
            return None
        from quantkit.runtime.kv.cache_type import CacheType

        both = both or ("f32" if numerics == "exact" else "f16")
        return CacheType(k or both, v or both, khad, vhad)


def runs_a_model(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: replace a command's parameter `launch` by the options for running a model; it gets a Launch."""

    @functools.wraps(command)
    def run(launch: Launch, **own: object) -> None:
        command(**own, launch=launch)
        launch.print_profiles()

    return with_options(run, "launch", RUN_OPTIONS, _launch)


def runs_variants(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: as `runs_a_model`, with lists of values for some options; the command gets a list of Launch.

    They are all combinations of the values, the first option's values changing slowest, as in llama-bench.
    """

    @functools.wraps(command)
    def run(launches: list[Launch], **own: object) -> None:
        command(**own, launches=launches)
        for launch in launches:
            launch.print_profiles()

    return with_options(run, "launches", RUN_OPTIONS | bench_lists.OPTIONS, _launches)


def _launch(given: Mapping[str, Any]) -> Launch:
    refused.check(given)
    _print_notes(given)
    return Launch(given)


def _launches(given: Mapping[str, Any]) -> list[Launch]:
    refused.check(given)
    _print_notes(given)
    variants = list(bench_lists.combinations(given))
    if not device_text(given):  # a list of -ngl would time the same model on the CPU again
        first = variants[0]["gpu_layers"]
        variants = [{**values, "gpu_layers": None} for values in variants if values["gpu_layers"] == first]
    return [Launch(values) for values in variants]


def _print_notes(given: Mapping[str, Any]) -> None:
    """Print to stderr which of the options have no effect, and why."""
    notes = list(without_effect.notes(given))
    if (given["gpu_layers"] or "auto").lower() not in ("0", "auto", "-1") and not device_text(given):
        notes.append(
            f"-ngl {given['gpu_layers']} has no effect: the model runs on the CPU; for a GPU pass --devices cuda:0"
        )
    for note in notes:
        on_message(f"note: {note}")


def _require_gpus(devices: str | None) -> None:
    """Raise UnsupportedError for a GPU of --devices that this machine does not have."""
    from quantkit.placement.devices import parse_devices

    for device in parse_devices(devices) if devices else ():
        if device.gpu is not None:
            from quantkit.runtime.cuda import gpu_worker

            gpu_worker.gpu(device.gpu)


def _reduction(text: str | None) -> tuple[int, float] | None:
    """Parse -ser K,T."""
    if text is None:
        return None
    try:
        count, threshold = text.split(",")
        return int(count), float(threshold)
    except ValueError:
        raise typer.BadParameter(f"-ser {text}: write K,T, for example 6,0.4") from None


def _print_repacked(done: Repacked, numerics: str) -> None:
    """Print to stderr what -rtr did, and a warning for types that it makes slower."""
    on_message(f"repacked {len(done)} tensors, {mib(done.nbytes)}, in {done.seconds:.2f} s")
    for (before, after), count in done.slower.items() if numerics == "fast" else ():
        print(
            f"warning: -rtr makes {count} tensors slower: {after} has no fast kernel here, {before} has one",
            file=sys.stderr,
        )


def _print_residency(model: Model) -> None:
    """Print to stderr what -thp and --mlock did, with both numbers where they did not do all."""
    if model.read is not None and (huge := model.read.huge_bytes) is not None:
        if huge:
            on_message(f"-thp: {mib(huge)} in huge pages, {mib(model.read.nbytes)} of weights read")
        else:
            on_message(f"note: -thp has no effect: {model.read.why_no_huge_pages()}")
    if model.locked is None:
        return
    if model.locked.complete:
        on_message(f"--mlock: {mib(model.locked.locked)} locked")
        return
    limit = "unlimited" if model.locked.limit is None else mib(model.locked.limit)
    on_message(
        f"warning: --mlock: {mib(model.locked.locked)} of {mib(model.locked.nbytes)} are locked: {model.locked.error}; "
        f"the limit (RLIMIT_MEMLOCK) is {limit}; raise it: ulimit -l unlimited"
    )


def _print_profile(ledger: Ledger) -> None:
    """Print the table of --profile to stderr: seconds by device and kind of work, transfers, and the bottleneck."""
    from quantkit.runtime.parallel.ledger import KINDS

    kinds = [kind for kind in KINDS if any(kind in by_kind for by_kind in ledger.seconds.values())]
    rows = []
    for device, by_kind in ledger.seconds.items():
        total = sum(by_kind.values())
        read = ledger.weights[device]
        rate = f"{read / total / 1e9:.2f}" if total and read else ""
        rows.append((device, *(f"{by_kind.get(kind, 0):.3f}" for kind in kinds), f"{total:.3f}", mib(read), rate))
    print_table(("seconds", *kinds, "total", "weights read", "GB/s"), rows, file=sys.stderr)
    for (source, target), nbytes in ledger.bytes.items():
        transfers = ledger.transfers[source, target]
        print(f"{source} -> {target}: {mib(nbytes)} in {transfers} transfers", file=sys.stderr)
    print(f"{ledger.passes} passes, {ledger.tokens} tokens; --profile runs the model layer by layer", file=sys.stderr)
    print(ledger.bound(), file=sys.stderr)


def device_text(given: Mapping[str, Any]) -> str | None:
    """The devices of --devices, or those of -dev in the same form; None for neither, or for `-dev none`."""
    devices: str | None = given["devices"]
    named: str | None = given["device"]
    if named is None or devices is not None:
        if named is not None:
            raise typer.BadParameter(f"--devices {devices} and -dev {named} both name the devices; drop one of them")
        return devices
    if named.lower() in ("none", "cpu"):
        return None
    if not all(re.fullmatch(r"cuda:?\d+", part.strip(), re.IGNORECASE) for part in named.split(",")):
        raise typer.BadParameter(
            f"-dev {named}: quantkit runs on CUDA devices and on the CPU; write CUDA0,CUDA1 or none"
        )
    return named


def placement_flags(given: Mapping[str, Any]) -> Flags:
    """The Flags of the options in PLACEMENT."""
    from quantkit.placement.devices import parse_devices
    from quantkit.placement.rules import ALL_LAYERS, Flags, parse_split

    devices, layers = device_text(given), (given["gpu_layers"] or "auto").lower()
    return Flags(
        {"all": ALL_LAYERS, "auto": None, "-1": None}[layers] if layers in ("all", "auto", "-1") else int(layers),
        tuple(given["override_tensor"] or ()),
        ALL_LAYERS if given["cpu_moe"] else given["n_cpu_moe"],
        parse_split(given["tensor_split"] or ""),
        given["split_mode"],
        given["main_gpu"],
        given["max_gpu"],
        given["no_kv_offload"],
        parse_devices(devices) if devices else (),
    )


def trained_context(file: GGUF) -> int:
    """The context length that a model was trained with, from its metadata."""
    from quantkit.archs.common import validate

    return validate.describe(file.metadata, file.tensors, file.path).hparams.n_ctx_train


def warn_of_long_context(size: int, trained: int) -> None:
    """Print a warning for a context (-c) that is longer than the one that the model was trained with."""
    if size > trained:
        on_message(f"warning: -c {size}: the model was trained with {trained} tokens; later ones may make no sense")


def context_size(given: int, model: Path) -> int:
    """The value of -c: for 0, the context length that the model, a GGUF file or a checkpoint, was trained with."""
    if given:
        return given
    if model.is_dir():
        from quantkit.pipelines import planning

        metadata = planning.open_model(model).metadata
        return int(metadata[f"{metadata['general.architecture']}.context_length"])
    from quantkit.formats import gguf

    return trained_context(gguf.require_model(gguf.open(model)))
