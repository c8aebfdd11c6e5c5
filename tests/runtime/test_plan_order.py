"""Plans of every architecture with threads in the worst orders: a missing barrier changes the logits, on every run.

Between two barriers, one thread runs all its operations before the next one begins. Of rows that threads claim, one
thread takes all, and the others find none, as threads do that come late. So whatever a thread reads before a barrier,
and another one computes or overwrites, is wrong in one of the orders.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from quantkit.codegen.callbacks import callback
from quantkit.codegen.simd import integers
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs.files import written
from tests.runtime.test_claims import Marked
from tests.runtime.test_features import NAMES
from tests.runtime.test_step import TOKENS, by_steps

THREADS = 3
ORDERS = {  # threads in their order, and the one that takes all rows that are claimed
    "claims last": ((0, 1, 2), 2),
    "claims first": ((0, 1, 2), 0),
    "backwards, claims last": ((2, 1, 0), 0),
    "backwards, claims first": ((2, 1, 0), 2),
}
_ALL = 1 << 40  # pieces claimed: more than there are

_function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)


def run_in_order(ops: OpList, order: Sequence[int], claiming: int, prepare: Callable[[], None] | None = None) -> None:
    """`OpList.run` on this thread."""
    assert ops.threads == len(order)
    if prepare is not None:
        prepare()
    phases, last = [], 0
    for i, op in enumerate(ops._ops):
        if op.barrier or i == len(ops._ops) - 1:
            phases.append(ops._ops[last : i + 1])
            last = i + 1
    for phase, thread in itertools.product(phases, order):
        for claims in ops._claims:
            claims.fill(0 if thread == claiming else _ALL)
        for op in phase:
            _function(op.function)(op.parameters, thread, ops.threads)


def results(model: Model) -> list[np.ndarray]:
    """Logits of a prompt, and of tokens one by one."""
    return [model.logits(TOKENS), by_steps(model, TOKENS[:5])]


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "m.gguf", name)
    model = load(path, numerics="fast", threads=THREADS)
    assert not model.fallback_reason
    expected = results(model)
    for order, (threads, claiming) in ORDERS.items():
        with monkeypatch.context() as patch:
            patch.setattr(OpList, "run", functools.partialmethod(run_in_order, threads, claiming))
            for found, wanted in zip(results(model), expected):
                np.testing.assert_array_equal(found, wanted, err_msg=order)


class NoteParameters(NamedTuple):
    """Parameters of `note`."""

    times: int  # int64[rows]: how often a row was claimed
    rows: int
    claimed: int  # int64[threads]: whether all were


@callback(OPERATION)
def note(parameters, thread, threads):
    """Note whether all rows have been claimed."""
    p = load_record(NoteParameters, parameters)
    integers(p.claimed, threads)[thread] = integers(p.times, p.rows).min()


@pytest.mark.parametrize("barrier", [False, True])
def test_a_missing_barrier_is_found(barrier: bool) -> None:
    """In some order a thread reads rows that are not claimed yet, unless there is a barrier before."""
    complete = []
    for threads, claiming in ORDERS.values():
        marked, claimed = Marked(THREADS, 96, 4), np.zeros(THREADS, np.int64)
        if barrier:
            marked.ops.add_barrier()
        marked.ops.add(note, NoteParameters(marked.times.ctypes.data, 96, claimed.ctypes.data))
        run_in_order(marked.ops, threads, claiming)
        np.testing.assert_array_equal(marked.times, 1)
        complete.append(bool(claimed.all()))
    assert all(complete) == barrier
