"""How many pieces a task gets: seconds of a worker, bytes of its result, what is left, the scheduler's time."""

from __future__ import annotations

import pytest

from quantkit.cluster.task_sizes import RETURNED_BYTES, SCHEDULER_SECONDS, TASK_SECONDS, TaskSizes

MUCH = 1 << 40  # bytes that are left
PIECE = 160_000  # bytes


@pytest.mark.parametrize("threads", [1, 16])
def test_a_task_takes_a_worker_some_seconds(threads: int) -> None:
    sizes = TaskSizes(MUCH, MUCH, workers=4, threads=4 * threads)
    assert sizes.pieces("iq2_k", PIECE) == 4 * threads  # not yet measured
    sizes.count("iq2_k", 8, 2.0)
    assert sizes.pieces("iq2_k", PIECE) == TASK_SECONDS / 0.25 * threads
    assert sizes.pieces("q4_0", PIECE) == 4 * threads


def test_results_are_bounded() -> None:
    sizes = TaskSizes(MUCH, workers=4, threads=4 * 64, seconds={"q8_0": 1e-6})
    assert RETURNED_BYTES - PIECE < sizes.pieces("q8_0", PIECE) * PIECE <= RETURNED_BYTES
    assert sizes.pieces("q8_0", 2 * RETURNED_BYTES) == 1
    assert sizes.worker_bytes == 3 * RETURNED_BYTES


def test_tasks_get_smaller_towards_the_end() -> None:
    """All of it is handed out, in few tasks."""
    sizes, found, total = TaskSizes(100_000 * PIECE, MUCH, 4, 64, seconds={"x": 0.01}), list[int](), 100_000
    while total:
        found.append(min(total, sizes.pieces("x", PIECE)))
        sizes.hand_out(found[-1] * PIECE)
        total -= found[-1]
    assert found == [*sorted(found[:-1], reverse=True), found[-1]]
    assert found[0] == 100_000 // 16
    assert sizes.left == 0
    assert found[-2] * 0.01 / 16 < 0.2  # seconds of a worker that others may wait for
    assert len(found) < 200


def test_the_scheduler_is_not_the_limit() -> None:
    """With 512 workers, tasks at the end take long enough that it keeps up."""
    sizes = TaskSizes(PIECE, MUCH, workers=512, threads=512 * 16, seconds={"x": 0.01})
    seconds = sizes.pieces("x", PIECE) * 0.01 / 16
    assert seconds == pytest.approx(2 * SCHEDULER_SECONDS * 512, rel=0.01)
