"""`Scanner`: a strict pull parser for large JSON headers from strangers. The caller asks for the value it expects.

Only the values asked for are built, so the caller's limits bound the memory. Nesting is never recursion, duplicate keys
are errors, and every error names the byte. It reads what headers need: strings, naturals, lists of naturals, objects.
It can skip any value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from quantkit.errors import FormatError

_SPACE = re.compile(rb"[ \t\r\n]*")
_SYMBOLS = {
    symbol: re.compile(rb"[ \t\r\n]*" + re.escape(symbol)) for symbol in (b"{", b"}", b"[", b"]", b":", b",", b'"')
}
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
_NATURAL = re.compile(rb"(?:0|[1-9][0-9]{0,18})(?![0-9.eE])")
_SCALAR = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
MAX_DEPTH = 64
MAX_SKIPPED_BYTES = 1 << 18  # of a skipped value


class Scanner:
    """A position in a JSON text. `first_byte` is the offset of the text in its file, for messages."""

    def __init__(self, path: Path, text: bytes, first_byte: int):
        self.path = path
        self.text = text
        self.pos = 0
        self._first_byte = first_byte

    def error(self, message: str, pos: int | None = None) -> FormatError:
        """An error that names the file and the byte: `pos` in the text, or the current position."""
        return FormatError(f"{self.path}: at byte {self._first_byte + (self.pos if pos is None else pos)}: {message}")

    def members(self, what: str, max_key: int) -> Iterator[str]:
        """Iterate over the keys of an object. The caller reads each key's value before it asks for the next key."""
        self._expect(b"{", what)
        seen: set[str] = set()
        if self._accept(b"}"):
            return
        while True:
            self._skip_space()
            at = self.pos
            key = self.string(f"a key of {what}", max_key)
            if key in seen:
                raise self.error(f"{what} has the key {key!r} twice", at)
            seen.add(key)
            self._expect(b":", f"key {key!r} of {what}")
            yield key
            if self._accept(b"}"):
                return
            self._expect(b",", what)

    def string(self, what: str, limit: int) -> str:
        """Read a string of at most `limit` bytes."""
        self._expect(b'"', what)
        start = self.pos
        end = _PLAIN.match(self.text, start).end()  # type: ignore[union-attr]  # it matches at least the empty string
        while self.text[end : end + 1] == b"\\" and end - start <= limit:
            end = _PLAIN.match(self.text, end + 2).end()  # type: ignore[union-attr]
        if end - start > limit:
            raise self.error(f"{what} is longer than {limit} bytes", start)
        if self.text[end : end + 1] != b'"':
            found = self.text[end : end + 1]
            raise self.error(f"{what} has a bare {found!r} in it" if found else f"{what} has no end", end)
        self.pos = end + 1
        token = self.text[start:end]
        try:
            text = token.decode()
            if "\\" in text:
                text = json.loads(f'"{text}"')
                text.encode()  # half a surrogate pair is an error
            return text
        except ValueError as error:  # UnicodeError and JSONDecodeError are ValueErrors
            raise self.error(f"{what} is not a JSON string: {error}", start) from None

    def natural(self, what: str) -> int:
        """Read an integer from 0 to below 10^19, which is beyond the size of any file."""
        self._skip_space()
        match = _NATURAL.match(self.text, self.pos)
        if match is None:
            raise self.error(f"{what} should be a natural number below 10^19, not {self._next()}")
        self.pos = match.end()
        return int(match[0])

    def integers(self, what: str, limit: int) -> list[int]:
        """Read a list of at most `limit` naturals."""
        self._expect(b"[", what)
        found: list[int] = []
        if self._accept(b"]"):
            return found
        while True:
            found.append(self.natural(what))
            if len(found) > limit:
                raise self.error(f"{what} has more than {limit} numbers")
            if self._accept(b"]"):
                return found
            self._expect(b",", what)

    def skip(self) -> None:
        """Skip one value of any kind."""
        closers: list[bytes] = []
        start = self.pos
        while True:
            self._skip_space()
            if self.pos - start > MAX_SKIPPED_BYTES:
                raise self.error(f"a value that is not used here is longer than {MAX_SKIPPED_BYTES} bytes", start)
            here = self.text[self.pos : self.pos + 1]
            if here in (b"{", b"["):
                self.pos += 1
                closer = b"}" if here == b"{" else b"]"
                if len(closers) == MAX_DEPTH:
                    raise self.error(f"JSON nested deeper than {MAX_DEPTH}")
                if not self._accept(closer):
                    closers.append(closer)
                    self._skip_key(closer)
                    continue
            elif here == b'"':
                self.string("a string", MAX_SKIPPED_BYTES)
            else:
                match = _SCALAR.match(self.text, self.pos)
                if match is None:
                    raise self.error(f"expected a JSON value, found {self._next()}")
                self.pos = match.end()
            while closers and self._accept(closers[-1]):
                closers.pop()
            if not closers:
                return
            self._expect(b",", "a list or object")
            self._skip_key(closers[-1])

    def finish(self) -> None:
        """FormatError unless only spaces follow: safetensors headers are padded with them."""
        self._skip_space()
        if self.pos != len(self.text):
            raise self.error(f"the JSON is followed by {self._next()}")

    def _skip_key(self, closer: bytes) -> None:
        if closer == b"}":
            self.string("a key", MAX_SKIPPED_BYTES)
            self._expect(b":", "a key")

    def _skip_space(self) -> None:
        self.pos = _SPACE.match(self.text, self.pos).end()  # type: ignore[union-attr]

    def _accept(self, symbol: bytes) -> bool:
        match = _SYMBOLS[symbol].match(self.text, self.pos)
        if match is None:
            return False
        self.pos = match.end()
        return True

    def _expect(self, symbol: bytes, what: str) -> None:
        if not self._accept(symbol):
            self._skip_space()
            raise self.error(f"{what}: expected {symbol.decode()!r}, found {self._next()}")

    def _next(self) -> str:
        return (
            repr(self.text[self.pos : self.pos + 16].decode("utf-8", "replace")) if self.text[self.pos :] else "the end"
        )
