"""Docstrings as Markdown for the site: an extension of griffe, which reads the sources for mkdocstrings.

quantkit's docstrings are plain text for `help()`. A list of names is aligned in columns:

    path       the file
    threads    number of threads; default: the CPUs
               that this process may use

The site shows it as a list of names in code font. Other indented text stays a code block, and everything else is text.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"( *)(\S(?:.*?\S)?)(?: {2,})(\S.*)")
_NAMES = re.compile(r"[\w.*]+(, [\w.*]+)*")


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring when its object has been read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Markdown that shows a plain-text docstring."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join(_list(lines) or block for block in blocks if (lines := block.splitlines()))


def _list(lines: list[str]) -> str:
    """Aligned lines "name    meaning" as a Markdown list; "" if the lines are anything else."""
    first = _ENTRY.fullmatch(lines[0])
    if first is None:
        return ""
    indent, items = len(first[1]), []
    for line in lines:
        found = _ENTRY.fullmatch(line)
        if found and len(found[1]) == indent and _NAMES.fullmatch(found[2]):
            names = ", ".join(f"`{name}`" for name in found[2].split(", "))
            items.append(f"- {names}: {found[3]}")
        elif items and line.startswith(" " * (indent + 4)):
            items[-1] += f" {line.strip()}"
        else:
            return ""
    return "\n".join(items)
