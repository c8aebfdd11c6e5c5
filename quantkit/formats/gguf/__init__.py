"""GGUF files: `open` reads metadata and lazy tensors, `Writer` streams a file.

The package takes and returns numpy arrays and `quantkit.types`, and knows nothing of models. It imports `errors`,
`inputs`, `types` and the other modules of `formats`.
"""

from __future__ import annotations

from quantkit.formats.gguf.metadata import Metadata
from quantkit.formats.gguf.reader import GGUF, Shard, Tensor, open, open_parts, require_model
from quantkit.formats.gguf.writer import TensorSpec, Writer

__all__ = ["GGUF", "Metadata", "Shard", "Tensor", "TensorSpec", "Writer", "open", "open_parts",
           "require_model"]  # fmt: skip
