"""Checks of what callers pass to public functions, made before an address is taken or memory is allocated.

Native code trusts its addresses and counts, so a wrong shape, dtype or range must be an error here. Each function
returns the value in the one form that the code behind it expects, or raises a DataError that says what was passed.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from quantkit.errors import DataError

_MOST_THREADS = 4096  # more is a mistake: each of them has a stack


def integer(value: object, what: str, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int from `least` to `most`; DataError for anything else, a bool or a float included."""
    if type(value) is not int:
        if isinstance(value, (bool, np.bool_)):
            raise DataError(f"{what} is {value!r}; it must be an integer")
        try:
            value = operator.index(value)  # type: ignore[arg-type]  # a TypeError where it has no index
        except TypeError:
            raise DataError(f"{what} is {value!r:.80}; it must be an integer") from None
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = [f"at least {least}"] if least is not None else []
        bounds += [f"at most {most}"] if most is not None else []
        raise DataError(f"{what} is {value}; it must be {' and '.join(bounds)}")
    return int(value)


def threads(value: object) -> int | None:
    """A number of threads from 1 to 4096, or None: the library chooses."""
    return None if value is None else integer(value, "threads", 1, _MOST_THREADS)


def array(values: object, what: str) -> np.ndarray:
    """`values` as an array of numbers; DataError for nested lists of unequal lengths and for other objects."""
    if hasattr(values, "detach"):  # a torch tensor, which numpy refuses with a gradient
        values = values.detach().cpu()
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{what}: no array can be made of this {type(values).__name__}: {error}") from None
    if found.dtype.kind in "mM" or found.dtype.type is np.void or (found.dtype == object and not _are_numbers(found)):
        raise DataError(f"{what}: expected numbers, got {found.dtype} of shape {found.shape}")
    return found


def _are_numbers(values: np.ndarray) -> bool:
    """Whether an array of objects holds Python numbers only. numpy makes one of a list with an int beyond 64 bits."""
    return all(isinstance(value, (int, float, np.number)) for value in values.reshape(-1))


def integers(values: object, what: str, below: int) -> np.ndarray:
    """`values` as int64, each from 0 to `below` - 1. Floats and bools are refused, not rounded."""
    found = array(values, what)
    if not found.size:
        return np.zeros(found.shape, np.int64)
    if found.dtype.kind == "O" and all(isinstance(value, int) for value in found.reshape(-1)):
        raise DataError(f"{what}: {next(v for v in found.reshape(-1) if not 0 <= v < below)} is not below {below}")
    if found.dtype.kind not in "iu":
        raise DataError(f"{what}: expected integers, got {found.dtype} of shape {found.shape}")
    least, most = int(found.min()), int(found.max())
    if least < 0 or most >= below:
        raise DataError(f"{what}: {least if least < 0 else most} is not from 0 to {below - 1}")
    return found.astype(np.int64, copy=False)


def real_numbers(values: object, what: str) -> np.ndarray:
    """`values` as contiguous float32 in native byte order. Values beyond its range become Inf."""
    if hasattr(values, "detach"):  # numpy has no bfloat16
        values = values.detach().cpu().float()
    found = array(values, what)
    if found.dtype.kind in "cSU":
        raise DataError(f"{what}: expected real numbers, got {found.dtype}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(found, np.float32)


def encoded(values: object, what: str) -> np.ndarray:
    """`values` as contiguous uint8. Other integer dtypes are converted if all values are from 0 to 255."""
    found = array(values, what)
    if found.dtype != np.uint8 and not (
        found.dtype.kind in "ui" and (not found.size or 0 <= found.min() <= found.max() < 256)
    ):
        raise DataError(f"{what}: expected bytes, uint8, got {found.dtype}; encoded rows are never numbers")
    return np.ascontiguousarray(found, np.uint8)


def output(out: Any, shape: tuple[int, ...], dtype: Any, source: np.ndarray, what: str) -> np.ndarray:
    """`out` if it is a writable contiguous array of this shape and dtype that has no byte in common with `source`."""
    wanted = f"{what}: expected out={np.dtype(dtype).name}{list(shape)}, contiguous and writable"
    if not isinstance(out, np.ndarray):
        raise DataError(f"{wanted}, got {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype or not (out.flags.c_contiguous and out.flags.writeable):
        flags = ", read-only" if not out.flags.writeable else "" if out.flags.c_contiguous else ", not contiguous"
        raise DataError(f"{wanted}, got {out.dtype}{list(out.shape)}{flags}")
    if np.may_share_memory(out, source):
        raise DataError(f"{wanted}, got memory that overlaps the input")
    return out
