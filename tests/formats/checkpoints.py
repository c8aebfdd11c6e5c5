"""Small checkpoints of given tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quantkit.formats.safetensors import Checkpoint, CheckpointSpec, CheckpointWriter, open_checkpoint

Stored = dict[str, tuple[str, np.ndarray]]  # by name: dtype, values


def written(path: Path, **tensors: tuple[str, np.ndarray]) -> Checkpoint:
    """Names are spelled with __ for dots."""
    path.mkdir()
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    with CheckpointWriter(path, [CheckpointSpec(name, x.shape, dtype) for name, (dtype, x) in named.items()]) as writer:
        for name, (_, x) in named.items():
            writer.write(name, np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    return open_checkpoint(path)


def written_in_shards(path: Path, tensors: Stored, shards: int) -> Checkpoint:
    """Tensors under their names, dealt to several files with an index."""
    specs = [CheckpointSpec(name, x.shape, dtype) for name, (dtype, x) in tensors.items()]
    each = -(-sum(x.nbytes for _, x in tensors.values()) // shards)
    path.mkdir()
    with CheckpointWriter(path, specs, max_shard_bytes=each) as writer:
        for name, (_, x) in tensors.items():
            writer.write(name, np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    return open_checkpoint(path)
