"""quantize on a cluster: killed workers and coordinators, the cost of the cluster, the coordinator's memory.

    python benchmarks/bench_cluster_jobs.py kill [--runs 20] [--coordinators 5] [--size 0.1] [--save]
    python benchmarks/bench_cluster_jobs.py overhead [--type IQ4_K] [--size 0.4] [--repeat 3] [--save]
    python benchmarks/bench_cluster_jobs.py memory [--passed 20] [--tasks 20000] [--save]

The input is random float32 matrices of 1024 columns, --size GB of them.

`kill` runs `quantkit quantize --cluster` on two worker processes of one thread, which this process starts. At random
moments it sends SIGKILL to workers, which dask starts again, and in --coordinators of the runs also to the command,
which is then given again. Every second run has --shared-output. Workers note each task that they complete in a file.
"twice" are the pieces that were completed more often than once; a kill may cause as many as were in flight: those
submitted and not yet in the journal.

`overhead` compares `quantkit quantize -t 2` with `--cluster local:2`: CPU seconds of all processes, and wall time.

`memory` passes results of --passed GB (10^9 bytes) through a coordinator: the workers return zeros at once instead of
encoding, 16 MB a task, and the coordinator hashes no source and drops the bytes where it would write them. It does the
same with --tasks tasks of few bytes each: of 1 TB in tasks of 16 MB there are 62500. The scheduler is in the same
process, as with `--cluster local`. Measured is VmHWM, the peak of resident memory.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from quantkit import cluster, types
from quantkit.cluster.workers import FileIdentity
from quantkit.formats import gguf, journal, provenance
from quantkit.formats.gguf import TensorSpec, Writer
from quantkit.pipelines import on_cluster

TABLES = {
    "kill": Table(
        "cluster-kill",
        "Has a quantized file the same bytes when workers and the command are killed?",
        (
            Column("run", "run", "d"), Column("output"), Column("workers", "workers killed", "d"),
            Column("coordinators", "command killed", "d"), Column("seconds", "seconds", ".1f"),
            Column("pieces", "pieces", "d"), Column("twice", "done twice", "d"),
            Column("lost", "not in the journal", "d"), Column("bytes", "bytes of one machine"),
        ),
        "`quantize --cluster` on two worker processes of one thread, with SIGKILL at random moments. Pieces that are "
        "completed and not yet in the journal when the command is killed are done twice, and so are those that a "
        "killed worker has finished and not yet returned.",
    ),
    "overhead": Table(
        "cluster-overhead",
        "What does a cluster on one machine cost?",
        (
            Column("how"), Column("cpu", "CPU seconds", ".1f"), Column("wall", "seconds", ".1f"),
            Column("wall_least", "least", ".1f"), Column("wall_most", "most", ".1f"),
        ),
        "`quantize -t 2` and `--cluster local:2` in turn, of random float32 matrices: medians, the CPU time of all "
        "processes. Starting the processes is in it.",
    ),
    "memory": Table(
        "cluster-memory",
        "How much memory does the command take while results pass through it?",
        (
            Column("what"), Column("tasks", "tasks", "d"), Column("gb", "GB of results", ".1f"),
            Column("seconds", "seconds", "d"), Column("peak_mb", "peak, MB", "d"),
        ),
        "Workers return zeros at once instead of encoding. The scheduler is in the same process. The peak is VmHWM, of "
        "all rows above too.",
    ),
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 1024, 8192
LOG = "QUANTKIT_BENCH_LOG"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def write_model(path: Path, gigabytes: float) -> Path:
    """Random matrices of 8192 x 1024 float32."""
    count = max(1, round(gigabytes * 1e9 / (4 * ROWS * COLUMNS)))
    specs = [TensorSpec(f"blk.{i}.ffn_up.weight", (ROWS, COLUMNS), types.get("f32")) for i in range(count)]
    metadata = gguf.Metadata({"general.architecture": "llama", "general.type": "tensors"})
    metadata.set("llama.block_count", count, "u32")
    with Writer(path, metadata, specs, durable=False) as writer:
        for i, spec in enumerate(specs):
            x = np.random.default_rng(i).standard_normal(spec.shape, np.float32)
            writer.write(spec.name, x.reshape(-1).view(np.uint8))
    return path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "quantkit", "quantize", *map(str, words), "--pure", "--no-progress"]


# ----------------------------------------------------------------------------------------------------------------- kill


def dask_setup(worker: object) -> None:
    """Make a worker note the tasks that it completes; dask calls this when the worker starts."""
    log = os.environ.get(LOG)
    if not log:
        return
    encode = on_cluster.encode_pieces

    def noted(task: on_cluster.PieceTask) -> on_cluster.Done:
        done = encode(task)
        line = f"{task.name} {task.first} {task.stop}\n".encode()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, line)
        os.close(descriptor)
        return done

    on_cluster.encode_pieces = noted


def completed(log: Path) -> collections.Counter[tuple[str, int]]:
    """How often each piece was completed."""
    found = collections.Counter[tuple[str, int]]()
    for line in log.read_text().splitlines() if log.exists() else []:
        name, first, stop = line.split()
        found.update((name, piece) for piece in range(int(first), int(stop)))
    return found


def in_journal(out: Path) -> int:
    """Pieces that the journal of an unfinished run holds."""
    found = journal.read(out.with_name(out.name + ".partial-job.journal"))
    if found is None:
        return 0
    pieces = len(list(provenance.row_pieces((ROWS, COLUMNS))))
    bounds = [entry["pieces"] for entries in found.pieces.values() for entry in entries]
    return pieces * len(found.entries) + sum(int(stop) - int(first) for first, stop in bounds)


def kill(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs with kills; a line each."""
    import distributed

    model, one = write_model(folder / "in.gguf", args.size), folder / "one.gguf"
    subprocess.run(command(model, one, args.type), env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    log, rng = folder / "log", random.Random(args.seed)
    os.environ[LOG] = str(log)
    rows: list[dict[str, Any]] = []
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=0, preload=[__file__], dashboard_address="127.0.0.1:0",
            silence_logs=60,
        ) as local,
        distributed.Client(local) as client,
    ):  # fmt: skip
        seconds = 2 * args.seconds
        for number in range(args.runs):
            out = folder / "out.gguf"
            for path in (log, out):
                path.unlink(missing_ok=True)
            shared = ["--shared-output"] if number % 2 else []
            words = command(model, out, args.type, "--cluster", local.scheduler_address, *shared)
            with_coordinator = number < args.coordinators
            row: dict[str, Any] = {"run": number, "output": "shared" if shared else "returned"}
            row |= {"workers": 0, "coordinators": 0, "lost": 0}
            started = time.monotonic()
            for attempt in range(100):
                process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
                while attempt < 3 and process.poll() is None:
                    try:
                        process.wait(rng.uniform(0.3, 1.0) * seconds / 2)
                    except subprocess.TimeoutExpired:
                        if with_coordinator and row["coordinators"] < 2 and rng.random() < 0.6:
                            process.kill()
                            process.wait()
                            row["coordinators"] += 1
                            if not out.exists():
                                row["lost"] += completed(log).total() - in_journal(out)
                            break
                        if row["workers"] < 3:
                            pids = list(client.run(os.getpid, on_error="ignore").values())
                            if not pids:  # dask's nannies give up on workers that die while they start
                                local.scale(0)
                                local.scale(2)
                            if pids:
                                os.kill(rng.choice(pids), signal.SIGKILL)
                                row["workers"] += 1
                while process.poll() is None:
                    if not client.nthreads():
                        local.scale(0)
                        local.scale(2)
                    time.sleep(0.5)
                if process.wait() == 0 or out.exists():  # killed between its work and its end
                    break
                if process.returncode != -signal.SIGKILL:
                    raise SystemExit(f"run {number}: the command failed with {process.returncode}")
            took = time.monotonic() - started
            counts = completed(log)
            row |= {"seconds": round(took, 1), "pieces": len(counts), "twice": counts.total() - len(counts)}
            row["bytes"] = "the same" if out.read_bytes() == one.read_bytes() else "OTHER"
            rows.append(row)
            print(row, flush=True)
    return rows


# ------------------------------------------------------------------------------------------------------------- overhead


def timed(words: list[str]) -> tuple[float, float]:
    """CPU seconds of a command and of all processes that it waited for, and wall seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(words, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.monotonic() - started


def overhead(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The command with and without a cluster, in turn."""
    model, out = write_model(folder / "in.gguf", args.size), folder / "out.gguf"
    on_two = ["--cluster", "local:2"]
    kinds: dict[str, list[object]] = {
        "2 threads": ["-t", 2], "2 workers": [*on_two], "2 workers, shared output": [*on_two, "--shared-output"],
    }  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(args.repeat):
        for kind, words in kinds.items():
            found[kind].append(timed(command(model, out, args.type, "--fresh", *words)))
            cpu, wall = found[kind][-1]
            print(f"{kind}: CPU {cpu:.1f} s, wall {wall:.1f} s", flush=True)
    rows = []
    for kind, times in found.items():
        cpus, walls = zip(*times)
        rows.append({"how": kind, "cpu": statistics.median(cpus), "wall": statistics.median(walls),
                     "wall_least": min(walls), "wall_most": max(walls)})  # fmt: skip
    return rows


# --------------------------------------------------------------------------------------------------------------- memory


def _zeros() -> None:
    """On a worker: results of the right size without work."""

    def encode(task: on_cluster.PieceTask) -> on_cluster.Done:
        nbytes, hashes = int(task.effort), [bytes(32)] * (task.stop - task.first)
        zeros = np.zeros(nbytes, np.uint8)
        return on_cluster.Done(task.name, task.first, task.stop, hashes, hashes, 0, nbytes, 0.0, zeros, {})

    on_cluster.encode_pieces = encode


def peak() -> int:
    """VmHWM of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) // 1000


def tasks(file: FileIdentity, count: int, nbytes: int) -> Iterator[on_cluster.PieceTask]:
    """Tasks of 32 pieces with the importance of two matrices of 7168 columns."""
    weights = np.ones((2, 7168), np.float32)
    for i in range(count):
        name = f"blk.{i // 128}.ffn_up_exps.weight"
        yield on_cluster.PieceTask(
            on_cluster.Input((file,)), name, (ROWS, COLUMNS), "f32", "q4_K", 32 * i, 32 * i + 32, weights, None,
            str(nbytes), False, "0" * 16,
        )  # fmt: skip


def memory(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Peaks of the coordinator with few large results and with many small ones."""
    file = FileIdentity.of(write_model(folder / "in.gguf", 0.03))
    record = provenance.unknown("x", "q4_K", "-", "0" * 16)
    log = journal.Journal(folder / "journal", {}, lambda: None)
    with cluster.connect("local:2") as client:
        client.run(_zeros)
        rows: list[dict[str, Any]] = [{"what": "before", "tasks": 0, "gb": 0.0, "seconds": 0, "peak_mb": peak()}]
        cases = ("large results", round(args.passed * 1e9 / 16e6), 16_000_000), ("many tasks", args.tasks, 1000)
        for what, count, nbytes in cases:
            started, passed = time.monotonic(), 0
            run = cluster.TaskRun(client, on_cluster.encode_pieces, tasks(file, count, nbytes), name="memory")
            for number, finished in enumerate(run):
                done = finished.result
                passed += done.nbytes
                log.add({**dataclasses.asdict(record), "pieces": [done.first, done.stop]})
                if number % max(1, count // 5) == 0:
                    print(f"{what}: {number} of {count}, {passed / 1e9:.1f} GB, peak {peak()} MB", flush=True)
            seconds = time.monotonic() - started
            rows.append({"what": what, "tasks": count, "gb": passed / 1e9, "seconds": round(seconds),
                         "peak_mb": peak()})  # fmt: skip
    log.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kill", "overhead", "memory"))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--coordinators", type=int, default=5, help="runs in which the command is killed too")
    parser.add_argument("--seconds", type=float, default=5, help="longest time between two kills")
    parser.add_argument("--size", type=float, default=0.1, help="GB of the input")
    parser.add_argument("--type", default="IQ4_K")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--passed", type=float, default=20, help="GB of results")
    parser.add_argument("--tasks", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    records.add_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = {"kill": kill, "overhead": overhead, "memory": memory}[args.what](args, Path(name))
    print(json.dumps(rows))
    records.save(TABLES[args.what], rows, args)


if __name__ == "__main__":
    main()
