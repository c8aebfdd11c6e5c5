"""The time of `quantkit convert` compared with copying the checkpoint's shards.

    python benchmarks/bench_convert.py [--size 2] [--kinds llama,experts] [--threads 2] [--repeat 3] [--directory DIR]

The checkpoint is random, has about --size GB and shards of 500 MB. "llama" has query and key rows that are permuted,
"experts" has 32 experts per layer that are stacked. `cp` of the shards and the conversion alternate, with a warm page
cache and to new files on the same file system. Figures are medians of --repeat runs.

    copy       GB/s of cp: bytes read, as many as written; "synced": including fsync
    convert    GB/s of `quantkit convert`, whole process: half the sum of bytes read and written
    /copy      convert divided by copy of the same round; the median
    CPU        CPU seconds of the process, for machines that are busy
    peak       peak resident memory, including pages of mapped files (VmHWM)

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkpoints, records
from benchmarks.records import Column, Table

TABLE = Table(
    "convert",
    "How fast is `quantkit convert`, compared with `cp`?",
    (
        Column("conversion"),
        Column("seconds", "seconds", ".2f"),
        Column("of_copy", "speed / cp", ".2f"),
        Column("of_copy_synced", "speed / (cp and fsync)", ".2f"),
        Column("peak_mib", "peak, MiB", ".0f"),
    ),
    "Whole processes. Speed is half of the bytes read and written per second. From FP8, the output is twice the input.",
)
CASES = (("BF16", "bf16"), ("BF16", "f16"), ("FP8", "bf16"))
COMMAND = (
    "import sys; from quantkit.cli import main; status = main(); "
    "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')]); sys.exit(status)"
)
_COMMON = {"vocab_size": 4096, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
           "hidden_act": "silu", "tie_word_embeddings": False}  # fmt: skip


def config(kind: str, gigabytes: float, item: float) -> dict[str, Any]:
    """A config.json of a model of that size, with matrix elements of `item` bytes."""
    if kind == "llama":
        layers = max(1, round(gigabytes * 1e9 / (218e6 * item)))
        return _COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 14336,
                          "num_hidden_layers": layers}  # fmt: skip
    layers = max(1, round(gigabytes * 1e9 / (344e6 * item)))
    return _COMMON | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": 6144,
                      "num_hidden_layers": layers, "num_experts": 32, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
                      "mlp_only_layers": []}  # fmt: skip


def copy(source: Path, target: Path, synced: bool) -> float:
    """Seconds to copy the shards."""
    target.mkdir()
    os.sync()  # writes of earlier runs must not slow down either
    started = time.perf_counter()
    subprocess.run(["cp", *map(str, sorted(source.glob("*.safetensors"))), str(target)], check=True)
    if synced:
        for path in target.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def convert(source: Path, out: Path, outtype: str, threads: int | None) -> tuple[float, float, int, int]:
    """Seconds, CPU seconds, peak in bytes and size of the output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    flags = [] if threads is None else ["--threads", str(threads)]
    os.sync()
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "convert", str(source), str(out), "--outtype", outtype, *flags],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    size = out.stat().st_size
    out.unlink()
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used, int(done.stdout.split()[-2]) << 10, size


def measure(directory: Path, kind: str, dtype: str, outtype: str, options: argparse.Namespace) -> dict[str, Any]:
    source = directory / f"{kind}-{dtype}"
    if not source.exists():
        for old in directory.glob("*-*"):
            shutil.rmtree(old)
        checkpoints.write(source, config(kind, options.size, 1 if dtype == "FP8" else 2), dtype, 500 * 10**6)
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    convert(source, directory / "m.gguf", outtype, options.threads)  # compiles, warms the page cache
    rows = []
    for _ in range(options.repeat):
        plain, synced = (nbytes / copy(source, directory / "copy", wait) / 1e9 for wait in (False, True))
        seconds, cpu, peak, size = convert(source, directory / "m.gguf", outtype, options.threads)
        rows.append((plain, synced, (nbytes + size) / 2 / seconds / 1e9, cpu, peak, seconds))
    names = ("copy", "copy_synced", "convert", "cpu_seconds", "peak_bytes", "seconds")
    of = {name: statistics.median(row[i] for row in rows) for i, name in enumerate(names)}
    ratios = {f"of_{name}": statistics.median(row[2] / row[i] for row in rows)
              for i, name in enumerate(("copy", "copy_synced"))}  # fmt: skip
    return {"kind": kind, "from": dtype, "to": outtype, "bytes": nbytes, **of, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=2)
    parser.add_argument("--kinds", default="llama,experts")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    records.add_option(parser)
    options = parser.parse_args()
    found = []
    print(f"{'':24}{'copy':>7}{'synced':>8}{'convert':>9}{'/copy':>7}{'/synced':>9}{'CPU':>7}{'peak MiB':>10}")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for kind in options.kinds.split(","):
            for dtype, outtype in CASES:
                row = measure(Path(directory), kind, dtype, outtype, options)
                found.append(row)
                print(
                    f"{kind:9}{dtype:5} -> {outtype:6}{row['copy']:7.2f}{row['copy_synced']:8.2f}{row['convert']:9.2f}"
                    f"{row['of_copy']:7.2f}{row['of_copy_synced']:9.2f}{row['cpu_seconds']:7.1f}"
                    f"{row['peak_bytes'] / 2**20:10.0f}", flush=True,
                )  # fmt: skip
    rows = [{"conversion": f"{row['kind']}, {row['from']} to {row['to']}", "peak_mib": row["peak_bytes"] / 2**20, **row}
            for row in found]  # fmt: skip
    records.save(TABLE, rows, options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
