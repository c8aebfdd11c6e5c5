"""Checks of what callers pass to public functions, made before an address is taken or memory is allocated.

Native code trusts its addresses and counts, so a wrong shape, dtype or range must be an error here. Each function
returns the value in the form that native code expects, or raises a DataError with the value that was passed.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from quantkit.errors import DataError

_MAX_THREADS = 4096  # more is a mistake: each of them has a stack


def integer(value: object, what: str, minimum: int | None = None, maximum: int | None = None) -> int:
    """`value` as an int from `minimum` to `maximum`; DataError for anything else, including a bool or a float."""
    if type(value) is not int:
        if isinstance(value, (bool, np.bool_)):
            raise DataError(f"{what} is {value!r}; it must be an integer")
        try:
            value = operator.index(value)  # type: ignore[arg-type]  # TypeError for objects that are not integers
        except TypeError:
            raise DataError(f"{what} is {value!r:.80}; it must be an integer") from None
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        bounds = [f"at least {minimum}"] if minimum is not None else []
        bounds += [f"at most {maximum}"] if maximum is not None else []
        raise DataError(f"{what} is {value}; it must be {' and '.join(bounds)}")
    return int(value)


def threads(value: object) -> int | None:
    """A number of threads from 1 to 4096, or None: the library chooses."""
    return None if value is None else integer(value, "threads", 1, _MAX_THREADS)


def array(values: object, what: str) -> np.ndarray:
    """`values` as an array of numbers; DataError for nested lists of unequal lengths and for other objects."""
    if hasattr(values, "detach"):  # a torch tensor, which numpy refuses with a gradient
        values = values.detach().cpu()
    try:
        result = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{what}: cannot convert this {type(values).__name__} to an array: {error}") from None
    if (
        result.dtype.kind in "mM"
        or result.dtype.type is np.void
        or (result.dtype == object and not _are_numbers(result))
    ):
        raise DataError(f"{what}: expected numbers, got {result.dtype} of shape {result.shape}")
    return result


def _are_numbers(values: np.ndarray) -> bool:
    """Whether an array of objects holds Python numbers only. numpy makes such an array if an int exceeds 64 bits."""
    return all(isinstance(value, (int, float, np.number)) for value in values.reshape(-1))


def integers(values: object, what: str, below: int) -> np.ndarray:
    """`values` as int64, each from 0 to `below` - 1. Floats and bools are refused, not rounded."""
    numbers = array(values, what)
    if not numbers.size:
        return np.zeros(numbers.shape, np.int64)
    if numbers.dtype.kind == "O" and all(isinstance(value, int) for value in numbers.reshape(-1)):
        raise DataError(f"{what}: {next(v for v in numbers.reshape(-1) if not 0 <= v < below)} is not below {below}")
    if numbers.dtype.kind not in "iu":
        raise DataError(f"{what}: expected integers, got {numbers.dtype} of shape {numbers.shape}")
    smallest, largest = int(numbers.min()), int(numbers.max())
    if smallest < 0 or largest >= below:
        raise DataError(f"{what}: {smallest if smallest < 0 else largest} is not from 0 to {below - 1}")
    return numbers.astype(np.int64, copy=False)


def real_numbers(values: object, what: str) -> np.ndarray:
    """`values` as contiguous float32 in native byte order. Values beyond its range become Inf."""
    if hasattr(values, "detach"):  # numpy has no bfloat16
        values = values.detach().cpu().float()
    numbers = array(values, what)
    if numbers.dtype.kind in "cSU":
        raise DataError(f"{what}: expected real numbers, got {numbers.dtype}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(numbers, np.float32)


def encoded(values: object, what: str) -> np.ndarray:
    """`values` as contiguous uint8. Other integer dtypes are converted if all values are from 0 to 255."""
    data = array(values, what)
    if data.dtype != np.uint8 and not (
        data.dtype.kind in "ui" and (not data.size or 0 <= data.min() <= data.max() < 256)
    ):
        raise DataError(f"{what}: expected bytes, uint8, got {data.dtype}; encoded rows are bytes, not numbers")
    return np.ascontiguousarray(data, np.uint8)


def output(out: Any, shape: tuple[int, ...], dtype: Any, source: np.ndarray, what: str) -> np.ndarray:
    """`out` if it is a writable contiguous array of this shape and dtype that has no memory in common with `source`."""
    wanted = f"{what}: expected out={np.dtype(dtype).name}{list(shape)}, contiguous and writable"
    if not isinstance(out, np.ndarray):
        raise DataError(f"{wanted}, got {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype or not (out.flags.c_contiguous and out.flags.writeable):
        flags = ", read-only" if not out.flags.writeable else "" if out.flags.c_contiguous else ", not contiguous"
        raise DataError(f"{wanted}, got {out.dtype}{list(out.shape)}{flags}")
    if np.may_share_memory(out, source):
        raise DataError(f"{wanted}, got memory that overlaps the input")
    return out
