"""States of a run by layer in a file, from which the run resumes.

    {"run": …, "layers": …, "shape": [chunks, n_ctx, state width]} and a line feed
    float32[chunks, n_ctx, state width]   hidden states
    uint8[chunks, bytes]                  keys and values that later layers read (`shared_keys`); none in most models
    uint8[16]                             BLAKE2b of all bytes before

`run` is a hash of what the run depends on, `layers` how many layers have made the states.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError
from quantkit.evaluate.layers.layer_by_layer import LayerStates
from quantkit.formats.atomic import writing
from quantkit.formats.owned import open_own
from quantkit.inputs import json_input

_MAX_HEADER = 1 << 12  # bytes
_DIGEST = 16  # bytes


def save_states(path: Path, run: str, layers: int, states: LayerStates) -> None:
    """Write the states; an existing file stays until the new one is complete."""
    digest = _digest()
    with writing(path, own=True) as file:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        write(json.dumps({"run": run, "layers": layers, "shape": states.hidden.shape}).encode() + b"\n")
        for of_chunk in states.hidden:
            write(np.ascontiguousarray(of_chunk, "<f4").data)
        for row in states.shared:
            write(row.data)
        file.write(digest.digest())


def saved_layers(path: Path, run: str, states: LayerStates) -> int:
    """The number of layers that have made the saved states; 0 if there is no file, or one of another run.

    `states` have the shapes of the run.
    """
    hidden, shared = states
    try:
        with os.fdopen(open_own(path), "rb") as file:
            header = file.readline(_MAX_HEADER)
            about = json_input.parse(header, str(path))
            size = len(header) + hidden.nbytes + shared.nbytes + _DIGEST
            if (about["run"], about["shape"]) != (run, list(hidden.shape)) or os.fstat(file.fileno()).st_size != size:
                return 0
            return int(about["layers"])
    except (FileNotFoundError, FormatError, KeyError, TypeError, ValueError):
        return 0


def read_states(path: Path, states: LayerStates) -> bool:
    """Fill the states with those of a file that `saved_layers` takes. False where its bytes have changed since."""
    digest = _digest()
    with os.fdopen(open_own(path), "rb") as file:
        digest.update(file.readline(_MAX_HEADER))
        for of_chunk in states.hidden:
            digest.update(data := file.read(of_chunk.nbytes))
            of_chunk[:] = np.frombuffer(data, "<f4").reshape(of_chunk.shape)
        for row in states.shared:
            digest.update(data := file.read(row.nbytes))
            row[:] = np.frombuffer(data, np.uint8)
        return file.read(_DIGEST) == digest.digest()


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST)
