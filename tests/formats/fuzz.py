"""Mutated headers: `python -m tests.formats.fuzz gguf 10000` opens so many and reports, as JSON, what became of them.

Run in a process of its own, whose address space is limited to what it had plus MEMORY, so that a reader that believes
an absurd length fails here and not on a user's machine.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.formats import gguf
from quantkit.formats.safetensors import open_checkpoint
from tests.formats import raw

MEMORY = 300 << 20
INTERESTING = [0, 1, 2, 7, 31, 33, 127, 255, 2**15, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**48,
               2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]  # fmt: skip


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """One to four damages: flipped bits, random bytes, edited lengths, cuts, pieces moved, doubled or removed."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        if not data:
            break
        at = int(rng.integers(len(data)))
        kind = rng.integers(6)
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[at] = int(rng.integers(256))
        elif kind == 2:
            width = int(rng.choice([1, 2, 4, 8]))
            value = INTERESTING[rng.integers(len(INTERESTING))] % (1 << 8 * width)
            data[at : at + width] = value.to_bytes(width, "little")
        elif kind == 3:
            width = int(rng.choice([4, 8]))
            value = int.from_bytes(data[at : at + width], "little") + int(rng.integers(-40, 40))
            data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 4 and rng.random() < 0.5:
            del data[at:]
        else:
            start, length = int(rng.integers(len(data))), int(rng.integers(1, 64))
            piece = data[start : start + length]
            data[at : at + (length if rng.random() < 0.5 else 0)] = piece if rng.random() < 0.7 else b""
    return bytes(data)


def use_gguf(path: Path) -> None:
    for tensor in gguf.open(path).tensors.values():
        tensor.rows(0, tensor.n_rows // tensor.type.interleave * tensor.type.interleave).max()


def use_safetensors(path: Path) -> None:
    for tensor in open_checkpoint(path).tensors.values():
        tensor.rows(0, tensor.n_rows)


def seeds(kind: str) -> tuple[list[bytes], Callable[[Path], None]]:
    if kind == "safetensors":
        return [raw.small_safetensors(), raw.safetensors({"a": raw.entry("F32", [2], 0, 8)}, bytes(8))], use_safetensors
    lean = raw.gguf([raw.pair("general.alignment", "u32", 64)], [raw.info("a", (8,), 0, 0)], bytes(64), alignment=64)
    return [raw.small_gguf(), lean, raw.gguf([raw.pair("words", "str[]", ["a"] * 50)], [], version=2)], use_gguf


def run(kind: str, count: int) -> dict[str, object]:
    """Open `count` mutants. Errors that are not ours are listed, the first ones with their seed."""
    contents, use = seeds(kind)
    rng = np.random.default_rng(20240601)
    result = {"opened": 0, "refused": 0, "slowest": 0.0}
    foreign: list[str] = []
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as directory:
        path = Path(directory) / f"mutant.{kind}"
        for i in range(count):
            raw.put(path, mutate(contents[i % len(contents)], rng))
            start = time.process_time()
            try:
                use(path)
                result["opened"] += 1
            except QuantkitError as error:
                result["refused"] += 1
                if str(path) not in str(error):
                    foreign.append(f"{i}: the file is not named: {error}")
            except Exception as error:  # anything else is what is looked for
                foreign.append(f"{i}: {error!r}")
            result["slowest"] = max(result["slowest"], time.process_time() - start)
    return {**result, "foreign": foreign[:5], "peak_kib": peak_kib()}


def peak_kib() -> int:
    """Largest resident size of this process; getrusage would count its parent's, too."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def main() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]))))


if __name__ == "__main__":
    main()
