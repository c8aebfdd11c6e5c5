"""quantkit: quantize, evaluate and run GGUF models.

    quantkit.types.get("iq4_k")        a tensor type: quantize, dequantize, sizes
    quantkit.repack                    row interleaving and its inverse
    quantkit.open("model.gguf")        a file: metadata, lazy tensors, shards joined
    quantkit.load("model.gguf")        a model that runs

Importing quantkit imports neither numba nor torch; each name above loads its part when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["load", "open", "repack", "types"]

if TYPE_CHECKING:
    from quantkit import repack, types
    from quantkit.formats.gguf import open
    from quantkit.runtime.loading import load

_FUNCTIONS = {"open": "quantkit.formats.gguf", "load": "quantkit.runtime.loading"}


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name in __all__:
        return importlib.import_module(f"quantkit.{name}")
    raise AttributeError(f"module 'quantkit' has no attribute '{name}'")
