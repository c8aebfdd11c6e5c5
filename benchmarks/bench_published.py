"""Published quantized checkpoints straight to a final type, compared with the detour through 16-bit floats.

    python benchmarks/bench_published.py [--sizes 1,4] [--kinds nvfp4,gptq] [--target IQ4_K] [--directory DIR] [--save]

The checkpoint is a random Llama whose matrices are codes of 4 bits: "nvfp4" as compressed-tensors has it, "gptq" with
groups of 128 columns. --sizes are gigabytes of the checkpoint, in shards of 1 GB. Each command is a process of its own.

    straight   seconds of `quantize HF_DIR OUT TARGET --pure --effort fast`
    detour     seconds of `convert HF_DIR FLOATS` and of `quantize FLOATS OUT`, which needs the disk for 16-bit floats
    peak       peak resident memory of the straight way, including pages of mapped files (VmHWM)
    equal      whether both outputs have the same bytes
"""

from __future__ import annotations

import argparse
import filecmp
import json
import math
import os
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
from benchmarks.bench_convert import COMMAND, config
from benchmarks.checkpoints import plain_specs, tokenizer
from benchmarks.records import Column, Table
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter

TABLE = Table(
    "published",
    "What does it take to quantize a published 4-bit checkpoint, straight and by way of 16-bit floats?",
    (
        Column("kind", "checkpoint"),
        Column("gigabytes", "GB", ".2f"),
        Column("weights", "weights, 10^9", ".2f"),
        Column("straight", "straight, s", ".0f"),
        Column("detour", "detour, s", ".0f"),
        Column("peak_mib", "peak, MiB", ".0f"),
        Column("detour_disk", "floats, GB", ".1f"),
        Column("equal", "same bytes"),
    ),
    "To IQ4_K at effort fast, on a machine that others use too. The peak is of the straight way, with mapped pages.",
)
_POOL = 1 << 24
_GROUP = 128
_SETTINGS: dict[str, dict[str, Any]] = {
    "nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 4, "group_size": 16}}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False},
}
_FLOATS = {"nvfp4": "bf16", "gptq": "stored"}  # --outtype: the floats in which programs of the format compute


def _parts(kind: str, name: str, rows: int, n: int) -> list[CheckpointSpec]:
    module = name.removesuffix(".weight")
    if kind == "nvfp4":
        return [
            CheckpointSpec(f"{name}_packed", (rows, n // 2), "U8"),
            CheckpointSpec(f"{name}_scale", (rows, n // 16), "F8_E4M3"),
            CheckpointSpec(f"{name}_global_scale", (1,), "F32"),
        ]
    return [
        CheckpointSpec(f"{module}.qweight", (n // 8, rows), "I32"),
        CheckpointSpec(f"{module}.qzeros", (n // _GROUP, rows // 8), "I32"),
        CheckpointSpec(f"{module}.scales", (n // _GROUP, rows), "F16"),
    ]


def _specs(kind: str, about: dict[str, Any]) -> Iterator[CheckpointSpec]:
    for spec in plain_specs(about):
        if spec.name.endswith("_proj.weight"):
            yield from _parts(kind, spec.name, *spec.shape)
        else:
            yield spec


def _pieces(spec: CheckpointSpec, pool: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The bytes of a tensor, in pieces: weights have a standard deviation of about 0.02."""
    count = math.prod(spec.shape)
    if spec.name.endswith("_global_scale"):
        yield np.array([2000], "<f4").view(np.uint8)
    elif spec.name.endswith("_scale"):
        yield rng.integers(0x48, 0x58, count, np.uint8)
    elif spec.name.endswith(".qzeros"):
        yield np.full(count, 0x77777777, "<u4").view(np.uint8)  # of symmetric codes, as version 1 stores 8
    elif spec.name.endswith(".scales"):
        yield rng.uniform(0.003, 0.005, count).astype("<f2").view(np.uint8)
    elif spec.dtype == "BF16":
        values = rng.standard_normal(count, np.float32) * np.float32(0.02) + np.float32("norm" in spec.name)
        yield np.ascontiguousarray(values.view("<u2")[1::2]).view(np.uint8)
    else:
        left = count * (4 if spec.dtype == "I32" else 1)
        while left:
            size = min(left, _POOL // 2)
            first = int(rng.integers(0, _POOL - size + 1))
            left -= size
            yield pool[first : first + size]


def write(directory: Path, kind: str, gigabytes: float) -> tuple[int, int]:
    """Write a checkpoint of about that size; bytes of its tensors, and weights."""
    directory.mkdir()
    about = config("llama", gigabytes, 0.5625 if kind == "nvfp4" else 0.515625)
    rng = np.random.default_rng(1)
    pool, specs = rng.integers(0, 256, _POOL, np.uint8), list(_specs(kind, about))
    with CheckpointWriter(directory, specs, max_shard_bytes=10**9) as writer:
        for spec in specs:
            for data in _pieces(spec, pool, rng):
                writer.write(spec.name, data)
    (directory / "config.json").write_text(json.dumps(about | {"quantization_config": _SETTINGS[kind]}))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer(), ensure_ascii=False), encoding="utf-8")
    return sum(spec.nbytes for spec in specs), sum(math.prod(spec.shape) for spec in plain_specs(about))


def run(*words: str) -> tuple[float, float]:
    """Seconds and peak in MiB of a command."""
    os.sync()
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - started, int(done.stdout.split()[-2]) / 1024


def measure(directory: Path, kind: str, gigabytes: float, options: argparse.Namespace) -> dict[str, Any]:
    source, floats = directory / "hf", directory / "floats.gguf"
    straight, detour = directory / "straight.gguf", directory / "detour.gguf"
    nbytes, weights = write(source, kind, gigabytes)
    how = [options.target, "--pure", "--effort", "fast"]
    seconds, peak = run("quantize", str(source), str(straight), *how)
    converted, _ = run("convert", str(source), str(floats), "--outtype", _FLOATS[kind])
    again, _ = run("quantize", str(floats), str(detour), *how)
    row = {
        "kind": kind, "gigabytes": nbytes / 1e9, "weights": weights / 1e9, "straight": seconds,
        "detour": converted + again, "peak_mib": peak, "detour_disk": floats.stat().st_size / 1e9,
        "equal": "yes" if filecmp.cmp(straight, detour, shallow=False) else "no",
    }  # fmt: skip
    for path in (floats, straight, detour, *source.iterdir()):
        path.unlink()
    source.rmdir()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,4")
    parser.add_argument("--kinds", default="nvfp4,gptq")
    parser.add_argument("--target", default="IQ4_K")
    parser.add_argument("--directory", type=Path)
    records.add_option(parser)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for kind in options.kinds.split(","):
            for size in options.sizes.split(","):
                rows.append(measure(Path(directory), kind, float(size), options))
                print(json.dumps(rows[-1]), flush=True)
                records.save(TABLE, rows, options)  # each time: the next size takes longer


if __name__ == "__main__":
    main()
