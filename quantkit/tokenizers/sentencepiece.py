"""Read tokenizer.model, a SentencePiece model, without the sentencepiece library.

The file is one protocol-buffers message (sentencepiece_model.proto). `read` takes from it the pieces (text, score,
type), the kind of model (unigram or BPE), the ids of the special pieces and the normalization. The types of pieces have
the same numbers as in GGUF.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.errors import FormatError, UnsupportedError
from quantkit.inputs.regular_file import read_bytes

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
# field numbers of ModelProto, of a piece, of TrainerSpec and of NormalizerSpec
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _IDS = 3, {40: "unk", 41: "bos", 42: "eos", 43: "pad"}
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES = 2, 3, 4
_MAX_BYTES = 256 << 20  # the largest published models have 5 MiB
_KINDS = {1: "unigram", 2: "bpe"}


@dataclass
class SentencePieceModel:
    """The contents of a tokenizer.model."""

    kind: str = ""  # "unigram" or "bpe"
    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type as in GGUF
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})  # -1: none
    charsmap: bytes = b""  # compiled table of character replacements; empty: none
    adds_space: bool = True  # a space is put before the text
    removes_spaces: bool = True  # spaces at the ends are removed, runs of spaces become one


def read(path: Path) -> SentencePieceModel:
    """Read a model. FormatError if the file is not one, UnsupportedError for the kinds word and char."""
    model = SentencePieceModel()
    try:
        for number, value in _fields(read_bytes(path, _MAX_BYTES)):
            if number == _PIECE:
                model.pieces.append(_piece(value))
            elif number == _TRAINER:
                _trainer(value, model, path)
            elif number == _NORMALIZER:
                _normalizer(value, model)
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise FormatError(f"{path}: not a SentencePiece model ({error})") from None
    if not model.pieces or not model.kind:
        missing = "training settings" if model.pieces else "pieces"
        raise FormatError(f"{path}: not a SentencePiece model, or only its beginning (it has no {missing})")
    return model


def _piece(data: bytes | int) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, 1
    for number, value in _fields(data):
        if number == _TEXT:
            text = _bytes(value).decode()
        elif number == _SCORE:
            (score,) = struct.unpack("<f", _bytes(value))
        elif number == _TYPE:
            kind = _number(value)
    return text, score, kind


def _trainer(data: bytes | int, model: SentencePieceModel, path: Path) -> None:
    model.kind = "unigram"  # the default of the format
    for number, value in _fields(data):
        if number == _MODEL_TYPE:
            if value not in _KINDS:
                raise UnsupportedError(f"{path}: SentencePiece model of type {value!r}; quantkit reads unigram and BPE")
            model.kind = _KINDS[_number(value)]
        elif number in _IDS:
            model.ids[_IDS[number]] = _signed(_number(value))


def _normalizer(data: bytes | int, model: SentencePieceModel) -> None:
    for number, value in _fields(data):
        if number == _CHARSMAP:
            model.charsmap = _bytes(value)
        elif number == _DUMMY_PREFIX:
            model.adds_space = bool(value)
        elif number == _EXTRA_SPACES:
            model.removes_spaces = bool(value)


# --------------------------------------------------------------------------------------------------------- wire format


def _fields(data: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    """Field numbers and values of a message; a value is an int for a varint, else bytes."""
    data, at = _bytes(data), 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(data)}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint (7 bits a byte, lowest first) and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at + shift // 7]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + shift // 7 + 1
    raise ValueError(f"a number of over 10 bytes at byte {at}")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number where bytes should be")
    return value


def _number(value: bytes | int) -> int:
    if not isinstance(value, int):
        raise TypeError("bytes where a number should be")
    return value
