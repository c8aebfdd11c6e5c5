"""The command-line options of `plan`, `quantize` and `recipe` that decide types and placement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from quantkit.cli.common.command import in_section
from quantkit.cli.common.launch import placement_flags
from quantkit.cli.common.options import MtpPolicy, RepackPattern, with_options
from quantkit.cli.common.run_options import PLACEMENT, CacheTypeName, Fit, OffloadPolicy, OffloadThreshold
from quantkit.pipelines.options import PlanOptions

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
NoSecondMoments = Annotated[
    bool, typer.Option("--no-second-moments", help="Do not use second moments that the imatrix holds.")
]
Repack = Annotated[
    bool, typer.Option("--repack", help="Also interleave the rows of every tensor whose type has an interleaved form.")
]
Dialect = Annotated[
    Literal["ik", "llama.cpp"] | None,
    typer.Option(
        "--dialect",
        "--for",
        help="Program that the file is for: ik (ik_llama.cpp) or llama.cpp. Types that it does not read are refused.",
        show_default=False,
    ),
]
ScaleNvfp4 = Annotated[
    bool,
    typer.Option(
        "--scale-nvfp4",
        help="Store a scale for each NVFP4 tensor in NAME.scale, as llama.cpp reads it: small weights lose less.",
    ),
]
ReplaceTypes = Annotated[
    bool,
    typer.Option(
        "--replace-types",
        help="With --dialect: replace types that the program does not read by the nearest ones, not larger.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Treat warnings about the plan as errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every tensor with the reason for its type.")]
Context = Annotated[
    int | None,
    typer.Option(
        "--ctx-size",
        "-c",
        metavar="N",
        help="Include a KV cache for N tokens; 0: the model's context length.",
        min=0,
        show_default=False,
    ),
]
CacheTypeK = Annotated[
    CacheTypeName,
    typer.Option("--cache-type-k", "-ctk", metavar="TYPE", help="Type of the K cache.", case_sensitive=False),
]
CacheTypeV = Annotated[
    CacheTypeName,
    typer.Option("--cache-type-v", "-ctv", metavar="TYPE", help="Type of the V cache.", case_sensitive=False),
]
Mla = Annotated[
    int,
    typer.Option("--mla-use", "-mla", help="KV cache of MLA: 0 stores full heads, 1 to 3 the latent.", min=0, max=3),
]
MtpCache = Annotated[bool, typer.Option("--mtp-cache", help="Include the KV cache of MTP layers, for drafting.")]
Vram = Annotated[str | None, typer.Option(metavar="GIB,…", help="Memory of each GPU, to check whether the model fits.")]
Ram = Annotated[float | None, typer.Option(metavar="GIB", help="Main memory of the CPU.", show_default=False)]
Runtime = Annotated[
    Literal["ik_llama.cpp", "quantkit"],
    typer.Option(help="Program that will run the model: which interleaved types its GPUs take."),
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

ClusterMachines = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="'N x CORES, GB/s'",
        help="Predict the time of quantize on N machines with links of so many GB/s; a third number: the GB/s of "
        "shared storage.",
        show_default=False,
    ),
]

# The command-line form of each option of PlanOptions, except `placement`, whose flags are in PLACEMENT.
_ANNOTATIONS: dict[str, Any] = {
    "imatrix": ImatrixFile,
    "include_weights": IncludeWeights,
    "exclude_weights": ExcludeWeights,
    "no_second_moments": NoSecondMoments,
    "custom_q": CustomQ,
    "tensor_type": TensorType,
    "tensor_type_file": TensorTypeFile,
    "recipe": RecipeName,
    "settings": Set,
    "pure": Pure,
    "output_tensor_type": Type,
    "token_embedding_type": Type,
    "per_layer_token_embedding_type": Type,
    "ffn_gate_inp_type": Type,
    "attn_q_type": Type,
    "attn_k_type": Type,
    "attn_v_type": Type,
    "attn_qkv_type": Type,
    "attn_output_type": Type,
    "ffn_gate_type": Type,
    "ffn_down_type": Type,
    "ffn_up_type": Type,
    "leave_output_tensor": LeaveOutput,
    "allow_requantize": AllowRequantize,
    "ignore_imatrix_rules": IgnoreRules,
    "repack": Repack,
    "repack_pattern": RepackPattern,
    "strict": Strict,
    "dialect": Dialect,
    "replace_types": ReplaceTypes,
    "scale_nvfp4": ScaleNvfp4,
    "fit": Fit,
    "bandwidth": Bandwidth,
    "compute": Compute,
    "cluster": ClusterMachines,
    "offload_threshold": OffloadThreshold,
    "offload_policy": OffloadPolicy,
    "ctx_size": Context,
    "cache_type_k": CacheTypeK,
    "cache_type_v": CacheTypeV,
    "mla": Mla,
    "mtp_cache": MtpCache,
    "mtp": MtpPolicy,
    "vram": Vram,
    "ram": Ram,
    "fit_margin": FitMargin,
    "runtime": Runtime,
}

# The sections of the help page; what is not listed is in "Options".
_SECTIONS = {
    "Importance matrix": ("imatrix", "include_weights", "exclude_weights", "no_second_moments", "ignore_imatrix_rules"),
    "Types of tensors": (
        "custom_q", "tensor_type", "tensor_type_file", "recipe", "settings", "pure", "output_tensor_type",
        "token_embedding_type",
        "per_layer_token_embedding_type", "ffn_gate_inp_type", "attn_q_type", "attn_k_type", "attn_v_type",
        "attn_qkv_type",
        "attn_output_type", "ffn_gate_type", "ffn_down_type", "ffn_up_type", "leave_output_tensor", "repack",
        "repack_pattern", "dialect", "replace_types", "scale_nvfp4",
    ),
    "Placement": ("fit", "offload_threshold", "offload_policy", "vram", "ram", "fit_margin", "runtime"),
    "KV cache": ("ctx_size", "cache_type_k", "cache_type_v", "mla", "mtp_cache"),
    "Predicted speed": ("bandwidth", "compute", "cluster"),
}  # fmt: skip
_SECTION_OF = {name: section for section, names in _SECTIONS.items() for name in names}


def takes_plan_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: replace a command's parameter `options` by the options of PlanOptions, except those named."""
    options: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(PlanOptions):
        if field.name == "placement":
            options |= PLACEMENT
        elif field.name not in without:
            is_collection = field.default in ((), dataclasses.MISSING)
            annotation = _ANNOTATIONS[field.name]
            if field.name in _SECTION_OF:
                annotation = in_section(annotation, _SECTION_OF[field.name])
            options[field.name] = annotation, None if is_collection else field.default
    return lambda command: with_options(command, "options", options, _plan_options)


def _plan_options(given: dict[str, Any]) -> PlanOptions:
    """The options of a command line, by name; None stands for an option that is not given."""
    values: dict[str, Any] = {"placement": placement_flags({name: given.pop(name) for name in PLACEMENT})}
    values |= {name: value for name, value in given.items() if value is not None}
    values["settings"] = read_settings(given.get("settings"))
    values["vram"] = read_vram(given.get("vram"))
    return PlanOptions(**values)


def read_settings(texts: Sequence[str] | None) -> dict[str, str]:
    """The values of --set NAME=VALUE."""
    found = {}
    for text in texts or ():
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name or not value:
            raise typer.BadParameter(f"--set '{text}' is not NAME=VALUE")
        found[name] = value
    return found


def read_vram(text: str | None) -> list[float]:
    """The GiB of each GPU of --vram."""
    try:
        sizes = [float(part) for part in (text or "").split(",") if part.strip()]
        if not all(0 < size < math.inf for size in sizes):
            raise ValueError
        return sizes
    except ValueError:
        raise typer.BadParameter(
            f"--vram '{text}': write the GiB of each GPU, comma-separated, for example 24,24"
        ) from None
