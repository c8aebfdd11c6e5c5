"""JSON documents from untrusted files, with limits on size and depth.

Python's parser raises RecursionError for deep nesting, and code that walks over a document recurses as well. `parse`
gives a document of up to `MAX_DEPTH` levels, or a FormatError that names where the text is from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError
from quantkit.inputs.regular_file import read_bytes

Json = Mapping[str, Any]
"""An object of a parsed document. Its values are untrusted, so of any type until they are checked."""

MAX_DEPTH = 64
MAX_BYTES = 256 << 20  # the largest tokenizer.json of known models has 34 MiB


def parse(text: str | bytes, where: str, unique_keys: bool = False) -> Any:
    """The document in a text. `where` begins the message of the FormatError for invalid JSON.

    Of a key that an object has twice, the last value counts; with `unique_keys` it is a FormatError.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise FormatError(f"{where}: JSON nested deeper than {MAX_DEPTH}") from None
    except _KeyTwice as error:
        raise FormatError(f"{where}: {error}") from None
    except ValueError as error:  # UnicodeDecodeError, JSONDecodeError, integers of thousands of digits
        raise FormatError(f"{where}: not JSON: {error}") from None
    if _is_deep(found):
        raise FormatError(f"{where}: JSON nested deeper than {MAX_DEPTH}")
    return found


def read(path: str | os.PathLike[str]) -> Any:
    """The document in a regular file of up to MAX_BYTES; FormatError if it is not JSON. OSError as from `open`."""
    return parse(read_bytes(path, MAX_BYTES), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist."""
    if not path.exists():
        return {}
    found = read(path)
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


class _KeyTwice(Exception):
    """An object with a key that is there twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _KeyTwice(f"an object has the key {twice[:300]!r} twice")
    return found


def _is_deep(document: object) -> bool:
    """Whether lists and objects are nested deeper than MAX_DEPTH. Level by level, without recursion."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, (list, dict))
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (list, dict))
        ]
        if not level:
            return False
    return True
