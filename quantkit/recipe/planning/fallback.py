"""The fallback type of a tensor whose rows do not fit the chosen type.

A row must be a whole number of blocks. The table is ik_llama.cpp's, for types of llama.cpp that one's: a type with
blocks of 256 becomes one with blocks of 32 and about the same quality, which may be larger. If that does not fit either
(columns that are not a multiple of 32), ik_llama.cpp writes a corrupt tensor; quantkit keeps the tensor as a float.
"""

from __future__ import annotations

from quantkit import types
from quantkit.recipe.errors import RecipeError
from quantkit.types import QuantType

_TABLE = {
    "iq4_nl": "q2_K q2_k_r4 q3_K q3_k_r4 iq1_s iq1_m iq2_xxs iq2_xxs_r4 iq2_xs iq2_xs_r4 iq2_s iq2_s_r4 iq2_ks iq2_k "
    "iq2_k_r4 iq2_kl iq3_xxs iq3_xxs_r4 iq3_s iq3_s_r4 iq3_ks iq3_k iq3_k_r4 iq4_xs iq4_xs_r8 iq4_ks iq4_ks_r4 "
    "iq4_kss iq1_kt iq2_kt iq3_kt iq4_kt",
    "q5_0": "q4_K q4_k_r4 iq4_k iq4_k_r4 iq5_ks iq5_ks_r4",
    "q6_0": "q5_K q5_k_r4 iq5_k iq5_k_r4",
    "q8_0": "q6_K q6_k_r4 iq6_k q8_k_r8",
    "q4_0": "tq1_0 tq2_0",
    "mxfp4": "nvfp4",
}
_FALLBACK = {wanted.lower(): name for name, wanted_by in _TABLE.items() for wanted in wanted_by.split()}

# The base type of an interleaved type without codec is its name without the suffix, with these exceptions.
_BASE = {"q8_k_r8": "q8_0", "q8_k_r16": "q8_0", "iq1_s_r4": "iq1_s", "iq1_m_r4": "iq1_m"}


def fit_columns(wanted: QuantType, columns: int, source: QuantType) -> QuantType:
    """`wanted` if rows of `columns` are whole blocks of it, else its fallback type."""
    found = wanted
    while columns % found.block_size:
        name = _FALLBACK.get(found.name.lower())
        if name is None and found.block_size > 32:
            raise RecipeError(
                f"{found.name} needs rows that are a multiple of {found.block_size}, these have {columns}"
            )
        found = types.layout(name) if name else _float_of(source)
    return found


def _float_of(source: QuantType) -> QuantType:
    """The type of a float source; F16 for any other source."""
    return source if source.name in ("f32", "f16", "bf16") else types.layout("f16")


def interleaved_rows(t: QuantType) -> int:
    """Number of rows that a type interleaves; from its name if it has no codec."""
    if t.interleave > 1 or t.has_codec:
        return t.interleave
    suffix = t.name.rpartition("_r")[2]
    return int(suffix) if "_r" in t.name and suffix.isdigit() else 1


def row_by_row(t: QuantType) -> QuantType:
    """The base type of an interleaved type, any other type itself."""
    if interleaved_rows(t) == 1:
        return t
    name = _BASE.get(t.name.lower()) or t.base or t.name.lower().rpartition("_r")[0]
    return types.layout(name)
