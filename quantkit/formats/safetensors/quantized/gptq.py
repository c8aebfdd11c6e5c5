"""GPTQ: integers of 2, 3, 4 or 8 bits, as AutoGPTQ and GPTQModel write them.

    NAME.qweight  I32[n * bits / 32, rows]         codes, a stream of bits down each column
    NAME.qzeros   I32[groups, rows * bits / 32]    zero points, a stream of bits along each row
    NAME.scales   F16, BF16 or F32 [groups, rows]
    NAME.g_idx    I32[n], optional                 the group of each column of the matrix; c // group_size without it

    weight[r, c] = scales[g, r] * (code[c, r] - zero[g, r])

Version 1 of the format (`checkpoint_format` "gptq", or none) stores zero points less 1. With 2, 4 and 8 bits programs
subtract and add the 1 in all fields of a 32-bit word at once, modulo 2^32, so a zero point of 0 borrows from its
neighbour. With 3 bits each zero point is stored on its own, modulo 8, except that GPTQModel up to version 4 subtracts
from three words at once, and has the numbers of the first and the third word swapped; `meta.quantizer` in the settings
tells the version. 7.7 does not; between the two, only symmetric codes are read, whose zero points are known. Version 2
("gptq_v2") stores zero points as they are.

`dynamic` overrides bits and group size for modules whose names match a pattern: "+:PATTERN" or "PATTERN"; a module that
matches "-:PATTERN" is not quantized. The first match counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.safetensors.quantized.matrix import (
    FLOATS,
    ColumnTensor,
    by_group,
    finite,
    float_type_of,
    require_group_sizes,
    require_shape,
    required,
    words,
)
from quantkit.formats.safetensors.quantized.packing import in_stream
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs.json_input import Json
from quantkit.inputs.safe_regex import compile
from quantkit.inputs.settings import integer, mapping, sequence

PARTS = (".qzeros", ".g_idx")
_CODES = ".qweight"
_BITS = (2, 3, 4, 8)
_V1, _V2 = "gptq", "gptq_v2"
_WORDS = ("I32", "U32")
_DYNAMIC = "quantization_config.dynamic"

Offset = tuple[tuple[int, ...], int]
"""What is added to zero points: numbers to words, one after another and again; and a number to each field."""

_AS_STORED: Offset = (), 0
_FIELDS: Offset = (), 1
_WORDS_OF_1: dict[int, Offset] = {2: ((0x55555555,), 0), 4: ((0x11111111,), 0), 8: ((0x01010101,), 0)}
_SWAPPED: Offset = (0x24924924, 0x92492492, 0x49249249), 0  # 3 bits, as GPTQModel up to version 4 has them
_LAST_SWAPPED, _FIRST_RIGHT = (5, 0), (7, 7)  # versions of GPTQModel: below the first, from the second on


class GPTQTensor(ColumnTensor):
    """Integers less a zero point, times the scale of their group of columns.

    zeros     zero points, I32[groups, rows * bits / 32]
    size      columns to a group, where `order` is None
    order     I32[n], the group of each column
    offsets   what is added to `zeros`; if there are two, that which gives symmetric codes
    symmetric all zero points have to be 2^(bits - 1)
    """

    def __init__(
        self,
        module: str,
        codes: CheckpointTensor,
        scales: CheckpointTensor,
        zeros: CheckpointTensor,
        order: CheckpointTensor | None,
        *,
        bits: int,
        size: int,
        offsets: tuple[Offset, ...],
        symmetric: bool,
    ):
        shape = (codes.shape[1], codes.shape[0] * 32 // bits)
        super().__init__(f"{module}.weight", f"INT{bits}", shape, codes, scales, zeros, order)
        self.zeros, self.order = zeros, order
        self.bits, self.size, self.offsets, self.symmetric = bits, size, offsets, symmetric
        self.float_type = float_type_of(scales)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        columns = np.ascontiguousarray(words(self.codes)[:, start:stop].T)
        x = in_stream(columns.view(np.uint8), self.bits)
        scales, n = finite(self.scales, self.scales.columns(start, stop).T, start), self.shape[1]
        x -= by_group(self._zeros(start, stop), self.size, n, self._groups)
        with np.errstate(over="ignore"):  # values beyond float32 become Inf, which callers refuse
            x *= by_group(scales, self.size, n, self._groups)
        return x

    def _zeros(self, start: int, stop: int) -> np.ndarray:
        """float32[rows, groups]: zero points. FormatError if they are not those of symmetric codes and have to be."""
        middle = 1 << self.bits - 1
        for offset in self.offsets:
            zeros = self._zeros_with(offset, start, stop)
            if not self.symmetric or (zeros == middle).all():
                return zeros
        row, group = (int(i) for i in np.argwhere(zeros != middle)[0])
        version = _V2 if self.offsets == (_AS_STORED,) else _V1
        raise FormatError(
            f"{self.zeros.path}: tensor {self.zeros.name} has the zero point {int(zeros[row, group])} at row "
            f"{start + row}, group {group}; config.json says sym, for which it is {middle}: either sym is wrong, or "
            f"checkpoint_format, which says {version} ({_V1} stores zero points less 1)"
        )

    def _zeros_with(self, offset: Offset, start: int, stop: int) -> np.ndarray:
        """float32[rows, groups]: the zero points that an offset gives."""
        first, last = start // 32, -(-stop // 32)  # 32 zero points take `bits` words
        stored = words(self.zeros)[:, first * self.bits : last * self.bits]
        ones, one = offset
        if ones:
            stored = stored + np.resize(np.array(ones, np.uint32), stored.shape[1])
        zeros = in_stream(np.ascontiguousarray(stored).view(np.uint8), self.bits)
        zeros = zeros[:, start - 32 * first : stop - 32 * first].T
        return (zeros + 1) % (1 << self.bits) if one else zeros

    @cached_property
    def _groups(self) -> np.ndarray | None:
        """int[n]: the group of each column; None if they are runs. FormatError for groups of other sizes."""
        if self.order is None:
            return None
        count, n = self.scales.shape[0], self.shape[1]
        found = self.order.raw().view("<i8" if self.order.dtype == "I64" else "<i4").astype(np.intp)
        if found.min() < 0 or found.max() >= count:
            column = int(np.argwhere((found < 0) | (found >= count))[0, 0])
            raise FormatError(
                f"{self.order.path}: tensor {self.order.name} puts column {column} into group {found[column]}; "
                f"{self.scales.name} has {count} groups, 0 to {count - 1}: fetch the file again or quantize the "
                "model anew"
            )
        require_group_sizes(self.order, found, self.size)
        return None if (found == np.arange(n) // self.size).all() else found


def check(settings: Json, where: Path) -> None:
    """UnsupportedError for a version of the format that is not read; FormatError for bits that GPTQ does not have."""
    form = settings.get("checkpoint_format") or settings.get("format") or _V1
    if form not in (_V1, _V2) or settings.get("is_marlin_format"):
        raise UnsupportedError(
            f"{where}: the checkpoint is quantized already (gptq, checkpoint_format "
            f"{'marlin' if form in (_V1, _V2) else form}); of this method quantkit reads {_V1} and {_V2}: convert it "
            "with GPTQModel first"
        )
    if settings.get("pack_dtype", "int32") != "int32":
        raise UnsupportedError(f"{where}: pack_dtype is {settings['pack_dtype']}; codes of GPTQ are read from int32")


def matrix(checkpoint: Checkpoint, codes: CheckpointTensor, settings: Json) -> GPTQTensor | None:
    """The matrix of NAME.qweight; None for a tensor of another name."""
    if not codes.name.endswith(_CODES):
        return None
    module = codes.name.removesuffix(_CODES)
    settings = _of_module(settings, module, codes)
    bits = _bits(settings, codes)
    if len(codes.shape) != 2 or codes.dtype not in _WORDS or codes.shape[0] * 32 % bits:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}; GPTQ with {bits} bits has I32 "
            f"of whole codes: bits in config.json are wrong, or the file is"
        )
    scales = required(checkpoint, codes, f"{module}.scales", FLOATS)
    zeros = required(checkpoint, codes, f"{module}.qzeros", _WORDS)
    order = checkpoint.tensors.get(f"{module}.g_idx")
    n, rows = codes.shape[0] * 32 // bits, codes.shape[1]
    size = group_size(settings, codes, scales, n)
    count = -(-n // size)
    why = f"{module} of {rows} x {n} with {bits} bits and groups of {size} columns"
    require_shape(scales, (count, rows), why)
    if rows * bits % 32:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.shape}; zero points of {rows} columns with {bits} bits do "
            "not fill words of 32 bits"
        )
    require_shape(zeros, (count, rows * bits // 32), why)
    if order is None and settings.get("desc_act") is True and count > 1:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} has no {module}.g_idx, the group of each column, which desc_act of "
            f"quantization_config makes necessary with {count} groups; a shard is missing, or desc_act is wrong"
        )
    if order is not None and (order.shape != (n,) or order.dtype not in ("I32", "I64")):
        raise FormatError(
            f"{order.path}: tensor {order.name} is {order.dtype} of shape {order.shape}; {why} needs I32 of {(n,)}"
        )
    return GPTQTensor(
        module, codes, scales, zeros, order, bits=bits, size=size, offsets=_offsets(settings, bits, zeros),
        symmetric=settings.get("sym") is True,
    )  # fmt: skip


def group_size(settings: Json, codes: CheckpointTensor, scales: CheckpointTensor, n: int) -> int:
    """Columns that share a scale; n for -1. FormatError if the settings do not say."""
    size = integer(settings, "group_size")
    if n == 0:
        raise FormatError(f"{codes.path}: tensor {codes.name} of shape {codes.shape} is empty: fetch the file again")
    if size == 0 or size < -1:
        groups = max(1, scales.shape[0]) if scales.shape else 1
        raise FormatError(
            f"{codes.path}: tensor {codes.name} has {n} columns in groups of unknown size: quantization_config has "
            f"group_size {settings.get('group_size')}; {scales.name} is {scales.shape}, so that group_size may be "
            f"{n // groups}: add it to config.json"
        )
    return n if size == -1 else min(size, n)


def _bits(settings: Json, codes: CheckpointTensor) -> int:
    bits = integer(settings, "bits")
    if bits not in _BITS:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is quantized with bits {settings.get('bits')}, as quantization_config "
            f"says; GPTQ has {', '.join(map(str, _BITS))}: correct it in config.json"
        )
    return bits


def _of_module(settings: Json, module: str, codes: CheckpointTensor) -> Json:
    """The settings with those that `dynamic` overrides for a module."""
    dynamic = mapping(settings, "dynamic")
    for pattern in dynamic:
        regex = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
        if compile(regex, _DYNAMIC, error=FormatError).match(module) is None:
            continue
        if pattern.startswith("-:"):
            raise FormatError(
                f"{codes.path}: tensor {codes.name} holds codes; {_DYNAMIC} says with {pattern!r} that {module} is not "
                "quantized: config.json belongs to another checkpoint"
            )
        return {**settings, **mapping(dynamic, pattern)}
    return settings


def _offsets(settings: Json, bits: int, zeros: CheckpointTensor) -> tuple[Offset, ...]:
    """What may have been subtracted from zero points. UnsupportedError where nothing tells."""
    if (settings.get("checkpoint_format") or settings.get("format")) == _V2:
        return (_AS_STORED,)
    if bits != 3:
        return (_WORDS_OF_1[bits],)
    version = _version_of_gptqmodel(settings)
    if version is None or version >= _FIRST_RIGHT:
        return (_FIELDS,)
    if version < _LAST_SWAPPED:
        return (_SWAPPED,)
    if settings.get("sym") is not True:
        raise UnsupportedError(
            f"{zeros.path}: tensor {zeros.name} is of version {_V1} with 3 bits, written by GPTQModel "
            f"{version[0]}.{version[1]}; GPTQModel stored these zero points in one way before {_LAST_SWAPPED[0]}.0 and "
            f"in another from {_FIRST_RIGHT[0]}.{_FIRST_RIGHT[1]} on: save the model as {_V2} with the GPTQModel that "
            "wrote it"
        )
    return _FIELDS, _SWAPPED


def _version_of_gptqmodel(settings: Json) -> tuple[int, int] | None:
    """Major and minor version of the GPTQModel that wrote a checkpoint, "gptqmodel:1.9.0"; None for another program."""
    meta: Mapping[str, object] = mapping(settings, "meta")
    quantizer = meta.get("quantizer")
    names = [quantizer] if isinstance(quantizer, str) else sequence(meta, "quantizer")
    found = (re.match(r"gptqmodel:(\d{1,4})\.(\d{1,4})", name) for name in names if isinstance(name, str))
    return next(((int(version[1]), int(version[2])) for version in found if version), None)
