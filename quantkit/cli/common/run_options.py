"""The options of the commands that run a model: placement, KV cache, attention, experts, loading, checks.

`launch` turns their values into a Model. Flags are spelled as in llama.cpp and ik_llama.cpp. The options that quantkit
takes from their command lines and has no use for are in `without_effect`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

import typer

from quantkit.cli.common import refused, without_effect

CacheTypeName = Literal["f32", "f16", "bf16", "q8_0", "q8_KV", "q6_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl"]

# The sections of the help page.
_PLACEMENT, _CACHE, _ATTENTION = "Placement", "KV cache", "Attention"
_EXPERTS, _LOADING, _CHECKS = "Experts", "Loading", "Checks"


def is_layer_count(text: str) -> bool:
    """Whether the text is a value of -ngl: a number, "all", or the default as llama.cpp writes it."""
    return re.fullmatch(r"\d{1,6}|-1|all|auto", text.lower()) is not None


def _checked_layers(text: str | None) -> str | None:
    if text is not None and not is_layer_count(text):
        raise typer.BadParameter(f"'{text}' is no number of layers; write N, all, or auto for the default")
    return text


GPU_LAYERS = ("--gpu-layers", "--n-gpu-layers", "-ngl")
GpuLayers = Annotated[
    str | None,
    typer.Option(
        *GPU_LAYERS,
        metavar="N",
        help="Put the last N layers, or all, on the GPU.",
        callback=_checked_layers,
        show_default=False,
        rich_help_panel=_PLACEMENT,
    ),
]
OverrideTensor = Annotated[
    list[str] | None,
    typer.Option(
        "--override-tensor",
        "-ot",
        metavar="REGEX=DEVICE,…",
        help="Device of tensors by name; the first match decides. Repeatable.",
        rich_help_panel=_PLACEMENT,
    ),
]
CpuMoe = Annotated[
    bool,
    typer.Option("--cpu-moe", "-cmoe", help="Keep all experts on the CPU.", rich_help_panel=_PLACEMENT),
]
NCpuMoe = Annotated[
    int,
    typer.Option(
        "--n-cpu-moe",
        "-ncmoe",
        metavar="N",
        help="Keep the experts of the last N layers on the CPU.",
        min=0,
        rich_help_panel=_PLACEMENT,
    ),
]
TensorSplit = Annotated[
    str | None,
    typer.Option(
        "--tensor-split",
        "-ts",
        metavar="N,N,…",
        help="Proportion of each GPU; default: by memory if known, else equal.",
        rich_help_panel=_PLACEMENT,
    ),
]
SplitMode = Annotated[
    Literal["none", "layer", "graph"],
    typer.Option(
        "--split-mode",
        "-sm",
        help="none: one GPU; layer: layers split over GPUs (pipeline); graph: tensor parallel.",
        rich_help_panel=_PLACEMENT,
    ),
]
MainGpu = Annotated[
    int | None,
    typer.Option(
        "--main-gpu",
        "-mg",
        metavar="N",
        help="The GPU to use with -sm none.",
        show_default=False,
        rich_help_panel=_PLACEMENT,
    ),
]
MaxGpu = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With -sm graph: number of GPUs per layer.",
        show_default=False,
        rich_help_panel=_PLACEMENT,
    ),
]
NoKvOffload = Annotated[
    bool,
    typer.Option("--no-kv-offload", "-nkvo", help="Keep the KV cache on the CPU.", rich_help_panel=_PLACEMENT),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=SIZE,…",
        help="Devices and their memory, for example cuda:0=24GiB; cpu:0=2GiB,cpu:1 are simulated on the CPU.",
        show_default=False,
        rich_help_panel=_PLACEMENT,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        "-dev",
        metavar="CUDA0,…",
        help="Same as --devices cuda:0,…; none: the CPU alone.",
        show_default=False,
        rich_help_panel=_PLACEMENT,
    ),
]
Fit = Annotated[
    bool,
    typer.Option(
        "--fit",
        help="Fill the devices to their memory and print the equivalent flags.",
        rich_help_panel=_PLACEMENT,
    ),
]
OffloadThreshold = Annotated[
    int,
    typer.Option(
        metavar="TOKENS",
        help="Minimum batch size per matrix to offload products of CPU tensors to GPUs.",
        rich_help_panel=_PLACEMENT,
    ),
]
OffloadPolicy = Annotated[
    str | None,
    typer.Option(
        "--offload-policy",
        "-op",
        metavar="OP,0,…",
        help="Operations, by name, to offload to GPUs (1) or not (0).",
        rich_help_panel=_PLACEMENT,
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
    "device": (Device, None),
}


def _cache_type(*flags: str, help: str) -> Any:
    """The option of a cache type. Its case does not matter, as that of types elsewhere."""
    about = typer.Option(
        *flags, metavar="TYPE", help=help, case_sensitive=False, rich_help_panel=_CACHE, show_default=False
    )
    return Annotated[CacheTypeName | None, about]


RUN_OPTIONS: dict[str, tuple[Any, Any]] = {  # options of every command that runs a model, with their defaults
    **PLACEMENT,
    "fit": (Fit, False),
    "fit_margin": (
        Annotated[
            float,
            typer.Option(
                metavar="MIB", help="With --fit: memory of each device to leave free.", rich_help_panel=_PLACEMENT
            ),
        ],
        1024,
    ),
    "reduce_type": (
        Annotated[
            Literal["f32", "f16", "bf16"],
            typer.Option(
                "--reduce-type",
                "--graph-reduce-type",
                "-grt",
                help="With -sm graph: all-reduce data type.",
                rich_help_panel=_PLACEMENT,
            ),
        ],
        "f32",
    ),
    "offload_threshold": (OffloadThreshold, 32),
    "offload_policy": (OffloadPolicy, None),
    "cache_type": (
        _cache_type(
            "--cache-type",
            help=f"Type of the KV cache: {' '.join(get_args(CacheTypeName))}; default: f16 with numerics fast, f32 "
            "with exact.",
        ),
        None,
    ),
    "cache_type_k": (_cache_type("--cache-type-k", "-ctk", help="Type of the K cache."), None),
    "cache_type_v": (_cache_type("--cache-type-v", "-ctv", help="Type of the V cache."), None),
    "k_cache_hadamard": (
        Annotated[
            bool,
            typer.Option(
                "--k-cache-hadamard",
                "-khad",
                help="Apply a Hadamard transform to keys before they are quantized.",
                rich_help_panel=_CACHE,
            ),
        ],
        False,
    ),
    "v_cache_hadamard": (
        Annotated[
            bool,
            typer.Option(
                "--v-cache-hadamard",
                "-vhad",
                help="Apply a Hadamard transform to values before they are quantized.",
                rich_help_panel=_CACHE,
            ),
        ],
        False,
    ),
    "flash_attn": (
        Annotated[
            Literal["on", "off", "auto", "1", "0"],
            typer.Option(
                "--flash-attn",
                "-fa",
                help="Flash attention (online softmax); off: compute all scores first. -fa alone means on, -no-fa off.",
                rich_help_panel=_ATTENTION,
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
                rich_help_panel=_ATTENTION,
            ),
        ],
        256,
    ),
    "mla": (
        Annotated[
            int,
            typer.Option(
                "--mla-use",
                "-mla",
                help="MLA: 0 caches full heads; 1 caches latents (absorbed); 2 and 3 also expand long prompts.",
                min=0,
                max=3,
                rich_help_panel=_ATTENTION,
            ),
        ],
        3,
    ),
    "fused_moe": (
        Annotated[
            bool,
            typer.Option(
                "--fused-moe/--no-fused-moe",
                "-fmoe/-no-fmoe",
                help="Compute gate, up and activation of experts in one operation.",
                rich_help_panel=_EXPERTS,
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
                rich_help_panel=_EXPERTS,
            ),
        ],
        None,
    ),
    "run_time_repack": (
        Annotated[
            bool,
            typer.Option(
                "--run-time-repack",
                "-rtr",
                help="Interleave rows in memory, as `quantkit repack` does in a file.",
                rich_help_panel=_LOADING,
            ),
        ],
        False,
    ),
    "mmap": (
        Annotated[
            bool,
            typer.Option("--mmap/--no-mmap", help="Map the file, or read it into memory.", rich_help_panel=_LOADING),
        ],
        True,
    ),
    "mlock": (
        Annotated[
            bool,
            typer.Option("--mlock", help="Lock the weights in memory (mlock).", rich_help_panel=_LOADING),
        ],
        False,
    ),
    "huge_pages": (
        Annotated[
            bool,
            typer.Option(
                "--transparent-huge-pages",
                "-thp",
                help="Read the file into memory that asks for huge pages (madvise).",
                rich_help_panel=_LOADING,
            ),
        ],
        False,
    ),
    "profile": (
        Annotated[
            bool,
            typer.Option(
                "--profile",
                help="Print the time of each device by kind of work; the model runs layer by layer.",
                rich_help_panel=_CHECKS,
            ),
        ],
        False,
    ),
    "tripwire": (
        Annotated[
            Literal["layer", "full", "off"],
            typer.Option(
                help="Check for bad scales at load, and for NaN and Inf after each layer or operation (full).",
                rich_help_panel=_CHECKS,
            ),
        ],
        "layer",
    ),
    **without_effect.OPTIONS,
    **refused.OPTIONS,
}
