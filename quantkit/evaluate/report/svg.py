"""Small plots as SVG text, 420 pixels wide: lines, steps and points with axes; no script and no external resource.

Colours are classes of the page's style sheet (html_page.py): `s0` … `s7` for series, and `grid`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 42
SERIES = 8


@dataclass(frozen=True)
class Series:
    """A data series: x and y of equal length, drawn as "line", "step" or "point" (with error bars, if given)."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    kind: str = "line"
    error: Sequence[float] | np.ndarray | None = None


def plot(series: Sequence[Series], x_label: str, y_label: str, *, x_log: bool = False, y_log: bool = False) -> str:
    """An <svg> element with the series. Values that a logarithmic axis cannot show are skipped."""
    shown = [_visible(s, x_log, y_log) for s in series]
    xs = np.concatenate([x for x, _, _ in shown] or [np.zeros(0)])
    ys = np.concatenate([y for _, y, _ in shown] or [np.zeros(0)])
    if not xs.size:
        return '<p class="note">no data</p>'
    across = _Axis(xs, x_log, _LEFT, WIDTH - _RIGHT)
    up = _Axis(ys, y_log, HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} against {escape(x_label)}">'
    ]
    for value, text in across.ticks():
        x = across(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{text}</text>')
    for value, text in up.ticks():
        y = up(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for i, (s, (x, y, error)) in enumerate(zip(series, shown)):
        parts += _drawn(s, i % SERIES, across(x), up(y), [up(y - error), up(y + error)] if error is not None else None)
    parts.append(f'<text x="{(WIDTH + _LEFT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(
        f'<text transform="translate(12 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join([*parts, "</svg>"])


def _visible(s: Series, x_log: bool, y_log: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    x, y = np.asarray(s.x, float), np.asarray(s.y, float)
    keep = np.isfinite(x) & np.isfinite(y) & ((x > 0) | (not x_log)) & ((y > 0) | (not y_log))
    error = None
    if s.error is not None:
        error = np.nan_to_num(np.asarray(s.error, float)[keep])
        error = np.minimum(error, 0.9 * y[keep]) if y_log else error
    return x[keep], y[keep], error


def _drawn(s: Series, colour: int, x: np.ndarray, y: np.ndarray, ends: list[np.ndarray] | None) -> list[str]:
    if s.kind == "point":
        bars = [
            f'<line class="s{colour}" x1="{a:.1f}" x2="{a:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            for a, low, high in zip(x, *(ends or ()))
        ] if ends else []  # fmt: skip
        title = f"<title>{escape(s.name)}</title>"
        return bars + [
            f'<circle class="s{colour}" cx="{a:.1f}" cy="{b:.1f}" r="5">{title}</circle>' for a, b in zip(x, y)
        ]
    points = [f"{a:.1f},{b:.1f}" for a, b in zip(x, y)]
    if s.kind == "step":
        points = [p for a, b, c in zip(x, y, [*x[1:], x[-1]]) for p in (f"{a:.1f},{b:.1f}", f"{c:.1f},{b:.1f}")]
    return [f'<polyline class="s{colour}" points="{" ".join(points)}"><title>{escape(s.name)}</title></polyline>']


class _Axis:
    """Maps values to pixels between `start` and `stop`, and gives ticks."""

    def __init__(self, values: np.ndarray, log: bool, start: float, stop: float):
        self._log = log
        v = np.log10(values) if log else values
        low, high = float(v.min()), float(v.max())
        margin = 0.06 * (high - low) or 0.5 * (1 if log else abs(high) or 1)
        self._low, self._high, self._start, self._stop = low - margin, high + margin, start, stop

    def __call__(self, value: np.ndarray | float) -> np.ndarray:
        v = np.log10(np.maximum(value, 1e-300)) if self._log else np.asarray(value)
        return self._start + (v - self._low) / (self._high - self._low) * (self._stop - self._start)

    def ticks(self) -> list[tuple[float, str]]:
        """Values and labels of the ticks."""
        span = self._high - self._low
        if self._log and span >= 1.3:
            every = max(1, math.ceil(span / 6))
            powers = range(math.ceil(self._low), math.floor(self._high) + 1)
            return [(10.0**p, f"{10.0**p:g}") for p in powers if p % every == 0]
        low, high = (10**self._low, 10**self._high) if self._log else (self._low, self._high)
        step = 10 ** math.floor(math.log10((high - low) / 4))
        step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 6)
        return [(step * k, f"{step * k:.6g}") for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
