"""Small plots for the HTML report: lines, steps and points with axes, drawn by matplotlib as SVG text.

The text holds no script and no external resource, and the same data give the same text. Colours are the page's, so that
they follow its light and dark modes: `var(--s0)` … `var(--s7)` for series, `var(--grid)`, and the colour of its text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.evaluate.report.plots import reproducible, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = 8  # colours
_WIDTH, _HEIGHT = 420, 280  # pixels
_DECADES = 1.3  # a logarithmic axis over less has round numbers as ticks, not powers of ten

# Colours that matplotlib writes, and what the page has instead. Nothing else is drawn in them.
_SERIES_COLOURS = tuple(f"#fe01{i:02x}" for i in range(SERIES))
_TEXT, _GRID = "#fe0200", "#fe0201"
_IN_PAGE = {colour: f"var(--s{i})" for i, colour in enumerate(_SERIES_COLOURS)}
_IN_PAGE |= {_TEXT: "currentColor", _GRID: "var(--grid)"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 12, "text.parse_math": False, "text.color": _TEXT, "axes.labelcolor": _TEXT,
    "axes.edgecolor": _GRID, "xtick.color": _GRID, "ytick.color": _GRID, "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT, "grid.color": _GRID,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """A data series: x and y of equal length, drawn as "line", "step" or "point"; with error bars, if given."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    kind: str = "line"
    error: Sequence[float] | np.ndarray | None = None


def plot(series: Sequence[Series], x_label: str, y_label: str, *, x_log: bool = False, y_log: bool = False) -> str:
    """An <svg> element with the series. Values that a logarithmic axis cannot show are skipped.

    Raises MissingPlots if matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    shown = [_visible(s, x_log, y_log) for s in series]
    if not any(x.size for x, _, _ in shown):
        return '<p class="note">no data</p>'
    with reproducible(f"{y_label} {x_label}", _STYLE):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72, layout="constrained")
        axes = figure.subplots()
        for i, (s, values) in enumerate(zip(series, shown)):
            _draw(axes, i, s.kind, *values)
        axes.set_xscale("log" if x_log else "linear")
        axes.set_yscale("log" if y_log else "linear")
        _set_ticks(axes.xaxis, x_log, np.concatenate([x for x, _, _ in shown]))
        _set_ticks(axes.yaxis, y_log, np.concatenate([y for _, y, _ in shown]))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(True, which="major", linewidth=0.8, clip_on=False)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return _for_page(text.getvalue(), [s.name for s in series], f"{y_label} against {x_label}")


def _visible(s: Series, x_log: bool, y_log: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    x, y = np.asarray(s.x, float), np.asarray(s.y, float)
    keep = np.isfinite(x) & np.isfinite(y) & ((x > 0) | (not x_log)) & ((y > 0) | (not y_log))
    error = None
    if s.error is not None:
        error = np.nan_to_num(np.asarray(s.error, float)[keep])
        error = np.minimum(error, 0.9 * y[keep]) if y_log else error
    return x[keep], y[keep], error


def _draw(axes: Axes, number: int, kind: str, x: np.ndarray, y: np.ndarray, error: np.ndarray | None) -> None:
    """A series, without clipping: the axes have room for all of it. Its group is named series-NUMBER."""
    colour: dict[str, Any] = {"color": _SERIES_COLOURS[number % SERIES], "clip_on": False}
    if error is not None:
        axes.errorbar(x, y, yerr=error, fmt="none", ecolor=colour["color"], capsize=3, clip_on=False)
    if kind == "point":
        (line,) = axes.plot(x, y, "o", markersize=9, **colour)
    else:
        (line,) = axes.plot(x, y, linewidth=1.8, drawstyle="steps-post" if kind == "step" else "default", **colour)
    line.set_gid(f"series-{number}")


def _set_ticks(axis: Any, is_log: bool, values: np.ndarray) -> None:
    """Few ticks, with plain numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    few: Any = MaxNLocator(5, steps=[1, 2, 5, 10])
    if is_log:
        axis.set_minor_locator(NullLocator())
        if np.log10(values.max() / values.min()) >= _DECADES:
            few = LogLocator(numticks=7)
    axis.set_major_locator(few)
    axis.set_major_formatter(lambda value, _: f"{value:.6g}")


def _for_page(text: str, names: Sequence[str], label: str) -> str:
    """The <svg> element of a file, with the page's colours and fonts; each series has its name as a tooltip."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(
        r"<svg[^>]*>", f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">', text
    )
    text = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", text, flags=re.DOTALL
    )
    for number, name in enumerate(names):
        colour = f"s{number % SERIES}"
        text = text.replace(f'<g id="series-{number}">', f'<g class="{colour}"><title>{escape(name)}</title>')
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # several plots are in one page
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, of_page in _IN_PAGE.items():
        text = text.replace(colour, of_page)
    return re.sub(r"\s*\n\s*", "\n", text)
