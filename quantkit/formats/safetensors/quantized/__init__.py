"""Quantized checkpoints: weights stored as codes and scales, read as the matrices they encode.

`unscaled` replaces codes and scales by `ScaledTensor`s, which have the interface of `CheckpointTensor` except for
`raw`. Rows are decoded when they are asked for. There is one module for each format, with its layout and formula:

    fp8, mxfp4, nvfp4                          under several methods
    compressed_tensors, gptq, awq, modelopt,
    bitsandbytes, bitnet                       methods, as `quantization_config.quant_method` names them

`settings` finds the settings, `matrix` is the base class, `packing` unpacks integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.safetensors.quantized import (
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)
from quantkit.formats.safetensors.quantized.matrix import ScaledTensor
from quantkit.formats.safetensors.quantized.settings import settings_of
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs.json_input import Json

__all__ = ["ScaledTensor", "unscaled"]

_Reader = Callable[[Checkpoint, CheckpointTensor, Json], ScaledTensor | None]


@dataclass(frozen=True)
class Method:
    """How a quantization method stores matrices.

    readers  functions that give the matrix whose codes a tensor holds, or None; the first matrix counts
    check    raises an error for settings that are not read
    parts    endings of names of tensors that codes need: one that no codes use is an error
    """

    readers: tuple[_Reader, ...]
    check: Callable[[Json, Path], None] = lambda settings, where: None
    parts: tuple[str, ...] = (".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale")


_MODELOPT = Method((modelopt.matrix,), modelopt.check)
METHODS = {
    "fp8": Method((mxfp4.of_blocks, fp8.matrix, mxfp4.of_experts)),
    "mxfp4": Method((mxfp4.of_blocks, fp8.matrix)),
    "compressed-tensors": Method((compressed_tensors.matrix,), compressed_tensors.check),
    "gptq": Method((gptq.matrix,), gptq.check, gptq.PARTS),
    "awq": Method((awq.matrix,), awq.check, awq.PARTS),
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "bitsandbytes": Method((bitsandbytes.matrix,), bitsandbytes.check, bitsandbytes.PARTS),
    "bitnet": Method((bitnet.matrix,), bitnet.check),
}

# Read when the checkpoint is opened, or scales of activations and caches, which decoding weights does not need.
_DROPPED = (".weight_shape", ".weight_zero_point", ".weight_g_idx", ".activation_scale", ".input_scale",
            ".output_scale", ".k_scale", ".v_scale", ".kv_scale", ".input_zero_point", ".output_zero_point",
            ".input_global_scale")  # fmt: skip


def unscaled(checkpoint: Checkpoint, config: Json) -> Checkpoint:
    """The checkpoint with its quantized weights as matrices, decoded as its settings say (`settings_of`).

    Without settings the checkpoint is returned unchanged. UnsupportedError for other methods; FormatError if tensors
    are missing, do not fit, or contradict the settings.
    """
    settings = settings_of(config, checkpoint.path)
    name = settings.get("quant_method")
    if not name:
        return checkpoint
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise UnsupportedError(
            f"{checkpoint.path}: the checkpoint is quantized already ({name}); quantkit reads {', '.join(METHODS)}, "
            "and bf16, f16 and f32"
        )
    method.check(settings, checkpoint.path)
    made: dict[str, ScaledTensor] = {}
    for tensor in checkpoint.tensors.values():
        found = next((m for read in method.readers if (m := read(checkpoint, tensor, settings)) is not None), None)
        if found is not None:
            made[tensor.name] = found
    used = {part.name for matrix in made.values() for part in matrix.inputs}
    for tensor in checkpoint.tensors.values():
        if tensor.name.endswith(method.parts) and tensor.name not in used:
            raise FormatError(f"{tensor.path}: {tensor.name} has no codes that it scales; a shard is missing")
    return replace(checkpoint, tensors=_shown(checkpoint, made, used))


def _shown(checkpoint: Checkpoint, made: dict[str, ScaledTensor], used: set[str]) -> dict[str, Any]:
    """The matrices by name, and the tensors that no matrix needs. FormatError for two tensors of one name."""
    shown: dict[str, Any] = {}
    for stored in checkpoint.tensors.values():
        is_part = stored.name in used or stored.name.endswith(_DROPPED) or bitsandbytes.state_of(stored.name)
        if is_part and stored.name not in made:
            continue
        found = made.get(stored.name, stored)
        if (other := shown.setdefault(found.name, found)) is not found:
            raise FormatError(
                f"{stored.path}: tensor {stored.name} is {found.name}, which is there already: {other.dtype} of shape "
                f"{other.shape} in {other.path}; codes and floats of one matrix may differ: remove one of them"
            )
    return shown
