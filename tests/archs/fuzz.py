"""Mutated models: `python -m tests.archs.fuzz 2000` runs 2000 of them and prints the outcomes as JSON.

A mutant is a small model whose metadata or tensors were changed by one to three mutations that know what keys mean, so
that it gets past the reader of files. `generate` and `perplexity` run it, each in a process forked from a warm one,
with a limit on memory and time. They may finish or refuse it with a QuantkitError; a signal, a traceback, a time-out
and running out of memory are failures. A finish with other numbers than the model's own is listed by its mutations.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import types
from quantkit.formats import gguf
from tests.archs.files import written

ARCHS = ("llama", "qwen3moe", "deepseek2", "qwen35")
MEMORY = 2 << 30  # beyond what the warm process has
SECONDS = 60
_TRACEBACK = 99
WHOLE = (0, 1, -1, 2, 3, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**63 - 1)
FLOATS = (0.0, -1.0, 1.0, math.nan, math.inf, -math.inf, 1e-38, 1e38, 2.0)
NEW_KEYS = {  # of keys that a file may have and these lack
    "rope.scaling.type": ("yarn", "str"), "rope.scaling.factor": (4.0, "f32"), "attention.sliding_window": (8, "u32"),
    "nextn_predict_layers": (1, "u32"), "rope.dimension_count": (8, "u32"), "attention.key_length": (16, "u32"),
    "attention.value_length": (16, "u32"), "expert_count": (4, "u32"), "attention.key_length_mla": (32, "u32"),
    "rope.scaling.original_context_length": (64, "u32"), "leading_dense_block_count": (1, "u32"),
    "expert_group_count": (2, "u32"), "expert_shared_count": (1, "u32"), "full_attention_interval": (2, "u32"),
}  # fmt: skip


@dataclass
class Mutant:
    """A model in memory: metadata, and tensors as (name, shape, type, bytes)."""

    arch: str
    metadata: gguf.Metadata
    tensors: list[tuple[str, tuple[int, ...], str, np.ndarray]]
    done: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> Mutant:
        file = gguf.open(path)
        tensors = [(t.name, t.shape, t.type.name, np.array(t.data).reshape(-1)) for t in file.tensors.values()]
        return cls(str(file.metadata["general.architecture"]), file.metadata.copy(), tensors)

    def copy(self) -> Mutant:
        return Mutant(self.arch, self.metadata.copy(), list(self.tensors))

    def write(self, path: Path) -> None:
        specs = [gguf.TensorSpec(name, shape, types.get(kind)) for name, shape, kind, _ in self.tensors]
        with gguf.Writer(path, self.metadata, specs, durable=False) as writer:
            for name, _, _, data in self.tensors:
                writer.write(name, data)


# ------------------------------------------------------------------------------------------------------------ mutations


def mutate(model: Mutant, rng: np.random.Generator) -> Mutant:
    found = model.copy()
    wanted = int(_pick(rng, (1, 1, 2, 3)))
    while len(found.done) < wanted:
        step = _change_key if rng.random() < 0.75 else _change_tensor
        if said := step(found, rng):
            found.done.append(said)
    return found


def _pick(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _change_key(model: Mutant, rng: np.random.Generator) -> str | None:
    keys = [k for k in model.metadata if k.startswith(f"{model.arch}.")]
    draw = rng.random()
    if draw < 0.15:
        keys = [k for k in model.metadata if k.startswith("tokenizer.ggml.")]
    elif draw < 0.3:
        key, (value, kind) = _pick(rng, list(NEW_KEYS.items()))
        model.metadata.pop(f"{model.arch}.{key}", None)
        model.metadata.set(f"{model.arch}.{key}", value, kind)
        keys = [f"{model.arch}.{key}"]
        if rng.random() < 0.5:
            return f"{key} = {value}"
    elif draw < 0.32:
        keys = ["general.architecture"]
    if not keys:
        return None
    key = _pick(rng, keys)
    value = model.metadata[key]
    if rng.random() < 0.1:
        del model.metadata[key]
        return f"{key} removed"
    new, kind = _other(value, model.metadata.kind(key), rng)
    with contextlib.suppress(Exception):  # a value that has no GGUF form
        trial = gguf.Metadata()
        trial.set(key, new, kind)
        model.metadata.pop(key)
        model.metadata.set(key, new, kind)
        return f"{key} = {new if not isinstance(new, list) else f'list of {len(new)} {kind}'} ({kind})"
    return None


def _other(value: Any, kind: str, rng: np.random.Generator) -> tuple[Any, str]:
    """Another value: a neighbour, a bound, or a value of another type."""
    draw = rng.random()
    if isinstance(value, list):
        return _pick(rng, [
            (value[:-1], kind), (value[: len(value) // 2], kind), (value + value, kind), ([], kind), (0, "u32"),
            (value[::-1], kind), ([str(v) for v in value], "str"), (list(range(len(value))), "i32"),
            ([-1] * len(value), "i32"), ([math.nan] * len(value), "f32"), (value + value[:1], kind), ("", "str"),
        ])  # fmt: skip
    if isinstance(value, str):
        return _pick(rng, [
            ("", "str"), (value + "x", "str"), (0, "u32"), (1.5, "f32"), ([value], "str"), (True, "bool"),
            (_pick(rng, ARCHS), "str"), ("llama", "str"), ("gpt2", "str"), ("none", "str"),
        ])  # fmt: skip
    if draw < 0.2:
        return _pick(rng, [
            (str(value), "str"), (float(value), "f32"), (bool(value), "bool"), ([value], kind), ("", "str"),
            ([value] * 3, kind), ([], kind), (-1, "i32"), ([math.nan], "f32"),
        ])  # fmt: skip
    if isinstance(value, float):
        return _pick(rng, [*((v, "f32") for v in FLOATS), (value * 2, "f32"), (value / 2, "f32"), (-value, "f32")])
    near = [int(value) + d for d in (-1, 1, -2, 2)] + [int(value) * 2, int(value) // 2, int(value) * 3]
    new = _pick(rng, near if draw < 0.6 else WHOLE)
    return new, "u32" if 0 <= new < 2**32 else "i64"


def _change_tensor(model: Mutant, rng: np.random.Generator) -> str | None:
    at = int(rng.integers(len(model.tensors)))
    name, shape, kind, data = model.tensors[at]
    draw = rng.random()
    if draw < 0.25:
        del model.tensors[at]
        return f"{name} dropped"
    if draw < 0.4:
        other = _pick(rng, [
            name.replace("blk.0", "blk.9"), name.replace("weight", "bias"), f"{name}x", "rope_freqs.weight",
            name.replace("attn_q", "attn_k"), name.replace("blk.1", "blk.0"),
        ])  # fmt: skip
        if any(t[0] == other for t in model.tensors):
            return None
        if rng.random() < 0.5:
            del model.tensors[at]
        model.tensors.append((other, shape, kind, data))
        return f"{name} as {other}"
    if draw < 0.5:
        if len(data) % 2 or shape[-1] % 32:
            return None
        other = _pick(rng, ["f16", "bf16", "q8_0", "q4_0"])
        x = data.view(np.float32).reshape(-1, shape[-1])
        model.tensors[at] = (name, shape, other, types.get(other).quantize(x).reshape(-1))
        return f"{name} is {other}"
    shapes = [
        shape[::-1],
        (math.prod(shape),),
        (*shape[:-1], max(1, shape[-1] // 2)),
        (*shape[:-1], shape[-1] * 2),
        (max(1, shape[0] - 1), *shape[1:]),
        (shape[0] + 1, *shape[1:]),
        (1, *shape),
        (shape[0] * 2, *shape[1:]),
    ]
    new = _pick(rng, shapes)
    if new == shape or len(new) > 4:
        return None
    x = rng.uniform(-0.2, 0.2, new).astype(np.float32)
    model.tensors[at] = (name, new, "f32", x.reshape(-1).view(np.uint8))
    return f"{name} is {new}"


# -------------------------------------------------------------------------------------------------------------- running


def commands(model: Path, text: Path) -> dict[str, list[str]]:
    return {
        "generate": ["generate", str(model), "-p", "the cat", "-n", "2", "--temp", "0", "-t", "1", "-s", "1"],
        "perplexity": ["perplexity", str(model), "-f", str(text), "-c", "32", "--chunks", "2", "-t", "1", "--json"],
    }


def further(model: Path, text: Path, directory: Path) -> dict[str, list[str]]:
    """Commands that also read what a model says of itself; each mutant is given to one of them."""
    file, out = str(model), str(directory / "out")
    return {
        "imatrix": ["imatrix", file, "-f", str(text), "-c", "32", "--chunks", "1", "-o", f"{out}.dat", "-t", "1"],
        "inspect": ["inspect", file],
        "verify": ["verify", file, "-t", "1"],
        "card": ["inspect", file, "--card"],
        "export": ["export", file, out, "--dry-run"],
        "plan": ["plan", file, "Q4_0", "--vram", "1", "-c", "64"],
        "shared": ["plan", file, "Q4_0", "--vram", "1,1", "-sm", "graph", "-c", "64"],
    }


def numbers(command: str, printed: str) -> str:
    """The part of the output that depends on the model."""
    if command == "generate":
        return printed
    with contextlib.suppress(ValueError, KeyError):
        return f"{json.loads(printed)['ppl']:.6f}"
    return printed


@dataclass
class Ran:
    """How a run ended: "done", "refused", or what went wrong; with what it printed."""

    outcome: str
    printed: str
    said: str
    seconds: float


def run(arguments: list[str], directory: Path, limit: int | None) -> Ran:
    """A command in a forked process, its address space limited to `limit` bytes."""
    out, err = directory / "stdout", directory / "stderr"
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        _in_child(arguments, out, err, limit)
    status = _waited(child, start + SECONDS)
    said = err.read_text(errors="replace") if err.exists() else ""
    if status is None:
        outcome = "time-out"
    elif os.WIFSIGNALED(status):
        outcome = f"signal {os.WTERMSIG(status)}"
    else:
        outcome = {0: "done", 1: "refused"}.get(os.WEXITSTATUS(status), f"status {os.WEXITSTATUS(status)}")
        if "Traceback" in said:
            outcome = "traceback"
    return Ran(outcome, out.read_text(errors="replace"), said, time.perf_counter() - start)


def _in_child(arguments: list[str], out: Path, err: Path, limit: int | None) -> None:
    code = _TRACEBACK
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        from quantkit.cli import main

        code = main(arguments)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _waited(child: int, deadline: float) -> int | None:
    """The status of a child, or None where it was still running and was ended."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.perf_counter() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.002)


def fuzz(count: int, seed: int, on_failure: Callable[[str], None] = lambda said: None) -> dict[str, Any]:
    """`count` mutants of small models in turn. Failures are told with what was mutated."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        directory = Path(name)
        text = directory / "text"
        text.write_text("the cat sat on the mat and saw a bird; " * 8)
        models = {arch: Mutant.of(written(directory / f"{arch}.gguf", arch, tokenizer=True)) for arch in ARCHS}
        own: dict[tuple[str, str], str] = {}
        path = directory / "mutant.gguf"
        for arch, model in models.items():
            model.write(path)
            for command, arguments in commands(path, text).items():
                _warm(arguments)
                ran = run(arguments, directory, None)
                assert ran.outcome == "done", f"{arch} {command}: {ran.outcome}\n{ran.said}"
                own[arch, command] = numbers(command, ran.printed)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        outcomes: Counter[str] = Counter()
        failures, others, slowest = [], [], (0.0, "")
        for number in range(count):
            arch = ARCHS[number % len(ARCHS)]
            mutant = mutate(models[arch], np.random.default_rng([seed, number]))
            mutant.write(path)
            more = list(further(path, text, directory).items())
            for command, arguments in (*commands(path, text).items(), more[number // len(ARCHS) % len(more)]):
                ran = run(arguments, directory, used + MEMORY)
                outcomes[f"{command}: {ran.outcome}"] += 1
                about = f"{number} {arch} {command}: {'; '.join(mutant.done)}"
                slowest = max(slowest, (ran.seconds, about))
                if ran.outcome not in ("done", "refused"):
                    failures.append(f"{about}: {ran.outcome}: {ran.said[-600:]}")
                    on_failure(failures[-1])
                elif (
                    ran.outcome == "done"
                    and (arch, command) in own
                    and numbers(command, ran.printed) != own[arch, command]
                ):
                    others.append(about)
        return {"mutants": count, "outcomes": dict(outcomes), "slowest": slowest, "failures": failures,
                "other_numbers": others}  # fmt: skip


def _warm(arguments: list[str]) -> None:
    """Run once in this process, so that children find kernels compiled."""
    from quantkit.cli import main

    with Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        main(arguments)


if __name__ == "__main__":
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 20240701
    print(json.dumps(fuzz(int(sys.argv[1]), first, lambda said: print(said, file=sys.stderr, flush=True)), indent=1))
