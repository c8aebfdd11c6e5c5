"""Checkpoints in safetensors: `open_checkpoint` reads a directory, `CheckpointWriter` streams one.

Takes and gives numpy arrays; weights stored as codes and scales are read as the matrices they stand for
(`quantized_checkpoint`). Imports `errors`, `types` and the other modules of `formats`.
"""

from __future__ import annotations

from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor, open_checkpoint
from quantkit.formats.safetensors.writer import CheckpointSpec, CheckpointWriter

__all__ = ["Checkpoint", "CheckpointSpec", "CheckpointTensor", "CheckpointWriter", "open_checkpoint"]
