"""Open and create base files for KL divergence, in the format given by the name or the first bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.formats.atomic import os_errors
from quantkit.formats.kld.base_file import BaseReader, BaseWriter
from quantkit.formats.kld.bounded_file import BoundedReader, BoundedWriter, is_bounded
from quantkit.formats.kld.chunk_file import LoggedChunks
from quantkit.formats.kld.scored_tokens import ScoredTokens


def base_writer(
    path: Path,
    tokens: np.ndarray,
    n_vocab: int,
    logged: LoggedChunks | None = None,
    *,
    target: float = 1e-3,
    note: dict[str, Any] | None = None,
    scored: ScoredTokens | None = None,
) -> BaseWriter | BoundedWriter:
    """A writer of a base file over int[n_chunk, n_ctx] tokens: the bounded format for names that end in `.qkld`,
    ik_llama.cpp's format for others.

    logged   the chunks that an interrupted run has written, from its log
    target   bounded format: target error of the mean KLD, in nats
    note     bounded format: the origin of the file, stored in it
    scored   bounded format: the scored tokens, stored in it. QuantkitError for ik_llama.cpp's format, which cannot
             store them
    """
    if path.suffix == ".qkld":
        return BoundedWriter(path, tokens, n_vocab, target=target, note=note, logged=logged, scored=scored)
    if scored is not None:
        raise QuantkitError(
            f"{path}: llama.cpp's base files hold the second half of each chunk and cannot record that {scored.about} "
            "are scored; name the file .qkld"
        )
    return BaseWriter(path, tokens, n_vocab, logged=logged)


def base_reader(path: Path) -> BaseReader | BoundedReader:
    """Open a base file of either format, detected by its first bytes."""
    return BoundedReader(path) if is_bounded(path) else BaseReader(path)


def is_base_file(path: Path) -> bool:
    """Whether a file is a base file rather than a GGUF model. Raises FormatError for a file that cannot be read."""
    with os_errors(path, "read"), path.open("rb") as file:
        return file.read(4) != b"GGUF"
