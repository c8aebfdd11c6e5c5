"""Check a fitted recipe by measurement: quantize it and its rivals of the same size, and compare KL divergences.

    rivals   the largest file type (a stock mix of llama-quantize) and the best single type, by predicted divergence,
             whose tensors take no more bytes

All have the same importance matrix and the same encoder. Differences are paired by token (`statistics.separate`). The
recipe holds if it has a lower divergence than every rival with 95 % confidence.

Costs can be refined by what was measured: then a recipe is fitted to the refined costs and measured like the first, as
often as is asked for, and the one with the lowest measured divergence stands.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError
from quantkit.evaluate.compare import CompareOptions, compare
from quantkit.evaluate.comparison import Candidate, Comparison
from quantkit.evaluate.models import OnMessage, no_message
from quantkit.evaluate.statistics import Separation, separate
from quantkit.formats.pipeline import Progress
from quantkit.pipelines import api
from quantkit.pipelines.allocate import RecipeFit
from quantkit.pipelines.options import QuantizeOptions
from quantkit.placement.allocation.costs import Costs
from quantkit.placement.allocation.refine import MeasuredFile, refined
from quantkit.recipe import Plan, file_types
from quantkit.recipe.planning.fallback import interleaved_rows
from quantkit.types.base import LLAMA_CPP

if TYPE_CHECKING:
    from distributed import Client

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
class Measured:
    """A recipe that was measured: bits per weight, and predicted and measured divergence in nats per token."""

    bits_per_weight: float
    predicted: float
    kld: float


@dataclass(frozen=True)
class AllocationCheck:
    """The recipe that stands, its comparison with the unquantized model, and a verdict for each rival.

    rounds   the recipes that were measured, in order
    costs    the costs with the factors that explain all measured files
    """

    found: RecipeFit
    comparison: Comparison
    verdicts: tuple[Verdict, ...]
    rounds: tuple[Measured, ...]
    costs: Costs

    @property
    def holds(self) -> bool:
        """Whether the recipe is better than all its rivals."""
        return all(verdict.better for verdict in self.verdicts)

    @property
    def measured(self) -> float:
        """The mean KL divergence of the recipe."""
        return _kld(self.comparison.candidates[1])

    @property
    def predicted(self) -> float:
        """The predicted KL divergence of the recipe."""
        return self.found.cost

    def to_json(self) -> dict[str, Any]:
        """The field `verify` of `recipe fit --json`."""
        rivals = [
            {"name": v.rival, "kld": _kld(c), "better": v.better, "difference": v.separation.difference.value,
             "difference_low": v.separation.difference.low, "difference_high": v.separation.difference.high}
            for v, c in zip(self.verdicts, self.comparison.candidates[2:])
        ]  # fmt: skip
        rounds = [{"bits_per_weight": m.bits_per_weight, "predicted": m.predicted, "kld": m.kld} for m in self.rounds]
        return {"kld": self.measured, "predicted": self.predicted, "holds": self.holds, "rivals": rivals,
                "rounds": rounds, "factors": dict(self.costs.factors)}  # fmt: skip


def _kld(candidate: Candidate) -> float:
    return candidate.divergence.mean_kld.value if candidate.divergence is not None else 0.0


def rivals(source: Path, found: RecipeFit, costs: Costs, options: QuantizeOptions) -> list[Rival]:
    """The rivals of a recipe; fewer than two if nothing is as small."""
    size = found.plan.bytes_after
    stock = [rival for rival in _plans(source, options, pure=False) if rival.plan.bytes_after <= size]
    single = [(cost, rival) for rival in _plans(source, options, pure=True) if rival.plan.bytes_after <= size
              and (cost := costs.predicted(rival.plan.tensors)) is not None]  # fmt: skip
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


def check_allocation(
    source: str | os.PathLike[str],
    found: RecipeFit,
    costs: Costs,
    text: str | os.PathLike[str],
    options: QuantizeOptions | None = None,
    compare_options: CompareOptions | None = None,
    *,
    refit: Callable[[Costs], RecipeFit] | None = None,
    refine: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | bool = False,
    on_chunk: Callable[..., None] | None = None,
    on_message: OnMessage = no_message,
    client: Client | None = None,
) -> AllocationCheck:
    """Quantize a fitted recipe and its rivals, and compare them on a text.

        source           the unquantized model, a GGUF file
        options          importance matrix, effort and threads of the quantization
        refit            fits a recipe to refined costs, with the limits of the first one
        refine           how often that is done, at most: not once more when the recipe does not change
        folder           where the files are written while they are compared; None: the folder for temporary files
        client           the workers of its cluster quantize and compare; `folder` is one that they see too

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
    settings = compare_options or CompareOptions(noise_floor="off")

    def compared(files: list[Path]) -> Comparison:
        return compare(path, files, text, settings, progress=on_chunk, on_message=on_message, client=client)

    with tempfile.TemporaryDirectory(prefix="quantkit-fit-", dir=folder) as name:
        files = _Files(path, Path(name), o, progress, on_message, client)
        comparison = compared([files.fitted(found), *map(files.rival, others)])
        measured = _measured(comparison, [found.plan, *(rival.plan for rival in others)], costs)
        checks = [AllocationCheck(found, comparison, _verdicts(comparison, others), (), refined(costs, measured))]
        while refit is not None and len(checks) <= refine:
            found = refit(checks[-1].costs)
            if _types(found) == _types(checks[-1].found):
                break
            alone = compared([files.fitted(found)])  # the rivals' figures are known
            reference, _, *of_rivals = comparison.candidates
            comparison = replace(comparison, candidates=[reference, alone.candidates[1], *of_rivals])
            measured += _measured(alone, [found.plan], costs)
            checks.append(
                AllocationCheck(found, comparison, _verdicts(comparison, others), (), refined(costs, measured))
            )
    rounds = tuple(Measured(c.found.plan.bits_per_weight, c.predicted, c.measured) for c in checks)
    best = min(checks, key=lambda check: check.measured)
    return replace(best, rounds=rounds, costs=checks[-1].costs)


def _types(found: RecipeFit) -> list[tuple[str, str]]:
    return [(t.name, t.type.name) for t in found.tensors]


def _verdicts(comparison: Comparison, others: list[Rival]) -> tuple[Verdict, ...]:
    klds = [c.divergence.kld for c in comparison.candidates if c.divergence is not None]
    return tuple(Verdict(rival.name, separate(comparison.sample, klds[0], kld)) for rival, kld in zip(others, klds[1:]))


def _measured(comparison: Comparison, plans: list[Plan], costs: Costs) -> list[MeasuredFile]:
    """What the compared files say about costs; those with a type that was not measured say nothing."""
    unrefined, found = replace(costs, factors={}), []
    for plan, candidate in zip(plans, comparison.candidates[1:]):
        predicted = unrefined.by_type(plan.tensors)
        if predicted is not None and candidate.divergence is not None:
            mean = candidate.divergence.mean_kld
            found.append(MeasuredFile(predicted, mean.value, mean.error))
    return found


class _Files:
    """The files that are compared, in a folder. Tensors that come out alike are copied from an earlier file."""

    def __init__(
        self,
        source: Path,
        folder: Path,
        options: QuantizeOptions,
        progress: Progress | bool,
        on_message: OnMessage,
        client: Client | None,
    ):
        self.source, self.folder, self.options = source, folder, options
        self.progress, self.on_message, self.client = progress, on_message, client
        self._fits = 0
        self._last: Path | None = None  # the newest file of a recipe

    def fitted(self, found: RecipeFit) -> Path:
        """The file of a recipe."""
        text = self.folder / "fit.recipe"
        out = self.folder / f"{FITTED}{f'-refined{self._fits}' if self._fits else ''}.gguf"
        text.write_text(str(found.recipe), encoding="utf-8")
        self._quantize(out, found.plan, found.file_type, replace(self.options, recipe=text))
        self._fits, self._last = self._fits + 1, out
        return out

    def rival(self, rival: Rival) -> Path:
        """The file of a rival."""
        out = self.folder / f"{rival.name}.gguf"
        self._quantize(out, rival.plan, rival.file_type, replace(self.options, pure=rival.pure))
        return out

    def _quantize(self, out: Path, plan: Plan, file_type: str, options: QuantizeOptions) -> None:
        self.on_message(f"{out.stem}: {plan.bits_per_weight:.3f} bits per weight")
        reuse = options if self._last is None else replace(options, reuse=self._last)
        api.quantize(self.source, out, file_type, reuse, progress=self.progress, client=self.client)
