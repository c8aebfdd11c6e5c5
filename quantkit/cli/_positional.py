"""The words behind IN of `quantize`: [OUT] TYPE [THREADS], as llama-quantize takes them.

    IN TYPE              OUT is ggml-model-TYPE.gguf in the folder of IN
    IN TYPE THREADS
    IN OUT TYPE
    IN OUT TYPE THREADS
    IN [OUT] --plan FILE

A word that reads like a type is never taken for the name of a file: a file of that name is written ./Q4_K_M.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from quantkit.errors import UnknownNameError

# Types, also misspelled ones and those that are no file type (q8_K), and their numbers.
_LIKE_A_TYPE = re.compile(r"\d+|(?:I?Q|TQ|B?F|MXFP)\d\w*|COPY", re.IGNORECASE)


@dataclass(frozen=True)
class Positional:
    """What the words mean. `file_type` is None where no TYPE was given, `out` where the default name is meant."""

    out: Path | None
    file_type: str | None
    threads: int | None


def read(words: Sequence[str | None]) -> Positional:
    """Decide which of the words is OUT, TYPE and THREADS; bad usage where that cannot be told."""
    given = [word for word in words if word is not None]
    if not given or not _is_like_a_type(given[0]):
        out, file_type, threads = (*given, None, None, None)[:3]
        return Positional(None if out is None else Path(out), file_type, _threads(threads))
    name, *behind = given
    as_file = f"a file of that name is written .{os.sep}{name}"
    _require_file_type(name, as_file)
    if len(behind) > 1 or (behind and _number(behind[0]) is None):
        raise typer.BadParameter(
            f"'{name}' is a type, and '{' '.join(behind)}' behind it is no number of THREADS: write IN OUT TYPE "
            f"[THREADS], or IN TYPE [THREADS]; {as_file}"
        )
    return Positional(None, name, _threads(behind[0] if behind else None))


def default_out(source: Path, file_type: str) -> Path:
    """Where llama-quantize writes when OUT is left out; beside the shards of a checkpoint's directory."""
    folder = source if source.is_dir() else source.parent
    return folder / f"ggml-model-{file_type}.gguf"


def _is_like_a_type(word: str) -> bool:
    return not os.path.dirname(word) and _LIKE_A_TYPE.fullmatch(word) is not None


def _require_file_type(name: str, as_file: str) -> None:
    from quantkit.recipe import file_type

    try:
        file_type(name)
    except UnknownNameError as error:
        raise typer.BadParameter(f"{error}; {as_file}") from None


def _number(word: str) -> int | None:
    return int(word) if re.fullmatch(r"[+-]?[0-9]+", word) else None


def _threads(word: str | None) -> int | None:
    if word is None:
        return None
    count = _number(word)
    if count is None:
        raise typer.BadParameter(f"THREADS '{word}' is not a number; the order is IN [OUT] TYPE [THREADS]")
    return count
