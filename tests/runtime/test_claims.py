"""Rows that threads claim: each once, whoever comes late, in every run of a list."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from quantkit.codegen.callbacks import callback
from quantkit.codegen.simd import atomic_add, atomic_load, integers, pause
from quantkit.errors import KernelError
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.kernels.cpu.operation import OPERATION, claim_rows, load_record

POLLS = 200_000_000  # of a thread that waits for the others: seconds


class MarkParameters(NamedTuple):
    """Parameters of `mark`."""

    claims: int
    rows: int
    multiple: int
    times: int  # int64[rows]: how often a row was claimed
    owners: int  # int64[rows]: by whom, the last time
    done: int  # address of an int64: rows claimed so far
    late: int  # a thread that claims nothing before the others have claimed everything; -1: none
    fails: int  # 1: thread 0 raises an exception after its first piece


@callback(OPERATION)
def mark(parameters, thread, threads):
    """Count claims in `times`."""
    p = load_record(MarkParameters, parameters)
    times, owners = integers(p.times, p.rows), integers(p.owners, p.rows)
    if thread == p.late:
        polls = 0
        while atomic_load(p.done) < p.rows and polls < POLLS:
            pause()
            polls += 1
    while True:
        first, last = claim_rows(p.claims, p.rows, p.multiple, thread, threads)
        if first == last:
            return
        for row in range(first, last):
            times[row] += 1
            owners[row] = thread
        atomic_add(last - first, p.done)
        if p.fails != 0 and thread == 0:
            raise ValueError("fails")


class Marked:
    """A list with one `mark`."""

    def __init__(self, threads: int, rows: int, multiple: int, late: int = -1, fails: bool = False):
        self.ops = OpList(threads)
        self.times, self.owners, self.done = (self.ops.keep(np.zeros(n, np.int64)) for n in (rows, rows, 1))
        addresses = (array.ctypes.data for array in (self.times, self.owners, self.done))
        self.stored = self.ops.add(
            mark, MarkParameters(self.ops.claims(), rows, multiple, *addresses, late, int(fails))
        )


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("rows", "multiple"), [(1, 32), (31, 4), (32, 32), (1000, 4), (1000, 32), (4096, 128), (0, 32)]
)
def test_every_row_once(threads: int, rows: int, multiple: int) -> None:
    marked = Marked(threads, rows, multiple)
    for run in range(1, 4):
        marked.ops.run()
        np.testing.assert_array_equal(marked.times, run)
    assert set(marked.owners) <= set(range(threads))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_others_take_the_rows_of_a_late_thread(late: int) -> None:
    marked = Marked(3, 1000, 4, late)
    marked.ops.run()
    np.testing.assert_array_equal(marked.times, 1)
    assert late not in marked.owners


def test_pieces_are_multiples() -> None:
    marked = Marked(3, 1000, 32)
    marked.ops.run()
    changes = np.flatnonzero(np.diff(marked.owners)) + 1
    assert np.all(changes % 32 == 0)


def test_a_run_after_a_failure_claims_all_rows() -> None:
    marked = Marked(2, 1000, 4, fails=True)
    with pytest.raises(KernelError, match="mark"):
        marked.ops.run()
    marked.times[:], marked.done[:] = 0, 0
    marked.stored.set(fails=0)
    marked.ops.run()
    np.testing.assert_array_equal(marked.times, 1)


def test_operations_have_claims_of_their_own() -> None:
    """More than are allocated together, on cache lines of their own."""
    ops = OpList(3)
    addresses = np.array([ops.claims() for _ in range(1000)])
    assert np.all(addresses % 64 == 0)
    assert np.diff(np.sort(addresses)).min() >= 3 * 64
