"""Importance matrices: for each weight the mean square of the activations that enter its columns, and their number.

`read` and `write` know both file formats, llama.cpp's GGUF (`gguf_form`) and the older `.dat` (`legacy_form`). `matrix`
has the record, merging, and values for experts that saw no tokens. The package imports `errors`, `types` and the other
modules of `formats`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from quantkit.errors import DataError
from quantkit.formats.imatrix import gguf_form, legacy_form
from quantkit.formats.imatrix.matrix import (
    POLICIES,
    TOKEN_WEIGHTS,
    Entry,
    Imatrix,
    check_policy,
    fill_missing,
    loses_counts,
    merge,
    rarely_active,
)
from quantkit.formats.imatrix.second_moments import SecondMoments
from quantkit.formats.mapping import map_file

__all__ = [
    "POLICIES",
    "TOKEN_WEIGHTS",
    "Entry",
    "Imatrix",
    "SecondMoments",
    "check_policy",
    "fill_missing",
    "form_of",
    "loses_counts",
    "merge",
    "rarely_active",
    "read",
    "write",
]  # fmt: skip


def read(path: str | os.PathLike[str]) -> Imatrix:
    """Read an importance matrix in either format.

    An entry of a legacy file is one matrix; `Entry.columns(n)` divides it into rows of `n` columns.
    """
    is_gguf = map_file(Path(path))[:4].tobytes() == b"GGUF"
    return gguf_form.read(path) if is_gguf else legacy_form.read(path)


def form_of(path: str | os.PathLike[str]) -> str:
    """The format for a file name: "gguf" if it ends in .gguf, else "legacy"."""
    return "gguf" if Path(path).suffix == ".gguf" else "legacy"


def write(path: str | os.PathLike[str], imatrix: Imatrix, form: str = "") -> None:
    """Write an importance matrix atomically, as "gguf" or "legacy"; the default follows from the name (`form_of`).

    The same matrix gives the same bytes. DataError for values that are negative or not finite.
    """
    if not imatrix.entries:
        raise DataError(f"{path}: an importance matrix needs at least one entry, this one has none")
    for name, entry in imatrix.entries.items():
        if not (np.isfinite(entry.values) & (entry.values >= 0)).all():
            raise DataError(f"{path}: entry {name!r} holds values that are negative or not finite")
    form = form or form_of(path)
    if form != "gguf" and imatrix.second_moments:
        raise DataError(f"{path}: the legacy format does not hold second moments; give the output a name in .gguf")
    (gguf_form if form == "gguf" else legacy_form).write(path, imatrix)
