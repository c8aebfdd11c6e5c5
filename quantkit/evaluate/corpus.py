"""Read what models are measured on: text files, conversations, corpora with categories."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from quantkit.errors import DataError, FormatError
from quantkit.formats.atomic import os_errors
from quantkit.inputs import json_input

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 text file, `-` for stdin, without the newline at its end. Raises DataError for other bytes."""
    data = text_bytes(path).removesuffix(b"\n")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: offset {error.start}: not UTF-8 ({error.reason}); convert the text first") from None


def text_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a text file; of stdin, which is read once, for the path `-`."""
    if os.fspath(path) == "-":
        return _read_stream(sys.stdin)
    with os_errors(Path(path), "read"):
        return Path(path).read_bytes()


def require_different(files: Sequence[Path]) -> None:
    """DataError for a text, or an importance matrix, that is given twice: its tokens would count as two."""
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise DataError(f"{path}: given twice, so each of its tokens would count as two; name it once")
        seen.add(path.resolve())


@functools.lru_cache(maxsize=1)
def _read_stream(stream: TextIO) -> bytes:
    return stream.buffer.read()


@dataclass(frozen=True)
class Conversation:
    """A conversation of a file.

    messages   with "role" and "content"
    where      the file and the line or the number of the conversation, for messages
    category   its "category"; None without one
    """

    messages: list[dict[str, Any]]
    where: str
    category: str | None = None


def conversations(path: str | os.PathLike[str]) -> list[Conversation]:
    """Read the conversations of a file.

    A .jsonl file has one per line: a list of messages, an object with "messages", or an object with "conversations" of
    "from" and "value"; an object may have a "category". In any other text, paragraphs (separated by blank lines)
    alternate between user and assistant. Raises DataError that names the first line of another form.
    """
    text = read_text(path).removeprefix("\ufeff")  # a byte order mark is not part of the text
    if Path(path).suffix != ".jsonl":
        paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
        pairs = [paragraphs[i : i + 2] for i in range(0, len(paragraphs), 2)]
        return [
            Conversation([{"role": r, "content": c} for r, c in zip(("user", "assistant"), pair)],
                         f"{path}: conversation {number}")
            for number, pair in enumerate(pairs, 1)
        ]  # fmt: skip
    return [_conversation(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _conversation(path: str | os.PathLike[str], number: int, line: str) -> Conversation:
    where = f"{path}: line {number}"
    try:
        found, category = json_input.parse(line, str(path)), None
        if isinstance(found, dict):
            category = _category(found, where)
            found = found["messages"] if "messages" in found else found["conversations"]
        messages = [
            {**m, "role": m["role"], "content": m["content"]}
            if "role" in m
            else {"role": _ROLES[m["from"]], "content": m["value"]}
            for m in found
        ]
        if messages:
            _require_texts(messages, where)
            return Conversation(messages, where, category)
    except (FormatError, KeyError, TypeError):
        pass
    raise DataError(
        f'{where} is not a conversation: it must be a list of {{"role": …, "content": …}}, or an object with such '
        '"messages"'
    )


def _require_texts(messages: list[dict[str, Any]], where: str) -> None:
    """DataError for a message without a role or content, which templates would write as "None"."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message["role"], str):
            raise DataError(f"{where}: message {number}: the role is {message['role']!r:.80}, not a text")
        if message["content"] is None and not message.get("tool_calls"):
            raise DataError(f"{where}: message {number}: the content is null; write a text, or leave the message out")


def _category(found: dict[str, Any], where: str) -> str | None:
    category = found.get("category")
    if category is not None and not (isinstance(category, str) and category.strip()):
        raise DataError(f'{where}: its "category" is {category!r}; it must be a text that is not empty')
    return category


def texts_by_category(path: str | os.PathLike[str]) -> dict[str, str]:
    """The texts of a .jsonl file of objects with "text" and "category", joined by blank lines for each category.

    Raises DataError that names the first line of another form.
    """
    texts: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            found = json_input.parse(line, where)
        except FormatError as error:
            raise DataError(f"{error}; --by-category takes a .jsonl file") from None
        if not isinstance(found, dict) or not isinstance(found.get("text"), str):
            remedy = "; add --chat for conversations" if isinstance(found, dict) and "messages" in found else ""
            raise DataError(f'{where} is no object with a "text" and a "category"{remedy}')
        category = _category(found, where)
        if category is None:
            raise DataError(f'{where} has no "category"; --by-category needs one on every line')
        texts.setdefault(category, []).append(found["text"])
    return {category: "\n\n".join(parts) for category, parts in texts.items()}
