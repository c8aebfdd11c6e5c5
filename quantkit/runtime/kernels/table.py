"""Which kernel computes with which type on this machine's CPU.

product(type)            C function: weights times one vector (kernels/cpu/matvec.py), or None
"""

from __future__ import annotations

from quantkit.jit import Callback
from quantkit.runtime.kernels.cpu import matvec
from quantkit.types import QuantType


def product(kind: QuantType) -> Callback | None:
    """The matrix-vector function of a type; None for types that only `reference` computes with."""
    return matvec.product(kind.ggml_type)
