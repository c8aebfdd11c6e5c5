"""The pages say what the program does: generated ones are fresh, code blocks run, the site builds without warnings."""

from __future__ import annotations

import contextlib
import doctest
import fnmatch
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit import cli, recipe
from quantkit.cli import _docs, demo
from quantkit.formats import gguf
from tests.documentation import OTHER_PROGRAMS, ROOT, Block, Command, blocks, make_world, pages

JSON_PAGE = ROOT / "docs" / "reference" / "json.md"
CODE = ("sh", "console", "python", "pycon")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the typer that pyproject.toml pins needs Python 3.11")
@pytest.mark.parametrize("name", list(_docs.PAGES))
def test_generated_pages_are_fresh(name: str) -> None:
    path = _docs.DOCS / name
    assert path.exists(), f"{path} is missing: run python -m quantkit.cli._docs"
    text = path.read_text(encoding="utf-8")
    if (first := text.partition("\n")[0] + "\n") != _docs.header():
        pytest.fail(
            f"{name} was generated with another typer, {first.strip()}: install the one that pyproject.toml pins"
        )
    assert text == _docs.PAGES[name](), f"{path} is stale: run python -m quantkit.cli._docs and commit the result"


def test_the_table_of_the_readme_is_what_the_demo_prints() -> None:
    assert _docs.README.read_text(encoding="utf-8") == _docs.readme(), "stale: run make readme, or _docs, and commit"


def test_figures_are_kept_of_a_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results as the demo leaves them give the README's lines; what is not printed is not kept."""
    for name in ("README", "FIGURES", "PICTURE"):
        monkeypatch.setattr(_docs, name, tmp_path / name)
    table = "<!-- output of `make demo`, updated by `make readme` -->\n```\nold\n```\n"
    (tmp_path / "README").write_text(f"# q\n{table}more\n```\nx\n```\n")
    figures = json.loads((_docs.DOCS / "demo.json").read_text(encoding="utf-8"))
    figures["models"][0]["path"] = "/home/me/bf16.gguf"
    figures["conditions"]["text"] = "/home/me/test.txt"
    (tmp_path / "results.json").write_text(json.dumps(figures))
    (tmp_path / "comparison.png").write_bytes(b"picture")
    _docs.store_figures(tmp_path / "results.json")
    assert "/home/me" not in (tmp_path / "FIGURES").read_text()
    assert (tmp_path / "PICTURE").read_bytes() == b"picture"
    assert _docs.readme() == f"# q\n{table.replace('old', demo.summary(figures))}more\n```\nx\n```\n"


def test_sizes_of_the_readme_are_those_of_its_model(smollm2_q4_1: Path) -> None:
    """Of the columns that no machine changes."""
    file, options = gguf.open(smollm2_q4_1), recipe.Options(allow_requantize=True)
    rows = re.findall(r"^(\S+)\.gguf +([\d.]+) +([\d.]+) ", _docs.README.read_text(encoding="utf-8"), re.MULTILINE)
    mix = demo.recipe_for(smollm2_q4_1)
    assert [name for name, *_ in rows] == ["bf16", "q8_0", mix, f"{mix}-repacked", "q4_0"]
    for name, gib, bits in rows:
        mine = recipe.find(mix) if name.startswith(mix) else None
        kind = "Q8_0" if mine else name.upper()
        plan = recipe.plan(file.tensors.values(), kind, mine, metadata=file.metadata, options=options)
        assert abs(float(bits) - plan.bits_per_weight) <= 0.0051, name
        assert 0 <= float(gib) * 2**30 - plan.bytes_after < 8 << 20, name  # metadata, most of it the tokenizer


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link[^>]*stylesheet)[^>]*(?:src|href)="?(https?:[^" >]+)', page.read_text()
        )
        assert not loaded, f"{page.name} loads {loaded[0]}: the site must work offline"


def test_lists_in_docstrings_become_markdown() -> None:
    """A list of names, with continued lines, becomes a list; other indented text and plain text stay."""
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = "    path     the file\n    a, b     two names,\n             one meaning"
    text = f"Open a file.\n\n{names}\n\n    x = f(1)    code\n"
    made = "Open a file.\n\n- `path`: the file\n- `a`, `b`: two names, one meaning\n\n    x = f(1)    code"
    assert module.markdown(text) == made
    assert module.markdown("a sentence  of\ntwo lines") == "a sentence  of\ntwo lines"


def test_pictures_are_fresh(tmp_path: Path) -> None:
    source = ROOT / "docs" / "figures"
    shutil.copy(source / "draw.py", tmp_path)
    subprocess.run([sys.executable, str(tmp_path / "draw.py")], check=True)
    for made in tmp_path.glob("*.svg"):
        kept = (source / made.name).read_text(encoding="utf-8")
        assert made.read_text(encoding="utf-8") == kept, f"{made.name} is stale: run python docs/figures/draw.py"


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: quantkit\.(\w+)$", text, re.M))
    assert documented == set(quantkit.__all__)


# ----------------------------------------------------------------------------------------------------- command lines


def documented() -> list[Any]:
    return [pytest.param(block, id=str(block)) for page in pages() for block in blocks(page) if block.commands()]


@pytest.mark.parametrize("block", documented())
def test_commands_are_understood(block: Block) -> None:
    for command in block.commands():
        if command.is_ours:
            parse(command.words[1:])
        else:
            assert command.words[0] in OTHER_PROGRAMS, f"{block}: what is {command.words[0]}?"


def parse(args: list[str]) -> None:
    """Fail where the command line does not take these arguments; nothing is run."""
    command, *rest = cli.as_command(args)
    if command in ("--help", "--version", "--install-completion"):
        return
    assert command in cli.commands(), f"no such command: {command}"
    path = [command]
    if rest and rest[0] in cli.subcommands(command):
        path.append(rest.pop(0))
    with contextlib.redirect_stderr(io.StringIO()):
        cli.parser(*path).make_context(" ".join(path), rest)


def test_every_block_has_a_language() -> None:
    known = {*CODE, "text", "json"}
    generated = [_docs.DOCS / name for name in _docs.PAGES]
    wrong = [
        str(block)
        for page in pages()
        if page not in generated
        for block in blocks(page)
        if block.language not in known and not block.body.startswith("file ")
    ]  # the demo's table is generated
    assert wrong == []


def test_the_tutorial_is_the_demo() -> None:
    """The tutorial explains the commands that `make demo` runs, to the letter."""
    folder = Path("demo")
    texts = folder / "calibration.txt", folder / "test.txt"
    shown = [["recipe", "show", "small-dense"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.cli.demo.recipe_for", lambda model: "small-dense")
        steps = [step.argv for step in demo.demo_steps(Path("smollm2.gguf"), folder, *texts, picture=False)]
    found = [command.words[1:] for block in blocks(ROOT / "docs" / "tutorial.md") for command in block.commands()
             if command.is_ours]  # fmt: skip
    assert sorted(steps + shown) == sorted(args for args in found if args[0] != "generate")


# ----------------------------------------------------------------------------------------------------- running pages


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


@pytest.fixture
def folder(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the world for one page, as the working directory."""
    shutil.copytree(world, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


def runnable() -> list[Any]:
    found = [page for page in pages() if any(b.language in CODE and not b.not_run for b in blocks(page))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in found]


@pytest.mark.parametrize("page", runnable())
def test_pages_run(page: Path, folder: Path) -> None:
    """A page's blocks, in order, in one folder; titled blocks are files that its commands read."""
    found = list(blocks(page))
    for block in found:
        if block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        if block.not_run:
            continue
        if block.language == "python" and not block.title:
            exec(compile(block.body, str(block), "exec"), names)
        elif block.language == "pycon":
            run_doctest(block, names)
        for command in block.commands():
            if command.is_ours:
                check_output(block, command, run(command))


def run(command: Command) -> str:
    """What a command prints; in this process, so that kernels are compiled once."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        status = cli.main(command.words[1:])
    assert status == 0, f"{' '.join(command.words)}\n{complained.getvalue()}"
    if command.stdout:
        Path(command.stdout).write_text(said.getvalue(), encoding="utf-8")
    return said.getvalue()


def check_output(block: Block, command: Command, printed: str) -> None:
    """The output that a page shows is the one that is printed; a line `…` stands for any lines."""
    if command.output is None:
        return
    parts = [re.escape(part.strip("\n")) for part in re.split(r"^…$", command.output, flags=re.M)]
    found = re.fullmatch(r".*?".join(parts), re.sub(r"[ \t]+$", "", printed, flags=re.M).strip("\n"), re.S)
    assert found, f"{block}: {' '.join(command.words)} prints\n{printed}"


def run_doctest(block: Block, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.body, names, str(block), str(block.page), block.line)
    failures = io.StringIO()
    doctest.DocTestRunner().run(test, out=failures.write, clear_globs=False)
    assert not failures.getvalue(), failures.getvalue()


# ------------------------------------------------------------------------------------------------------ JSON schemas

Path_ = tuple[str, ...]  # ("models", "[]", "ppl")


def fields(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Paths of all fields of a JSON document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*at, key)
            yield from fields(inner, (*at, key))
    elif isinstance(value, list):
        for inner in value:
            yield from fields(inner, (*at, "[]"))


def tables() -> list[tuple[list[Command], list[str], str]]:
    """Of docs/reference/json.md: the commands before a table, and the fields that the table names."""
    text = JSON_PAGE.read_text(encoding="utf-8")
    commands: list[Command] = []
    found: list[tuple[list[Command], list[str], str]] = []
    for part in re.finditer(r"^```sh\n(.*?)^```$|((?:^\|[^\n]*\n)+)", text, re.M | re.S):
        if part[1] is not None:
            commands = Block(JSON_PAGE, 0, "sh", part[1], None, None).commands()
        elif commands:
            rows = part[2].splitlines()[2:]
            names = [name for row in rows for name in re.findall(r"`[^`]+`\??", row.split(" | ")[0])]
            words = commands[-1].words
            found.append((commands, names, "recipe fit" if words[1:3] == ["recipe", "fit"] else words[1]))
            commands = []
    return found


def covers(pattern: Path_, path: Path_) -> bool:
    if pattern[-1] == "**":
        return len(path) >= len(pattern) and covers(pattern[:-1], path[: len(pattern) - 1])
    return len(pattern) == len(path) and all(fnmatch.fnmatchcase(p, q) for q, p in zip(pattern, path))


def split_field(name: str) -> Path_:
    """`a.b[].c` as a path."""
    return tuple(name.replace("[]", ".[]").lstrip(".").split("."))


_PLANS = ("quantize", "recipe fit")  # their documents are plans with further fields


def test_documented_json_is_what_is_printed(folder: Path) -> None:
    """Every field that a command prints is in its table, and the reverse; `schema` comes first."""
    assert len(tables()) > 15
    before: dict[str, list[str]] = {}
    for commands, names, title in tables():
        for command in commands:
            printed = run(command)
        before[title] = names = [*before.get("plan", []), *names] if title in _PLANS else names
        record = json.loads(printed)
        assert next(iter(record)) == "schema"
        assert f"| `schema` | `{record['schema']}` |" in JSON_PAGE.read_text(encoding="utf-8"), title
        document = set(fields(record))
        patterns = {split_field(name.strip("`?")): name.endswith("?") for name in names}
        missing = [".".join(path) for path in document if not any(covers(pattern, path) for pattern in patterns)]
        assert not missing, f"{title}: {JSON_PAGE.name} lacks {sorted(set(missing))[:20]}"
        for pattern, optional in patterns.items():
            if not optional:
                assert any(covers(pattern, path) for path in document), f"{title}: no field {'.'.join(pattern)}"
