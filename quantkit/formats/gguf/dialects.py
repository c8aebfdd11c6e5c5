"""Ids that programs of the GGUF family give to different types, and how a reader tells them apart.

    id        program                            type
    42        llama.cpp                          Q2_0: 18 bytes for 64 elements
              PrismML's fork, before Sept. 2026  another Q2_0: 34 bytes for 128 elements
    142, 143  PrismML's fork, since then         PQ2_0: 34 bytes for 128; PTQ1_0: 28 bytes for 128
              ik_llama.cpp, 2024                 IQ2_TN and IQ1_TN, now retired numbers

The rest of the ids in `quantkit.types.layouts` have one meaning each. Tensors of id 42 are told apart by the offset of
the next tensor. Where those of a file are so small that padding hides the difference, the key `quantkit.dialect`
decides, which quantkit writes, or the environment variable QUANTKIT_DIALECT, which --dialect of commands that read
files sets; without either the file is refused.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from quantkit.errors import FormatError, UnknownNameError, UnsupportedError
from quantkit.formats.gguf.metadata import Metadata
from quantkit.types import DIALECTS, QuantType
from quantkit.types.base import LLAMA_CPP

KEY = "quantkit.dialect"  # str, one of DIALECTS: the program that the file is for
VARIABLE = "QUANTKIT_DIALECT"

_FOREIGN = {
    142: "PQ2_0 of PrismML's fork of llama.cpp, or IQ2_TN of ik_llama.cpp in 2024",
    143: "PTQ1_0 of PrismML's fork of llama.cpp, or IQ1_TN of ik_llama.cpp in 2024",
}
_Q2_0 = 42
_PRISM_BLOCK, _PRISM_BYTES = 128, 34


class Placed(Protocol):
    """What is asked of a tensor here; `offset` counts from the start of the file."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> QuantType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def foreign(ggml_type: int) -> str:
    """What an unknown id is in files of other programs, as the end of a sentence; empty if that is not known."""
    meaning = _FOREIGN.get(ggml_type)
    return f": {meaning}; quantkit reads neither. Get the model in another type, such as Q2_0" if meaning else ""


def check_blocks(
    path: Path, tensors: Sequence[Placed], end: int, alignment: int, metadata: Mapping[str, object]
) -> None:
    """FormatError if tensors of id 42 have the blocks of PrismML's fork, or may have them.

    tensors: all of a file, by offset; end: the size of the file
    """
    stops = [t.offset for t in tensors[1:]] + [end]
    suspects = []
    for t, stop in zip(tensors, stops):
        if t.type.ggml_type != _Q2_0:
            continue
        if t.shape[-1] % _PRISM_BLOCK:
            return  # rows of their blocks are multiples of 128
        room, theirs = stop - t.offset, math.prod(t.shape) // _PRISM_BLOCK * _PRISM_BYTES
        if theirs <= room < t.nbytes:
            raise FormatError(
                f"{path}: tensor {t.name} of id {_Q2_0} has room for {room} bytes, as for the {theirs} of blocks of "
                f"{_PRISM_BLOCK} elements, which PrismML's fork of llama.cpp wrote, not for the {t.nbytes} of "
                "llama.cpp's q2_0; get the model in groups of 64, or, if the file is truncated, again"
            )
        if _padded(theirs, alignment) != _padded(t.nbytes, alignment):
            return
        suspects.append(t)
    if suspects and _stated(metadata) != LLAMA_CPP:
        t = suspects[0]
        raise FormatError(
            f"{path}: tensor {t.name} of id {_Q2_0} may be {t.nbytes} bytes of llama.cpp's q2_0 or "
            f"{math.prod(t.shape) // _PRISM_BLOCK * _PRISM_BYTES} of another type of PrismML's fork, and padding hides "
            f"which; if the file is llama.cpp's, pass --dialect llama.cpp to a command that only reads it, or set "
            f"{VARIABLE}=llama.cpp"
        )


@contextlib.contextmanager
def assumed(dialect: str | None) -> Iterator[None]:
    """A context in which files are taken for those of a program where they do not say it; None changes nothing."""
    if dialect is None:
        yield
        return
    if dialect not in DIALECTS:
        raise UnknownNameError("dialect", dialect, DIALECTS)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = dialect
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def state(metadata: Metadata, tensors: Mapping[str, Placed], dialect: str, path: Path) -> None:
    """Say in the metadata for which program a file is; UnsupportedError for a tensor that it does not read."""
    foreign = [tensor for tensor in tensors.values() if dialect not in tensor.type.readers]
    if foreign:
        raise UnsupportedError(
            f"{path}: {foreign[0].name} and {len(foreign) - 1} more are {foreign[0].type.name}, which --dialect "
            f"{dialect} does not read; quantize the file with --dialect {dialect}, or drop the option"
        )
    metadata.set(KEY, dialect, "str")


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _stated(metadata: Mapping[str, object]) -> str:
    """The dialect that the file or the environment states; UnknownNameError for another word in the environment."""
    named = os.environ.get(VARIABLE, "")
    if named and named not in DIALECTS:
        raise UnknownNameError(f"dialect in {VARIABLE}", named, DIALECTS)
    return str(metadata.get(KEY, "")) or named
