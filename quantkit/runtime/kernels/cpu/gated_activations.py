"""Activations of gated feed-forwards, act(gate) * up: for each a C function for elements first .. last - 1,

    void(gate, up, first, last, out, numbers)     out[i] = act(gate[i]) * up[i], float32; out may be gate

`first` and `last` are multiples of 16. All arguments are int64; addresses are integers. `numbers` is the address of
those of an xIELU, which differ between layers and use the same code; others do not read it. Operations take the address
of the function of a block's activation. The formulas are those of kernels/reference.py; NaN stays NaN.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.simd import F32, IrBuilder, Value, simd_intrinsic, vector

SIGNATURE = "void(int64, int64, int64, int64, int64, int64)"
_FLOATS16 = vector(16, F32)
_SQRT_2_OVER_PI, _CUBIC = 0.7978845608, 0.044715
_ALPHA, _LIMIT = 1.702, 7.0  # of gpt-oss


def _times_sigmoid(ir: IrBuilder, x: Value, z: Value) -> Value:
    """x / (1 + e^z)."""
    return x / (ir.exp(z) + 1.0)


def _swiglu(ir: IrBuilder, gate: Value, up: Value) -> Value:
    sigmoid = ir.constant(_FLOATS16, 1.0) / (ir.exp(gate * -1.0) + 1.0)
    return gate * sigmoid * up


def _geglu(ir: IrBuilder, gate: Value, up: Value) -> Value:
    u = (gate + gate * _CUBIC * gate * gate) * _SQRT_2_OVER_PI
    return _times_sigmoid(ir, gate, u * -2.0) * up


def _reglu(ir: IrBuilder, gate: Value, up: Value) -> Value:
    return ir.max(gate, ir.zero(_FLOATS16)) * up


def _relu2(ir: IrBuilder, gate: Value, up: Value) -> Value:
    positive = ir.max(gate, ir.zero(_FLOATS16))
    return positive * positive * up


def _swiglu_oai(ir: IrBuilder, gate: Value, up: Value) -> Value:
    limit = ir.constant(_FLOATS16, _LIMIT)
    g, u = ir.min(gate, limit), ir.max(ir.min(up, limit), limit * -1.0)
    return _times_sigmoid(ir, g, g * -_ALPHA) * (u + 1.0)


def _sigmoid(ir: IrBuilder, gate: Value, up: Value) -> Value:
    return _times_sigmoid(ir, up, gate * -1.0)


ACTIVATIONS: dict[str, Callable[[IrBuilder, Value, Value], Value]] = {
    "swiglu": _swiglu,
    "geglu": _geglu,
    "reglu": _reglu,
    "relu2": _relu2,
    "swiglu_oai": _swiglu_oai,
    "sigmoid": _sigmoid,
}


def _limited(ir: IrBuilder, gate: Value, up: Value, limit: float) -> Value:
    """SwiGLU with silu(gate) at most `limit`, up within -limit … limit."""
    largest = ir.constant(_FLOATS16, limit)
    silu = _swiglu(ir, gate, ir.constant(_FLOATS16, 1.0))
    return ir.min(silu, largest) * ir.max(ir.min(up, largest), largest * -1.0)


def _clamped(ir: IrBuilder, gate: Value, up: Value, limit: float) -> Value:
    """SwiGLU with gate at most `limit`, up within -limit … limit."""
    largest = ir.constant(_FLOATS16, limit)
    return _swiglu(ir, ir.min(gate, largest), ir.max(ir.min(up, largest), largest * -1.0))


LIMITED: dict[str, Callable[[IrBuilder, Value, Value, float], Value]] = {"swiglu": _limited, "swiglu_clamped": _clamped}
_NAMES = [*ACTIVATIONS, "swiglu_clamped"]  # intrinsics take a number as a constant, not a name


@simd_intrinsic("void")
def activate_range(
    ir: IrBuilder, number: int, limit: int, gate: Value, up: Value, first: Value, last: Value, out: Value
) -> None:
    """out = act(gate) * up for elements first .. last - 1, multiples of 16.

    The activation is _NAMES[number]; `limit` has the bits of its limit as float32, or is 0.
    """
    name = _NAMES[number]
    most = struct.unpack("<f", struct.pack("<i", limit))[0]

    def activation(ir: IrBuilder, gate: Value, up: Value) -> Value:
        return LIMITED[name](ir, gate, up, most) if limit else ACTIVATIONS[name](ir, gate, up)

    with ir.loop(first, last, 16) as i:
        result = activation(ir, ir.load(_FLOATS16, gate + i * 4), ir.load(_FLOATS16, up + i * 4))
        ir.store(result, out + i * 4)


@simd_intrinsic("void")
def xielu_range(ir: IrBuilder, x: Value, first: Value, last: Value, out: Value, numbers: Value) -> None:
    """out = xIELU(x) for elements first .. last - 1, multiples of 16; `numbers` is the address of float32[4]."""
    p, n, b, e = (ir.splat(ir.load(F32, numbers + i * 4), 16) for i in range(4))
    with ir.loop(first, last, 16) as i:
        z = ir.load(_FLOATS16, x + i * 4)
        above, below = p * z * z, (ir.expm1(ir.min(z, e)) - z) * n
        ir.store(ir.choose(ir.less(ir.zero(_FLOATS16), z), above, below) + b * z, out + i * 4)


@callback(SIGNATURE)
def xielu(gate, up, first, last, out, numbers):
    """out = xIELU(gate), ungated; numbers float32[4] are p, n, b, e of `reference.xielu`."""
    xielu_range(gate, first, last, out, numbers)


@functools.cache
def activation(name: str, limit: float | None = None) -> Callback:
    """The compiled function of an activation with a name, by what blocks.FeedForward and blocks.Experts say of it."""
    assert name in ACTIVATIONS if limit is None else name in LIMITED and limit > 0, f"{name} with a limit of {limit}"
    number = _NAMES.index(name)
    bits = 0 if limit is None else struct.unpack("<i", struct.pack("<f", limit))[0]

    @callback(SIGNATURE)
    def run(gate, up, first, last, out, numbers):
        activate_range(number, bits, gate, up, first, last, out)

    return run
