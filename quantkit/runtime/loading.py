"""`load`: open a GGUF file as a model, on the CPU or on several devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.archs.common import validate
from quantkit.formats import gguf
from quantkit.hub.models import model_file
from quantkit.placement import budget
from quantkit.placement import fit as fitting
from quantkit.placement.devices import CPU, Device, parse_devices
from quantkit.placement.offload import Offload
from quantkit.placement.rules import Flags, place_model
from quantkit.runtime import repacking, residency
from quantkit.runtime.blocks.float_attention import AttentionOptions
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.model import SEQUENCE_TOKENS, Model, ModelFile, cache_type_of

if TYPE_CHECKING:
    from quantkit.tokenizers.tokenizer import Tokenizer

GIB = 1 << 30


def load(
    path: str | os.PathLike[str] | ModelFile,
    *,
    numerics: str = "exact",
    threads: int | None = None,
    cache_type: str | CacheType | None = None,
    flash_attention: bool = True,
    attention_mib: int = 256,
    n_ctx: int | None = None,
    override_tensor: str | Sequence[str] = "",
    gpu_layers: int | None = None,
    n_cpu_moe: int = 0,
    repack: bool = False,
    fused_experts: bool = True,
    expert_reduction: tuple[int, float] | None = None,
    mla: int = 3,
    tripwire: str = "layer",
    devices: str | Sequence[Device] = "",
    split_mode: str = "layer",
    tensor_split: Sequence[float] = (),
    main_gpu: int | None = None,
    max_gpus: int | None = None,
    kv_on_cpu: bool = False,
    fit: bool = False,
    fit_margin: int = GIB,
    reduce_type: str = "f32",
    experts_by: str = "number",
    profile: bool = False,
    offload: Offload | None = None,
    tokenizer: Tokenizer | None = None,
    mmap: bool = True,
    huge_pages: bool = False,
    mlock: bool = False,
) -> Model:
    """Open the GGUF file `path`, or any shard of a set, as a Model. Tensors are read when they are needed.

    `path` may also be an address on the Hub, hf://ORG/NAME/FILE.gguf, or an open `ModelFile`.

    numerics    "exact": weights are decoded exactly, activations are float32. "fast": activations are quantized where
                that is faster.
    threads     default: the CPUs that this process may use.
    cache_type  "q8_0" for keys and values, "q8_0/q4_0" for each, "q4_0 khad vhad" rotated; see `runtime/kv/cache.py`.
                Default f32 for exact numerics, f16 for fast.
    flash_attention, attention_mib   see `AttentionOptions`: `-fa` and `-amb`.
    n_ctx       size of the caches that `new_cache` makes by default; the model's own where not given.
    override_tensor, gpu_layers, n_cpu_moe   placement: `-ot` (a string or several), `-ngl` and `--n-cpu-moe`.
    repack      at load, interleave the rows of every tensor on the CPU whose type has an interleaved form (`-rtr`).
    fused_experts   gate, up and activation of an expert in one operation (`-fmoe`); the numbers are the same.
    expert_reduction   (K, t), `-ser K,t`: always use the first K selected experts, others only with a probability above
                t times the first one's. It changes what the model computes, in both numerics.
    mla         0 to 3: what latent attention caches and how it attends (runtime/blocks/latent.py). Other models ignore
                it.
    tripwire    non-finite checks: "layer" after each layer, "full" after each operation; both also check the scales of
                a layer's weights before it first runs. "off" checks nothing, so NaN reach the results.
    devices     devices beside the CPU: "cuda:0,cuda:1=20GiB" are GPUs, with all free memory unless a size is given;
                "cpu:0=2GiB,cpu:1=2GiB" are simulated devices (placement/devices.py). Or a list of Device.
    split_mode, tensor_split, main_gpu, max_gpus, kv_on_cpu   `-sm`, `-ts`, `-mg`, `--max-gpu` and `-nkvo`.
    fit, fit_margin   fill each device up to its memory less `fit_margin` bytes (placement/fit.py); the model's `fitted`
                are the flags that give the same placement.
    reduce_type, experts_by   for -sm graph: the all-reduce data type (f32, f16 or bf16), and whether devices share
                experts by "number" or by "columns".
    offload     minimum batch size for computing on a GPU with experts that stay on the CPU; default 32 tokens an expert
                (placement/offload.py).
    profile     count time and bytes in `split.ledger`. The model then runs layer by layer, on one device too.
    tokenizer   a Tokenizer that the caller has already made of this file; default: made when it is needed.
    mmap, huge_pages, mlock   `--no-mmap`, `-thp` and `--mlock` (runtime/residency.py): whether weights are mapped or
                read into memory, in huge pages if the kernel has them (which reads them too), and locked there; the
                model's `read` and `locked` say what was done.

    Raises DataError where a device has too little memory for its weights, the cache of `n_ctx` and working memory.

    A model on several devices runs layer by layer (`split`). With fast numerics, neighbouring layers that are whole on
    the CPU, experts of other layers there, and the head run as compiled plans. `fallback_reason` says so.
    """
    attention = AttentionOptions(flash_attention, attention_mib)
    kind = cache_type_of(cache_type, numerics, attention)
    file = gguf.require_model(gguf.open(model_file(path))) if isinstance(path, (str, os.PathLike)) else path
    described = validate.describe(file.metadata, file.tensors, file.path)
    for tensor in file.tensors.values():
        _ = tensor.scales  # raises an error for bad numbers
    rules = (override_tensor,) if isinstance(override_tensor, str) else tuple(override_tensor)
    requested = parse_devices(devices) if isinstance(devices, str) else tuple(devices) or (CPU,)
    available = _with_memory(requested)
    flags = Flags(
        gpu_layers,
        rules,
        n_cpu_moe,
        tuple(tensor_split),
        split_mode,
        main_gpu,
        max_gpus,
        kv_on_cpu,
        tuple(available),
        runtime="quantkit",
    )
    fitted = None
    if fit or any(device.memory for device in available):
        size = n_ctx or described.hparams.n_ctx_train
        if not (n_ctx or fit or any(device.memory for device in requested)):
            size = min(size, SEQUENCE_TOKENS)  # the user gave no sizes: require only the memory to run at all
        cache = budget.CacheSettings(size, kind.k, kind.v, mla)
        if fit:
            about = (file.tensors, file.metadata, available, cache.of_layers(file.metadata))
            fitted = fitting.fit(*about, margin=fit_margin, flags=flags, mla=mla)
            flags = fitted.flags
        budget.require_memory(file.tensors, file.metadata, flags, cache, file.path)
    placement = place_model(file.tensors, flags, file.metadata, available)
    read_weights = None
    if huge_pages or not mmap:
        tensors, read_weights = residency.read(
            file.tensors, lambda tensor: not (repack and repacking.is_repacked(tensor, placement)), huge_pages
        )
        file = _Loaded(file.path, file.metadata, tensors, file.size)
    model = Model(
        file, described, placement, numerics=numerics, threads=threads, cache_type=kind, attention=attention,
        n_ctx=n_ctx, repack=repack, fused_experts=fused_experts, expert_reduction=expert_reduction, mla=mla,
        tripwire=tripwire, reduce_type=reduce_type, experts_by=experts_by, profile=profile, offload=offload,
        tokenizer=tokenizer,
    )  # fmt: skip
    model.fitted = fitted.text if fitted else None
    model.read = read_weights
    if mlock:
        model.locked = residency.lock(model.weights.values())
    return model


@dataclass(frozen=True)
class _Loaded:
    """A ModelFile with other tensors than the file's."""

    path: Path
    metadata: gguf.Metadata
    tensors: dict[str, gguf.Tensor]
    size: int


def _with_memory(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices, GPUs without a given size with their free memory. UnsupportedError for a GPU that does not exist."""
    if all(device.gpu is None for device in devices):
        return tuple(devices)
    from quantkit.runtime.cuda import gpu_worker

    return tuple(map(gpu_worker.with_memory, devices))
