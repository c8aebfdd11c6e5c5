"""A hash of what a run depends on. A saved run resumes only if its hash is equal."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantkit.evaluate.corpus import text_bytes

_MAX_WHOLE = 64 << 20  # bytes; of larger files only samples are hashed
_SAMPLES, _SAMPLE_BYTES = 1024, 16 << 10


def fingerprint(paths: Sequence[Path], settings: Mapping[str, object]) -> str:
    """A hash of the settings and of each file's name, size and contents; a run resumes only if it is equal.

    Of a file above 64 MiB (a model), 16 KiB at each of 1024 offsets are hashed, the first and the last among them. So a
    change of a tensor that takes a thousandth of the file or more is always detected.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in paths:
        if os.fspath(path) == "-":  # stdin
            digest.update(text_bytes(path))
            continue
        size = path.stat().st_size
        digest.update(os.fsencode(f"{path.name} {size}"))
        with path.open("rb") as file:
            if size <= _MAX_WHOLE:
                digest.update(file.read())
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
