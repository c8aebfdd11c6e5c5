"""compressed-tensors: what `config_groups` in config.json says of each module.

    ints     NAME.weight_packed I32[rows, words], codes of 1 to 8 bits from the low bits of a word up, with
             NAME.weight_shape (rows, n); or NAME.weight I8[rows, n]. NAME.weight_scale [rows, groups]; optional
             NAME.weight_zero_point I8[rows, groups], packed along rows if weights are packed; optional
             NAME.weight_g_idx I32[n], the group of each column
    float 8  `fp8`
    float 4  NAME.weight_packed U8: `nvfp4` with groups of 16 columns, `mxfp4` with groups of 32

A group names modules, or patterns of their names, or the class Linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.safetensors.quantized import fp8, mxfp4, nvfp4
from quantkit.formats.safetensors.quantized.matrix import (
    ScaledTensor,
    Shape,
    by_group,
    finite,
    float_type_of,
    require_group_sizes,
)
from quantkit.formats.safetensors.quantized.packing import in_words
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs.json_input import Json
from quantkit.inputs.safe_regex import compile
from quantkit.inputs.settings import integer, mapping, sequence

PACKED = ".weight_packed"
_TARGETS = "config.json: quantization_config.config_groups, targets"
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_SIZES = {_NVFP4: nvfp4.BLOCK, _MXFP4: 32}  # columns to a scale
_OFFLINE = ("weight_input", "weight_output")  # places of rotations that weights are stored with
_FORMATS = (None, "dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision")


def check(settings: Json, where: Path) -> None:
    """UnsupportedError for a format that is not read; FormatError for groups that its blocks do not have."""
    for group in _groups(settings):
        weights, form = mapping(group, "weights"), group.get("format") or settings.get("format")
        kind, bits = weights.get("type", "int"), integer(weights, "num_bits", 8)
        known = (form in _FORMATS or form in tuple(_SIZES)) and (
            (kind == "float" and bits in (4, 8)) or (kind == "int" and bits in range(1, 9))
        )
        if not known or (form in tuple(_SIZES) and (kind, bits) != ("float", 4)):
            raise UnsupportedError(
                f"{where}: the checkpoint is quantized already (compressed-tensors, {form or 'no format'}, {kind} of "
                f"{bits} bits); of this method quantkit reads {', '.join(filter(None, _FORMATS))}: integers of 1 to 8 "
                f"bits and float of 8, and {', '.join(_SIZES)}: float of 4"
            )
        size = integer(weights, "group_size")
        if (kind, bits) == ("float", 4) and size not in ((_SIZES[form],) if form in _SIZES else _SIZES.values()):
            raise FormatError(
                f"{where}: a group of config_groups, {form or 'no format'}, has group_size {size}; blocks of "
                f"{_NVFP4} have {_SIZES[_NVFP4]} columns, those of {_MXFP4} {_SIZES[_MXFP4]}"
            )
    _check_transforms(settings, where)


def _check_transforms(settings: Json, where: Path) -> None:
    """UnsupportedError for rotations that a layer applies when it runs. Those of weights are in the weights already."""
    schemes = mapping(mapping(settings, "transform_config"), "config_groups")
    for name in schemes:
        steps: Json = {str(i): step for i, step in enumerate(sequence(mapping(schemes, name), "apply"))}
        places = [mapping(steps, i).get("location") for i in steps]
        if online := [place for place in places if place not in _OFFLINE]:
            raise UnsupportedError(
                f"{where}: transform_config of compressed-tensors has {name}, which rotates the {online[0]} of layers "
                f"when they run; a GGUF file cannot say that. quantkit reads rotations of {' and '.join(_OFFLINE)} "
                "alone: quantize the model without the others"
            )


def matrix(checkpoint: Checkpoint, codes: CheckpointTensor, settings: Json) -> ScaledTensor | None:
    """The matrix whose codes a tensor holds; None if it holds none."""
    whole = codes.dtype == "I8" and codes.name.endswith(".weight")
    if not whole and not codes.name.endswith(PACKED):
        return fp8.matrix(checkpoint, codes, settings)
    module = codes.name.removesuffix(PACKED).removesuffix(".weight")
    weights = mapping(_of_module(settings, module), "weights")
    if weights.get("type", "int") == "int":
        return _integers(checkpoint, codes, module, weights)
    if integer(weights, "num_bits", 8) != 4 or whole:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}; config.json says that "
            f"{module} holds floats of {integer(weights, 'num_bits', 8)} bits: config.json is of another checkpoint"
        )
    if integer(weights, "group_size") == nvfp4.BLOCK:
        return nvfp4.of_pairs(checkpoint, module, codes)
    return mxfp4.of_pairs(checkpoint, module, codes)


def _groups(settings: Json) -> list[Json]:
    """The objects of `config_groups`."""
    groups = mapping(settings, "config_groups")
    return [mapping(groups, name) for name in groups]


class IntegerTensor(ScaledTensor):
    """Integers of `bits` bits, as compressed-tensors has them: (code - zero point) * scale of the column's group.

    codes         I8[rows, n], signed; or packed I32[rows, ceil(n / k)] of k = 32 // bits codes a word, low bits first,
                  unsigned with an offset of 2^(bits - 1)
    scales        [rows, groups], one a row, or one for the matrix
    zero_points   function that reads int8[rows, groups], called once; None: 0
    groups        int[n], the group of each column; None: groups are runs of `size` columns, the last may be shorter
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        codes: CheckpointTensor,
        scales: CheckpointTensor,
        bits: int,
        size: int,
        zero_points: Callable[[], np.ndarray] | None = None,
        groups: np.ndarray | None = None,
    ):
        super().__init__(name, f"INT{bits}", shape, codes, scales)
        self.bits, self.size, self.groups = bits, size, groups
        self.float_type = float_type_of(scales)
        self._zero_points = cache(zero_points) if zero_points is not None else None

    def _rows(self, start: int, stop: int) -> np.ndarray:
        x = self._codes(start, stop)
        if self._zero_points is not None:
            whole = self._zero_points()
            x -= self._wide((whole if len(whole) == 1 else whole[start:stop]).astype(np.float32))
        with np.errstate(over="ignore"):  # values beyond float32 become Inf, which callers refuse
            x *= self._wide(self._scales(start, stop))
        return x

    def _scales(self, start: int, stop: int) -> np.ndarray:
        """float32[rows, groups], or [1, 1] for one scale."""
        if len(self.scales.shape) == 2 and self.scales.shape[0] > 1:
            return finite(self.scales, self.scales.rows(start, stop), start)
        whole = self.scales.dequantize().reshape(-1, 1 if len(self.scales.shape) < 2 else self.scales.shape[1])
        return finite(self.scales, whole) if len(whole) == 1 else finite(self.scales, whole[start:stop], start)

    def _codes(self, start: int, stop: int) -> np.ndarray:
        """float32[stop - start, n]: the integers."""
        n = self.shape[-1]
        if self.codes.dtype == "I8":
            return self.codes.rows(start, stop)
        data = self.codes.raw().reshape(self.n_rows, -1)[start:stop]
        return in_words(data, self.bits)[:, :n]

    def _wide(self, x: np.ndarray) -> np.ndarray:
        """Expand [rows, groups] to one number for each column."""
        return by_group(x, self.size, self.shape[-1], self.groups)


def _integers(checkpoint: Checkpoint, codes: CheckpointTensor, module: str, weights: Json) -> IntegerTensor:
    parts = {
        name: checkpoint.tensors.get(f"{module}.weight_{name}") for name in ("scale", "shape", "zero_point", "g_idx")
    }
    bits = integer(weights, "num_bits", 8)
    rows, n = shape = _shape(codes, parts["shape"], bits)
    scales = parts["scale"]
    if scales is None:
        raise FormatError(f"{codes.path}: tensor {codes.name} holds integers and has no scales, {module}.weight_scale")
    size = integer(weights, "group_size", -1)
    if size < -1 or size == 0:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is in groups of group_size {size}, as config_groups says; a group has "
            "1 column or more, and -1 makes all of a row one: correct it in config.json"
        )
    size = n if size == -1 else min(size, n)
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
    if parts["g_idx"] is None and weights.get("actorder") in (True, "group", "dynamic") and count > 1:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} has no {module}.weight_g_idx, the group of each column; config.json "
            f"says actorder {weights['actorder']}, with which it is needed: a shard is missing, or actorder is wrong"
        )
    order = _order(parts["g_idx"], n, size)
    made = IntegerTensor(f"{module}.weight", shape, codes, scales, bits, size, zero_points, order)
    if parts["zero_point"] is not None:
        made.inputs.append(parts["zero_point"])
    return made


def _of_module(settings: Json, module: str) -> Json:
    """The config_groups entry of a module: one that names it, else one that names its class."""
    groups = _groups(settings)
    by_name = [g for g in groups if any(_matches(target, module) for target in sequence(g, "targets"))]
    by_class = [g for g in groups if "Linear" in sequence(g, "targets")]
    found = by_name or by_class or groups
    if not found or any(mapping(group, "weights") != mapping(found[0], "weights") for group in found):
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
        return in_words(words.view(np.uint8), bits).T[:rows].astype(np.int8)

    return read


def _order(stored: CheckpointTensor | None, n: int, size: int) -> np.ndarray | None:
    """int[n]: the group of each column; None if groups are runs of neighbouring columns."""
    if stored is None:
        return None
    wide = stored.dtype == "I64"
    found = stored.raw().view("<i8" if wide else "<i4") if wide or stored.dtype == "I32" else np.zeros(0, int)
    if found.size == n and (found == -1).all():
        return None
    count = -(-n // size)
    if found.size != n or found.min() < 0 or found.max() >= count:
        raise FormatError(
            f"{stored.path}: tensor {stored.name} is {stored.dtype} of shape {stored.shape}; it should name one of "
            f"{count} groups for each of {n} columns"
        )
    groups = found.astype(np.intp)
    require_group_sizes(stored, groups, size)
    return groups
