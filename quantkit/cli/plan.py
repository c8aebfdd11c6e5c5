"""`quantkit plan`: what a recipe makes of a model, and whether that fits, before there are weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli._planning import (
    AllowRequantize,
    Asked,
    Bandwidth,
    CacheTypeK,
    CacheTypeV,
    Compute,
    Context,
    CpuMoe,
    CustomQ,
    Devices,
    ExcludeWeights,
    Explain,
    Fit,
    FitMargin,
    GpuLayers,
    IgnoreRules,
    ImatrixFile,
    IncludeWeights,
    LeaveOutput,
    MainGpu,
    MaxGpu,
    Mla,
    NCpuMoe,
    NoKvOffload,
    OffloadPolicy,
    OffloadThreshold,
    OverrideTensor,
    Pure,
    Ram,
    RecipeName,
    Repack,
    RepackPattern,
    Set,
    SplitMode,
    Strict,
    TensorSplit,
    TensorType,
    TensorTypeFile,
    Type,
    Verbose,
    Vram,
    document,
    open_source,
    print_plan,
    require_clean,
)
from quantkit.cli._shared import Json, print_json


def plan(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, or any shard of a set, a checkpoint's directory, or its config.json alone.",
            show_default=False,
        ),
    ],
    file_type: Annotated[
        str, typer.Argument(metavar="TYPE", help="File type, as Q4_K_M; COPY for the types that are there.")
    ] = "COPY",
    imatrix: ImatrixFile = None,
    custom_q: CustomQ = None,
    tensor_type: TensorType = None,
    tensor_type_file: TensorTypeFile = None,
    recipe: RecipeName = None,
    settings: Set = None,
    pure: Pure = False,
    output_tensor_type: Type = None,
    token_embedding_type: Type = None,
    ffn_gate_inp_type: Type = None,
    attn_q_type: Type = None,
    attn_k_type: Type = None,
    attn_v_type: Type = None,
    attn_qkv_type: Type = None,
    attn_output_type: Type = None,
    ffn_gate_type: Type = None,
    ffn_down_type: Type = None,
    ffn_up_type: Type = None,
    leave_output_tensor: LeaveOutput = False,
    allow_requantize: AllowRequantize = False,
    ignore_imatrix_rules: IgnoreRules = False,
    include_weights: IncludeWeights = None,
    exclude_weights: ExcludeWeights = None,
    repack: Repack = False,
    repack_pattern: RepackPattern = None,
    gpu_layers: GpuLayers = None,
    override_tensor: OverrideTensor = None,
    cpu_moe: CpuMoe = False,
    n_cpu_moe: NCpuMoe = 0,
    tensor_split: TensorSplit = None,
    split_mode: SplitMode = "layer",
    main_gpu: MainGpu = None,
    max_gpu: MaxGpu = None,
    no_kv_offload: NoKvOffload = False,
    devices: Devices = None,
    fit: Fit = False,
    bandwidth: Bandwidth = None,
    compute: Compute = None,
    offload_threshold: OffloadThreshold = 32,
    offload_policy: OffloadPolicy = None,
    explain: Explain = False,
    ctx_size: Context = None,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    mla: Mla = 3,
    vram: Vram = None,
    ram: Ram = None,
    fit_margin: FitMargin = 1024,
    strict: Strict = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Show what a file type, rules and flags make of a model, who goes where, and whether it fits.

    No weight is read, and none need be there: a config.json is enough. The plan names the type of every class of
    tensors with the reason, what each rule matched, sizes, and what is probably a mistake. With -ngl, -ot, -ts and
    their kin it tells the bytes on each device, with -c the cache, with --vram and --ram whether it fits. --fit fills
    the devices and prints the flags that do the same, with speeds that their bytes allow.
    `quantkit quantize IN OUT --plan FILE` executes what --json prints.
    """
    asked = Asked.of(locals())
    model = open_source(source)
    made = asked.plan(model, asked.read_imatrix())
    budget = asked.budget(made, model.metadata)
    if strict:
        require_clean(made, budget)
    if json:
        print_json(document(made, budget))
    else:
        print_plan(made, verbose, budget, explain)
