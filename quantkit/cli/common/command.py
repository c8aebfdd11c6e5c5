"""The parser of a command: the habits of llama.cpp's command line that typer does not know, and help in sections.

    -fa             an option whose value may be missing: `-fa`, `-fa on` and `-fa 0` are all valid
    -muge           unknown, so an error: never `-m uge`, as clusters of short options would have it. `-t8` stays
    -no-fa          the same as -fa off
    -w 0            the same as --no-warmup
    -ger 1          an option without effect, with the value that llama-bench wants
    --flash_attn    the same as --flash-attn
    --chat TEXT     the same as --chat --file TEXT, for a file that is no GGUF file
    -m FILE         the model, which is also an argument (`takes_model`); -hf ORG/NAME one on the Hub

Options are listed in sections by their `rich_help_panel`.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from quantkit import progress
from quantkit.cli.common import without_effect

# Options whose value may be missing, and the value that they then have.
_BARE = {"-fa": "on", "--flash-attn": "on"} | dict.fromkeys(
    ("-fmoe", "--fused-moe", "-rtr", "--run-time-repack", "-mmp", "--mmap", "-thp", "--transparent-huge-pages"), "1"
)

# Other spellings of an option with a value, where a command has that option.
_SPELLINGS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("-no-fa",): ("--flash-attn", "off"),
    ("--no-flash-attn",): ("--flash-attn", "off"),
} | {
    (flag, value): (option,)
    for flag in ("-w", "--warmup")
    for value, option in (("0", "--no-warmup"), ("1", "--warmup"))
}

_METAVARS = {"int": "N", "float": "X", "Path": "FILE", "path": "FILE", "str": "TEXT"}  # for an option without one
_TYPES = re.compile(r"<(?:list\[)?(int|float|Path|path|str)(?: range)?\]?>")

ModelOption = Annotated[
    Path | None, typer.Option("--model", "-m", metavar="FILE", help="Same as the argument.", show_default=False)
]
ModelOptions = Annotated[
    list[Path] | None,
    typer.Option(
        "--model", "-m", metavar="FILE,…", help="Same as the argument. Repeatable.", show_default=False
    ),
]  # fmt: skip
HubRepository = Annotated[
    str | None,
    typer.Option(
        "--hf-repo",
        "-hfr",
        "-hf",
        metavar="ORG/NAME",
        help="Same as hf://ORG/NAME as the argument; -hff FILE names a file in it.",
        show_default=False,
    ),
]
HubFile = Annotated[str | None, typer.Option("--hf-file", "-hff", metavar="FILE", hidden=True)]


class Command(TyperCommand):
    """A command that reads its words as llama.cpp's tools do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line."""
        if not ctx.resilient_parsing and not ctx.ignore_unknown_options:
            args = list(_normalized(args, _takes_value(self.get_params(ctx)), ctx.fail))
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and error.param.envvar == progress.VARIABLE:  # a flag cannot be wrong otherwise
                raise typer.BadParameter(progress.wrong_value()) from None
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by section; those without one come first."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is None:
                continue
            if param.param_type_name == "argument":
                sections["Arguments"].append((record[0].partition(" <")[0], record[1]))
                continue
            section = sections.setdefault(getattr(param, "rich_help_panel", None) or "Options", [])
            section.append((_TYPES.sub(lambda found: _METAVARS[found[1]], record[0]), record[1]))
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def _takes_value(params: Sequence[Any]) -> dict[str, bool]:
    """The options of a command: whether each takes a value."""
    options = [param for param in params if param.param_type_name == "option"]
    return {
        name: not (param.is_flag or param.count)
        for param in options
        for name in (*param.opts, *param.secondary_opts)
    }  # fmt: skip


def _normalized(words: Sequence[str], options: dict[str, bool], fail: Callable[[str], Any]) -> Iterator[str]:
    """The words as typer's parser reads them. `options`: whether each takes a value. `fail` raises a usage error."""
    rest = iter(range(len(words)))
    for i in rest:
        word = words[i]
        if word == "--":
            yield from words[i:]
            return
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
            if word == "--chat" and "--file" in options and words[i + 1 : i + 2] and _is_text(words[i + 1]):
                yield "--file"
                yield words[next(rest)]
        if spelling := _other_spelling(word, words[i + 1 : i + 2], options):
            known, count = spelling
            yield from known
            for _ in range(count - 1):
                next(rest)
            continue
        if re.match(r"-[A-Za-z]\D", word) and word not in options:
            near = difflib.get_close_matches(word, options, n=3)
            fail(f"No such option: {word}" + (f" (Possible options: {', '.join(sorted(near))})" if near else ""))
        yield word
        following = words[i + 1] if i + 1 < len(words) else ""
        if not options.get(word):
            if word in without_effect.SWITCHES and re.fullmatch("[01](,[01])*", following) and word in options:
                next(rest)
            continue
        if word in _BARE and not _is_switch(following):
            yield _BARE[word]
        elif i + 1 < len(words):
            yield words[next(rest)]


def _other_spelling(
    word: str, following: Sequence[str], options: dict[str, bool]
) -> tuple[tuple[str, ...], int] | None:
    """What `_SPELLINGS` has for a word, or for it and the next one, with the number of words that it stands for."""
    for words in ((word,), (word, *following)):
        if (known := _SPELLINGS.get(words)) and known[0] in options:
            return known, len(words)
    return None


def _is_text(path: str) -> bool:
    """Whether the word after --chat is a text: a .jsonl file, there or not, or a file that is no GGUF file."""
    if path.endswith(".jsonl"):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) != b"GGUF"
    except OSError:
        return False


def _is_switch(word: str) -> bool:
    """Whether the word after an option of `_BARE` is its value, valid or not: `on`, `0,1`; not a file or an option."""
    return re.fullmatch(r"\w+(,\w+)*", word) is not None and not os.path.exists(word)


def in_sections(**sections: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: list options in sections of the help page: `in_sections(KV_cache=["cache_type_k"])`."""

    def group(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters = dict(signature.parameters)
        for section, names in sections.items():
            for name in names:
                own = parameters[name].annotation
                parameters[name] = parameters[name].replace(annotation=in_section(own, section.replace("_", " ")))
        command.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
        command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return command

    return group


def in_section(annotation: Any, section: str) -> Any:
    """The annotation of an option, listed in a section of the help page."""
    kind, about = get_args(annotation)[:2]
    about = copy.copy(about)
    about.rich_help_panel = section
    return Annotated[kind, about]


def takes_model(name: str = "model", *following: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the argument `name` of a command can also be given with -m FILE; the command gets it as before.

    With -m, the words on the command line are the `following` arguments. A model that is given twice is an error,
    unless both are the same, and so is one that is missing. If the argument is a list, -m is repeatable and takes
    comma-separated files.
    """
    return lambda command: _with_model_option(command, name, following)


def _with_model_option(command: Callable[..., None], name: str, following: Sequence[str]) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    own = signature.parameters[name]
    kind, about = get_args(own.annotation)[:2]
    several = kind != Path
    by_name = inspect.Parameter.KEYWORD_ONLY  # typer passes all by name, and they may then have any order
    option = inspect.Parameter(
        "model_option", by_name, default=None, annotation=ModelOptions if several else ModelOption
    )
    hub = [
        inspect.Parameter("hub_repository", by_name, default=None, annotation=HubRepository),
        inspect.Parameter("hub_file", by_name, default=None, annotation=HubFile),
    ]
    optional = own.replace(default=None, annotation=Annotated[kind | None, about])
    parameters = [
        (optional if parameter is own else parameter).replace(kind=by_name)
        for parameter in signature.parameters.values()
    ]
    at = max(i for i, p in enumerate(parameters) if p.name in (name, *following)) + 1
    parameters[at:at] = [option, *hub]
    metavar = about.metavar or name.upper()

    @functools.wraps(command)
    def run(model_option: Any, hub_repository: str | None, hub_file: str | None, **given: Any) -> None:
        if (fetched := _on_hub(hub_repository, hub_file)) is not None:
            if model_option and not several:
                raise typer.BadParameter(f"the model is given twice: -m {model_option} and -hf; drop one of them")
            model_option = [*(model_option or ()), fetched] if several else fetched
        if several:
            files = [Path(part) for path in model_option or () for part in str(path).split(",")]
            given[name] = [*files, *(path for path in given[name] or () if path not in files)]
        elif model_option is not None:
            _put_first(given, [name, *following], model_option)
        if not given[name]:
            raise typer.BadParameter(
                f"{metavar} is missing: give the file as an argument, with -m FILE or -hf ORG/NAME"
            )
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _on_hub(repository: str | None, file: str | None) -> Path | None:
    """The address that -hf and -hff give; None without them. Bad usage for ORG/NAME:TYPE, which names no file."""
    if repository is None:
        if file is not None:
            raise typer.BadParameter(f"-hff {file} is a file of a repository: add -hf ORG/NAME")
        return None
    name, colon, tag = repository.removeprefix("hf://").partition(":")
    if colon and file is None:
        raise typer.BadParameter(
            f"-hf {repository}: name the file of {tag} with -hff FILE; without :{tag}, the only file is taken, or all "
            "are listed"
        )
    return Path(f"hf://{name}/{file}" if file else f"hf://{name}")


def _put_first(given: dict[str, Any], names: Sequence[str], model: Path) -> None:
    """Make `model` the first of the arguments `names`; the words that were given move to the next ones."""
    words = [given[name] for name in names if given[name] is not None]
    if words and Path(words[0]) == model:
        words = words[1:]
    if len(words) >= len(names):
        text = "" if str(words[0]).endswith(".gguf") else f", or write -f {words[0]} for a text"
        raise typer.BadParameter(f"the model is given twice: -m {model} and {words[0]}; drop one of them{text}")
    for name, value in zip(names, [model, *words, *[None] * len(names)]):
        given[name] = str(value) if value is not None and name != names[0] else value
