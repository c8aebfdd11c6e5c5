"""Which types have which CUDA kernels. Imports no numba, so that plans and listings can ask.

All are compiled in the tests and compared with the plain decoders in numba's simulator; docs/results.md says what has
been measured on a GPU.
"""

from __future__ import annotations

from quantkit.types import QuantType, layout

FLOATS = ("f32", "f16", "bf16", "bf16_r16")  # types whose elements are numbers already
FLOAT_IDS = {layout(name).ggml_type: name for name in FLOATS}


def product(kind: QuantType) -> str:
    """How products with vectors run: "integer" from packed weights, "float" from numbers, "" where there is none."""
    from quantkit.runtime.kernels.cuda.codecs.registry import CODECS

    if kind.ggml_type in CODECS:
        return "integer"
    return "float" if kind.ggml_type in FLOAT_IDS else ""
