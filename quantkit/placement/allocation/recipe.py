r"""An allocation as a recipe that people can read and edit: rules by classes of tensors and ranges of layers.

    # attn_v: 30 tensors, 1.34 MiB, predicted KLD 0.00081
    blk.{0-3,28-29}.attn_v\.weight$=q6_0
    blk.{4-27}.attn_v\.weight$=q5_0

gate and up are one class where they have the same types. Every tensor with a free type is matched by one rule alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.recipe.planning.presets import is_file_type
from quantkit.recipe.rules.grammar import Recipe, Rule
from quantkit.recipe.rules.layers import ranges
from quantkit.types import QuantType

DEFAULT_FILE_TYPE = "Q8_0"


@dataclass(frozen=True)
class Allocated:
    """A tensor with the type and the device that were chosen, its bytes and its predicted cost in nats per token."""

    name: str
    type: QuantType
    device: str
    nbytes: int
    cost: float


@dataclass(frozen=True)
class TensorClass:
    """Tensors whose names differ only in their layer. `layers` by type, ascending; empty for a single tensor."""

    name: str
    types: Mapping[QuantType, tuple[int, ...]]
    tensors: int
    nbytes: int
    cost: float

    def described(self) -> str:
        """The types with their layers: q6_0 0-3,28-29; q5_0 4-27."""
        return "; ".join(
            f"{kind.name} {ranges(layers)}" if layers and len(self.types) > 1 else kind.name
            for kind, layers in self.types.items()
        )


def classes(tensors: Sequence[Allocated]) -> list[TensorClass]:
    """The classes of a model in the order of their first tensors."""
    members: dict[str, list[Allocated]] = defaultdict(list)
    for t in tensors:
        members[_class_of(t.name)[0]].append(t)
    found = [_class(name, listed) for name, listed in members.items()]
    return _with_gate_and_up(found)


def _class_of(name: str) -> tuple[str, int | None]:
    found = re.match(r"blk\.(\d+)\.(.*)", name)
    return (f"blk.*.{found[2]}", int(found[1])) if found else (name, None)


def _class(name: str, tensors: Sequence[Allocated]) -> TensorClass:
    layers: dict[QuantType, list[int]] = defaultdict(list)
    for t in tensors:
        layer = _class_of(t.name)[1]
        layers[t.type] += [] if layer is None else [layer]
    ordered = {kind: tuple(sorted(found)) for kind, found in layers.items()}
    return TensorClass(name, ordered, len(tensors), sum(t.nbytes for t in tensors), sum(t.cost for t in tensors))


def _with_gate_and_up(found: list[TensorClass]) -> list[TensorClass]:
    """The classes with gate and up as one where their types are equal."""
    merged: list[TensorClass] = []
    for each in found:
        parts = re.fullmatch(r"blk\.\*\.ffn_(gate|up)(_\w+)?\.weight", each.name)
        name = f"blk.*.ffn_(gate|up){parts[2] or ''}.weight" if parts else ""
        other = next((m for m in merged if parts and _is_other(m.name, parts[1], parts[2]) and m.types == each.types),
                     None)  # fmt: skip
        if other is None:
            merged.append(each)
            continue
        both = replace(other, name=name, tensors=other.tensors + each.tensors, nbytes=other.nbytes + each.nbytes,
                       cost=other.cost + each.cost)  # fmt: skip
        merged[merged.index(other)] = both
    return merged


def _is_other(name: str, part: str, ending: str | None) -> bool:
    return name == f"blk.*.ffn_{'up' if part == 'gate' else 'gate'}{ending or ''}.weight"


def recipe_of(tensors: Sequence[Allocated], about: str = "") -> Recipe:
    """The rules that give every tensor its type; `about` is the comment at the beginning."""
    rules = []
    for found in classes(tensors):
        kind = found.name.removeprefix("blk.*.").removesuffix(".weight").replace("(gate|up)", "gate and up")
        remark = f"{kind}: {_counted(found.tensors)}, {found.nbytes / 2**20:.2f} MiB, predicted KLD {found.cost:.3g}"
        for quant_type, layers in found.types.items():
            rules.append(Rule(_pattern(found, layers), quant_type, remark=remark))
            remark = ""
    return Recipe(tuple(rules), about)


def _counted(tensors: int) -> str:
    return f"{tensors} tensor{'s' if tensors > 1 else ''}"


def _pattern(found: TensorClass, layers: Sequence[int]) -> str:
    ending = found.name.removeprefix("blk.*.").replace(".", r"\.")
    if not layers:
        return f"^{ending}$"
    where = r"blk\.\d+\." if len(found.types) == 1 else f"blk.{{{ranges(layers)}}}."
    return f"{where}{ending}$"


def file_type_for(tensors: Sequence[Allocated]) -> str:
    """The TYPE of a quantize command for this recipe: the type of most bytes if there is such a file type."""
    held: Counter[str] = Counter()
    for t in tensors:
        held[t.type.name] += t.nbytes
    name = held.most_common(1)[0][0].upper() if held else DEFAULT_FILE_TYPE
    return name if is_file_type(name) else DEFAULT_FILE_TYPE
