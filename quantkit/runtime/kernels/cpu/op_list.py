"""Build a list of operations, with the memory that they use, and run it on a thread team.

A plan appends operations once and runs the list for every token or batch. The list owns all memory that operations
point to: parameters, constants, working memory, and arrays given to `keep`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from quantkit.codegen.callbacks import Callback
from quantkit.placement.kernel_sizes import CACHE_LINE, whole_lines
from quantkit.runtime.kernels.cpu.operation import StoredRecord
from quantkit.runtime.kernels.cpu.thread_team import ListedOperation, team

_Array = TypeVar("_Array", bound="np.ndarray[Any, Any]")
_CLAIMS_BYTES = 1 << 15  # allocated together
Buffers = dict[tuple[str, int], "np.ndarray[Any, Any]"]  # working memory by name and size in bytes


class OpList:
    """A list of operations for `threads` threads.

    A field of a record named `private_stride` is the distance between the threads' copies of a buffer. It must not be
    0: all threads would write the same bytes.

    `buffers` is working memory that several lists share: they run one after another, and none expects what it left.
    """

    def __init__(self, threads: int, buffers: Buffers | None = None):
        self.threads = threads
        self._ops: list[ListedOperation] = []
        self._alive: list[StoredRecord | np.ndarray[Any, Any]] = []
        self._buffers: Buffers = {} if buffers is None else buffers
        self._array: np.ndarray[Any, Any] | None = None
        self._claims: list[np.ndarray[Any, Any]] = []  # what `claims` gives parts of
        self._claims_left = 0  # bytes of the last one

    def add(self, operation: Callback, parameters: NamedTuple, barrier: bool = False) -> StoredRecord:
        """Append an operation; with `barrier`, all threads wait for each other after it.

        Returns the stored parameters: their fields may be changed between runs.
        """
        stored = self.record(parameters)
        self._ops.append(ListedOperation(operation.address, stored.address, int(barrier)))
        self._array = None
        return stored

    def add_barrier(self) -> None:
        """Make all threads wait for each other after the last operation."""
        if self._ops:
            self._ops[-1] = self._ops[-1]._replace(barrier=1)
            self._array = None

    def run(self, prepare: Callable[[], None] | None = None) -> None:
        """Execute the list; see `ThreadTeam.run`."""
        array = self._array
        if array is None:
            array = self._array = np.array(self._ops, np.int64).reshape(-1, 3)

        def begin() -> None:
            for claims in self._claims:
                claims.fill(0)
            if prepare is not None:
                prepare()

        team(self.threads).run(array, begin)

    def record(self, fields: NamedTuple) -> StoredRecord:
        """Store a record that lives as long as the list."""
        stride = getattr(fields, "private_stride", None)
        assert self.threads == 1 or stride is None or stride > 0, (
            f"{self.threads} threads would write one buffer: private_stride is {stride}"
        )
        stored = StoredRecord(fields)
        self._alive.append(stored)
        return stored

    def keep(self, array: _Array) -> _Array:
        """Hold a reference to an array, so that its address stays valid as long as the list. Returns the array."""
        self._alive.append(array)
        return array

    def constant(self, value: float) -> int:
        """Address of a float32 constant."""
        return self.keep(np.array([value], np.float32)).ctypes.data

    def buffer(self, name: str, nbytes: int) -> int:
        """Address of working memory, zero at first. Operations that ask for the same name and size share it."""
        key = (name, nbytes)
        if key not in self._buffers:
            self._buffers[key] = np.zeros(nbytes // 8 + 1, np.int64)
        return self._buffers[key].ctypes.data

    def private_buffer(self, name: str, nbytes: int) -> tuple[int, int]:
        """Address and stride of working memory with one part per thread, each on cache lines of its own."""
        stride = whole_lines(nbytes)
        return self.buffer(name, self.threads * stride), stride

    def claims(self) -> int:
        """Address of what an operation's threads have claimed (`claim_rows`), all 0 whenever the list begins."""
        nbytes = self.threads * CACHE_LINE
        if self._claims_left < nbytes:
            self._claims_left = max(_CLAIMS_BYTES, nbytes)
            self._claims.append(np.zeros((self._claims_left + CACHE_LINE) // 8, np.int64))
        self._claims_left -= nbytes
        return whole_lines(self._claims[-1].ctypes.data) + self._claims_left

    @property
    def nbytes(self) -> int:
        """Bytes of all working memory, shared memory too."""
        return sum(array.nbytes for array in (*self._buffers.values(), *self._claims))
