"""`quantkit upload`: files and a model card to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common.dialect import knows_dialect
from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.options import Json
from quantkit.cli.common.output import print_json
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError


@shows_progress
@knows_dialect
def upload(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE… hf://ORG/NAME",
            help="Files, and the repository: hf://ORG/NAME, or hf://ORG/NAME@BRANCH. Of a split GGUF file any shard "
            "stands for all.",
            show_default=False,
        ),
    ],
    card: Annotated[
        bool, typer.Option("--card", help="Write a model card, README.md, unless the repository has one.")
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Results of `quantkit compare -o FILE` for the card.", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Picture of `quantkit compare --plot FILE` for the card; it is uploaded too.",
            show_default=False,
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private if it is created.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the model card and upload nothing.")] = False,
    json: Json = False,
) -> None:
    """Upload files to the Hugging Face Hub, with a model card.

    The repository is created if it does not exist. All files appear in one commit. The card has a table of tensors by
    type, the command that reproduces them, sizes, hashes, and the results of a comparison. Log in with `hf auth login`,
    or set HF_TOKEN.
    """
    from quantkit.hub import address
    from quantkit.hub import upload as hub

    if len(words) < 2 or not address.is_address(words[-1]):
        raise OptionError("write the files first and the repository last: quantkit upload FILE… hf://ORG/NAME")
    target = address.parse(words[-1])
    if (results or picture) and not card:
        raise OptionError("--results and --picture are parts of a model card: add --card")
    paths = _with_shards([Path(word) for word in words[:-1]], [picture] if picture else [])
    text = _card(target.name, paths, results, picture) if card else None
    if dry_run:
        print(text or "", end="")
        on_message(f"nothing is uploaded: {len(paths)} files, {sum(path.stat().st_size for path in paths)} bytes")
        return
    done = hub.upload(paths, target, card=text, private=private, create_pr=create_pr)
    if json:
        record = {"url": done.url, "pull_request": done.pull_request, "files": done.files}
        print_json("quantkit.upload/1", record)
        return
    for name in done.files:
        print(f"uploaded {name}")
    print(done.pull_request or done.url)


def _with_shards(paths: list[Path], others: list[Path]) -> list[Path]:
    """The files with all shards of the sets that they are in, each once."""
    from quantkit.formats import gguf

    found: dict[Path, None] = {}
    for path in paths:
        found |= dict.fromkeys(gguf.open(path).paths if path.suffix == ".gguf" else [path])
    for path in [*found, *others]:
        if not path.is_file():
            raise OptionError(f"{path}: no such file")
    return list(found | dict.fromkeys(others))


def _card(title: str, paths: list[Path], results: Path | None, picture: Path | None) -> str:
    from quantkit.cli.common.repository_card import read_results, repository_card
    from quantkit.formats import gguf
    from quantkit.hub.upload import hashes

    files: dict[Path, gguf.GGUF] = {}
    for path in paths:
        if path.suffix == ".gguf":
            opened = gguf.open(path)
            files.setdefault(opened.paths[0], opened)
    found = None if results is None else read_results(results)
    return repository_card(title, list(files.values()), hashes(paths), found, picture.name if picture else None)
