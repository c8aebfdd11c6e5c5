"""Predict how long `quantize` takes on a cluster, and what binds: encoding, reading or the network.

    encoding   weights over the speeds of their types' encoders on a core, over all cores
    reading    bytes of the source: each machine over its own link, all of them over the storage that they share
    network    bytes of the output over the coordinator's link, which takes the results of all workers

All three go on at the same time, so the longest is the time of the job. A job needs some tasks for each core, or the
last ones leave cores idle; `tasks_per_core` tells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import OptionError
from quantkit.recipe import Plan

TASK_WEIGHTS = 1 << 24  # of a task of `quantize` (pipelines/on_cluster.py)
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
    """Seconds that each part of a job takes by itself; `speeds` are weights a second of each type on a core."""

    machines: Machines
    encoding: float
    reading: float
    network: float
    tasks_per_core: float
    speeds: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The time of the job."""
        return max(self.encoding, self.reading, self.network)

    @property
    def binds(self) -> str:
        """What takes longest: "encoding", "reading" or "network"."""
        return max(("encoding", "reading", "network"), key=lambda name: float(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """The fields of `quantkit plan --cluster --json`."""
        m = self.machines
        names = ("seconds", "binds", "encoding", "reading", "network", "tasks_per_core")
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
    tasks = sum(-(-count // TASK_WEIGHTS) for count in weights.values())
    return Prediction(machines, encoding, reading, network, tasks / cores, dict(speeds))
