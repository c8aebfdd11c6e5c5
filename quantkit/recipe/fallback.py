"""What a tensor gets when its rows do not fit the type that was chosen for it.

Rows must be a whole number of blocks. The table is ik_llama.cpp's (spec/tools.md 2.7): a 256-wide type becomes a
32-wide one of about its quality, which may be larger than what was asked for. Where that does not fit either (columns
that are no multiple of 32), the reference writes a corrupt tensor; here the tensor stays a float.
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
}
_FALLBACK = {wanted.lower(): name for name, wanted_by in _TABLE.items() for wanted in wanted_by.split()}

# The row-by-row form of an interleaved type without codec is its name without the suffix, but for these.
_BASE = {"q8_k_r8": "q8_0", "q8_k_r16": "q8_0", "iq1_s_r4": "iq1_s", "iq1_m_r4": "iq1_m"}


def fit_columns(wanted: QuantType, columns: int, source: QuantType) -> QuantType:
    """`wanted` where rows of `columns` are whole blocks of it, else the type that takes its place."""
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
    """The float that loses nothing of a float source; F16 for anything else."""
    return source if source.name in ("f32", "f16", "bf16") else types.layout("f16")


def interleaved_rows(t: QuantType) -> int:
    """Rows that a type interleaves, by its name where there is no codec to ask."""
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
