"""`TaskSizes`: how many pieces of a job a task gets, so that it takes a worker a few seconds with all of its threads.

seconds        `TASK_SECONDS`: long against what a task costs the scheduler, short against a job. More workers end
               more tasks, so a task never takes so little that the scheduler is busy for over half of the time
bytes          `max_bytes` of results, since they wait in the memory of workers until the coordinator takes them
what is left   tasks get smaller towards the end, so that all workers end together
"""

from __future__ import annotations

from dataclasses import dataclass, field

TASK_SECONDS = 5.0  # of a worker
SCHEDULER_SECONDS = 0.007  # of one core, for scheduler and coordinator, for each task (benchmarks/bench_cluster.py)
AHEAD = 2  # times its threads that a worker's tasks may take: one runs, one waits
RETURNED_BYTES = 1 << 26  # of a result that passes through the coordinator
WRITTEN_BYTES = 1 << 28  # of a result that a worker writes itself
_FIRST_PIECES = 4  # for each thread, while it is not known how long a piece takes
_SHARES = 4  # tasks for each worker that would take all that is left


@dataclass
class TaskSizes:
    """The sizes of tasks; `workers` and `threads` (of all) change while workers come and go.

    left       bytes of results that are in no task yet
    max_bytes  of the result of a task
    seconds    that a piece takes one thread, by its kind
    """

    left: int
    max_bytes: int = RETURNED_BYTES
    workers: int = 1
    threads: int = 1
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def worker_bytes(self) -> int:
        """Bytes of results that a worker has at most: of the tasks that it may have."""
        return (AHEAD + 1) * self.max_bytes

    def pieces(self, kind: str, nbytes: int) -> int:
        """The pieces of the next task, each with a result of `nbytes` bytes."""
        threads, seconds = self.threads / self.workers, self.seconds.get(kind)
        if seconds is None:
            least, most = threads, _FIRST_PIECES * threads
        else:
            pace = threads / max(seconds, 1e-9)  # pieces a second of a worker
            least, most = max(threads, 2 * SCHEDULER_SECONDS * self.workers * pace), TASK_SECONDS * pace
        share = self.left / (_SHARES * self.workers * nbytes)
        return max(1, int(min(max(least, min(most, share)), self.max_bytes / nbytes)))

    def hand_out(self, nbytes: int) -> None:
        """Count the result of a task that is made."""
        self.left = max(0, self.left - nbytes)

    def count(self, kind: str, pieces: int, seconds: float) -> None:
        """Count pieces that took so many seconds of threads."""
        each = seconds / pieces
        self.seconds[kind] = 0.8 * self.seconds.get(kind, each) + 0.2 * each
