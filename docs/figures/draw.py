"""The pictures of the documentation: `python docs/figures/draw.py` writes them as SVG beside this file.

Boxes and arrows on a grid of pixels. SVG is drawn by every browser and by GitHub, with nothing loaded from elsewhere.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
TEAL, GRAY, GOLD = ("#e0f2f1", "#00796b"), ("#f3f4f6", "#6b7280"), ("#fff8e1", "#b7791f")


class Picture:
    """An SVG under construction, `width` by `height` pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = width, height
        self.title = title
        self.parts: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, title: str, lines: str = "", colors: tuple[str, str] = TEAL) -> None:
        """A rounded box with a bold title and lines of text, separated by "|"."""
        fill, edge = colors
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{edge}"/>')
        rows = [line for line in lines.split("|") if line]
        first = y + (h - 17 * len(rows)) / 2 + 5
        self._text(x + w / 2, first, title, "t")
        for i, line in enumerate(rows):
            self._text(x + w / 2, first + 17 * (i + 1), line)

    def note(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        self._text(x, y, text, "n", anchor)

    def arrow(self, *points: tuple[int, int], dashed: bool = False) -> None:
        """A line through the points, with a head at the last one."""
        path = "M" + " L".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<path d="{path}" class="a"{dash}/>')

    def frame(self, x: int, y: int, w: int, h: int, label: str) -> None:
        """A dashed frame around a part that repeats."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="10" class="f"/>')
        self._text(x + 12, y + 20, label, "n", "start")

    def _text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        style = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{style} text-anchor="{anchor}">{escape(text)}</text>')

    def save(self, name: str) -> None:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img">\n<title>{escape(self.title)}</title>\n'
            "<style>text{font:13px system-ui,sans-serif;fill:#1f2937}.t{font-weight:600;font-size:14px}"
            ".n{font-style:italic;fill:#4b5563}.a{fill:none;stroke:#374151;stroke-width:1.4;marker-end:url(#h)}"
            ".f{fill:none;stroke:#9ca3af;stroke-dasharray:6 4}</style>\n"
            '<defs><marker id="h" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="#374151"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="#ffffff" rx="8"/>\n'
        )
        text = head + "\n".join(self.parts) + "\n</svg>\n"
        (HERE / f"{name}.svg").write_text(text, encoding="utf-8")


def packages() -> None:
    """The packages, as `tests/test_imports.py` checks them."""
    p = Picture(780, 840, "The packages of quantkit; imports point downwards")
    rows = [
        [("cli", "one file per command")],
        [("serve", "an OpenAI-compatible server")],
        [("evaluate", "importance matrix, perplexity, KL divergence, comparison, benchmarks")],
        [("pipelines", "convert, export, quantize, repack,|verify, resume"),
         ("runtime", "model, blocks, KV cache, decode plans,|kernels, several devices")],
        [("recipe", "rules, mixes, plan, lint"), ("placement", "tensor to device, fit, memory, speed")],
        [("formats", "GGUF, safetensors,|imatrix, KLD"), ("hub", "the Hugging Face|Hub"),
         ("cluster", "dask.|distributed"),
         ("archs", "one file per|architecture"),
         ("tokenizers", "read, write,|encode"),
         ("vision", "one file|per tower")],
        [("repack", "row interleaving and back")],
        [("types", "one file per type: byte map, encode, decode")],
        [("codegen", "numba kernels and their disk cache, IR builder, SIMD intrinsics, native functions")],
        [("inputs", "checks of arguments, JSON and|regular expressions from outside"),
         ("progress", "the progress bar")],
        [("errors", "the exceptions")],
    ]  # fmt: skip
    for i, row in enumerate(rows):
        width = (740 - 12 * (len(row) - 1)) // len(row)
        for j, (name, lines) in enumerate(row):
            below = ("codegen", "inputs", "progress", "errors")
            colors = GOLD if name in ("recipe", "placement") else GRAY if name in below else TEAL
            p.box(20 + j * (width + 12), 16 + i * 72, width, 62, name, lines, colors)
    p.note(
        390,
        825,
        "Imports point downwards. In a row hub, archs import formats, tokenizers and vision both, placement recipe.",
    )
    p.save("packages")


def quantize() -> None:
    p = Picture(780, 420, "A tensor through quantize")
    p.box(20, 30, 170, 70, "source", "GGUF or checkpoint,|mapped, read-only", GRAY)
    p.box(220, 30, 160, 70, "formats", "a piece of rows, 2 MiB|as exact float32")
    p.box(410, 30, 160, 70, "types", "encode_rows: search|for codes and scales")
    p.box(600, 30, 160, 70, "repack", "interleave rows,|if the plan says so")
    p.arrow((190, 65), (220, 65))
    p.arrow((380, 65), (410, 65))
    p.arrow((570, 65), (600, 65))
    p.box(220, 160, 160, 70, "recipe", "rules, mix, shape:|a type and a reason", GOLD)
    p.box(410, 160, 160, 70, "imatrix", "importance of|each column", GOLD)
    p.arrow((300, 160), (430, 100), dashed=True)
    p.arrow((490, 160), (490, 100), dashed=True)
    p.note(110, 200, "decided before a byte is read")
    p.box(600, 160, 160, 70, "provenance", "hash of source and|result, encoder version")
    p.arrow((680, 100), (680, 160))
    p.box(370, 300, 390, 70, "OUT.gguf.partial-job", "each piece goes to its place, from several threads;|"
          "the journal names a tensor after its bytes are synced")  # fmt: skip
    p.arrow((680, 230), (680, 300))
    p.box(20, 300, 240, 70, "OUT.gguf", "complete, or not there at all", GRAY)
    p.arrow((370, 335), (260, 335))
    p.note(315, 326, "os.replace")
    p.note(390, 405, "Threads take pieces; memory does not grow with the model. A killed job resumes from its journal.")
    p.save("quantize")


def token() -> None:
    p = Picture(780, 480, "A token through the runtime")
    p.box(20, 30, 120, 56, "tokenizers", "text to ids", GRAY)
    p.box(170, 30, 150, 56, "embedding", "decode one row")
    p.arrow((140, 58), (170, 58))
    p.frame(20, 110, 740, 210, "")
    p.note(748, 130, "each layer", "end")
    p.box(40, 145, 90, 56, "norm")
    p.box(155, 145, 130, 56, "Q, K, V", "products, RoPE")
    p.box(310, 145, 130, 56, "KV cache", "store the row", GOLD)
    p.box(465, 145, 130, 56, "attention", "online softmax")
    p.box(620, 145, 120, 56, "output", "+ residual")
    for a, b in ((130, 155), (285, 310), (440, 465), (595, 620)):
        p.arrow((a, 173), (b, 173))
    p.box(40, 245, 90, 56, "norm")
    p.box(155, 245, 130, 56, "router", "top-k experts")
    p.box(310, 245, 130, 56, "gate, up", "activation")
    p.box(465, 245, 130, 56, "down")
    p.box(620, 245, 120, 56, "sum", "+ residual")
    for a, b in ((130, 155), (285, 310), (440, 465), (595, 620)):
        p.arrow((a, 273), (b, 273))
    p.arrow((245, 86), (245, 100), (85, 100), (85, 145))
    p.arrow((680, 201), (680, 222), (85, 222), (85, 245))
    p.note(220, 239, "dense layers have no router")
    p.box(380, 345, 150, 56, "norm, output", "logits")
    p.arrow((680, 301), (680, 373), (530, 373))
    p.box(180, 345, 150, 56, "sampling", "next id", GRAY)
    p.arrow((380, 373), (330, 373))
    p.arrow((180, 373), (10, 373), (10, 16), (245, 16), (245, 30))
    p.note(
        390, 432, "Fast numerics: the model is one decode plan, a list of native functions. A thread team executes it"
    )
    p.note(
        390, 452, "with a barrier between dependent ops. Products read packed weights; nothing is decoded to memory."
    )
    p.save("token")


if __name__ == "__main__":
    packages()
    quantize()
    token()
