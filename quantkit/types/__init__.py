"""The tensor types: one file each, found by name or id.

    get("iq4_k")      any case; an unknown name raises with the nearest ones
    layout("iq2_xxs") the record of any known type, with or without codec
    from_id(139)      what a GGUF tensor info holds; layout only where no codec is registered
    all()             every type with a codec that files hold, by id
    activations()     the run-time formats of right-hand sides of products, by id
    names()           the names of all these

Every function but `names` imports the files of the types that it returns. A type without codec still has a record: a
reader needs its sizes to find the next tensor of a file.
"""

from __future__ import annotations

from quantkit.errors import FormatError, UnknownNameError, UnsupportedError
from quantkit.types import base, layouts
from quantkit.types.base import DIALECTS, EFFORTS, QuantType, check_finite, check_importance, effort_level, names

__all__ = [
    "DIALECTS",
    "EFFORTS",
    "QuantType",
    "activations",
    "all",
    "check_finite",
    "check_importance",
    "effort_level",
    "from_id",
    "get",
    "layout",
    "names",
]

layouts.define()


def get(name: str) -> QuantType:
    """The type called `name`, in any case. UnknownNameError lists the nearest names."""
    quant_type = layout(name)
    if not quant_type.has_codec:
        raise UnsupportedError(
            f"type {quant_type.name} (id {quant_type.ggml_type}) is known but quantkit has no codec for it"
        )
    return quant_type


def layout(name: str) -> QuantType:
    """The record called `name`, in any case, even of a type that has no codec here."""
    if not isinstance(name, str) or name.lower() not in base.ids:
        raise UnknownNameError("type", name, names())
    return base.by_id(base.ids[name.lower()])


def from_id(ggml_type: int) -> QuantType:
    """The type of an id in a file. The record of an id without codec raises only when it decodes."""
    if ggml_type not in base.ids.values():
        raise FormatError(f"tensor type id {ggml_type} is not known")
    return base.by_id(ggml_type)


def all() -> list[QuantType]:
    """Every type of files that can be decoded, in order of id."""
    return [t for t in base.layouts() if t.has_codec and not t.activation]


def activations() -> list[QuantType]:
    """The formats of activations, which files never hold, in order of id."""
    return [t for t in base.layouts() if t.activation]
