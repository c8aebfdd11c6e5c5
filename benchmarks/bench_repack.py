"""Time of repacking and unpacking a file, compared with copying it and with llama-quantize --repack.

    python benchmarks/bench_repack.py [--types q4_0,iq4_k] [--size 1] [--threads 2] [--repeat 3] [--directory DIR]

Each file holds --size GiB of one type in random matrices of 14336 x 4096. All programs alternate, with a warm page
cache, and write to a new file. Figures are medians of --repeat runs. "CPU" is CPU seconds of the process, for machines
that are busy.

    copy       cp, which returns when all data are in the page cache; "synced": including fsync
    repack     quantkit repack, the whole process, without fsync; "own": its seconds from plan to rename
    unpack     quantkit unpack
    reference  llama-quantize --repack of ik_llama.cpp, the whole process
    peak       peak resident memory of quantkit, including pages of the mapped input (VmHWM)
    kernel     interleaving all pieces on --threads threads, without writing
    write      writing as many bytes in pieces of the same size, without interleaving

    /copy      speed of repacking divided by that of cp; /synced: by that of cp with fsync; unpack likewise

The last line is JSON, times in seconds.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records
from benchmarks.records import Column, Table
from quantkit import types
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.formats.pipeline import spread
from quantkit.pipelines.repack_file import Repacking, plan_repack

TABLE = Table(
    "repack",
    "How fast is repacking, compared with `cp`?",
    (
        Column("type"),
        Column("copy", "cp, s", ".2f"),
        Column("synced", "cp and fsync, s", ".2f"),
        Column("repack", "repack, s", ".2f"),
        Column("unpack", "unpack, s", ".2f"),
        Column("reference", "ik_llama.cpp, s", ".2f"),
        Column("repack of reference", "ratio", ".2f"),
        Column("repack of copy", "repack / cp, speed", ".2f"),
        Column("unpack of copy", "unpack / cp, speed", ".2f"),
    ),
    "Seconds of whole processes; neither `repack` nor `cp` syncs. ik_llama.cpp: `llama-quantize --repack`; the ratio "
    "is of seconds.",
)
ROWS, COLUMNS = 14336, 4096
COMMAND = (
    "import sys; from quantkit.cli import main; status = main(); "
    "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')]); sys.exit(status)"
)


def make(path: Path, kind: str, gibibytes: float) -> None:
    """A llama with ffn_up tensors only."""
    t = types.get(kind)
    count = max(1, round(gibibytes * 2**30 / (ROWS * t.row_bytes(COLUMNS))))
    metadata = Metadata({"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"})
    keys = {"block_count": count, "context_length": 128, "embedding_length": COLUMNS, "feed_forward_length": ROWS,
            "attention.head_count": 32, "vocab_size": 32}  # fmt: skip
    for key, value in keys.items():
        metadata.set(f"llama.{key}", value, "u32")
    metadata.set("llama.attention.layer_norm_rms_epsilon", 1e-5, "f32")
    metadata.set("general.quantization_version", 2, "u32")
    metadata.set("general.file_type", t.file_type, "u32")
    specs = [TensorSpec(f"blk.{i}.ffn_up.weight", (ROWS, COLUMNS), t) for i in range(count)]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (ROWS, t.row_bytes(COLUMNS)), dtype=np.uint8)
    data &= 0xBF  # finite scales at every offset; ik_llama.cpp refuses others
    with Writer(path, metadata, specs) as writer:
        for spec in specs:
            writer.write(spec.name, data)


def seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def run(*command: str | Path) -> tuple[str, float]:
    """The output of a command, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }  # users have bytecode caches
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-1000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, sum(after[:2]) - sum(before[:2])


def copied(source: Path, out: Path) -> dict[str, float]:
    out.unlink(missing_ok=True)
    begin = time.perf_counter()
    cpu = run("cp", source, out)[1]
    copy = time.perf_counter() - begin
    with out.open("rb") as stream:
        os.fsync(stream.fileno())
    return {"copy": copy, "synced": time.perf_counter() - begin, "copy CPU": cpu}


def ours(command: str, source: Path, out: Path, threads: int) -> dict[str, float]:
    out.unlink(missing_ok=True)
    begin = time.perf_counter()
    said, cpu = run(sys.executable, "-c", COMMAND, command, source, out, "--json", "--threads", str(threads))
    process = time.perf_counter() - begin
    record, peak = said.split("\n")[:2]
    return {
        command: process,
        f"{command} own": json.loads(record)["seconds"],
        f"{command} CPU": cpu,
        f"{command} peak": int(peak.split()[-2]) / 1024,
    }


def reference(tool: Path, source: Path, out: Path, threads: int) -> dict[str, float]:
    out.unlink(missing_ok=True)
    begin = time.perf_counter()
    cpu = run(tool, "--repack", source, out, "Q8_0", str(threads))[1]
    return {"reference": time.perf_counter() - begin, "reference CPU": cpu}


class DiscardingWriter:
    """A writer that computes the pieces, drops them and records their sizes."""

    def __init__(self) -> None:
        self.sizes: list[tuple[str, int, int]] = []

    def put(self, name: str, start: int, data: np.ndarray) -> None:
        self.sizes.append((name, start, data.nbytes))

    def put_direct(self, *given: object) -> bool:
        return False


def parts(job: Repacking, out: Path, threads: int) -> dict[str, float]:
    """Kernels without writing; writing without kernels."""

    def make_all() -> list[tuple[str, int, int]]:
        writer: Any = DiscardingWriter()
        tasks = (task for change in job.changes for task in change.tasks(writer))
        spread(tasks, job.nbytes, threads=threads, progress=False)
        return list(writer.sizes)

    sizes = make_all()
    kernel = seconds(make_all)
    piece = np.random.default_rng(2).integers(0, 256, max(size for *_, size in sizes), dtype=np.uint8)
    out.unlink(missing_ok=True)
    with Writer(out, job.metadata, [change.spec for change in job.changes], durable=False) as writer:

        def put(name: str, start: int, size: int) -> int:
            writer.put(name, start, piece[:size])
            return size

        tasks = (functools.partial(put, *size) for size in sizes)
        write = seconds(lambda: spread(tasks, job.nbytes, threads=threads, progress=False))
    return {"kernel": kernel, "write": write}


def measure(kind: str, folder: Path, tool: Path | None, options: argparse.Namespace) -> dict[str, float]:
    """Medians of all times for one type, and the ratios of the table."""
    source, repacked, out = (folder / f"{name}.gguf" for name in ("source", "repacked", "out"))
    make(source, kind, options.size)
    job = plan_repack(quantkit.open(source))
    ours("repack", source, repacked, options.threads)  # warms the page cache, compiles
    ours("unpack", repacked, out, options.threads)
    rounds = []
    for _ in range(options.repeat):
        found = copied(source, out) | ours("repack", source, out, options.threads)
        found |= ours("unpack", repacked, out, options.threads) | parts(job, out, options.threads)
        if tool:
            found |= reference(tool, source, out, options.threads)
        rounds.append(found)
    medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    for command in ("repack", "unpack"):
        medians[f"{command} of copy"] = medians["copy"] / medians[command]
        medians[f"{command} of synced copy"] = medians["synced"] / medians[command]
    if "reference" in medians:
        medians["repack of reference"] = medians["repack"] / medians["reference"]
    return {"GiB": source.stat().st_size / 2**30, **medians}


SHOWN = {"copy": "copy", "synced": "synced", "repack": "repack", "repack own": "own", "unpack": "unpack",
         "reference": "refer.", "copy CPU": "cp CPU", "repack CPU": "our CPU", "reference CPU": "ref CPU",
         "kernel": "kernel", "write": "write", "repack peak": "MB", "repack of copy": "/copy",
         "unpack of copy": "unpack", "repack of synced copy": "/synced", "unpack of synced copy": "unpack"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="iq4_k,q4_0,q4_K,iq2_xxs,q8_0")
    parser.add_argument("--size", type=float, default=1.0, help="GiB of each file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where the files are made; default: TMPDIR")
    records.add_option(parser)
    options = parser.parse_args()
    found = importlib.util.find_spec("ik_llama_cpp")
    tool = Path(found.origin).parent / "bin" / "llama-quantize" if found and found.origin else None
    results = {}
    print(f"{'type':8s} {'GiB':>6s} " + " ".join(f"{head:>7s}" for head in SHOWN.values()))
    for kind in options.types.split(","):
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-repack-") as folder:
            results[kind] = measure(kind, Path(folder), tool, options)
        shown = [results[kind].get(name, float("nan")) for name in SHOWN]
        cells = [f"{value:7.0f}" if "peak" in name else f"{value:7.2f}" for name, value in zip(SHOWN, shown)]
        print(f"{kind:8s} {results[kind]['GiB']:6.3f} " + " ".join(cells), flush=True)
    records.save(TABLE, [{"type": kind, **row} for kind, row in results.items()], options)
    busy = os.getloadavg()[0]
    print(json.dumps({"threads": options.threads, "repeat": options.repeat, "load": busy, "results": results}))


if __name__ == "__main__":
    main()
