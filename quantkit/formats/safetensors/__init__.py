"""Checkpoints in safetensors: `open_checkpoint` reads a directory, `CheckpointWriter` streams one.

The package takes and returns numpy arrays. Weights stored as codes and scales are read as the matrices they encode
(`quantized`). It imports `errors`, `inputs`, `types` and the other modules of `formats`.
"""

from __future__ import annotations

from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor, open_checkpoint
from quantkit.formats.safetensors.writer import CheckpointSpec, CheckpointWriter

__all__ = ["Checkpoint", "CheckpointSpec", "CheckpointTensor", "CheckpointWriter", "open_checkpoint"]
