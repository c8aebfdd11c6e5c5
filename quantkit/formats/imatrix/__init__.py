"""Importance matrices: of each weight, the mean square of what enters its columns, and how much text that was.

`read` and `write` know both forms of file, llama.cpp's GGUF (`gguf_form`) and the older `.dat` (`legacy_form`);
`matrix` has the record and what is done with several. Imports `errors`, `types` and the other modules of `formats`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from quantkit.errors import DataError
from quantkit.formats.imatrix import gguf_form, legacy_form
from quantkit.formats.imatrix.matrix import (
    POLICIES,
    Entry,
    Imatrix,
    check_policy,
    few,
    fill_missing,
    merge,
    uncounted,
)
from quantkit.formats.mapping import map_file

__all__ = ["POLICIES", "Entry", "Imatrix", "check_policy", "few", "fill_missing", "form_of", "merge", "read",
           "uncounted", "write"]  # fmt: skip


def read(path: str | os.PathLike[str]) -> Imatrix:
    """Read an importance matrix of either form.

    Every entry of a legacy file comes as one matrix; `Entry.columns(n)` parts it by row length.
    """
    is_gguf = map_file(Path(path))[:4].tobytes() == b"GGUF"
    return gguf_form.read(path) if is_gguf else legacy_form.read(path)


def form_of(path: str | os.PathLike[str]) -> str:
    """The form that a file of this name gets: "gguf" where it ends so, else "legacy"."""
    return "gguf" if Path(path).suffix == ".gguf" else "legacy"


def write(path: str | os.PathLike[str], imatrix: Imatrix, form: str = "") -> None:
    """Write an importance matrix, atomically, as "gguf" or "legacy"; by default what its name says (`form_of`).

    The same matrix gives the same bytes. DataError for values that no reader could use, among them those of experts
    that saw nothing and were not filled in.
    """
    if not imatrix.entries:
        raise DataError(f"{path}: an importance matrix needs at least one entry, this one has none")
    for name, entry in imatrix.entries.items():
        if not (np.isfinite(entry.values) & (entry.values >= 0)).all():
            raise DataError(f"{path}: entry {name!r} holds values that are negative or not finite")
    (gguf_form if (form or form_of(path)) == "gguf" else legacy_form).write(path, imatrix)
