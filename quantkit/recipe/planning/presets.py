"""File types: the TYPE of a quantize command, its number in `general.file_type` and its default tensor type.

Names and numbers are those of ik_llama.cpp and llama.cpp, which agree but for one tensor type: Q1_0_G128 is number 41
for ik_llama.cpp, whose name for it is that, and 40 for llama.cpp, which calls it Q1_0 and gives 41 to Q2_0. File types
that are not floats have a mix (`mixes.py`), which gives some tensors more bits.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from quantkit import types
from quantkit.errors import UnknownNameError
from quantkit.types import QuantType
from quantkit.types.base import IK, LLAMA_CPP

_NUMBERS = """
F32 0, F16 1, Q4_0 2, Q4_1 3, Q8_0 7, Q5_0 8, Q5_1 9, Q2_K 10, Q3_K_S 11, Q3_K_M 12, Q3_K_L 13, Q4_K_S 14, Q4_K_M 15,
Q5_K_S 16, Q5_K_M 17, Q6_K 18, IQ2_XXS 19, IQ2_XS 20, Q2_K_S 21, IQ3_XS 22, IQ3_XXS 23, IQ1_S 24, IQ4_NL 25, IQ3_S 26,
IQ3_M 27, IQ2_S 28, IQ2_M 29, IQ4_XS 30, IQ1_M 31, BF16 32, Q4_0_4_4 33, Q4_0_4_8 34, Q4_0_8_8 35, TQ1_0 36, TQ2_0 37,
MXFP4 38, NVFP4 39, Q1_0 40, Q2_0 41, Q1_0_G128 41, Q6_0 135, IQ1_BN 136, IQ2_BN 137, IQ2_K 138, IQ3_K 139, IQ4_K 140,
IQ5_K 141, IQ6_K 142, IQ4_KS 145, IQ3_KL 146, IQ2_KS 147, IQ4_KSS 148, Q8_KV 149, IQ5_KS 150, IQ2_KT 151, IQ3_KT 152,
IQ4_KT 153, IQ3_KS 154, IQ2_KL 155, IQ1_KT 156, Q4_0_R8 202, Q8_0_R8 207, Q5_0_R4 208, Q2_K_R4 210, Q3_K_R4 211,
Q4_K_R4 214, Q5_K_R4 216, Q6_K_R4 218, IQ2_XXS_R4 219, IQ2_XS_R4 220, IQ3_XXS_R4 223, IQ1_S_R4 224, IQ4_NL_R4 225,
IQ3_S_R4 226, IQ2_M_R4 229, IQ4_XS_R8 230, IQ1_M_R4 231, BF16_R16 232, Q6_0_R4 335, IQ2_BN_R4 337, IQ2_K_R4 338,
IQ3_K_R4 339, IQ4_K_R4 340, IQ5_K_R4 341, IQ4_KS_R4 345, IQ5_KS_R4 350, MXFP4_R8 351, Q8_KV_R8 398, Q8_K_R8 399
"""
_DEFAULTS = {
    "Q2_K_S": "q2_K", "Q3_K_S": "q3_K", "Q3_K_M": "q3_K", "Q3_K_L": "q3_K", "Q4_K_S": "q4_K", "Q4_K_M": "q4_K",
    "Q5_K_S": "q5_K", "Q5_K_M": "q5_K", "IQ3_KL": "iq3_k", "IQ2_S": "iq2_xs", "IQ2_M": "iq2_s", "IQ2_M_R4": "iq2_s_r4",
    "IQ3_XS": "iq3_s", "IQ3_S": "iq3_s", "IQ3_M": "iq3_s", "Q4_0_4_4": "q4_0_4x4", "Q4_0_4_8": "q4_0_4x8",
    "Q4_0_8_8": "q4_0_8x8",
}  # fmt: skip
_SAME_IN = {"Q1_0": {IK: "Q1_0_G128"}, "Q1_0_G128": {LLAMA_CPP: "Q1_0"}}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

COPY = "COPY"


@dataclass(frozen=True)
class FileType:
    """A file type. `default` is None for COPY, which changes no tensor."""

    name: str
    number: int | None
    default: QuantType | None

    @property
    def is_float(self) -> bool:
        """Whether its default type is F32, F16 or BF16."""
        return self.default is not None and self.default.block_size == 1


_BY_NAME = {name: int(n) for name, n in (item.split() for item in _NUMBERS.replace("\n", " ").split(","))}
_NAMES: dict[int, list[str]] = {}
for _name, _number in _BY_NAME.items():
    _NAMES.setdefault(_number, []).append(_name)


@functools.cache
def _file_type(name: str) -> FileType:
    if name == COPY:
        return FileType(COPY, None, None)
    return FileType(name, _BY_NAME[name], types.layout(_DEFAULTS.get(name, name)))


def file_types() -> list[FileType]:
    """All file types, COPY last."""
    return [_file_type(name) for name in (*_BY_NAME, COPY)]


def file_type(name: str | int) -> FileType:
    """The file type of a name in any case, an alias (Q4_K is Q4_K_M) or a number.

    UnknownNameError for a number that two programs give to different file types.
    """
    if (names := _names(name))[1:]:
        raise UnknownNameError(f"file type (two have the number {name}: give the name)", str(name), names)
    if not is_file_type(name):
        raise UnknownNameError("file type", str(name), (*_BY_NAME, COPY))
    return _file_type(_canonical(name))


def in_dialect(found: FileType, dialect: str | None) -> FileType:
    """The file type as one of `types.DIALECTS` calls and numbers it."""
    return _file_type(_SAME_IN.get(found.name, {}).get(dialect or "", found.name))


def is_file_type(name: str | int) -> bool:
    """Whether `file_type` knows a name or number."""
    found = _canonical(name)
    return found in _BY_NAME or found == COPY


def _canonical(name: str | int) -> str:
    text = str(name).upper()
    names = _names(text)
    return names[0] if len(names) == 1 else _ALIASES.get(text, text)


def _names(number: str | int) -> list[str]:
    """The file types that have a number; none for what is no number."""
    text = str(number)
    return _NAMES.get(int(text), []) if re.fullmatch("[0-9]{1,9}", text) else []
