"""Types that the program a file is for reads: ik_llama.cpp ("ik") or llama.cpp, and what takes the place of others.

A type that the user chose is replaced only when asked for: by the type of the program with the most bits that is not
larger, from a list without types of few levels, which suit weights made for them. An interleaved type becomes the one
whose rows it interleaves. What quantkit chose itself, by the mix of a file type or because rows do not fit, is replaced
without asking.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit import types
from quantkit.errors import UnknownNameError
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.planning.planned import PlannedTensor
from quantkit.types import QuantType
from quantkit.types.base import DIALECTS, IK, LLAMA_CPP

PROGRAMS = {IK: "ik_llama.cpp", LLAMA_CPP: "llama.cpp"}

# The types to choose from, larger ones first, in blocks of 256; and for rows that are no multiple of 256.
_LADDER = ("q8_0", "q6_K", "q5_K", "q4_K", "iq4_xs", "iq3_s", "iq3_xxs", "q2_K", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m",
           "iq1_s")  # fmt: skip
_SHORT_LADDER = ("q8_0", "q5_1", "q5_0", "iq4_nl")
# Ternary types, and those of llama.cpp alone.
_OWN = {"iq2_bn": "tq1_0", "i2_s": "tq1_0", "nvfp4": "iq4_nl", "tq1_0": "iq1_bn", "tq2_0": "iq2_bn", "q2_0": "iq2_ks"}
_TERNARY = frozenset(("iq1_bn", "iq2_bn", "i2_s", "tq1_0", "tq2_0"))


def checked(dialect: str | None) -> str | None:
    """A dialect, or None; UnknownNameError for another text."""
    if dialect is not None and dialect not in DIALECTS:
        raise UnknownNameError("dialect", dialect, DIALECTS)
    return dialect


def reads(dialect: str | None, kind: QuantType) -> bool:
    """Whether the program of a dialect reads a type; True for None, which stands for no program in particular."""
    return dialect is None or dialect in kind.readers


def nearest(kind: QuantType, dialect: str, columns: int) -> QuantType | None:
    """The type that takes the place of `kind`, of the same or a smaller size; None if there is none."""
    if reads(dialect, kind):
        return kind
    base = types.layout(kind.base) if kind.base else kind
    if reads(dialect, base) and columns % base.block_size == 0:
        return base
    kind = base if base.readers else kind
    names = [_OWN[kind.name]] if kind.name in _OWN else []
    if kind.name not in _TERNARY:
        names += _LADDER if columns % 256 == 0 else _SHORT_LADDER
    size = kind.bits_per_weight(columns) if columns % kind.block_size == 0 else kind.bits_per_weight()
    for found in map(types.layout, names):
        fits = columns % found.block_size == 0
        if fits and reads(dialect, found) and found.bits_per_weight(columns) <= size:
            return found
    return None


def refuse_foreign(planned: Iterable[PlannedTensor], dialect: str | None) -> None:
    """RecipeError that names the tensors whose types the program does not read, and what it reads instead."""
    foreign = [t for t in planned if not reads(dialect, t.type)]
    if not foreign or dialect is None:
        return
    found: dict[str, list[PlannedTensor]] = {}
    for t in foreign:
        found.setdefault(t.type.name, []).append(t)
    sentences = []
    for name, tensors in found.items():
        more = f" and {len(tensors) - 1} more" if tensors[1:] else ""
        near = nearest(tensors[0].type, dialect, tensors[0].shape[-1])
        sentences.append(f"{name} of {tensors[0].name}{more} (nearest: {near.name if near else 'none'})")
    raise RecipeError(
        f"{PROGRAMS[dialect]} does not read {', '.join(sentences)}; choose types that `quantkit types` shows for it, "
        "or pass --replace-types"
    )


def unread_mixture(planned: Iterable[PlannedTensor]) -> str:
    """The warning for a file that neither program reads; empty if one does."""
    only = {t.type.readers[0]: t for t in planned if len(t.type.readers) == 1}
    if len(only) < 2:
        return ""
    ik, other = only[IK], only[LLAMA_CPP]
    return (
        f"no program but quantkit will read this file: {ik.name} becomes {ik.type.name}, of ik_llama.cpp alone, "
        f"and {other.name} {other.type.name}, of llama.cpp alone; pass --dialect ik or llama.cpp"
    )
