"""Upload files and a model card to a repository on the Hub, in one commit.

    upload([Path("m-Q4_K.gguf")], parse("hf://ORG/NAME"), card="# …", private=True)

A repository that does not exist is created. The contents of large files are sent first, one file after another, and the
commit makes all of them visible at once: an upload that is interrupted changes nothing, and what was sent before is not
sent again. A model card that is there already is not replaced, except in a pull request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.errors import OptionError
from quantkit.hub.address import Address
from quantkit.hub.client import HubError, file_chunks, hub_errors, retried
from quantkit.progress import ProgressBar

CARD = "README.md"


@dataclass(frozen=True)
class Uploaded:
    """The result of `upload`: the commit's URL, that of the pull request if there is one, the names of the files."""

    url: str
    pull_request: str | None
    files: list[str]


def hashes(paths: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of files by name, as the Hub will show them."""
    sizes = {path: path.stat().st_size for path in paths}
    found, done = dict[str, str](), 0
    with ProgressBar("hashing", sum(sizes.values()), unit="B") as bar:
        for path, size in sizes.items():
            digest = hashlib.sha256()
            for block in file_chunks(path, 0, size):
                digest.update(block)
                done += len(block)
                bar.show(done, sum(sizes.values()), label=f"hashing {path.name}")
            found[path.name] = digest.hexdigest()
    return found


def upload(
    paths: Sequence[Path], address: Address, *, card: str | None = None, private: bool = False, create_pr: bool = False
) -> Uploaded:
    """Upload files under their names, and `card` as README.md.

    private    if the repository is created, make it private
    create_pr  open a pull request instead of changing the branch

    OptionError for two files of one name and for an address of a file; HubError if the Hub refuses, and for a card
    where the repository has one.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    _check(paths, address, card)
    api = HfApi(library_name="quantkit")
    repo, revision = address.repo, address.revision
    if not retried(address, lambda: api.repo_exists(repo)):
        if create_pr:
            raise HubError(f"{address}: there is no such repository to open a pull request in; leave out --create-pr")
        with hub_errors(address):
            api.create_repo(repo, private=True if private else None, exist_ok=True)
    elif (
        card is not None and not create_pr and retried(address, lambda: api.file_exists(repo, CARD, revision=revision))
    ):
        raise HubError(
            f"{address.of(CARD)}: the repository has a model card, which is not replaced; use --create-pr to propose "
            "this one, or leave out --card"
        )
    operations = [CommitOperationAdd(path.name, path) for path in paths]
    if card is not None:
        operations.append(CommitOperationAdd(CARD, card.encode("utf-8", "replace")))
    total, done = sum(path.stat().st_size for path in paths), 0
    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()  # one bar on a terminal, ours
    try:
        with ProgressBar("upload", total, unit="B") as bar:
            for path, operation in zip(paths, operations):
                bar.show(done, total, label=f"upload {path.name}")
                send = partial(api.preupload_lfs_files, repo, [operation], revision=revision, create_pr=create_pr)
                retried(address.of(path.name), partial(send, free_memory=False))
                done += path.stat().st_size
                bar.show(done, total)
        with hub_errors(address):
            info = api.create_commit(
                repo, operations, commit_message=_message(paths), revision=revision, create_pr=create_pr
            )
    finally:
        if not was_disabled:
            enable_progress_bars()
    return Uploaded(info.commit_url, info.pr_url if create_pr else None, [one.path_in_repo for one in operations])


def _check(paths: Sequence[Path], address: Address, card: str | None) -> None:
    if address.file:
        raise OptionError(f"{address}: files keep their names: write hf://{address.repo}")
    names = [path.name for path in paths] + [CARD] * (card is not None)
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"two files are called {name}; files in a repository have different names")


def _message(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"Upload {paths[0].name}{more} with quantkit"
