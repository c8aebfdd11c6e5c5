"""Write a comparison as one HTML file: tables, plots as inline SVG, verdicts, a model card block, all conditions.

The file is self-contained: no script, no external font or image. It adapts to screens from phones to wide monitors, and
to the system's dark mode. The plots need matplotlib; without it the page says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from quantkit.evaluate.comparison import Comparison
from quantkit.evaluate.conditions import conditions_line
from quantkit.evaluate.layers.tensor_errors import TensorError
from quantkit.evaluate.report.page_plots import SERIES, Series, plot
from quantkit.evaluate.report.plots import MissingPlots
from quantkit.evaluate.report.tables import domain_rows, model_card, table_header, table_rows, verdicts

_LIGHT = ("#2f6db3", "#c9581b", "#2e8450", "#8a4fa3", "#94780a", "#218289", "#c2477d", "#6b6b6b")
_DARK = ("#6fa8e8", "#f0915a", "#69c48b", "#c595dd", "#d9c04c", "#6cc8cf", "#ee8fb8", "#b0b0b0")
_MIN_KLD = 1e-6
_BINS = 40


def _colours(values: Sequence[str]) -> str:
    return ":root{" + "".join(f"--s{i}:{c};" for i, c in enumerate(values)) + "--grid:#8884}"


_STYLE = (
    """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:16px;max-width:1400px;background:#fff;color:#1b1b1b}
h1{font-size:1.4em;line-height:1.25;overflow-wrap:anywhere}h2{font-size:1.1em;margin:1.8em 0 .5em}
h3{font-size:1em;margin:.8em 0 .2em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:4px 8px;text-align:right;vertical-align:baseline;border-bottom:1px solid #ddd}
td{white-space:nowrap}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:#fff}
.figures td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:11em}
small{display:block;font-size:12px;opacity:.7}
.several{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:0 32px}
@media(max-width:760px){.figures thead,.figures .none{display:none}
.figures,.figures tbody{display:block}
.figures tr{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:0 10px;padding:8px 0}
.figures tr{border-bottom:1px solid #8886}
.figures td{border:0;padding:3px 0;text-align:left}
.figures td:first-child{grid-column:1/-1;font-weight:600}
.figures td:not(:first-child)::before{content:attr(data-label);display:block;font-size:12px;opacity:.7}
}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:20px}
figure{margin:0;max-width:600px}figcaption{font-size:14px;font-weight:600;margin-bottom:4px}
svg{width:100%;height:auto;font:12px system-ui,sans-serif;fill:currentColor;stroke-linejoin:round}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;padding:0;list-style:none;font-size:14px}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;padding:12px;background:#8881;border-radius:6px;font-size:13px}
.note{color:#666;font-size:13px}dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;font-size:13px}
dd{margin:0;overflow-wrap:anywhere}
"""
    + _colours(_LIGHT)
    + "".join(f".key.s{i}{{background:var(--s{i})}}" for i in range(SERIES))
    + "@media(prefers-color-scheme:dark){body,th:first-child,td:first-child{background:#161616;color:#e6e6e6}"
    "th,td{border-color:#383838}.note{color:#aaa}" + _colours(_DARK) + "}"
)


def page(comparison: Comparison) -> str:
    """The HTML text of a comparison."""
    name, layers, conditions = comparison.candidates[0].name, comparison.layers, comparison.conditions
    parts = [
        f"<h1>Distance from {escape(name)}: {comparison.positions:,} tokens</h1>",
        _table(table_header(comparison), table_rows(comparison), figures=True),
        '<p class="note">± is one standard error, computed over chunks; for a PPL alone it is computed over tokens, as '
        "llama-perplexity prints it. KLD in nats. These data cannot distinguish models that share a place.</p>",
        _list("Verdicts", verdicts(comparison)),
        _legend([c.name for c in comparison.candidates[1:]]),
        _plots(comparison),
    ]
    parts += _texts(*domain_rows(comparison))
    if layers:
        parts += ["<h2>Tensors that add most error</h2>", f'<div class="several">{_worst(layers)}</div>']
    card = escape(model_card(comparison, conditions_line(conditions)))
    parts += ["<h2>Model card</h2>", f"<pre>{card}</pre>", "<h2>Conditions</h2>"]
    pairs = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in conditions.items())
    parts.append(f"<dl>{pairs}</dl>")
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'  # browsers ask the server for one otherwise
        f"<title>quantkit: distance from {escape(name)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _plots(comparison: Comparison) -> str:
    """The plots, or a sentence if matplotlib is not installed."""
    try:
        return f'<div class="plots">{"".join(_figures(comparison))}</div>'
    except MissingPlots as error:
        return f'<p class="note">{escape(str(error))}</p>'


def _figures(comparison: Comparison) -> list[str]:
    models = [(c, c.paired) for c in comparison.candidates if c.paired is not None]
    sizes = [
        Series(c.name, [c.size_bytes / 2**30], [max(p.figures["kld"].value, _MIN_KLD)], "point",
               [p.figures["kld"].error])
        for c, p in models
    ]  # fmt: skip
    spread, position = [], []
    largest = max((p.largest for _, p in models), default=0.0)
    edges = np.geomspace(_MIN_KLD, max(10 * _MIN_KLD, largest) * 1.01, _BINS + 1)
    for c, p in models:
        counts, _ = np.histogram(np.maximum(p.divergence.kld, _MIN_KLD), edges)
        spread.append(Series(c.name, edges[:-1], 100 * counts / counts.sum(), "step"))
        x = [(part.low + part.high - 1) / 2 for part in p.by_position]
        klds = [part.kld for part in p.by_position]
        position.append(Series(c.name, x, [kld.value for kld in klds], "line", [kld.error for kld in klds]))
    found = [
        _figure("Quality against size (lower left is better)", plot(sizes, "size, GiB", "mean KLD, nats", y_log=True)),
        _figure("Tokens by their KLD", plot(spread, "KLD of a token, nats", "tokens, %", x_log=True)),
        _figure("KLD by position in the chunk", plot(position, "tokens before", "mean KLD, nats", y_log=True)),
    ]
    if comparison.layers:
        series = []
        for model, added in comparison.layers.items():
            blocks = sorted({a.layer for a in added if a.layer is not None})
            sums = [sum(a.error**2 for a in added if a.layer == layer) ** 0.5 for layer in blocks]
            series.append(Series(model, blocks, sums))
        found.append(_figure("Error that each layer adds", plot(series, "layer", "relative error", y_log=True)))
    return found


def _texts(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table per text. The first cell of each row is the name of its text."""
    found = ["<h2>By text</h2>"] if rows else []
    for text, of_text in itertools.groupby(rows, key=lambda row: row[0]):
        found += [f"<h3>{escape(text)}</h3>", _table(header[1:], [row[1:] for row in of_text], figures=True)]
    return found


def _worst(layers: Mapping[str, Sequence[TensorError]]) -> str:
    """A table per model of the tensors that add most error."""
    found = []
    for model, added in layers.items():
        worst = sorted(added, key=lambda a: -a.error)[:20]
        cells = [[a.name, a.type, f"{a.error:.3g}", f"{100 * a.share:.1f}"] for a in worst]
        header = ["tensor", "type", "relative error of its block", "share of all, %"]
        found.append(f"<section><h3>{escape(model)}</h3>{_table(header, cells)}</section>")
    return "".join(found)


def _figure(title: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>"


def _legend(names: Sequence[str]) -> str:
    items = (f'<li><span class="key s{i % SERIES}"></span>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f"<h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], figures: bool = False) -> str:
    """A table. With `figures` each row becomes a card on screens that are too narrow for its columns."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, header, row))}</tr>" for row in rows)
    kind = ' class="figures"' if figures else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(label: str, text: str) -> str:
    """A cell with the error below the value, which keeps columns narrow."""
    value, sign, error = text.partition(" ± ")
    below = f" <small>± {escape(error)}</small>" if sign else ""
    none = ' class="none"' if text == "-" else ""
    return f'<td{none} data-label="{escape(label)}">{escape(value)}{below}</td>'
