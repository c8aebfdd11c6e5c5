"""What the commands that run a model share: options, opening it, what they say of that."""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli._shared import mib, table, with_options
from quantkit.errors import UnknownNameError, printable

if TYPE_CHECKING:
    from quantkit.placement.rules import Flags
    from quantkit.runtime.parallel.ledger import Ledger

GpuLayers = Annotated[
    int | None,
    typer.Option("--gpu-layers", "-ngl", help="Layers on the GPU, the last ones.", min=0, show_default=False),
]
OverrideTensor = Annotated[
    list[str] | None,
    typer.Option(
        "--override-tensor",
        "-ot",
        metavar="REGEX=DEVICE,…",
        help="Where tensors go; the first rule decides. Repeatable.",
    ),
]
CpuMoe = Annotated[bool, typer.Option("--cpu-moe", "-cmoe", help="All experts on the CPU.")]
NCpuMoe = Annotated[
    int, typer.Option("--n-cpu-moe", "-ncmoe", help="Experts of so many layers, the last ones, on the CPU.", min=0)
]
TensorSplit = Annotated[
    str | None,
    typer.Option("--tensor-split", "-ts", metavar="N,N,…", help="The share of each GPU; default: by memory, or even."),
]
SplitMode = Annotated[
    str,
    typer.Option(
        "--split-mode", "-sm", metavar="none|layer|graph", help="GPUs: one; each its layers; a part of each layer."
    ),
]
MainGpu = Annotated[int | None, typer.Option("--main-gpu", "-mg", help="The GPU of -sm none.", show_default=False)]
MaxGpu = Annotated[int | None, typer.Option(help="So many GPUs share a layer, with -sm graph.", show_default=False)]
NoKvOffload = Annotated[bool, typer.Option("--no-kv-offload", "-nkvo", help="Keys and values stay on the CPU.")]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=SIZE,…",
        help="Devices and their memory: cuda:0=24GiB; cpu:0=2GiB,cpu:1 are virtual ones, which the CPU plays.",
        show_default=False,
    ),
]
Fit = Annotated[bool, typer.Option("--fit", help="Fill the devices to their memory; says the -ot that do the same.")]
OffloadThreshold = Annotated[
    int, typer.Option(metavar="TOKENS", help="From so many tokens a matrix on, GPUs take part in the CPU's products.")
]
OffloadPolicy = Annotated[
    str | None,
    typer.Option(
        "--offload-policy", "-op", metavar="OP,0,…", help="Operations by name that they take part in (1) or not (0)."
    ),
]

PLACEMENT: dict[str, tuple[Any, Any]] = {  # options that say where tensors go, with their defaults
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

_OPTIONS: dict[str, tuple[Any, Any]] = {  # of every command that runs a model, with their defaults
    **PLACEMENT,
    "fit": (Fit, False),
    "fit_margin": (
        Annotated[float, typer.Option(metavar="MIB", help="With --fit: what is left of each device's memory.")],
        1024,
    ),
    "reduce_type": (
        Annotated[str, typer.Option(metavar="f32|f16|bf16", help="What sums over devices travel as, -sm graph.")],
        "f32",
    ),
    "offload_threshold": (OffloadThreshold, 32),
    "offload_policy": (OffloadPolicy, None),
    "profile": (
        Annotated[
            bool, typer.Option("--profile", help="Say where each device's time goes; the model runs layer by layer.")
        ],
        False,
    ),
    "run_time_repack": (
        Annotated[
            bool,
            typer.Option("--run-time-repack", "-rtr", help="Interleave rows in memory, as `repack` does in a file."),
        ],
        False,
    ),
    "fused_moe": (
        Annotated[
            bool,
            typer.Option(
                "--fused-moe/--no-fused-moe", "-fmoe/-no-fmoe", help="Gate, up and activation of experts at once."
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
                metavar="K,t",
                help="Of the experts of a token the first K, others only above t times the first one's probability.",
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
                help="Of K and V: f32 f16 bf16 q8_0 q8_KV q6_0 q5_0 q5_1 q4_0 q4_1 iq4_nl; default: f16 if fast, "
                "f32 if exact.",
            ),
        ],
        None,
    ),
    "cache_type_k": (
        Annotated[str | None, typer.Option("--cache-type-k", "-ctk", metavar="TYPE", help="Of keys alone.")],
        None,
    ),
    "cache_type_v": (
        Annotated[str | None, typer.Option("--cache-type-v", "-ctv", metavar="TYPE", help="Of values alone.")],
        None,
    ),
    "k_cache_hadamard": (
        Annotated[
            bool, typer.Option("--k-cache-hadamard", "-khad", help="Rotate keys before they are rounded for the cache.")
        ],
        False,
    ),
    "v_cache_hadamard": (Annotated[bool, typer.Option("--v-cache-hadamard", "-vhad", help="Rotate values.")], False),
    "flash_attn": (
        Annotated[
            str,
            typer.Option(
                "--flash-attn", "-fa", metavar="on|off|auto|1|0", help="Streaming softmax; off: all scores at once."
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
                help="Memory of the scores with -fa off, of keys and values that -mla 2 and 3 expand; 0: any.",
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
                help="Latent attention: 0 caches full heads; 1 latents, absorbed; 2, 3 also expand long prompts.",
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
            help="Look for bad scales first, and for NaN and Inf after each layer, or operation (full); off: neither.",
            metavar="layer|full|off",
        ),
    ],
    "layer",
)
_FLASH = {"on": True, "auto": True, "1": True, "off": False, "0": False}


class Launch:
    """What the options of `runs_a_model` say: how a command runs its models."""

    def __init__(self, given: dict[str, Any]):
        from quantkit.placement.offload import parse_ops

        self._given = given
        self._profiled: list[Ledger] = []
        if given["flash_attn"] not in _FLASH:
            raise UnknownNameError("choice for -fa", given["flash_attn"], _FLASH)
        self._check_cache_type()  # refused here what cannot be, before commands look at files
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
        cache_type: Any = None,
        repack: bool | None = None,
        tokenizer: Any = None,
    ) -> Any:
        """`runtime.model.load`; says on stderr what was repacked, and which rules decide nothing.

        n_ctx: tokens of the longest sequence that will run, for which there must be memory; None: the model's context.
        cache_type, repack: in place of the options'. tokenizer: the file's, where the command made it already.
        """
        from quantkit.runtime.model import load

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
            print(f"--fit: the same as {model.fitted}", file=sys.stderr)
        if self._given["profile"] and model.split is not None:
            self._profiled.append(model.split.ledger)  # not the model, whose memory the next one may need
        for rule in model.placement.idle:
            print(f"warning: {printable(rule.said)} decides no tensor", file=sys.stderr)
        if model.repacked is not None:
            _say_repacked(model)
        return model

    def tell_profiles(self) -> None:
        """On stderr, where the time of what ran went."""
        for ledger in self._profiled:
            print(_profile(ledger), file=sys.stderr)

    def _check_cache_type(self) -> None:
        """UnsupportedError or UnknownNameError for caches that attention cannot read."""
        kind = self._cache_type("exact")
        if kind is not None:
            from quantkit.runtime.blocks.layers import Attending
            from quantkit.runtime.model import cache_type_of

            cache_type_of(kind, "exact", Attending(_FLASH[self._given["flash_attn"]], 0))

    def _cache_type(self, numerics: str) -> Any:
        """The CacheType; None where no option speaks of it."""
        both, k, v = (self._given[name] for name in ("cache_type", "cache_type_k", "cache_type_v"))
        khad, vhad = self._given["k_cache_hadamard"], self._given["v_cache_hadamard"]
        if not (both or k or v or khad or vhad):
            return None
        from quantkit.runtime.kv.cache import CacheType

        both = both or ("f32" if numerics == "exact" else "f16")
        return CacheType(k or both, v or both, khad, vhad)


def runs_a_model(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: give a command the options of running models in place of its parameter `launch`, a Launch of them."""

    @functools.wraps(command)
    def run(launch: Launch, **own: Any) -> None:
        command(**own, launch=launch)
        launch.tell_profiles()

    return with_options(run, "launch", _OPTIONS, Launch)


def conditions(model: Any) -> dict[str, Any]:
    """What a figure of a model depends on besides its file, as far as options of running it decide that."""
    from quantkit import __version__
    from quantkit.codegen import jit

    found = {
        "numerics": model.numerics,
        "cache_type": model.cache_type,
        "flash_attention": "on" if model.how.flash else f"off, -amb {model.how.work_mib}",
        "threads": model.threads,
        "cpu": cpu_name(),
        "isa": jit.isa(),
        "quantkit": __version__,
    }
    if model.has_latents:
        found["mla"] = model.mla
    if model.repacked is not None:
        found["repacked"] = len(model.repacked)
    if model.expert_reduction is not None:
        least, share = model.expert_reduction
        found["expert reduction"] = f"{least},{share:g}"
    if model.split is not None:
        found |= model.split.describe()
    return found | ({"layer_by_layer": model.fallback_reason} if model.fallback_reason else {})


def cpu_name() -> str:
    """What the CPU calls itself."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _require_gpus(devices: str | None) -> None:
    """UnsupportedError for a GPU of --devices that is not here."""
    from quantkit.placement.devices import parse_devices

    for device in parse_devices(devices) if devices else ():
        if device.gpu is not None:
            from quantkit.runtime.cuda import gpu_worker

            gpu_worker.gpu(device.gpu)


def _reduction(text: str | None) -> tuple[int, float] | None:
    """What -ser says."""
    if text is None:
        return None
    try:
        least, share = text.split(",")
        return int(least), float(share)
    except ValueError:
        raise typer.BadParameter(f"-ser {text}: write K,t, as 6,0.4") from None


def _say_repacked(model: Any) -> None:
    done = model.repacked
    print(f"repacked {len(done)} tensors, {mib(done.nbytes)}, in {done.seconds:.2f} s", file=sys.stderr)
    for (before, after), count in done.slower.items() if model.numerics == "fast" else ():
        print(
            f"warning: -rtr makes {count} tensors slower: {after} has no fast kernel here, {before} has one",
            file=sys.stderr,
        )


def _profile(ledger: Ledger) -> str:
    """The table of --profile: seconds by device and kind of work, what moved, what bounds the run."""
    from quantkit.runtime.parallel.ledger import KINDS

    kinds = [kind for kind in KINDS if any(kind in mine for mine in ledger.seconds.values())]
    rows = []
    for device, mine in ledger.seconds.items():
        total = sum(mine.values())
        read = ledger.weights[device]
        rate = f"{read / total / 1e9:.2f}" if total and read else ""
        rows.append((device, *(f"{mine.get(kind, 0):.3f}" for kind in kinds), f"{total:.3f}", mib(read), rate))
    lines = [table(("seconds", *kinds, "total", "weights read", "GB/s"), rows)]
    for (source, target), nbytes in ledger.bytes.items():
        lines.append(f"{source} -> {target}: {mib(nbytes)} in {ledger.transfers[source, target]} transfers")
    lines.append(f"{ledger.passes} passes, {ledger.tokens} tokens; layer by layer, which --profile counts")
    return "\n".join([*lines, ledger.bound()])


def placement_flags(given: Mapping[str, Any]) -> Flags:
    """What the options of PLACEMENT say together."""
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
