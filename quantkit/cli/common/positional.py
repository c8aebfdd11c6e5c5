"""The positional arguments of `quantize` after IN: [OUT] TYPE [THREADS], as in llama-quantize.

    IN TYPE              OUT is ggml-model-TYPE.gguf in the directory of IN
    IN TYPE THREADS
    IN OUT TYPE
    IN OUT TYPE THREADS
    IN [OUT] --plan FILE

An argument that looks like a type is never taken as a file name: write ./Q4_K_M for a file of that name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from quantkit.errors import UnknownNameError

# Names of types, including misspelled ones and those that are not a file type (q8_K), and their numbers.
_LIKE_A_TYPE = re.compile(r"\d+|(?:I?Q|TQ|B?F|MXFP)\d\w*|COPY", re.IGNORECASE)


@dataclass(frozen=True)
class Positional:
    """The parsed arguments. `file_type` is None without TYPE; `out` is None for the default name."""

    out: Path | None
    file_type: str | None
    threads: int | None


def read(words: Sequence[str | None]) -> Positional:
    """Decide which of the arguments is OUT, TYPE and THREADS; bad usage if that is ambiguous."""
    given = [word for word in words if word is not None]
    if not given or not _is_like_a_type(given[0]):
        out, file_type, threads = (*given, None, None, None)[:3]
        if file_type is not None:
            _require_file_type(file_type)
        return Positional(None if out is None else Path(out), file_type, _threads(threads))
    name, *rest = given
    as_file = f"for a file of that name write .{os.sep}{name}"
    _require_file_type(name, as_file)
    if len(rest) > 1 or (rest and _number(rest[0]) is None):
        raise typer.BadParameter(
            f"'{name}' is a type, and '{' '.join(rest)}' after it is not a number of THREADS: write IN OUT TYPE "
            f"[THREADS], or IN TYPE [THREADS]; {as_file}"
        )
    return Positional(None, name, _threads(rest[0] if rest else None))


def default_out(source: Path, file_type: str) -> Path:
    """The default OUT, as in llama-quantize; inside IN if IN is a checkpoint directory."""
    folder = source if source.is_dir() else source.parent
    return folder / f"ggml-model-{file_type}.gguf"


def _is_like_a_type(word: str) -> bool:
    return not os.path.dirname(word) and _LIKE_A_TYPE.fullmatch(word) is not None


def refuse_type(out: str, name: str, remedy: str) -> None:
    """Bad usage for an output whose name is a type, as of `convert HF_DIR q8_0`: the output is missing there."""
    if _is_like_a_type(out) or out == "auto":
        raise typer.BadParameter(
            f"'{out}' is a type, and {name} is missing: {remedy}; for a file of that name write .{os.sep}{out}"
        )


def _require_file_type(name: str, remedy: str = "") -> None:
    from quantkit.recipe import file_type

    try:
        file_type(name)
    except UnknownNameError as error:
        raise typer.BadParameter(f"{error}; {remedy}" if remedy else str(error)) from None


def _number(word: str) -> int | None:
    return int(word) if re.fullmatch(r"[+-]?[0-9]+", word) else None


def _threads(word: str | None) -> int | None:
    if word is None:
        return None
    count = _number(word)
    if count is None:
        raise typer.BadParameter(f"THREADS '{word}' is not a number; the order is IN [OUT] TYPE [THREADS]")
    return count
