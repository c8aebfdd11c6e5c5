"""Where a model's weights are in memory: mapped from the file, read into anonymous memory, or locked.

A mapped file needs no time to open, and the system's page cache keeps what is used. `--no-mmap` reads the tensors
instead: then other programs' files cannot displace them, except into swap. `--mlock` forbids that too, and `-thp` asks
the kernel for huge pages, which a mapped file of an ordinary file system cannot have.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.gguf import Tensor
from quantkit.formats.mapping import release

_HUGE = 2 << 20  # bytes of a huge page on x86-64, and of the smallest ones on ARM
_ALIGNMENT = 64  # bytes; a line of the CPU's cache
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class _Read(Tensor):
    """A tensor of a file whose bytes were read into memory."""

    __slots__ = ()

    def __init__(self, tensor: Tensor, data: np.ndarray):
        super().__init__(tensor.name, tensor.shape, tensor.type, tensor.nbytes, 0, tensor.path)
        self._file, self.scale = data, tensor.scale


@dataclass(frozen=True)
class ReadWeights:
    """What `read` did: bytes of the tensors, and how many of them are in huge pages (None if not asked for)."""

    nbytes: int
    huge_bytes: int | None

    def why_no_huge_pages(self) -> str:
        """The reason why none of the weights is in a huge page."""
        if (setting := _huge_pages_setting()) in ("never", "unknown"):
            return f"the kernel has no transparent huge pages ({_THP} is {setting})"
        if self.nbytes < _HUGE:
            return f"the weights have {self.nbytes} bytes, a huge page {_HUGE}"
        return f"the kernel had no huge page free for {self.nbytes} bytes"


def read(
    tensors: Mapping[str, Tensor], wanted: Callable[[Tensor], bool], huge_pages: bool = False
) -> tuple[dict[str, Tensor], ReadWeights]:
    """Read the `wanted` tensors into memory; the others stay as they are. Returns all, and what was read.

    With `huge_pages` the memory asks the kernel for huge pages. FormatError if a file ends before a tensor does.
    """
    chosen = sorted(filter(wanted, tensors.values()), key=lambda tensor: (str(tensor.path), tensor.offset))
    memory = _memory(sum(_aligned(tensor.nbytes) for tensor in chosen), huge_pages)
    result, start = dict(tensors), 0
    for path, held in itertools.groupby(chosen, key=lambda tensor: tensor.path):
        with open(path, "rb", buffering=0) as file:
            for tensor in held:
                data = memory[start : start + tensor.nbytes]
                file.seek(tensor.offset)
                _fill(file.readinto, data, tensor)
                data.flags.writeable = False
                release(tensor.stored)
                result[tensor.name] = _Read(tensor, data)
                start += _aligned(tensor.nbytes)
    nbytes = sum(tensor.nbytes for tensor in chosen)
    return result, ReadWeights(nbytes, min(nbytes, _huge_bytes(memory)) if huge_pages else None)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _fill(readinto: Callable[[memoryview], int | None], data: np.ndarray, tensor: Tensor) -> None:
    """Fill an array from a file."""
    view, done = data.data, 0
    while done < len(view):
        got = readinto(view[done : done + (1 << 30)])
        if not got:
            raise FormatError(
                f"{tensor.path}: tensor {tensor.name} has {tensor.nbytes} bytes, the file ends after {done} of them: "
                "another program changed it; restore it and run the command again"
            )
        done += got


def _memory(nbytes: int, huge_pages: bool) -> np.ndarray:
    """uint8[nbytes], not initialized; with `huge_pages` it begins at one, and the kernel is asked for them."""
    if not huge_pages:
        return np.empty(nbytes, np.uint8)
    whole = np.empty(nbytes + _HUGE, np.uint8)
    start = -whole.ctypes.data % _HUGE
    data = whole[start : start + nbytes]
    if _MADV_HUGEPAGE is not None:
        _libc().madvise(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(nbytes // _HUGE * _HUGE), _MADV_HUGEPAGE)
    return data


def _huge_bytes(data: np.ndarray) -> int:
    """Bytes in huge pages of the mappings that hold an array; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    first, last, found, inside = data.ctypes.data, data.ctypes.data + data.nbytes, 0, False
    for line in lines:
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) < last and int(match[2], 16) > first
        elif inside and line.startswith("AnonHugePages:"):
            found += 1024 * int(line.split()[1])
    return found


def _huge_pages_setting() -> str:
    """The kernel's setting for transparent huge pages: "always", "madvise" or "never"; "unknown" if it has none."""
    try:
        text = _THP.read_text(encoding="ascii")
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


# ---------------------------------------------------------------------------------------------------------------- mlock


@dataclass(frozen=True)
class LockedWeights:
    """What `lock` did: bytes to lock, bytes locked, the process's limit (None: unlimited), and the error's text."""

    nbytes: int
    locked: int
    limit: int | None
    error: str

    @property
    def complete(self) -> bool:
        """Whether all weights are locked."""
        return not self.error


def lock(tensors: Iterable[Tensor]) -> LockedWeights:
    """Lock the tensors' pages in memory until the process ends. It stops at the first that the system refuses."""
    held = list(tensors)
    locked, error = 0, ""
    for tensor in held:
        if error := _mlock(tensor.stored):
            break
        locked += tensor.nbytes
    return LockedWeights(sum(tensor.nbytes for tensor in held), locked, _lock_limit(), error)


def _lock_limit() -> int | None:
    """Bytes that this process may lock; None without a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _mlock(data: np.ndarray) -> str:
    """Lock the pages that hold an array; the system's reason if it refuses, empty if it does not."""
    if os.name == "nt":
        return "Windows has no mlock"
    start = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = data.ctypes.data + data.nbytes - start
    if _libc().mlock(ctypes.c_void_p(start), ctypes.c_size_t(nbytes)):
        return os.strerror(ctypes.get_errno())
    return ""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
