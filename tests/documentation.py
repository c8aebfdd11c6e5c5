"""The code blocks of README and docs, and the folder of tiny files in which they run.

The pages name the same files throughout: HF_DIR and MOE_DIR are checkpoints, model-bf16.gguf and moe-bf16.gguf what
`convert` makes of them, calibration.txt, wiki.txt and code.txt texts, config.json that of DeepSeek V3. chat.jsonl holds
conversations and corpus.jsonl texts, both with categories, hellaswag.txt tasks.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import checkpoints
from quantkit import archs, cli
from tests.recipe.configs import DEEPSEEK_V3

ROOT = Path(__file__).parents[1]
# Multiples of 256, so that every type fits; a context for the default chunks of 512 tokens.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 1024}
TEXT = "A recipe names a type for every tensor. A rule is a pattern and a type; the first match decides. "
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
OTHER_PROGRAMS = frozenset(
    ("pip", "python", "python3", "make", "git", "hf", "docker", "cmp", ".", "dask", "ssh", "sbatch", "helm", "export")
)
_NOT_RUN = re.compile(r"<!-- not run: (?P<why>[^>]+) -->\s*$")
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<body>.*?)^(?P=indent)```[ \t]*$", re.M | re.S
)


@dataclass(frozen=True)
class Command:
    """A command line of a page, and the output that the page shows for it; None where it shows none."""

    words: list[str]
    output: str | None
    stdout: str | None  # where `> FILE` sends the output

    @property
    def is_ours(self) -> bool:
        return self.words[0] == "quantkit"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `not_run` says why it is not run, where a comment before it says so."""

    page: Path
    line: int
    language: str
    body: str
    title: str | None
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[Command]:
        """A `sh` block holds commands alone; in a `console` block they follow a `$ `, and their output follows them."""
        if self.language == "sh":
            return [_command(line) for line in joined(self.body) if shlex.split(line, comments=True)]
        if self.language != "console":
            return []
        found: list[Command] = []
        for part in re.split(r"^\$ ", self.body, flags=re.M)[1:]:
            first, *output = joined(part)
            found.append(_command(first, "\n".join(output) if any(output) else None))
        return found


def _command(line: str, output: str | None = None) -> Command:
    words = shlex.split(line, comments=True)
    if ">" not in words:
        return Command(words, output, None)
    at = words.index(">")
    assert len(words) == at + 2, f"only `COMMAND > FILE` is understood: {line}"
    return Command(words[:at], output, words[at + 1])


def joined(text: str) -> list[str]:
    """Lines, those that end in a backslash with the next."""
    return text.replace("\\\n", " ").rstrip("\n").split("\n")


def pages() -> list[Path]:
    """Everything that users read: README, the other pages of the root, and docs."""
    return [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")),
            *sorted((ROOT / "docs").rglob("*.md"))]  # fmt: skip


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        why = _NOT_RUN.search(text[: found.start()])
        title = re.search(r'title="([^"]+)"', found["options"])
        line = text.count("\n", 0, found.start()) + 1
        body = textwrap.dedent(found["body"])
        yield Block(page, line, found["language"], body, title and title[1], why and why["why"])


def make_world(folder: Path) -> None:
    """Write the files that the pages name."""
    dense = archs.get("llama").EXAMPLE | SIZES
    moe = archs.get("qwen3moe").EXAMPLE | SIZES | {"moe_intermediate_size": 256}
    for name, model, config in (("HF_DIR", "model", dense), ("MOE_DIR", "moe", moe)):
        checkpoints.write(folder / name, config, "BF16")
        (folder / name / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        convert = ["convert", str(folder / name), str(folder / f"{model}-bf16.gguf"), "--json"]
        assert cli.main(convert) == 0, convert
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3), encoding="utf-8")
    for name in ("calibration.txt", "wiki.txt", "code.txt"):
        (folder / name).write_text(f"{name}. {TEXT * 25}", encoding="utf-8")
    said = [{"role": "user", "content": "What is a rule?"}, {"role": "assistant", "content": "A pattern and a type."}]
    for name, content in (("chat.jsonl", {"messages": said}), ("corpus.jsonl", {"text": TEXT * 12})):
        lines = [json.dumps(content | {"category": category}) for category in ("prose", "code") * 4]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    task = "A rule is\n1\na day.\na pattern and a type.\nit.\nnone.\n"
    (folder / "hellaswag.txt").write_text(task * 3, encoding="utf-8")
