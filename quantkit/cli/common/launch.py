"""Shared parts of the commands that run a model: options, loading, --profile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.options import with_options
from quantkit.cli.common.output import mib, print_table
from quantkit.errors import UnknownNameError, printable

if TYPE_CHECKING:
    from quantkit.placement.rules import Flags
    from quantkit.runtime.kv.cache_type import CacheType
    from quantkit.runtime.model import Model
    from quantkit.runtime.parallel.ledger import Ledger
    from quantkit.runtime.repacking import Repacked
    from quantkit.tokenizers.tokenizer import Tokenizer

GpuLayers = Annotated[
    int | None,
    typer.Option(
        "--gpu-layers", "-ngl", metavar="N", help="Put the last N layers on the GPU.", min=0, show_default=False
    ),
]
OverrideTensor = Annotated[
    list[str] | None,
    typer.Option(
        "--override-tensor",
        "-ot",
        metavar="REGEX=DEVICE,…",
        help="Device of tensors by name; the first match decides. Repeatable.",
    ),
]
CpuMoe = Annotated[bool, typer.Option("--cpu-moe", "-cmoe", help="Keep all experts on the CPU.")]
NCpuMoe = Annotated[
    int,
    typer.Option("--n-cpu-moe", "-ncmoe", metavar="N", help="Keep the experts of the last N layers on the CPU.", min=0),
]
TensorSplit = Annotated[
    str | None,
    typer.Option(
        "--tensor-split",
        "-ts",
        metavar="N,N,…",
        help="Proportion of each GPU; default: by memory if known, else equal.",
    ),
]
SplitMode = Annotated[
    str,
    typer.Option(
        "--split-mode",
        "-sm",
        metavar="none|layer|graph",
        help="none: one GPU; layer: layers split over GPUs (pipeline); graph: tensor parallel.",
    ),
]
MainGpu = Annotated[
    int | None, typer.Option("--main-gpu", "-mg", metavar="N", help="The GPU to use with -sm none.", show_default=False)
]
MaxGpu = Annotated[
    int | None, typer.Option(metavar="N", help="With -sm graph: number of GPUs per layer.", show_default=False)
]
NoKvOffload = Annotated[bool, typer.Option("--no-kv-offload", "-nkvo", help="Keep the KV cache on the CPU.")]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=SIZE,…",
        help="Devices and their memory, for example cuda:0=24GiB; cpu:0=2GiB,cpu:1 are simulated on the CPU.",
        show_default=False,
    ),
]
Fit = Annotated[bool, typer.Option("--fit", help="Fill the devices to their memory and print the equivalent flags.")]
OffloadThreshold = Annotated[
    int,
    typer.Option(metavar="TOKENS", help="Minimum batch size per matrix to offload products of CPU tensors to GPUs."),
]
OffloadPolicy = Annotated[
    str | None,
    typer.Option(
        "--offload-policy", "-op", metavar="OP,0,…", help="Operations, by name, to offload to GPUs (1) or not (0)."
    ),
]

PLACEMENT: dict[str, tuple[Any, Any]] = {  # options for the devices of tensors, with their defaults
    "gpu_layers": (GpuLayers, None),
    "override_tensor": (OverrideTensor, None),
    "cpu_moe": (CpuMoe, False),
    "n_cpu_moe": (NCpuMoe, 0),
    "split_mode": (SplitMode, "layer"),
    "tensor_split": (TensorSplit, None),
    "main_gpu": (MainGpu, None),
    "max_gpu": (MaxGpu, None),
    "no_kv_offload": (NoKvOffload, False),
    "devices": (Devices, None),
}

_OPTIONS: dict[str, tuple[Any, Any]] = {  # options of every command that runs a model, with their defaults
    **PLACEMENT,
    "fit": (Fit, False),
    "fit_margin": (
        Annotated[float, typer.Option(metavar="MIB", help="With --fit: memory of each device to leave free.")],
        1024,
    ),
    "reduce_type": (
        Annotated[str, typer.Option(metavar="f32|f16|bf16", help="With -sm graph: all-reduce data type.")],
        "f32",
    ),
    "offload_threshold": (OffloadThreshold, 32),
    "offload_policy": (OffloadPolicy, None),
    "profile": (
        Annotated[
            bool,
            typer.Option(
                "--profile", help="Print the time of each device by kind of work; the model runs layer by layer."
            ),
        ],
        False,
    ),
    "run_time_repack": (
        Annotated[
            bool,
            typer.Option(
                "--run-time-repack", "-rtr", help="Interleave rows in memory, as `quantkit repack` does in a file."
            ),
        ],
        False,
    ),
    "fused_moe": (
        Annotated[
            bool,
            typer.Option(
                "--fused-moe/--no-fused-moe",
                "-fmoe/-no-fmoe",
                help="Compute gate, up and activation of experts in one operation.",
            ),
        ],
        True,
    ),
    "smart_expert_reduction": (
        Annotated[
            str | None,
            typer.Option(
                "--smart-expert-reduction",
                "-ser",
                metavar="K,T",
                help="Use the first K experts of a token, and others only above T times the first one's probability.",
            ),
        ],
        None,
    ),
    "cache_type": (
        Annotated[
            str | None,
            typer.Option(
                "--cache-type",
                metavar="TYPE",
                help="Type of the KV cache: f32 f16 bf16 q8_0 q8_KV q6_0 q5_0 q5_1 q4_0 q4_1 iq4_nl; default: f16 with "
                "numerics fast, f32 with exact.",
            ),
        ],
        None,
    ),
    "cache_type_k": (
        Annotated[str | None, typer.Option("--cache-type-k", "-ctk", metavar="TYPE", help="Type of the K cache.")],
        None,
    ),
    "cache_type_v": (
        Annotated[str | None, typer.Option("--cache-type-v", "-ctv", metavar="TYPE", help="Type of the V cache.")],
        None,
    ),
    "k_cache_hadamard": (
        Annotated[
            bool,
            typer.Option(
                "--k-cache-hadamard", "-khad", help="Apply a Hadamard transform to keys before they are quantized."
            ),
        ],
        False,
    ),
    "v_cache_hadamard": (
        Annotated[
            bool,
            typer.Option(
                "--v-cache-hadamard", "-vhad", help="Apply a Hadamard transform to values before they are quantized."
            ),
        ],
        False,
    ),
    "flash_attn": (
        Annotated[
            str,
            typer.Option(
                "--flash-attn",
                "-fa",
                metavar="on|off|auto|1|0",
                help="Flash attention (online softmax); off: compute all scores first.",
            ),
        ],
        "on",
    ),
    "attention_max_batch": (
        Annotated[
            int,
            typer.Option(
                "--attention-max-batch",
                "-amb",
                metavar="MIB",
                help="Memory for scores with -fa off, and for keys and values that -mla 2 and 3 expand; 0: no limit.",
                min=0,
            ),
        ],
        256,
    ),
    "mla": (
        Annotated[
            int,
            typer.Option(
                "-mla",
                help="MLA: 0 caches full heads; 1 caches latents (absorbed); 2 and 3 also expand long prompts.",
                min=0,
                max=3,
            ),
        ],
        3,
    ),
}
_OPTIONS["tripwire"] = (
    Annotated[
        str,
        typer.Option(
            help="Check for bad scales at load, and for NaN and Inf after each layer or operation (full).",
            metavar="layer|full|off",
        ),
    ],
    "layer",
)
_FLASH = {"on": True, "auto": True, "1": True, "off": False, "0": False}


class Launch:
    """The parsed options of `runs_a_model`: how a command runs its models."""

    def __init__(self, given: dict[str, Any]):
        from quantkit.placement.offload import parse_ops

        self._given = given
        self._profiled: list[Ledger] = []
        if given["flash_attn"] not in _FLASH:
            raise UnknownNameError("choice for -fa", given["flash_attn"], _FLASH)
        self._check_cache_type()  # an impossible cache type fails before any file is read
        self._options = {
            "repack": given["run_time_repack"],
            "fused_experts": given["fused_moe"],
            "expert_reduction": _reduction(given["smart_expert_reduction"]),
            "flash_attention": _FLASH[given["flash_attn"]],
            "tripwire": given["tripwire"],
            "attention_mib": given["attention_max_batch"],
            "mla": given["mla"],
            "offload": parse_ops(given["offload_policy"] or "", given["offload_threshold"]),
        }
        _require_gpus(given["devices"])

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

        flags = placement_flags({name: self._given[name] for name in PLACEMENT})
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
            fit=self._given["fit"],
            fit_margin=int(self._given["fit_margin"] * 2**20),
            reduce_type=self._given["reduce_type"],
            profile=self._given["profile"],
            tokenizer=tokenizer,
            **(self._options if repack is None else self._options | {"repack": repack}),
        )
        if model.fitted is not None:
            on_message(f"--fit: equivalent to {model.fitted}")
        if self._given["profile"] and model.split is not None:
            self._profiled.append(model.split.ledger)  # not the model: the next one may need its memory
        for rule in model.placement.idle:
            print(f"warning: {printable(rule.text)} decides no tensor", file=sys.stderr)
        if model.repacked is not None:
            _print_repacked(model.repacked, model.numerics)
        return model

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

            cache_type_of(kind, "exact", AttentionOptions(_FLASH[self._given["flash_attn"]], 0))

    def _cache_type(self, numerics: str) -> CacheType | None:
        """The CacheType; None if no option sets it."""
        both, k, v = (self._given[name] for name in ("cache_type", "cache_type_k", "cache_type_v"))
        khad, vhad = self._given["k_cache_hadamard"], self._given["v_cache_hadamard"]
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

    return with_options(run, "launch", _OPTIONS, Launch)


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


def placement_flags(given: Mapping[str, Any]) -> Flags:
    """The Flags of the options in PLACEMENT."""
    from quantkit.placement.devices import parse_devices
    from quantkit.placement.rules import ALL_LAYERS, Flags, parse_split

    return Flags(
        given["gpu_layers"],
        tuple(given["override_tensor"] or ()),
        ALL_LAYERS if given["cpu_moe"] else given["n_cpu_moe"],
        parse_split(given["tensor_split"] or ""),
        given["split_mode"],
        given["main_gpu"],
        given["max_gpu"],
        given["no_kv_offload"],
        parse_devices(given["devices"]) if given["devices"] else (),
    )
