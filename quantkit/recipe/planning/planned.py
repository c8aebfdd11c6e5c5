"""The result of planning: the type of every tensor with the reason, the effect of every rule, sizes, warnings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit import types
from quantkit.errors import UnsupportedError
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.planning.interleaving import TypeChange, repacked_type
from quantkit.recipe.planning.presets import FileType, in_dialect, is_file_type
from quantkit.recipe.rules.grammar import Recipe, Rule
from quantkit.recipe.rules.layers import summarised
from quantkit.types import QuantType
from quantkit.types.base import LLAMA_CPP


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the output.

    shape is numpy's: rows of `shape[-1]` columns, experts first. `wanted` is the type that was chosen; it differs from
    `type` if the shape needs a fallback. `importance` names the entry of the importance matrix that is used.
    `repacked`: --repack interleaves the tensor; `row_type` is its type before. `scale`: what values are divided by
    before they are encoded (--scale-nvfp4); the plan then has a tensor NAME.scale that the input has not.
    """

    name: str
    shape: tuple[int, ...]
    source: QuantType
    type: QuantType
    reason: str
    wanted: QuantType | None = None
    rule: int | None = None  # index of the rule that decided
    importance: str | None = None
    repacked: bool = False
    scale: float | None = None

    @property
    def copied(self) -> bool:
        """Whether the output has the source's bytes."""
        return self.type is self.source

    @property
    def reordered(self) -> bool:
        """Whether the output has the bits of the source in another order: interleaved, or no longer interleaved."""
        return self.source.name == self.type.base or self.type.name == self.source.base

    @property
    def lacks_encoder(self) -> bool:
        """Whether it would have to be encoded to a type that quantkit does not encode weights to."""
        return not self.copied and not self.reordered and (self.type.encode_rows is None or self.type.activation)

    @property
    def row_type(self) -> QuantType:
        """The type before --repack."""
        return types.layout(self.type.base) if self.repacked and self.type.base else self.type

    @property
    def elements(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    def _bytes(self, t: QuantType) -> int:
        return t.tensor_bytes(self.shape)

    @property
    def bytes_before(self) -> int:
        """Bytes of the tensor in the source."""
        return self._bytes(self.source)

    @property
    def bytes_after(self) -> int:
        """Bytes of the tensor in the output."""
        return self._bytes(self.type)

    def to_json(self) -> dict[str, Any]:
        """The tensor in the JSON of `quantkit plan --json`; `replay` reads it."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "source": self.source.name,
            "type": self.type.name,
            "wanted": (self.wanted or self.row_type).name,
            "reason": self.reason,
            "rule": self.rule,
            "importance": self.importance,
            "repacked": self.repacked,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }


@dataclass
class RuleUse:
    """The tensors that one rule matches, those of them that may be quantized, and those that it decides."""

    rule: Rule
    matched: list[str] = field(default_factory=list)
    candidates: list[str] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The rule with counts, and the tensors that it decides by class."""
        return {
            "rule": str(self.rule),
            "matched": len(self.matched),
            "candidates": len(self.candidates),
            "decided": len(self.decided),
            "tensors": list(summarised(self.decided)),
        }


@dataclass
class TypeUse:
    """The tensors of one type."""

    type: QuantType
    tensors: int = 0
    elements: int = 0
    bytes: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Bits per element."""
        return 8 * self.bytes / max(1, self.elements)

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values."""
        numbers = {name: getattr(self, name) for name in ("tensors", "elements", "bytes", "bits_per_weight")}
        return {"type": self.type.name} | numbers


@dataclass(frozen=True)
class Plan:
    """Every tensor's type with the reason.

    `warnings` are full sentences about probable mistakes, `notes` about rules without effect. `dialect` is the program
    that the file is for, where one was named.
    """

    file_type: FileType
    recipe: Recipe
    flags: str  # the flags that shaped the plan, as on the command line
    tensors: tuple[PlannedTensor, ...]
    rules: tuple[RuleUse, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    dialect: str | None = None

    def __getitem__(self, name: str) -> PlannedTensor:
        return next(t for t in self.tensors if t.name == name)

    @property
    def bytes_before(self) -> int:
        """Bytes of tensor data in the source."""
        return sum(t.bytes_before for t in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of tensor data, without header and padding."""
        return sum(t.bytes_after for t in self.tensors)

    @property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(t.elements for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits per element of the output."""
        return 8 * self.bytes_after / max(1, self.elements)

    @property
    def written_type(self) -> FileType:
        """The output's `general.file_type`: the interleaved one if --repack interleaves most of its main type."""
        return in_dialect(repacked_type(self.file_type, self.type_changes()), self.dialect)

    @property
    def written_dialect(self) -> str | None:
        """`dialect`, or llama.cpp if only that program reads a type of the plan; the output's `quantkit.dialect`."""
        of_llama_cpp = any(t.type.readers == (LLAMA_CPP,) for t in self.tensors)
        return self.dialect or (LLAMA_CPP if of_llama_cpp else None)

    def type_changes(self) -> list[TypeChange]:
        """(name, type before --repack, type, bytes) of each tensor."""
        return [(t.name, t.row_type, t.type, t.bytes_after) for t in self.tensors]

    @property
    def fallbacks(self) -> list[PlannedTensor]:
        """Tensors whose shape does not allow the type that was chosen for them."""
        return [t for t in self.tensors if t.wanted is not None and t.row_type is not t.wanted]

    def by_type(self) -> list[TypeUse]:
        """The tensors, elements and bytes of each type, the type with the most bytes first."""
        found = {t.type.name: TypeUse(t.type) for t in self.tensors}
        for t in self.tensors:
            use = found[t.type.name]
            use.tensors += 1
            use.elements += t.elements
            use.bytes += t.bytes_after
        return sorted(found.values(), key=lambda use: -use.bytes)

    def types(self) -> Counter[str]:
        """The number of tensors of each type."""
        return Counter(t.type.name for t in self.tensors)

    def require_codecs(self) -> None:
        """UnsupportedError when a tensor must be encoded to, or decoded from, a type that quantkit cannot."""
        changed = [t for t in self.tensors if not t.copied and not t.reordered]
        self._refuse("encode", [(t, t.type) for t in changed if t.lacks_encoder])
        self._refuse("decode", [(t, t.source) for t in changed if t.source.decode_rows is None])

    def _refuse(self, verb: str, pairs: Sequence[tuple[PlannedTensor, QuantType]]) -> None:
        if pairs:
            tensor, t = pairs[0]
            more = f" and {len(pairs) - 1} more tensor(s)" if len(pairs) > 1 else ""
            raise UnsupportedError(
                f"{tensor.name}{more}: the plan needs to {verb} {t.name}, which quantkit cannot do; choose "
                "another type for it with --custom-q (`quantkit types` lists the codecs)"
            )

    def require_clean(self) -> None:
        """Raise RecipeError with all warnings, if there are any."""
        if self.warnings:
            raise RecipeError("; ".join(self.warnings))

    def text(self) -> str:
        """The recipe, with file type and flags as a comment: the output's key `quantkit.recipe`."""
        about = f"quantkit quantize {self.file_type.name}{' ' if self.flags else ''}{self.flags}"
        description = [line for line in self.recipe.about.split("\n") if not _is_made_by(line)]
        return str(replace(self.recipe, about="\n".join([about, *description]).strip("\n")))

    def to_json(self) -> dict[str, Any]:
        """The document of `quantkit plan --json`, without its schema; `replay` reads it."""
        return {
            "file_type": self.file_type.name,
            "written_as": self.written_type.name,
            "flags": self.flags,
            "recipe": str(self.recipe),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_per_weight": self.bits_per_weight,
            "types": [use.to_json() for use in self.by_type()],
            "fallbacks": [t.name for t in self.fallbacks],
            "rules": [use.to_json() for use in self.rules],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "tensors": [t.to_json() for t in self.tensors],
        }


def _is_made_by(line: str) -> bool:
    """Whether `Plan.text` wrote a comment line, as it does in recipes that come from a GGUF file."""
    words = line.split()
    return words[:2] == ["quantkit", "quantize"] and len(words) > 2 and is_file_type(words[2])
