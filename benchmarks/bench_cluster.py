"""Simulate the quantization of DeepSeek V3 and Kimi-K2 over many workers: efficiency, the scheduler's share, memory.

    python benchmarks/bench_cluster.py [--cores 16] [--network 10] [--storage 20] [--waves 6] [--empty 2000]
                                       [--clock] [--save]

Tensors, types and pieces are those that `quantize` makes of the published config.json with `recipes/deepseek-iq2_k`.
Nothing is encoded. The time of a task is its number of weights over the speed of its type's encoder on one core, which
is measured here, as CPU time of one thread.

Two parts:

    dask        dask's own scheduler, with workers in this process whose tasks sleep as long as the encoder would take.
                Then --empty tasks of no time give the CPU time of the coordinator (client, scheduler and, here, the
                workers' ends of connections) for each task. Efficiency is the time of tasks over that of
                all threads. It runs the first tasks of DeepSeek V3, --waves for each worker, at real
                speed; a worker has one thread.
    simulated   a clock for whole models. A task is handed out by a coordinator that takes the measured time for each,
                reads its source over the storage that all share, is encoded on the cores of a worker, and sends its
                bytes over the coordinator's network. The share of each in the time of a run tells which of them binds.

A worker is a machine of --cores cores. `quantize` sizes its tasks with the same class (`cluster/task_sizes.py`).
--clock leaves out the part of dask: its rows, and the speeds and costs of the clock, are those of the last results.
"""

from __future__ import annotations

import argparse
import heapq
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.bench_jobs import CONFIG as LAYOUT
from benchmarks.records import Column, Table
from quantkit import types
from quantkit.cluster.task_sizes import AHEAD, RETURNED_BYTES, WRITTEN_BYTES, TaskSizes
from quantkit.cluster.tasks import TaskRun
from quantkit.pipelines import api
from quantkit.pipelines.options import PlanOptions
from quantkit.placement import many_machines
from quantkit.recipe import Plan

TABLE = Table(
    "cluster",
    "How does quantizing scale over machines?",
    (
        Column("model"), Column("how"), Column("workers", "workers", "d"), Column("cores", "cores", "d"),
        Column("weights", "10⁶ weights a task", ".1f"), Column("output", "output"),
        Column("tasks", "tasks", "d"), Column("hours", "hours", ".3f"), Column("efficiency", "efficiency", ".3f"),
        Column("scheduler", "scheduler busy", ".3f"), Column("storage", "storage busy", ".3f"),
        Column("network", "network busy", ".3f"), Column("memory", "coordinator, MB", ".0f"), Column("binds"),
    ),
    "A fake encoder takes as long as the real one, measured on one core. `dask` runs dask's own scheduler with "
    "sleeping tasks for a part of the model; `clock` runs whole models on a simulated clock, with dask's measured time "
    "for each task, storage of 20 GB/s and 10 Gbit/s at the coordinator. Workers return the output to it, or write it "
    "to shared storage. Busy is the share of the run's time. Weights are those of a task on average; `quantize` sizes "
    "tasks for the cores of a worker. The memory of the coordinator is that of the tasks that are handed out and of a "
    "result.",
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek V3": LAYOUT | {"vocab_size": 129280, "num_hidden_layers": 61, "n_routed_experts": 256,
                             "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
    "Kimi-K2": LAYOUT | {"vocab_size": 163840, "num_hidden_layers": 61, "n_routed_experts": 384,
                         "num_attention_heads": 64, "num_key_value_heads": 64, "routed_scaling_factor": 2.827},
}  # fmt: skip
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "deepseek-iq2_k.recipe"
SIZES = (8, 64, 512)


@dataclass(frozen=True)
class Task:
    """Pieces of a tensor: seconds on one core, bytes that are read and returned."""

    pieces: int
    weights: float
    seconds: float
    read: float
    returned: float


def plan_of(config: Mapping[str, Any]) -> Plan:
    """The plan of a model from its config alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return api.plan(path, "IQ2_K", PlanOptions(recipe=str(RECIPE))).plan


def speed(name: str, columns: int = 7168) -> float:
    """Weights a second that one core encodes in a type, by CPU time of this thread; copies have no limit."""
    kind = types.get(name)
    if kind.block_size == 1:
        return 1e9
    rows = np.random.default_rng(1).standard_normal((32, columns)).astype(np.float32)
    importance = np.ones(columns, np.float32)
    kind.quantize(rows, importance, threads=1)  # compiles
    begin = time.thread_time()
    kind.quantize(rows, importance, threads=1)
    return rows.size / (time.thread_time() - begin)


def tasks_of(plan: Plan, speeds: Mapping[str, float], sizes: TaskSizes) -> Iterator[Task]:
    """The tasks of a plan, as `quantize` sizes them once it knows the speed of every encoder."""
    for t, count, pieces in many_machines.tasks_of(plan, sizes, speeds):
        weights = count / pieces * int(np.prod(t.shape))
        yield Task(count, weights, weights / speeds[t.type.name], 2 * weights, count / pieces * t.bytes_after)


@dataclass(frozen=True)
class Costs:
    """What the coordinator takes for a task: seconds of its CPU, and bytes while it is handed out."""

    seconds: float
    memory: float


def simulate(
    tasks: Iterator[Task], workers: int, cores: int, costs: Costs, storage: float, network: float, result: int
) -> dict[str, float]:
    """Run tasks on a simulated clock; `storage` and `network` are shared, in bytes a second.

    A worker has tasks for AHEAD times its cores. It does one after the other, each on all of its cores.
    `result` are the bytes of a task's result that the coordinator holds.
    """
    free, load = [0.0] * workers, [0] * workers
    running: list[tuple[float, int, int, float]] = []  # when a task is done, its worker and cores, bytes returned
    now = read = sent = most = 0.0  # the coordinator's time; when storage and network are free
    total = dict.fromkeys(("tasks", "weights", "seconds", "read", "returned"), 0.0)
    task = next(tasks, None)
    while task is not None or running:
        worker = min(range(workers), key=load.__getitem__)
        if task is None or load[worker] >= AHEAD * cores:
            done, worker, share, returned = heapq.heappop(running)
            sent = max(sent, done) + returned / network
            now = max(now, sent)
            load[worker] -= share
            continue
        now += costs.seconds
        read = max(read, now) + task.read / storage
        begin = max(free[worker], read)
        free[worker] = begin + task.seconds / cores
        share = min(task.pieces, cores)
        load[worker] += share
        heapq.heappush(running, (begin + task.seconds / share, worker, share, task.returned))
        most = max(most, len(running))
        for name in total:
            total[name] += 1 if name == "tasks" else getattr(task, name)
        task = next(tasks, None)
    shares = {
        "efficiency": total["seconds"] / workers / cores / sent,
        "scheduler": total["tasks"] * costs.seconds / sent,
        "storage": total["read"] / storage / sent,
        "network": total["returned"] / network / sent,
    }
    memory = (most * costs.memory + result) / 1e6
    about = {"tasks": int(total["tasks"]), "weights": total["weights"] / total["tasks"] / 1e6}
    return {"hours": sent / 3600, **about, **shares, "memory": memory}


def binds(row: Mapping[str, float]) -> str:
    """What takes the largest share of a run's time."""
    names = {"efficiency": "encoding", "scheduler": "scheduler", "storage": "reading", "network": "network"}
    return names[max(names, key=lambda key: row[key])]


class _Sleep(NamedTuple):
    """A task of the fake encoder, with as many bytes of arguments as the importance of a row takes."""

    seconds: float
    importance: bytes


def _sleep(task: _Sleep) -> float:
    time.sleep(task.seconds)
    return task.seconds


# The clocks and profilers of 32 workers would take a core of this process; those of real workers run on their machines.
QUIET = {
    "distributed.admin.tick.interval": "5s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.profile.enabled": False,
}


def run_dask(tasks: Sequence[Task], workers: int, threads: int, empty: int) -> tuple[dict[str, float], Costs]:
    """Run tasks by dask's scheduler, with workers of so many threads in this process; then `empty` tasks of no time."""
    import dask
    import psutil
    from distributed import Client, LocalCluster

    process, importance = psutil.Process(), bytes(4 * 7168)
    with (
        dask.config.set(QUIET),
        LocalCluster(
            n_workers=workers, threads_per_worker=threads, processes=False, memory_limit=0, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        warm = [_Sleep(0.0, importance)] * workers
        list(TaskRun(client, _sleep, warm))
        memory, peak, begin, work = process.memory_info().rss, 0, time.monotonic(), 0.0
        cpu = time.process_time()
        for number, done in enumerate(TaskRun(client, _sleep, [_Sleep(t.seconds, importance) for t in tasks])):
            work += done.result
            if number % 64 == 0:
                peak = max(peak, process.memory_info().rss - memory)
        wall, cpu = time.monotonic() - begin, time.process_time() - cpu
        begun = time.process_time()
        list(TaskRun(client, _sleep, warm[:1] * empty))
        each = (time.process_time() - begun) / empty
    costs = Costs(each, peak / (AHEAD * workers * threads))
    row = {"hours": wall / 3600, "efficiency": work / wall / workers / threads, "scheduler": cpu / wall}
    return row | {"storage": 0.0, "network": 0.0, "memory": peak / 1e6}, costs


def last_measured() -> tuple[dict[str, float], Costs, list[dict[str, object]]]:
    """Speeds and costs that the last saved results were made with, and their rows of dask."""
    saved = json.loads((records.FOLDER / f"{TABLE.name}.json").read_text())
    details, rows = saved["details"], [row for row in saved["rows"] if row["how"] == "dask"]
    return details["weights_per_second"], Costs(details["scheduler_seconds"], details["task_bytes"]), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=16, help="cores of a worker")
    parser.add_argument("--network", type=float, default=10.0, help="of the coordinator, Gbit/s")
    parser.add_argument("--storage", type=float, default=20.0, help="that all workers share, GB/s")
    parser.add_argument("--waves", type=int, default=6, help="tasks for each thread of the runs by dask")
    parser.add_argument("--empty", type=int, default=2000, help="tasks that measure the coordinator's time")
    parser.add_argument("--clock", action="store_true", help="only the simulated clock")
    records.add_option(parser)
    options = parser.parse_args()
    plans = {name: plan_of(config) for name, config in CONFIGS.items()}
    rows: list[dict[str, object]] = []
    if options.clock:
        speeds, costs, rows = last_measured()
    else:
        speeds = {name: speed(name) for plan in plans.values() for name in {t.type.name for t in plan.tensors}}
    print("weights/s on a core: " + ", ".join(f"{name} {value / 1e6:.2f} M" for name, value in speeds.items()))
    name = "DeepSeek V3"
    for size in () if options.clock else SIZES:  # one thread for each simulated worker
        tasks = [t for t in tasks_of(plans[name], speeds, TaskSizes(0, workers=size, threads=size)) if t.seconds > 1]
        tasks = tasks[: options.waves * size]
        processes = min(size, 32)
        row, costs = run_dask(tasks, processes, size // processes, options.empty)
        rows.append({"model": name, "how": "dask", "workers": size, "cores": size,
                     "weights": sum(t.weights for t in tasks) / len(tasks) / 1e6, "output": "", "tasks": len(tasks),
                     **row, "binds": binds(row)})  # fmt: skip
        print(rows[-1], f"{1e3 * costs.seconds:.2f} ms and {costs.memory / 1e3:.0f} kB a task", flush=True)
    for name, plan in plans.items():
        for workers in SIZES:
            for cores, shared in ((1, False), (options.cores, False), (options.cores, True)):
                most, network = (WRITTEN_BYTES, 1e15) if shared else (RETURNED_BYTES, options.network * 1e9 / 8)
                sizes = TaskSizes(0, most, workers, workers * cores)
                row = simulate(tasks_of(plan, speeds, sizes), workers, cores, costs, options.storage * 1e9, network,
                               0 if shared else most)  # fmt: skip
                rows.append({"model": name, "how": "clock", "workers": workers, "cores": workers * cores,
                             "output": "shared" if shared else "returned", **row, "binds": binds(row)})  # fmt: skip
                print(rows[-1])
    details = {"weights_per_second": speeds, "scheduler_seconds": costs.seconds, "task_bytes": costs.memory}
    print(f"peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")
    records.save(TABLE, rows, options, details)


if __name__ == "__main__":
    main()
