"""The front matter of a model card: YAML between two lines `---` at the beginning of a README.md.

Every scalar is read as text: in `language: [en, no]` the second value is Norwegian, not false, and a version 1.10 does
not become 1.1. Cards are untrusted: aliases (which multiply), tags, deep nesting and blocks of more than
MAX_BYTES are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from quantkit.errors import FormatError
from quantkit.inputs.regular_file import read_beginning

MAX_BYTES = 1 << 20  # the front matter of cards with thousands of benchmark results takes a third
_MAX_DEPTH = 32
_BLOCK = re.compile(rb"(?:\xef\xbb\xbf)?---[ \t]*\r?\n(.*?\n)??---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_NULL = frozenset(("", "~", "null", "Null", "NULL"))

Value = None | str | list[Any] | dict[str, Any]


def read(path: str | os.PathLike[str]) -> Mapping[str, Value]:
    """The front matter of a card, empty if it has none; FormatError if it is not plain YAML.

    Values are text, lists, mappings, and None where the value is empty or null.
    """
    data = read_beginning(path, MAX_BYTES + 16)
    block = _BLOCK.match(data)
    if block is None:
        if len(data) > MAX_BYTES and data.startswith(b"---"):
            raise FormatError(f"{path}: the front matter has more than {MAX_BYTES} bytes, or no closing line '---'")
        return {}
    try:
        # YAML allows no tab in an indentation, and published cards (Qwen3-235B-A22B-Instruct-2507) have some.
        value = _parsed((block[1] or b"").decode().replace("\t", "  "))
    except (_Refused, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: the front matter is not plain YAML: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError(f"{path}: the front matter is not a mapping of keys to values")
    return value


class _Refused(Exception):
    """The reason, and the line of the file."""


def _parsed(text: str) -> Value:
    """The YAML document in a text, None if there is none; _Refused for several, or for one that is not plain."""
    import yaml

    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            builder.add(event, yaml)
    except yaml.YAMLError as error:
        raise _Refused(" ".join(str(error).split())) from None
    return builder.documents[0] if builder.documents else None


class _Builder:
    """Builds values from the events of a YAML parser, without recursion."""

    def __init__(self) -> None:
        self.documents: list[Value] = []
        self._open: list[list[Any] | dict[str, Any]] = []
        self._keys: list[str | None] = []  # for each open mapping the key whose value comes next; None for lists

    def add(self, event: Any, yaml: ModuleType) -> None:
        """Take the next event of `yaml.parse`; _Refused for aliases, anchors, tags and nesting beyond the limit."""
        line = event.start_mark.line + 2  # the first line is that of the dashes
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _Refused(f"line {line}: anchors and aliases are not read")
        if getattr(event, "tag", None) is not None:
            raise _Refused(f"line {line}: tags are not read")
        if isinstance(event, yaml.ScalarEvent):
            plain = event.style is None or event.style == ""
            self._put(None if plain and event.value in _NULL else event.value, event.value, line)
        elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            made: list[Any] | dict[str, Any] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
            self._put(made, None, line)
            self._open.append(made)
            self._keys.append(None)
            if len(self._open) > _MAX_DEPTH:
                raise _Refused(f"line {line}: nested deeper than {_MAX_DEPTH}")
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            self._open.pop()
            self._keys.pop()

    def _put(self, value: Value, text: str | None, line: int) -> None:
        """Append a value to the innermost list, or take it as the next key or value of the innermost mapping."""
        if not self._open:
            if self.documents:
                raise _Refused(f"line {line}: a second document")
            self.documents.append(value)
            return
        inner, key = self._open[-1], self._keys[-1]
        if isinstance(inner, list):
            inner.append(value)
        elif key is None:
            if text is None:
                raise _Refused(f"line {line}: a key that is not text")
            if text in inner:
                raise _Refused(f"line {line}: a second key {text!r}")
            self._keys[-1] = text
        else:
            inner[key] = value
            self._keys[-1] = None
