"""KL divergence in the memory of a GPU and of the CPU: recipes of `recipe fit` against one type for each.

    python benchmarks/bench_fit_pools.py --train TEXT --calibrate TEXT --text TEXT… [--pairs Q6_0/IQ4_K,…]
                                         [--types IQ2_K,…] [--no-second-moments] [--chunks 8] [--folder DIR] [--save]

The model is the mixture of experts of benchmarks/trained.py, trained on --train for some minutes; the folder keeps it.
It is placed as users place such models, `-ngl 99 -ot exps=CPU`: attention on a GPU, experts on the CPU. (Planning needs
no GPU.) A pair is a file with one type for everything but the experts, and one for the experts. The memory that it
takes on each device, cache included, is what `recipe fit` gets as --vram and --ram. Each recipe is compared with the
best pair that fits the same memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records, trained
from benchmarks.bench_fit import Bench, add_options
from benchmarks.records import Column, Table
from quantkit.pipelines.allocate import FitOptions, fit_recipe
from quantkit.pipelines.planning import open_model
from quantkit.placement.budget import GIB

TABLE = Table(
    "fit_pools",
    "How much lower is the divergence in the same memory of a GPU and of the CPU?",
    (
        Column("name", "types"),
        Column("gpu", "GPU, MiB", ".2f"),
        Column("cpu", "CPU, MiB", ".2f"),
        Column("predicted", "predicted KLD", ".5f"),
        Column("seen", "KLD, text of the costs", ".5f"),
        Column("error", "predicted / that", ".3f"),
        Column("measured", "KLD, other texts", ".5f"),
        Column("best", "best pair in this memory"),
        Column("ratio", "KLD / best pair", ".3f"),
    ),
    "A mixture of 16 experts (4 used) in each of 4 layers, trained for minutes, with attention on a GPU and experts on "
    "the CPU. A pair is one type for all but the experts, and one for the experts. Mean KL divergence from the f16 "
    "model, exact numerics; other texts were used neither for training nor for costs.",
)
PLACEMENT = "-ngl 99 -ot exps=CPU"
PAIRS = "Q8_0/IQ2_K,Q8_0/IQ3_K,Q6_0/IQ3_K,Q6_0/IQ4_KS,IQ5_K/IQ4_K,Q6_0/IQ5_K,Q8_0/IQ6_K"
TYPES = "IQ2_KS,IQ2_K,IQ3_KS,IQ3_K,IQ4_KS,IQ4_K,IQ5_KS,IQ5_K,IQ6_K,Q6_0,Q8_0"


class Pools(Bench):
    """Makes pairs and recipes, and measures them."""

    def pair(self, name: str) -> dict[str, int]:
        """A file with one type for the GPU's matrices and one for the experts; its bytes on each device."""
        gpu, experts = name.split("/")
        return self.made(name, f"_exps\\.={experts.lower()}\n.*={gpu.lower()}\n", gpu)

    def fit_memory(self, name: str, memory: dict[str, int]) -> None:
        """The file of `recipe fit` for the memory that a pair takes."""
        chosen = FitOptions(
            vram=[memory["CUDA0"] / GIB], ram=memory["CPU"] / GIB, fit_margin=0, placement=PLACEMENT,
            types=self.options.types.split(","), ctx_size=trained.CONTEXT, allow_requantize=True,
        )  # fmt: skip
        found = fit_recipe(open_model(self.model), self.costs, chosen)
        self.made(f"fit as {name}", str(found.recipe), found.file_type)

    def made(self, name: str, rules: str, file_type: str) -> dict[str, int]:
        """Make and measure a file; its bytes on each device."""
        recipe, out = self.options.folder / "pools.recipe", self.options.folder / "x.gguf"
        recipe.write_text(rules, encoding="utf-8")
        planned = quantkit.plan(self.model, file_type, quantkit.PlanOptions(
            recipe=recipe, imatrix=self.matrix, placement=PLACEMENT, vram=[1], ram=1, fit_margin=0,
            ctx_size=trained.CONTEXT,
        ))  # fmt: skip
        assert planned.devices is not None
        quantkit.quantize(self.model, out, file_type, replace(self.quantizing, recipe=recipe))
        self.add(name, out, self.costs.predicted(planned.plan.tensors))
        memory = {load.device: load.total for load in planned.devices.loads}
        self.rows[-1] |= {"gpu": memory["CUDA0"] / 2**20, "cpu": memory["CPU"] / 2**20, "bytes": memory}
        return memory

    def compare(self) -> None:
        """For each recipe, the pair with the least divergence among those that fit its memory."""
        pairs = [row for row in self.rows if not row["name"].startswith("fit")]
        for row in self.rows:
            row["best"], row["ratio"] = "", None
            if row in pairs:
                continue
            limit = next(pair["bytes"] for pair in pairs if row["name"] == f"fit as {pair['name']}")
            fitting = [pair for pair in pairs if all(pair["bytes"][d] <= limit[d] for d in limit)]
            best = min(fitting, key=lambda pair: float(pair["measured"]))
            row["best"], row["ratio"] = best["name"], row["measured"] / best["measured"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--pairs", default=PAIRS)
    parser.add_argument("--types", default=TYPES, help="that recipes choose from")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-fit-moe"))
    add_options(parser)
    options = parser.parse_args()
    options.model = "moe"
    bench = Pools(options)
    memory = {name: bench.pair(name) for name in options.pairs.split(",")}
    for name, taken in memory.items():
        bench.fit_memory(name, taken)
    bench.compare()
    for row in bench.rows:
        if row["ratio"] is not None:
            print(f"{row['name']}: {row['measured']:.4f}, {row['ratio']:.3f} of {row['best']}", flush=True)
    records.save(TABLE, bench.rows, options, bench.rows)
    print(json.dumps({"bench": TABLE.name, "rows": bench.rows}))


if __name__ == "__main__":
    main()
