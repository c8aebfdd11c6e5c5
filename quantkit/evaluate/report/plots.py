"""Plots with matplotlib: a comparison, the speed of a sweep over depth, an importance matrix, costs over sizes.

matplotlib is an extra; `MissingPlots` tells how to install it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.errors import QuantkitError, printable
from quantkit.evaluate.bench import MeasuredSpeed
from quantkit.evaluate.comparison import Candidate, Comparison
from quantkit.evaluate.divergence import Divergence
from quantkit.evaluate.imatrix.coverage import Coverage
from quantkit.evaluate.statistics import Interval, at_share
from quantkit.formats.atomic import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from quantkit.pipelines.allocate import CurvePoint

_COLOURS = ("#2f6db3", "#d1662b", "#3a9157", "#8a4fa3", "#b8a02c", "#4aa3a8", "#c2477d", "#6b6b6b")
_BESIDE = (((6, 2), "left"), ((6, -9), "left"), ((-6, 2), "right"), ((-6, -9), "right"))  # a point, in points
_MIN_KLD = 1e-6  # nats; smaller values are rounding errors of the base file


class MissingPlots(QuantkitError):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raise MissingPlots if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPlots("no plot without matplotlib: pip install 'quantkit[plots]'")


def require_plot_file(path: Path) -> None:
    """Raise QuantkitError, before any work, if no plot can be written to a file of this name."""
    require_matplotlib()
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise QuantkitError(f"{path}: a plot's file name must end in .png, .svg or .pdf")


@contextlib.contextmanager
def reproducible(salt: str, style: Mapping[Any, Any] | None = None) -> Iterator[None]:
    """A context in which matplotlib gives the same bytes for the same figure, drawn in a style.

    `salt` makes the ids of an SVG: those of another plot on the same page need another one.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": salt, **(style or {})}):
        yield


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure in the format of the name's extension. The file appears when it is complete."""
    form = Path(path).suffix[1:].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    with writing(path) as file, reproducible("quantkit"):
        figure.savefig(file, format=form, metadata=undated)


def plot_comparison(path: str | os.PathLike[str], comparison: Comparison, by_position: bool = False) -> None:
    """Plot a comparison to a PNG, SVG or PDF file: KLD over size, and the distribution of KLD over tokens.

    With `by_position` also KLD over position, and with several texts or categories KLD by these.

    Raises QuantkitError if no model was compared with the reference.
    """
    require_matplotlib()
    points = _points(comparison.candidates)
    if not points:
        raise QuantkitError(f"{path}: nothing to draw, no model was compared with the reference")
    text = Path(str(comparison.conditions.get("text", "the texts"))).name
    title = f"Divergence from {comparison.candidates[0].name}: {comparison.positions} tokens of {text}"
    more = [_draw_positions] if by_position else []
    more += [_draw_domains] if len(comparison.domains) > 1 else []
    figure = _figure(title, 10.4 if more else 5.4)
    axes = figure.subplots(2 if more else 1, 2, width_ratios=(1, 1.15), squeeze=False)
    _draw_sizes(axes[0, 0], points)
    _draw_spread(axes[0, 1], points)
    below = list(axes[1]) if more else []
    if len(more) == 1:
        for unused in below:
            unused.remove()
        below = [figure.add_subplot(2, 1, 2)]
    for draw, panel in zip(more, below):
        draw(panel, comparison)
    _save(figure, path)


def _draw_positions(axes: Axes, comparison: Comparison) -> None:
    """Mean KLD by the number of tokens before a token, with its 95 % interval."""
    compared = [(c, c.paired.by_position) for c in comparison.candidates if c.paired is not None]
    for i, (c, parts) in enumerate(compared):
        x = [(part.low + part.high - 1) / 2 for part in parts]
        _draw_intervals(axes, x, [part.kld for part in parts], i, _plain(c.name), "o-")
    if len({part.high - part.low for _, parts in compared for part in parts[:-1]}) > 1:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens before")
    axes.set_ylabel("mean KL divergence, nats")
    axes.set_title("By position, with 95 % intervals", fontsize=10)
    axes.legend(fontsize=8.5, frameon=False)
    _style_axes(axes)


def _draw_domains(axes: Axes, comparison: Comparison) -> None:
    """Mean KLD of each text or category, with its 95 % interval."""
    compared = [(c, c.paired) for c in comparison.candidates if c.paired is not None]
    for i, (c, paired) in enumerate(compared):
        x = [at + 0.6 * ((i + 0.5) / len(compared) - 0.5) for at in range(len(comparison.domains))]
        klds = [paired.of(domain).figures["kld"] for domain in comparison.domains]
        _draw_intervals(axes, x, klds, i, _plain(c.name), "o")
    names = [_plain(domain.name) for domain in comparison.domains]
    axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 4 else 0, fontsize=8.5)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel("mean KL divergence, nats")
    axes.set_title("By text, with 95 % intervals", fontsize=10)
    axes.legend(fontsize=8.5, frameon=False)
    _style_axes(axes)


def _draw_intervals(
    axes: Axes, x: Sequence[float], figures: Sequence[Interval], number: int, label: str, style: str
) -> None:  # fmt: skip
    """Figures with their intervals, on a logarithmic axis. An end that the data do not give is not drawn."""
    values = np.maximum([f.value for f in figures], _MIN_KLD)
    low = np.nan_to_num(values - np.maximum([f.low for f in figures], 0.05 * values))
    high = np.nan_to_num(np.array([f.high for f in figures]) - values)
    axes.errorbar(x, values, yerr=np.maximum([low, high], 0), fmt=style, color=_COLOURS[number % len(_COLOURS)],
                  capsize=3, markersize=4, label=label)  # fmt: skip
    axes.set_yscale("log")


def plot_sweep(
    path: str | os.PathLike[str], rows: Sequence[tuple[MeasuredSpeed, MeasuredSpeed]], memory: float, title: str
) -> None:
    """Plot a sweep: tokens/s of prompts and of generation over the number of tokens in the cache.

    `memory` is the memory bandwidth in bytes/s, which bounds generation.
    """
    require_matplotlib()
    figure = _figure(title, 4.6)
    depth = [prompt.n_kv for prompt, _ in rows]
    for axes, side, name in zip(figure.subplots(1, 2), zip(*rows), ("Prompt", "Generation")):
        values = [speed.tokens_per_second for speed in side]
        axes.errorbar(depth, values, yerr=[s.deviation for s in side], color=_COLOURS[0], marker="o", markersize=4,
                      capsize=3, label=f"{side[0].tokens} tokens, measured")  # fmt: skip
        if side[0].bytes_read:
            bound = [memory / speed.bytes_read for speed in side]
            axes.plot(depth, bound, color="#999999", linestyle=":", label="memory bandwidth bound")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens in the cache before (N_KV)")
        axes.set_ylabel("tokens/s")
        axes.set_title(name, fontsize=10)
        axes.legend(fontsize=8.5, frameon=False, loc="lower left")
        _style_axes(axes)
    _save(figure, path)


def plot_importance(path: str | os.PathLike[str], rows: Sequence[Coverage], title: str) -> None:
    """Plot an importance matrix: tokens by expert and layer, or the effective columns of a model without experts; and
    the similarity of neighbouring layers."""
    require_matplotlib()
    figure = _figure(title, 5.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    stacked = [row for row in rows if len(row.counts) > 1 and row.layer is not None]
    if stacked:
        _draw_experts(figure, left, stacked)
    else:
        _draw_lines(left, rows, lambda row: 100 * row.effective_columns)
        left.set_ylabel("effective columns, %")
        left.set_title("Columns (fewer: the matrix matters more to a quantizer)", fontsize=10)
    _draw_lines(right, rows, lambda row: row.similarity)
    right.set_ylabel("cosine with the layer before")
    right.set_title("Similarity of neighbouring layers", fontsize=10)
    _save(figure, path)


def plot_costs(
    path: str | os.PathLike[str],
    curve: Sequence[CurvePoint],
    others: Mapping[str, Sequence[CurvePoint]],
    title: str,
    measured: bool = False,
) -> None:
    """Plot KL divergence over bits per weight: allocations as a line, `others` as points by what they are.

    `measured`: the costs of the points are measured divergences, not predicted ones.

    QuantkitError if no cost is above 0, which the axis has no place for.
    """
    require_matplotlib()
    points = [point for point in curve if point.cost > 0]
    if not points:
        raise QuantkitError(f"{path}: all costs are 0, so there is no curve to plot; omit --curve")
    figure = _figure(title, 5.4)
    axes = figure.subplots()
    axes.plot([p.bits_per_weight for p in points], [p.cost for p in points], color=_COLOURS[0], marker=".",
              label="types allocated by recipe fit")  # fmt: skip
    labelled = []
    for (name, group), colour in zip(others.items(), _COLOURS[1:]):
        shown = [point for point in group if point.cost > 0]
        axes.scatter([p.bits_per_weight for p in shown], [p.cost for p in shown], color=colour, label=name, s=22)
        labelled += [(point, colour) for point in shown]
    axes.set_yscale("log")
    axes.set_xlabel("bits per weight")
    axes.set_ylabel(f"{'measured' if measured else 'predicted'} KL divergence, nats")
    axes.legend(fontsize=8.5, frameon=False)
    _style_axes(axes)
    _label(figure, axes, labelled)
    _save(figure, path)


def _label(figure: Figure, axes: Axes, points: Sequence[tuple[CurvePoint, str]]) -> None:
    """Write each point's label beside it, where it hides no other label and no point if it can."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # which lays the axes out
    places = axes.transData.transform([(point.bits_per_weight, point.cost) for point, _ in points])
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in places]
    for point, colour in points:
        for attempt, (offset, aligned) in enumerate((*_BESIDE, _BESIDE[0])):
            text = axes.annotate(_plain(point.label), (point.bits_per_weight, point.cost), textcoords="offset points",
                                 xytext=offset, ha=aligned, fontsize=8, color=colour)  # fmt: skip
            box = text.get_window_extent()
            if attempt == len(_BESIDE) or not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        taken.append(box)


def _draw_experts(figure: Figure, axes: Axes, rows: Sequence[Coverage]) -> None:
    """Tokens of each expert in each layer, relative to an even share; of one weight, since all see the same tokens."""
    from matplotlib.ticker import MaxNLocator

    kind = rows[0].kind
    chosen = sorted((row for row in rows if row.kind == kind), key=lambda row: row.layer or 0)
    counts = np.full((max(row.layer or 0 for row in chosen) + 1, max(len(row.counts) for row in chosen)), np.nan)
    for row in chosen:
        counts[row.layer or 0, : len(row.counts)] = row.counts / max(1e-9, row.counts.mean())
    shown = np.log2(np.maximum(counts, 2.0**-6))
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-6, vmax=6, origin="lower")
    bar = figure.colorbar(image, ax=axes, ticks=[-6, -3, 0, 3, 6])
    bar.ax.set_yticklabels(["1/64 or less", "1/8", "even", "x 8", "x 64"], fontsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title(f"Tokens of each expert, {kind}", fontsize=10)


def _draw_lines(axes: Axes, rows: Sequence[Coverage], value: Callable[[Coverage], float | None]) -> None:
    """A line for each class of tensors, over the layers."""
    from matplotlib.ticker import MaxNLocator

    lines: dict[tuple[tuple[int, float], ...], list[str]] = {}  # weights with the same input have the same line
    for kind in dict.fromkeys(row.kind for row in rows):
        points = [(row.layer, y) for row in rows if row.kind == kind and row.layer is not None and (y := value(row))]
        if points:
            lines.setdefault(tuple(sorted((x, round(y, 6)) for x, y in points)), []).append(kind)
    for i, (found, kinds) in enumerate(lines.items()):
        style = ("-", "--", ":")[i // len(_COLOURS) % 3]
        axes.plot(*zip(*found), style, color=_COLOURS[i % len(_COLOURS)], marker=".", label=", ".join(kinds))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    if axes.lines:
        axes.legend(fontsize=7.5, frameon=False)
    _style_axes(axes)


def _figure(title: str, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_plain(title), fontsize=11)
    return figure


def _plain(text: str) -> str:
    """Text that matplotlib draws literally: dollar signs escaped, no control characters, no surrogates."""
    return printable(text).replace("$", r"\$")


@dataclass
class _Point:
    """Candidates with equal size and KLD, such as a file and its repacked form, drawn as one point."""

    names: list[str]
    size: float  # GiB
    bits: float
    divergence: Divergence
    colour: str

    @property
    def kld(self) -> float:
        return max(self.divergence.mean_kld.value, _MIN_KLD)

    def coincides(self, size: float, divergence: Divergence) -> bool:
        kld = max(divergence.mean_kld.value, _MIN_KLD)
        return abs(size / self.size - 1) < 0.005 and abs(math.log(kld / self.kld)) < 0.02


def _points(candidates: Sequence[Candidate]) -> list[_Point]:
    found: list[_Point] = []
    for c in candidates:
        if c.divergence is None:
            continue
        size = c.size_bytes / 2**30
        same = next((p for p in found if p.coincides(size, c.divergence)), None)
        if same is None:
            colour = _COLOURS[len(found) % len(_COLOURS)]
            found.append(_Point([_plain(c.name)], size, c.bits_per_weight, c.divergence, colour))
        else:
            same.names.append(_plain(c.name))
    return found


def _draw_sizes(axes: Axes, points: Sequence[_Point]) -> None:
    """Mean KLD, with its error, against GiB: lower left is better."""
    middle = (min(p.size for p in points) + max(p.size for p in points)) / 2
    for p in points:
        error = min(p.divergence.mean_kld.error, 0.95 * p.kld)
        axes.errorbar(p.size, p.kld, yerr=error, fmt="o", color=p.colour, capsize=3, markersize=7)
        side = 1 if p.size <= middle else -1  # labels are on the inner side
        axes.annotate(
            "\n".join([*p.names, f"{p.bits:.2f} bpw, KLD {p.kld:.2g}"]), (p.size, p.kld), textcoords="offset points",
            xytext=(10 * side, 0), ha="left" if side > 0 else "right", va="center", fontsize=8.5, color=p.colour,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(x=0.2, y=0.2)
    axes.set_xlabel("size, GiB")
    axes.set_ylabel("mean KL divergence, nats")
    axes.set_title("Quality against size (lower left is better)", fontsize=10)
    _style_axes(axes)


def _draw_spread(axes: Axes, points: Sequence[_Point]) -> None:
    """Share of tokens whose KLD exceeds x; lines at the median and at 1 %."""
    leftmost = rightmost = 1.0
    positions = min(len(p.divergence) for p in points)
    for p in points:
        ordered = np.maximum(p.divergence.sorted_kld(), _MIN_KLD)
        share = 1 - np.arange(ordered.size) / ordered.size
        axes.step(ordered, 100 * share, where="post", color=p.colour, linewidth=1.6, label=", ".join(p.names))
        leftmost = min(leftmost, at_share(ordered, 0.02))
        rightmost = max(rightmost, float(ordered[-1]))
    for height, label in ((50, "median"), (1, "worst 1 %")):
        axes.axhline(height, color="#999999", linewidth=0.8, linestyle=":")
        axes.annotate(label, (0.005, height), xycoords=("axes fraction", "data"), xytext=(2, 2),
                      textcoords="offset points", fontsize=8, color="#777777")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(leftmost, 1.5 * rightmost)
    axes.set_ylim(80 / positions, 130)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("KL divergence of a token, nats")
    axes.set_ylabel("tokens above it, %")
    axes.set_title("Spread over the tokens (further left is better)", fontsize=10)
    axes.legend(fontsize=8.5, frameon=False, loc="lower left")
    _style_axes(axes)


def _style_axes(axes: Axes) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
