"""quantkit: quantize, evaluate and run GGUF models.

    quantkit.open("model.gguf")        a file: metadata, lazy tensors, shards joined
    quantkit.load("model.gguf")        a model that runs

    quantkit.convert, export, plan, quantize, repack_file, unpack_file, verify
                                       the commands of the same names: paths and options in, a result out
    quantkit.quantize_calibrated       quantize, with importance measured on texts while the file is written
    quantkit.imatrix, perplexity, divergence, compare
                                       a model, a text and options in, a result with its conditions out

    quantkit.types.get("iq4_k")        a tensor type: quantize, dequantize, sizes
    quantkit.repack.repack, unpack     row interleaving of arrays, and its inverse

Importing quantkit imports neither numba nor torch; each name above loads its part when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quantkit import errors, repack, types
    from quantkit.evaluate.compare import CompareOptions, compare
    from quantkit.evaluate.divergence import DivergenceOptions, divergence
    from quantkit.evaluate.imatrix.one_pass import CalibrationOptions, quantize_calibrated
    from quantkit.evaluate.imatrix.run import ImatrixOptions, imatrix
    from quantkit.evaluate.perplexity import PerplexityOptions, perplexity
    from quantkit.formats.gguf import open
    from quantkit.formats.pipeline import Progress
    from quantkit.pipelines.api import convert, export, plan, quantize, repack_file, unpack_file, verify
    from quantkit.pipelines.options import (
        ConvertOptions,
        ExportOptions,
        PlanOptions,
        QuantizeOptions,
        RepackOptions,
        VerifyOptions,
    )
    from quantkit.repack import unpack
    from quantkit.runtime.loading import load

__all__ = [
    "CalibrationOptions",
    "CompareOptions",
    "ConvertOptions",
    "DivergenceOptions",
    "ExportOptions",
    "ImatrixOptions",
    "PerplexityOptions",
    "PlanOptions",
    "Progress",
    "QuantizeOptions",
    "RepackOptions",
    "VerifyOptions",
    "compare",
    "convert",
    "divergence",
    "errors",
    "export",
    "imatrix",
    "load",
    "open",
    "perplexity",
    "plan",
    "quantize",
    "quantize_calibrated",
    "repack",
    "repack_file",
    "types",
    "unpack",
    "unpack_file",
    "verify",
]

# The module of each public name; a module that is itself public stands for its own name.
_MODULES = {
    "quantkit.errors": ("errors",),
    "quantkit.evaluate.compare": ("CompareOptions", "compare"),
    "quantkit.evaluate.divergence": ("DivergenceOptions", "divergence"),
    "quantkit.evaluate.imatrix.one_pass": ("CalibrationOptions", "quantize_calibrated"),
    "quantkit.evaluate.imatrix.run": ("ImatrixOptions", "imatrix"),
    "quantkit.evaluate.perplexity": ("PerplexityOptions", "perplexity"),
    "quantkit.formats.gguf": ("open",),
    "quantkit.formats.pipeline": ("Progress",),
    "quantkit.pipelines.api": ("convert", "export", "plan", "quantize", "repack_file", "unpack_file", "verify"),
    "quantkit.pipelines.options": ("ConvertOptions", "ExportOptions", "PlanOptions", "QuantizeOptions",
                                   "RepackOptions", "VerifyOptions"),
    "quantkit.repack": ("repack", "unpack"),
    "quantkit.runtime.loading": ("load",),
    "quantkit.types": ("types",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'quantkit' has no attribute '{name}'")
    module = importlib.import_module(_MODULE_OF[name])
    return module if module.__name__ == f"quantkit.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
