"""Check a fitted recipe by measurement: quantize it and its rivals of the same size, and compare KL divergences.

    rivals   the largest file type (a stock mix of llama-quantize) and the best single type, by predicted divergence,
             whose tensors take no more bytes

All have the same importance matrix and the same encoder. Differences are paired by token (`statistics.separate`). The
recipe holds if it has a lower divergence than every rival with 95 % confidence.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.evaluate.compare import Candidate, CompareOptions, Comparison, compare
from quantkit.evaluate.models import OnMessage, no_message
from quantkit.evaluate.statistics import Separation, separate
from quantkit.formats.pipeline import Progress
from quantkit.pipelines import api
from quantkit.pipelines.allocate import RecipeFit
from quantkit.pipelines.options import QuantizeOptions
from quantkit.placement.allocation.costs import Costs
from quantkit.recipe import Plan, file_types
from quantkit.recipe.planning.fallback import interleaved_rows
from quantkit.types.base import LLAMA_CPP

FITTED = "fit"


@dataclass(frozen=True)
class Rival:
    """A file that the recipe must beat: TYPE of its quantize command, whether with --pure, its plan."""

    file_type: str
    pure: bool
    plan: Plan

    @property
    def name(self) -> str:
        """The name of its file, without extension."""
        return f"{self.file_type}-pure" if self.pure else self.file_type


@dataclass(frozen=True)
class Verdict:
    """Whether the recipe has less divergence than a rival: difference is the rival's minus the recipe's."""

    rival: str
    separation: Separation

    @property
    def better(self) -> bool:
        """Whether it has less, with 95 % confidence."""
        return self.separation.separated and self.separation.difference.value > 0


@dataclass(frozen=True)
class AllocationCheck:
    """The comparison with the unquantized model, and a verdict for each rival."""

    comparison: Comparison
    verdicts: tuple[Verdict, ...]
    predicted: float

    @property
    def holds(self) -> bool:
        """Whether the recipe is better than all its rivals."""
        return all(verdict.better for verdict in self.verdicts)

    @property
    def measured(self) -> float:
        """The mean KL divergence of the recipe."""
        return _kld(self.comparison.candidates[1])

    def to_json(self) -> dict[str, Any]:
        """The field `verify` of `recipe fit --json`."""
        rivals = [
            {"name": v.rival, "kld": _kld(c), "better": v.better, "difference": v.separation.difference.value,
             "difference_low": v.separation.difference.low, "difference_high": v.separation.difference.high}
            for v, c in zip(self.verdicts, self.comparison.candidates[2:])
        ]  # fmt: skip
        return {"kld": self.measured, "predicted": self.predicted, "holds": self.holds, "rivals": rivals}


def _kld(candidate: Candidate) -> float:
    return candidate.divergence.mean_kld.value if candidate.divergence is not None else 0.0


def rivals(source: Path, found: RecipeFit, costs: Costs, options: QuantizeOptions) -> list[Rival]:
    """The rivals of a recipe; fewer than two if nothing is as small."""
    size = found.plan.bytes_after
    stock = [rival for rival in _plans(source, options, pure=False) if rival.plan.bytes_after <= size]
    single = [(cost, rival) for rival in _plans(source, options, pure=True) if rival.plan.bytes_after <= size
              and (cost := _predicted(rival.plan, costs)) is not None]  # fmt: skip
    best = [max(stock, key=lambda rival: rival.plan.bytes_after)] if stock else []
    return best + ([min(single, key=lambda pair: pair[0])[1]] if single else [])


def _plans(source: Path, options: QuantizeOptions, pure: bool) -> Iterator[Rival]:
    """The plans of all file types that models are quantized to."""
    for kind in file_types():
        if kind.default is None or kind.is_float or interleaved_rows(kind.default) > 1 or "_bn" in kind.default.name:
            continue
        if (
            kind.default.readers == (LLAMA_CPP,) or kind.default.name == "q1_0_g128"
        ):  # for weights that are made for them
            continue
        if kind.name.startswith("Q4_0_") or (pure and kind.default.name.upper() != kind.name):
            continue
        try:
            job = api.prepare_quantize(source, kind.name, replace(options, pure=pure))
        except QuantkitError:  # a type that this model's rows or the importance matrix do not allow
            continue
        yield Rival(kind.name, pure, job.plan)


def _predicted(plan: Plan, costs: Costs) -> float | None:
    """The predicted divergence of a plan; None if a type was not measured."""
    total = 0.0
    for t in plan.tensors:
        if t.wanted is None:
            continue
        cost = costs.cost(t.name, t.shape, t.type, t.source)
        if cost is None:
            return None
        total += cost
    return total


def check_allocation(
    source: str | os.PathLike[str],
    found: RecipeFit,
    costs: Costs,
    text: str | os.PathLike[str],
    options: QuantizeOptions | None = None,
    compare_options: CompareOptions | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | bool = False,
    on_chunk: Callable[..., None] | None = None,
    on_message: OnMessage = no_message,
) -> AllocationCheck:
    """Quantize a fitted recipe and its rivals, and compare them on a text.

        source           the unquantized model, a GGUF file
        options          importance matrix, effort and threads of the quantization
        folder           where the files are written while they are compared; None: the folder for temporary files

    QuantkitError if no file type and no single type is small enough to be a rival, or the source is not a GGUF file.
    """
    path, o = Path(source), options or QuantizeOptions()
    if path.is_dir() or path.suffix == ".json":
        raise QuantkitError(f"{path}: --verify compares with a GGUF file; quantkit convert makes one of a checkpoint")
    others = rivals(path, found, costs, o)
    if not others:
        raise QuantkitError(
            f"no file type and no single type with costs is as small as {found.plan.bits_per_weight:.3f} bits per "
            "weight, so there is nothing to compare with; omit --verify"
        )
    with tempfile.TemporaryDirectory(prefix="quantkit-fit-", dir=folder) as name:
        files = _quantized(path, found, others, o, Path(name), progress, on_message)
        settings = compare_options or CompareOptions(noise_floor="off")
        comparison = compare(path, files, text, settings, progress=on_chunk, on_message=on_message)
    klds = [c.divergence.kld for c in comparison.candidates if c.divergence is not None]
    verdicts = tuple(
        Verdict(rival.name, separate(comparison.sample, klds[0], kld)) for rival, kld in zip(others, klds[1:])
    )
    return AllocationCheck(comparison, verdicts, found.cost)


def _quantized(
    source: Path,
    found: RecipeFit,
    others: list[Rival],
    options: QuantizeOptions,
    folder: Path,
    progress: Progress | bool,
    on_message: OnMessage,
) -> list[Path]:
    """The files of the recipe and of its rivals. Tensors that come out alike are copied from the first file."""
    text, first = folder / "fit.recipe", folder / f"{FITTED}.gguf"
    text.write_text(str(found.recipe), encoding="utf-8")
    on_message(f"{FITTED}: {found.plan.bits_per_weight:.3f} bits per weight")
    api.quantize(source, first, found.file_type, replace(options, recipe=text), progress=progress)
    paths = [first]
    for rival in others:
        out = folder / f"{rival.name}.gguf"
        on_message(f"{rival.name}: {rival.plan.bits_per_weight:.3f} bits per weight")
        api.quantize(source, out, rival.file_type, replace(options, pure=rival.pure, reuse=first), progress=progress)
        paths.append(out)
    return paths
