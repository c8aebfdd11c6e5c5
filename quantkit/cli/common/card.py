"""The Markdown of `inspect --card` for a model card: sizes, classes of tensors, recipe, commands."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit.cli.common.card_command import HIDDEN, argument, base, requantize
from quantkit.cli.common.evaluation import markdown
from quantkit.cli.common.output import gib
from quantkit.errors import printable
from quantkit.recipe.rules.layers import ranges

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUF, Tensor


def card(file: GGUF) -> str:
    """A complete Markdown section with a heading such as `## NAME 249.099 GiB (5.997 BPW)`."""
    tensors = list(file.tensors.values())
    size, elements = sum(t.nbytes for t in tensors), sum(_elements(t) for t in tensors)
    parts = [
        f"## {cell(_title(file))} {gib(size)} ({8 * size / max(1, elements):.3f} BPW)",
        _facts(file, elements),
        markdown(("tensors", "layers", "shape", "type", "count", "GiB", "BPW"), _classes(tensors)),
        markdown(("type", "count", "weights", "GiB", "BPW"), _types(tensors)),
        _recipe(file),
        _commands(file),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _elements(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def _title(file: GGUF) -> str:
    """The file's name without `.gguf` and without the shard number."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", file.path.name)


def _facts(file: GGUF, elements: int) -> str:
    """Model, architecture, size, importance matrix and quantkit version, one line each."""
    m = file.metadata
    facts = {
        "model": m.get("general.name"),
        "architecture": m.get("general.architecture"),
        "parameters": f"{elements / 1e9:.3f} B" if elements >= 10**7 else str(elements),
        "files": f"{len(file.paths)}, {gib(file.size)} with metadata",
        "importance matrix": _imatrix(m),
        "made by": f"quantkit {m['quantkit.version']}" if "quantkit.version" in m else None,
    }
    return "\n".join(f"- {name}: {cell(str(value))}" for name, value in facts.items() if value)


def _imatrix(metadata: Any) -> str:
    if "quantize.imatrix.file" not in metadata:
        return ""
    name, text = (str(metadata.get(f"quantize.imatrix.{key}", "")) for key in ("file", "dataset"))
    if name == HIDDEN:
        return "used, not named"
    entries, chunks = (metadata.get(f"quantize.imatrix.{key}_count") for key in ("entries", "chunks"))
    counted = f", {entries} entries" + (f" of {chunks} chunks" if chunks else "") if entries else ""
    return f"{base(name)}" + (f", of {base(text)}" if text else "") + counted


@dataclass
class _Class:
    """Tensors that differ only in their layer."""

    layers: list[int] = field(default_factory=list)
    count: int = 0
    elements: int = 0
    nbytes: int = 0


def _classes(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """One row per class of tensors that differ only in their layer, in file order."""
    found: dict[tuple[str, str, str], _Class] = {}
    for t in tensors:
        layer = re.match(r"blk\.(\d+)\.(.*)", t.name)
        name = f"blk.*.{layer[2]}" if layer else t.name
        use = found.setdefault((name, " x ".join(map(str, t.shape)), t.type.name), _Class())
        if layer:
            use.layers.append(int(layer[1]))
        use.count, use.elements, use.nbytes = use.count + 1, use.elements + _elements(t), use.nbytes + t.nbytes
    return [
        (_code(name), ranges(use.layers), shape, kind, use.count, *_size(use.nbytes, use.elements))
        for (name, shape, kind), use in found.items()
    ]


def _types(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    """One row per type, largest total size first, and a row of totals."""
    found: dict[str, _Class] = {}
    for t in tensors:
        for name in (t.type.name, ""):
            use = found.setdefault(name, _Class())
            use.count, use.elements, use.nbytes = use.count + 1, use.elements + _elements(t), use.nbytes + t.nbytes
    total = found.pop("", _Class())
    ordered = sorted(found.items(), key=lambda item: -item[1].nbytes)
    return [
        (name, use.count, use.elements, *_size(use.nbytes, use.elements)) for name, use in [*ordered, ("all", total)]
    ]


def _size(nbytes: int, elements: int) -> tuple[str, str]:
    return f"{nbytes / 2**30:.3f}", f"{8 * nbytes / max(1, elements):.3f}"


def _recipe(file: GGUF) -> str:
    """The recipe in a collapsed block: the one stored in the file, else rules that give the types it has."""
    from quantkit.recipe.registry import recipe_text

    text = recipe_text(file.path).rstrip("\n")
    summary = "Recipe of this file" if "quantkit.recipe" in file.metadata else "Its types as a recipe"
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"<details>\n<summary>{summary}</summary>\n\n{fence}\n{text}\n{fence}\n\n</details>"


def _commands(file: GGUF) -> str:
    """Commands that reproduce, inspect and run the file."""
    name = argument(file.paths[0].name)
    lines = [
        "# contents, memory, quality",
        f"quantkit inspect {name}",
        f"quantkit plan {name} COPY -c 32768 -ctk q8_0 -ctv q8_0",
        f"quantkit compare MODEL-BF16.gguf {name} -f TEXT",
        f"quantkit generate {name} -p 'Hello'",
    ]
    if words := requantize(file):
        command = f"quantkit quantize MODEL-BF16.gguf OUT.gguf {' '.join(words)}"
        lines[:0] = ["# reproduce these types from the BF16 model", command]
    return "```bash\n" + "\n".join(map(printable, lines)) + "\n```"


def cell(text: str) -> str:
    """Escape text for a table cell: no HTML, link, code, cell end or terminal control sequence."""
    return re.sub(r"([|<\[`\\])", r"\\\1", printable(text.replace("\n", " ")))


def _code(name: str) -> str:
    """A name in code font for a table cell; the name may contain backquotes."""
    text = printable(name)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", r"\|")
