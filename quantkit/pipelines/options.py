"""Options of the public functions for files (`quantkit.pipelines.api`): the flags of each command, under Python names.

A field's default is the flag's default. Options are immutable; `dataclasses.replace` gives a changed copy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.formats.imatrix import Imatrix
    from quantkit.placement.rules import Flags

PathLike = str | os.PathLike[str]


def texts(given: str | Sequence[str]) -> list[str]:
    """The texts of a repeatable option; a single text counts as one."""
    return [given] if isinstance(given, str) else list(given)


def comma_separated(given: str | Sequence[str]) -> list[str]:
    """The items of a repeatable option whose texts are comma-separated."""
    return [part for text in texts(given) for part in text.split(",") if part]


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `convert`.

    The fields are flags of `quantkit convert`:

        pre                value of `tokenizer.ggml.pre`, if the tokenizer is not recognised
        mtp                MTP (multi-token prediction) layers: "keep", "drop", "only" (these alone), or "auto" for the
                           architecture's default
        split_max_size     maximum bytes of tensors in a shard; None: no limit
        dry_run            check everything and write nothing
        threads            number of threads; None: the CPUs that this process may use
        metadata           a JSON file of `general.*` keys that override what the checkpoint states
        model_name         value of `general.name`
        split_max_tensors  maximum number of tensors in a shard; None: no limit
        disk               for a checkpoint on the Hub: bytes on the disk beyond the output; None: 10 GB, or what is
                           needed if that is more
        keep_shards        for a checkpoint on the Hub: leave it in the directory NAME beside the output
        fuse_gate_up       write gate and up of experts as one tensor, ffn_gate_up_exps
        merge_lora         the directory of a PEFT adapter (LoRA) that is added to the weights
        shared_output      with a cluster: workers write into the output themselves
        dialect            program that the file is for, "ik" or "llama.cpp": types that it does not read are refused
    """

    pre: str | None = None
    mtp: str = "auto"
    split_max_size: int | None = None
    dry_run: bool = False
    threads: int | None = None
    metadata: PathLike | None = None
    model_name: str | None = None
    split_max_tensors: int | None = None
    disk: int | None = None
    keep_shards: bool = False
    fuse_gate_up: bool = False
    merge_lora: PathLike | None = None
    shared_output: bool = False
    dialect: str | None = None


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export`.

    The fields are flags of `quantkit export`:

        dtype           dtype of quantized tensors: "bf16", "f16", "f32", or "auto" for f32, which is lossless
        max_shard_size  maximum bytes of a safetensors file
        dry_run         check everything and write nothing
        threads         number of threads; None: the CPUs that this process may use
    """

    dtype: str = "auto"
    max_shard_size: int = 5 * 10**9
    dry_run: bool = False
    threads: int | None = None


@dataclass(frozen=True)
class TypeOptions:
    """Options that decide the type of every tensor, shared by `plan` and `quantize`.

    Importance matrix:

        imatrix               a file, or an importance matrix that was read from one
        include_weights       use only entries whose name contains one of these texts
        exclude_weights       ignore entries whose name contains one of these texts
        no_second_moments     do not use second moments that it holds

    Rules, in this order; the first that matches a tensor decides:

        custom_q              texts "REGEX=TYPE,…", or files of them
        tensor_type           texts "REGEX=TYPE"
        tensor_type_file      a file of rules
        recipe                the name of a shipped recipe, a recipe file, or a GGUF file that contains one
        settings              values of the recipe's settings, by name

    Types by tensor or by class, above or below the rules as in `quantkit quantize --help`:

        output_tensor_type, token_embedding_type, per_layer_token_embedding_type, ffn_gate_inp_type, attn_q_type,
        attn_k_type, attn_v_type, attn_qkv_type, attn_output_type, ffn_gate_type, ffn_down_type, ffn_up_type

    Switches:

        pure                  use the file type for every tensor, without a mix
        leave_output_tensor   do not quantize `output.weight`
        allow_requantize      allow quantized tensors to be quantized again
        ignore_imatrix_rules  allow very low-bit types without an importance matrix
        repack                also interleave the rows of every tensor whose type has an interleaved form
        repack_pattern        interleave only tensors whose name matches one of these regexes; implies `repack`
        strict                treat warnings about the plan as errors

    The program that the file is for:

        dialect               "ik" (ik_llama.cpp) or "llama.cpp": types that it does not read are refused
        replace_types         or replaced by the nearest type that it reads, of the same or a smaller size
        scale_nvfp4           give each tensor that becomes NVFP4 a tensor NAME.scale, which lowers its error

    A checkpoint as input:

        mtp                   MTP (multi-token prediction) layers: "keep", "drop", "only" for these alone, or "auto" for
                              the architecture's default
    """

    imatrix: PathLike | Imatrix | None = None
    include_weights: Sequence[str] = ()
    exclude_weights: Sequence[str] = ()
    no_second_moments: bool = False
    custom_q: Sequence[str] = ()
    tensor_type: Sequence[str] = ()
    tensor_type_file: PathLike | None = None
    recipe: PathLike | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    pure: bool = False
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    per_layer_token_embedding_type: str | None = None
    ffn_gate_inp_type: str | None = None
    attn_q_type: str | None = None
    attn_k_type: str | None = None
    attn_v_type: str | None = None
    attn_qkv_type: str | None = None
    attn_output_type: str | None = None
    ffn_gate_type: str | None = None
    ffn_down_type: str | None = None
    ffn_up_type: str | None = None
    leave_output_tensor: bool = False
    allow_requantize: bool = False
    ignore_imatrix_rules: bool = False
    repack: bool = False
    repack_pattern: Sequence[str] = ()
    strict: bool = False
    dialect: str | None = None
    replace_types: bool = False
    mtp: str = "auto"
    scale_nvfp4: bool = False


@dataclass(frozen=True)
class PlanOptions(TypeOptions):
    """Options of `plan`: those of TypeOptions, and where the tensors go.

    Devices:

        placement          placement flags as text, for example "-ngl 99 -ot exps=CPU"; None: no flags
        fit                fill the devices to their memory
        vram               GiB of each GPU
        ram                GiB of the CPU's memory
        fit_margin         MiB of each GPU to reserve for compute buffers
        runtime            program that will run the model, "ik_llama.cpp" or "quantkit": which interleaved types its
                           GPUs take

    KV cache:

        ctx_size           tokens; 0: the model's context length; None: no cache
        cache_type_k       type of the K cache
        cache_type_v       type of the V cache
        mla                layout of a latent cache: 0 stores full heads, 1 to 3 the latent
        mtp_cache          MTP layers draft, and have a cache too

    Predicted speed:

        bandwidth          memory bandwidth in GB/s: "cpu=80,cuda:0=900"
        compute            compute in TFLOP/s, in the same form
        offload_threshold  minimum batch size per matrix to offload products of CPU tensors to GPUs, in tokens
        offload_policy     operations to offload (1) or not (0): "OP,0,…"
        cluster            "WORKERS x CORES, GB/s of a link[, GB/s of the storage]": predict the time that `quantize`
                           takes there
    """

    placement: Flags | str | None = None
    fit: bool = False
    bandwidth: str | None = None
    compute: str | None = None
    cluster: str | None = None
    offload_threshold: int = 32
    offload_policy: str | None = None
    ctx_size: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mla: int = 3
    mtp_cache: bool = False
    vram: Sequence[float] = ()
    ram: float | None = None
    fit_margin: float = 1024
    runtime: str = "ik_llama.cpp"


@dataclass(frozen=True)
class QuantizeOptions(TypeOptions):
    """Options of `quantize`: those of TypeOptions, and how the file is written.

    Input and metadata:

        plan               a plan that decides every type: the document of `quantkit plan --json`, or a file of it
        pre                value of `tokenizer.ggml.pre`, if a checkpoint's tokenizer is not recognised
        metadata           a JSON file of `general.*` keys that override what a checkpoint states
        model_name         value of `general.name`, for a checkpoint
        override_kv        texts "KEY=TYPE:VALUE" that set metadata keys; TYPE is int, float, bool or str
        hide_imatrix       do not store the name of the importance matrix in the output

    Work:

        effort             encoder effort: "fast", "normal" or "best"
        threads            number of threads; None: the CPUs that this process may use
        fresh              restart instead of resuming an interrupted run
        shared_output      with a cluster: workers write into the output themselves
        partial_requant    quantize only tensors that would differ from those in the output; copy the rest
        reuse              like `partial_requant`, but copy from this file

    Shards:

        split_max_size     maximum bytes of tensors in a shard
        split_max_tensors  maximum number of tensors in a shard
        keep_split         split the output into the same shards as the input

    Parts (pipelines/parts.py):

        only               write only tensors whose name matches one of these regexes, as a part for `merge`
        individual_tensors  with `keep_split`: write only these shards, numbers from 1, and the first one
        skip_first_shard   with `individual_tensors`: do not write the first shard unless it is one of them
        disk               for a checkpoint on the Hub: bytes on the disk beyond the output; None: 10 GB, or what is
                           needed if that is more
        keep_shards        for a checkpoint on the Hub: leave it in the directory NAME beside the output
    """

    plan: PathLike | Mapping[str, Any] | None = None
    pre: str | None = None
    metadata: PathLike | None = None
    model_name: str | None = None
    override_kv: Sequence[str] = ()
    hide_imatrix: bool = False
    effort: str = "normal"
    threads: int | None = None
    fresh: bool = False
    partial_requant: bool = False
    reuse: PathLike | None = None
    split_max_size: int | None = None
    split_max_tensors: int | None = None
    keep_split: bool = False
    only: Sequence[str] = ()
    individual_tensors: Sequence[int] | Sequence[str] = ()
    skip_first_shard: bool = False
    disk: int | None = None
    keep_shards: bool = False
    shared_output: bool = False


@dataclass(frozen=True)
class RepackOptions:
    """Options of `repack_file` and `unpack_file`.

    The fields are flags of `quantkit repack`:

        repack_pattern     interleave only tensors whose name matches one of these regexes (`repack_file` only)
        placement          placement flags of the later run, for example "-ngl 99 -ot exps=CPU": tensors on a GPU are
                           copied (`repack_file` only)
        runtime            with `placement`: the program of that run, "ik_llama.cpp" or "quantkit"
        split_max_size     maximum bytes of tensors in a shard
        split_max_tensors  maximum number of tensors in a shard
        keep_split         split the output into the same shards as the input
        dry_run            plan and write nothing
        threads            number of threads; None: the CPUs that this process may use
    """

    repack_pattern: Sequence[str] = ()
    placement: Flags | str | None = None
    runtime: str = "ik_llama.cpp"
    split_max_size: int | None = None
    split_max_tensors: int | None = None
    keep_split: bool = False
    dry_run: bool = False
    threads: int | None = None


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `verify`.

    The fields are flags of `quantkit verify`:

        source   the input that the file was quantized from: a GGUF file or a checkpoint directory, or either on the Hub
        imatrix  the importance matrix that it was quantized with
        threads  number of threads; None: the CPUs that this process may use
        disk     for a checkpoint on the Hub: bytes on the disk while it is streamed; None: 10 GB, or what is needed if
                 that is more
    """

    source: PathLike | None = None
    imatrix: PathLike | Imatrix | None = None
    threads: int | None = None
    disk: int | None = None
