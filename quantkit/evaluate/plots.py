"""One picture of a comparison: divergence against size, and how divergence is spread over the tokens.

matplotlib is an extra; `MissingPlots` says how to get it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.evaluate.compare import Candidate

_COLOURS = ("#2f6db3", "#d1662b", "#3a9157", "#8a4fa3", "#b8a02c", "#4aa3a8", "#c2477d", "#6b6b6b")
_LEAST_KLD = 1e-6  # nats; less is the rounding of a base file


class MissingPlots(QuantkitError):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPlots("no picture without matplotlib: pip install 'quantkit[plots]'")


def plot(path: str | os.PathLike[str], candidates: Sequence[Candidate], title: str) -> None:
    """Write a picture (PNG, SVG or PDF by the name's ending) of the candidates that have a divergence."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [c for c in candidates if c.divergence is not None]
    if not measured:
        raise QuantkitError(f"{path}: nothing to draw, no model was compared with the reference")
    figure = Figure(figsize=(12.5, 5.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _sizes(left, measured)
    _spread(right, measured)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _sizes(axes: Any, measured: Sequence[Candidate]) -> None:
    """Mean KLD, with its error, against GiB: lower left is better."""
    for index, c in enumerate(measured):
        assert c.divergence is not None
        kld, x = c.divergence.mean_kld, c.size_bytes / 2**30
        y = max(kld.value, _LEAST_KLD)
        colour = _COLOURS[index % len(_COLOURS)]
        axes.errorbar(x, y, yerr=min(kld.error, 0.95 * y), fmt="o", color=colour, capsize=3, markersize=7)
        axes.annotate(
            f"{c.path.stem}\n{c.bits_per_weight:.2f} bpw", (x, y), xytext=(9, 5), textcoords="offset points",
            fontsize=8.5, color=colour,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(x=0.25, y=0.2)
    axes.set_xlabel("size, GiB")
    axes.set_ylabel("mean KL divergence, nats")
    axes.set_title("Quality against size (lower left is better)", fontsize=10)
    _quiet(axes)


def _spread(axes: Any, measured: Sequence[Candidate]) -> None:
    """Share of tokens whose KLD exceeds x; marks at the median and at 1 %."""
    lowest = 1.0
    for index, c in enumerate(measured):
        assert c.divergence is not None
        ordered = np.maximum(c.divergence.sorted_kld(), _LEAST_KLD)
        share = 1 - np.arange(ordered.size) / ordered.size
        colour = _COLOURS[index % len(_COLOURS)]
        axes.step(ordered, 100 * share, where="post", color=colour, linewidth=1.6, label=c.path.stem)
        lowest = min(lowest, float(share[-1]))
    for share, label in ((50, "median"), (1, "worst 1 %")):
        axes.axhline(share, color="#999999", linewidth=0.8, linestyle=":")
        axes.annotate(label, (0.005, share), xycoords=("axes fraction", "data"), xytext=(2, 2),
                      textcoords="offset points", fontsize=8, color="#777777")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(80 * lowest, 130)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("KL divergence of a token, nats")
    axes.set_ylabel("tokens above it, %")
    axes.set_title("Spread over the tokens (further left is better)", fontsize=10)
    axes.legend(fontsize=8.5, frameon=False, loc="lower left")
    _quiet(axes)


def _quiet(axes: Any) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
