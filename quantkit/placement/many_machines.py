"""Predict how long `quantize` takes on a cluster, and what binds: encoding, reading, the network or the scheduler.

    encoding   weights over the speeds of their types' encoders on a core, over all cores
    reading    bytes of the source: each machine over its own link, all of them over the storage that they share
    network    bytes of the output over the coordinator's link, which takes the results of all workers
    scheduler  tasks, as `quantize` sizes them for the workers, over the time that each takes at the scheduler

All of them go on at the same time, so the longest is the time of the job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.cluster.task_sizes import SCHEDULER_SECONDS, TaskSizes
from quantkit.errors import OptionError
from quantkit.formats.provenance import PIECE_ELEMENTS
from quantkit.recipe import Plan, PlannedTensor

PARTS = ("encoding", "reading", "network", "scheduler")
_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Machines:
    """Machines of a cluster. GB are 10^9 bytes.

    workers   number of machines
    cores     of each
    link      GB/s of each machine's network, the coordinator's too
    storage   GB/s of the storage that all share; None: no limit but the links
    """

    workers: int
    cores: int
    link: float
    storage: float | None = None

    @classmethod
    def parse(cls, text: str) -> Machines:
        """Read "64 x 16, 1.25" or "64 x 16, 1.25, 20"; OptionError for other text."""
        found = re.fullmatch(rf"\s*(\d+)\s*x\s*(\d+)\s*,\s*{_NUMBER}(?:\s*,\s*{_NUMBER})?\s*", text)
        if found is None or not all(float(number) > 0 for number in found.groups(default="1")):
            raise OptionError(
                f"--cluster {text}: write 'WORKERS x CORES, GB/s of a link' or 'WORKERS x CORES, GB/s of a link, GB/s "
                "of the storage', for example '64 x 16, 1.25'"
            )
        return cls(int(found[1]), int(found[2]), float(found[3]), float(found[4]) if found[4] else None)


@dataclass(frozen=True)
class Prediction:
    """Seconds that each part of a job takes by itself.

    tasks         their number            worker_bytes  memory that results take on a worker, at most
    speeds        weights a second of each type on a core
    """

    machines: Machines
    encoding: float
    reading: float
    network: float
    scheduler: float
    tasks: int
    worker_bytes: int
    speeds: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The time of the job."""
        return max(float(getattr(self, name)) for name in PARTS)

    @property
    def binds(self) -> str:
        """What takes longest, of `PARTS`."""
        return max(PARTS, key=lambda name: float(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """The fields of `quantkit plan --cluster --json`."""
        m = self.machines
        names = ("seconds", "binds", *PARTS, "tasks", "worker_bytes")
        about = {"workers": m.workers, "cores": m.cores, "link": m.link, "storage": m.storage}
        return about | {name: getattr(self, name) for name in names} | {"weights_per_second": dict(self.speeds)}


def predict(plan: Plan, machines: Machines, speeds: Mapping[str, float]) -> Prediction:
    """The prediction for a plan; `speeds` are weights a second on a core, by the name of a type."""
    weights = {t.name: math.prod(t.shape) for t in plan.tensors}
    cores = machines.workers * machines.cores
    encoding = sum(weights[t.name] / speeds[t.type.name] for t in plan.tensors) / cores
    total = machines.workers * machines.link
    reading = plan.bytes_before / (min(total, machines.storage or total) * 1e9)
    network = plan.bytes_after / (machines.link * 1e9)
    sizes = TaskSizes(0, workers=machines.workers, threads=cores)
    tasks = sum(1 for _ in tasks_of(plan, sizes, speeds))
    scheduler = tasks * SCHEDULER_SECONDS
    about = (tasks, sizes.worker_bytes, dict(speeds))
    return Prediction(machines, encoding, reading, network, scheduler, *about)


def tasks_of(plan: Plan, sizes: TaskSizes, speeds: Mapping[str, float]) -> Iterator[tuple[PlannedTensor, int, int]]:
    """The tasks of `quantize` once it knows its encoders' speeds: tensor, pieces of the task, pieces of the tensor."""
    sizes.left = plan.bytes_after
    sizes.seconds = {name: PIECE_ELEMENTS / speed for name, speed in speeds.items()}
    for planned in plan.tensors:
        left = pieces = -(-math.prod(planned.shape) // PIECE_ELEMENTS)
        nbytes = max(1, planned.bytes_after // pieces)
        while left:
            count = min(left, sizes.pieces(planned.type.name, nbytes))
            left -= count
            sizes.hand_out(count * nbytes)
            yield planned, count, pieces
