"""Quantized checkpoints: weights stored as codes and scales, read as the matrices they encode.

    fp8     NAME.weight F8_E4M3 or F8_E5M2, multiplied by NAME.weight_scale_inv (or weight_scale): one number, one a
            row, or one for each block of rows and columns. Blocks are 128 x 128 unless config.json gives a size. The
            last block of an axis may be incomplete.
    mxfp4   NAME_blocks U8[…, rows, n / 32, 16] with NAME_scales U8[…, rows, n / 32], as in gpt-oss's experts: byte j
            of a block holds elements 2j (low bits) and 2j + 1 as E2M1 codes; a scale e means 2^(e - 127).
    ints    compressed-tensors: NAME.weight_packed I32[rows, words], codes of 1 to 8 bits from the low bits of a word
            up, with NAME.weight_shape (rows, n); or NAME.weight I8[rows, n]. NAME.weight_scale [rows, groups];
            optional NAME.weight_zero_point I8[rows, groups], packed along rows if weights are packed; optional
            NAME.weight_g_idx I32[n], the group of each column. config.json gives bits and group size, for all modules
            or by their names.
    bitnet  NAME.weight U8[rows / 4, n], packed, with NAME.weight_scale of one number; or floats that are rounded to
            ternary values when the model runs

`unscaled` replaces codes and scales by `ScaledTensor`s (`quantized_matrix`), which have the interface of
`CheckpointTensor` except for `raw`. Rows are decoded when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.safetensors.quantized_matrix import (
    FP8Tensor,
    IntegerTensor,
    MXFP4Tensor,
    ScaledTensor,
    Ternarized,
    TernaryTensor,
    unpack,
)
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs.json_input import Json
from quantkit.inputs.safe_regex import compile
from quantkit.inputs.settings import integer, mapping, sequence

FP8 = ("F8_E4M3", "F8_E5M2")
INTEGERS = tuple(f"INT{bits}" for bits in range(1, 9))
_BLOCK = (128, 128)
_PACKED = ".weight_packed"
_SCALES = (".weight_scale_inv", ".weight_scale")
_OF_INTEGERS = (".weight_shape", ".weight_zero_point", ".weight_g_idx")
# Scales of activations and caches, which decoding weights does not need.
_OF_ACTIVATIONS = (".activation_scale", ".input_scale", ".output_scale", ".k_scale", ".v_scale", ".kv_scale",
                   ".input_zero_point", ".output_zero_point")  # fmt: skip
_COMPRESSED = "compressed-tensors"
_BITNET = "bitnet"
_METHODS = ("fp8", "mxfp4", _COMPRESSED, _BITNET)
_TARGETS = "config.json: quantization_config.config_groups, targets"
_FORMATS = (None, "dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision")


def unscaled(checkpoint: Checkpoint, config: Json) -> Checkpoint:
    """The checkpoint with its quantized weights as matrices, decoded as `quantization_config` in config.json says.

    Without that setting the checkpoint is returned unchanged. UnsupportedError for other methods; FormatError if scales
    are missing or do not fit.
    """
    settings: Json = mapping(config, "quantization_config")
    if config.get("weight_bits") == 1 and not settings:  # the first BitNets, whose own class makes weights ternary
        settings = {"quant_method": _BITNET, "quantization_mode": "online"}
    if not settings.get("quant_method"):
        return checkpoint
    _refuse_other_methods(settings, checkpoint.path)
    tensors: dict[str, ScaledTensor] = {}
    used: set[str] = set()
    for name, tensor in checkpoint.tensors.items():
        made = _made_of(checkpoint, tensor, settings)
        if made is not None:
            tensors[name] = made
            if made.scales is not made.codes:
                used.add(made.scales.name)
    for name in checkpoint.tensors:
        if name.endswith(_SCALES) and name not in used:
            raise FormatError(f"{checkpoint.path}: {name} has no codes that it scales")
    dropped = used.union(name for name in checkpoint.tensors if name.endswith((*_OF_ACTIVATIONS, *_OF_INTEGERS)))
    kept = [tensors.get(name, tensor) for name, tensor in checkpoint.tensors.items() if name not in dropped]
    shown: dict[str, Any] = {tensor.name: tensor for tensor in kept}
    return replace(checkpoint, tensors=shown)


def _made_of(checkpoint: Checkpoint, tensor: CheckpointTensor, settings: Json) -> ScaledTensor | None:
    """The matrix whose codes a tensor holds; None if it holds no codes."""
    name = tensor.name
    if name.endswith("_blocks"):
        return _mxfp4(checkpoint, name.removesuffix("_blocks"), tensor)
    if tensor.dtype in FP8:
        return _fp8(checkpoint, tensor, _block_size(settings))
    if settings["quant_method"] == _BITNET:
        return _bitnet(checkpoint, tensor, settings) if name.endswith("_proj.weight") else None
    whole = tensor.dtype == "I8" and name.endswith(".weight")
    if settings["quant_method"] == _COMPRESSED and (name.endswith(_PACKED) or whole):
        return _integers(checkpoint, tensor, settings)
    return None


def _refuse_other_methods(settings: Json, where: Path) -> None:
    """UnsupportedError for a quantization_config of a method or format that is not known here."""
    method = settings.get("quant_method")
    if method not in _METHODS:
        raise UnsupportedError(
            f"{where}: the checkpoint is quantized already ({method}); quantkit reads {', '.join(_METHODS)}, "
            "and bf16, f16 and f32"
        )
    for group in _groups(settings) if method == _COMPRESSED else ():
        weights, form = mapping(group, "weights"), group.get("format") or settings.get("format")
        kind, bits = weights.get("type", "int"), integer(weights, "num_bits", 8)
        if form not in _FORMATS or not ((kind == "float" and bits == 8) or (kind == "int" and bits in range(1, 9))):
            raise UnsupportedError(
                f"{where}: the checkpoint is quantized already ({method}, {form or 'no format'}, {kind} of {bits} "
                f"bits); of this method quantkit reads {', '.join(filter(None, _FORMATS))}: integers of 1 to 8 bits "
                "and float of 8"
            )


def _block_size(settings: Json) -> tuple[int, int]:
    """Rows and columns that share a scale; `_BLOCK` if config.json gives no size."""
    structures = [mapping(group, "weights").get("block_structure") for group in _groups(settings)]
    size: Any = settings.get("weight_block_size") or next(filter(None, structures), None) or _BLOCK
    if not isinstance(size, Sequence) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise FormatError(f"config.json: weight_block_size is {size!r}; it has to be two numbers, such as [128, 128]")
    return size[0], size[1]


def _groups(settings: Json) -> list[Json]:
    """The objects of `config_groups`."""
    groups = mapping(settings, "config_groups")
    return [mapping(groups, name) for name in groups]


def _fp8(checkpoint: Checkpoint, codes: CheckpointTensor, block: tuple[int, int]) -> FP8Tensor:
    names = [codes.name.removesuffix(".weight") + suffix for suffix in _SCALES]
    scales = next((checkpoint.tensors[name] for name in names if name in checkpoint.tensors), None)
    if scales is None:
        raise FormatError(f"{codes.path}: tensor {codes.name} is {codes.dtype} and has no scales, {' or '.join(names)}")
    if len(codes.shape) < 2:
        raise FormatError(f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}, not a matrix")
    *lead, rows, n = codes.shape
    stack = math.prod(lead)
    grid = (*lead, -(-rows // block[0]), -(-n // block[1]))
    if scales.shape == grid:
        return FP8Tensor(codes, scales, block)
    if math.prod(scales.shape) == stack:  # one a matrix
        return FP8Tensor(codes, scales, (rows, n))
    if math.prod(scales.shape) == stack * rows:  # one a row
        return FP8Tensor(codes, scales, (1, n))
    raise FormatError(
        f"{scales.path}: tensor {scales.name} is {scales.shape}; {codes.name} is {codes.shape}, whose blocks of "
        f"{block[0]} x {block[1]} need {grid}"
    )


def _mxfp4(checkpoint: Checkpoint, name: str, codes: CheckpointTensor) -> MXFP4Tensor:
    scales = checkpoint.tensors.get(f"{name}_scales")
    if scales is None:
        raise FormatError(f"{codes.path}: tensor {codes.name} has no scales, {name}_scales")
    if codes.dtype != "U8" or scales.dtype not in ("U8", "F8_E8M0") or len(codes.shape) < 3 or codes.shape[-1] != 16:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}, its scales {scales.dtype}; "
            "MXFP4 is U8 of shape […, rows, blocks, 16] with U8 scales"
        )
    if scales.shape != codes.shape[:-1]:
        raise FormatError(
            f"{scales.path}: tensor {scales.name} is {scales.shape}; the blocks of {codes.name} need {codes.shape[:-1]}"
        )
    return MXFP4Tensor(name, codes, scales)


def _bitnet(checkpoint: Checkpoint, tensor: CheckpointTensor, settings: Json) -> ScaledTensor | None:
    """A ternary matrix: packed, or floats that the layers round to ternary values when they run ("online")."""
    name = f"{tensor.name}_scale"
    scales = checkpoint.tensors.get(name)
    if tensor.dtype != "U8":
        if scales is not None:
            raise UnsupportedError(
                f"{tensor.path}: tensor {tensor.name} is {tensor.dtype} with a scale; U8 can have one"
            )
        return Ternarized(tensor) if settings.get("quantization_mode") == "online" else None
    if scales is None or math.prod(scales.shape) != 1 or len(tensor.shape) != 2:
        raise FormatError(
            f"{tensor.path}: tensor {tensor.name} is packed and has to be a matrix with one scale, {name}"
        )
    return TernaryTensor(tensor, scales, settings.get("linear_class", "bitlinear") != "autobitlinear")


# ------------------------------------------------------------------------------------------------------------- integers


def _integers(checkpoint: Checkpoint, codes: CheckpointTensor, settings: Json) -> IntegerTensor:
    module = codes.name.removesuffix(_PACKED).removesuffix(".weight")
    parts = {
        name: checkpoint.tensors.get(f"{module}.weight_{name}") for name in ("scale", "shape", "zero_point", "g_idx")
    }
    weights = _of_module(settings, module)
    bits = integer(weights, "num_bits", 8)
    rows, n = shape = _shape(codes, parts["shape"], bits)
    scales = parts["scale"]
    if scales is None:
        raise FormatError(f"{codes.path}: tensor {codes.name} holds integers and has no scales, {module}.weight_scale")
    size = integer(weights, "group_size") or n
    size = n if size < 0 else size
    count = -(-n // size)
    if scales.shape not in ((rows, count), (rows, 1), (rows,), (1,), ()):
        raise FormatError(
            f"{scales.path}: tensor {scales.name} is {scales.shape}; {module} is {shape}, whose {count} groups of "
            f"{size} columns need {(rows, count)}"
        )
    zero_points = None
    if parts["zero_point"] is not None:
        zero_points = _zero_points(parts["zero_point"], scales, bits)
    elif weights.get("symmetric") is False:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} has no zero points, {module}.weight_zero_point; config.json says that "
            "its integers are not symmetric, so that they are needed"
        )
    order = _order(parts["g_idx"], n, count)
    made = IntegerTensor(f"{module}.weight", shape, codes, scales, bits, size, zero_points, order)
    if parts["zero_point"] is not None:
        made.inputs.append(parts["zero_point"])
    return made


def _of_module(settings: Json, module: str) -> Json:
    """`weights` of the config_groups entry of a module: of one that names it, else of one that names its class."""
    groups = list(_groups(settings))
    by_name = [g for g in groups if any(_matches(target, module) for target in sequence(g, "targets"))]
    by_class = [g for g in groups if "Linear" in sequence(g, "targets")]
    found = [mapping(g, "weights") for g in by_name or by_class or groups]
    if not found or any(weights != found[0] for weights in found):
        raise UnsupportedError(
            f"config.json: quantization_config.config_groups has {len(found)} groups that {module} may be in, which "
            "differ; quantkit assigns groups by the names of modules"
        )
    return found[0]


def _matches(target: object, module: str) -> bool:
    """Whether a target matches a module: its name, or "re:" and a regex that matches the beginning of its name."""
    if not isinstance(target, str):
        raise FormatError(f"{_TARGETS}: {target!r}; a target is a module's name, a class, or re: and a pattern")
    if not target.startswith("re:"):
        return target == module
    return compile(target[3:], _TARGETS, error=FormatError).match(module) is not None


def _shape(codes: CheckpointTensor, stated: CheckpointTensor | None, bits: int) -> tuple[int, int]:
    """(rows, n) of a matrix of integers."""
    if len(codes.shape) != 2 or codes.dtype not in ("I8", "I32", "U32"):
        raise FormatError(f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}, not a matrix")
    if codes.dtype == "I8":
        return codes.shape[0], codes.shape[1]
    name = f"{codes.name.removesuffix('_packed')}_shape"
    if stated is None or stated.dtype not in ("I32", "I64"):
        raise FormatError(f"{codes.path}: tensor {codes.name} needs {name}, two whole numbers: its rows and columns")
    shape = [int(i) for i in stated.raw().view("<i8" if stated.dtype == "I64" else "<i4")]
    rows, words = codes.shape
    if len(shape) != 2 or shape[0] != rows or min(shape) < 1 or -(-shape[1] // (32 // bits)) != words:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.shape}, {name} says {tuple(shape)}; with {32 // bits} codes "
            f"of {bits} bits to a word the two do not fit"
        )
    return shape[0], shape[1]


def _zero_points(stored: CheckpointTensor, scales: CheckpointTensor, bits: int) -> Callable[[], np.ndarray]:
    """A function that reads the zero points: int8[rows, groups], one for each scale."""
    rows, groups = (*scales.shape, 1, 1)[:2]
    if stored.dtype == "I8" and math.prod(stored.shape) == rows * groups:
        return lambda: stored.raw().view(np.int8).reshape(rows, groups)
    if stored.dtype not in ("I32", "U32") or stored.shape != (-(-rows // (32 // bits)), groups):
        raise FormatError(
            f"{stored.path}: tensor {stored.name} is {stored.dtype} of shape {stored.shape}; scales of {scales.shape} "
            f"need I8 of that shape, or {32 // bits} rows packed into one of I32"
        )

    def read() -> np.ndarray:
        words = np.ascontiguousarray(stored.raw().view("<u4").reshape(stored.shape).T)
        return unpack(words.view(np.uint8), bits).T[:rows].astype(np.int8)

    return read


def _order(stored: CheckpointTensor | None, n: int, count: int) -> np.ndarray | None:
    """int[n]: the group of each column; None if groups are runs of neighbouring columns."""
    if stored is None:
        return None
    wide = stored.dtype == "I64"
    found = stored.raw().view("<i8" if wide else "<i4") if wide or stored.dtype == "I32" else np.zeros(0, int)
    if found.size == n and (found == -1).all():
        return None
    if found.size != n or found.min() < 0 or found.max() >= count:
        raise FormatError(
            f"{stored.path}: tensor {stored.name} is {stored.dtype} of shape {stored.shape}; it should name one of "
            f"{count} groups for each of {n} columns"
        )
    return found.astype(np.intp)
