"""What commands are given, as local paths: a path stays as it is, an address becomes the path of a file."""

from __future__ import annotations

import os
from pathlib import Path

from quantkit.errors import OptionError, printable
from quantkit.hub import address, headers
from quantkit.hub.address import Address
from quantkit.hub.client import HubError, Repository


def model_file(given: str | os.PathLike[str]) -> Path:
    """The path of a GGUF file. One on the Hub is fetched into the cache, with all shards of its set.

    HubError if it is not there, OptionError for an address of something else.
    """
    found = address.find(given)
    if found is None:
        return Path(given)
    repository = Repository.open(found)
    name = _gguf_name(repository)
    paths = {shard: repository.download(shard) for shard in headers.gguf_shards(repository, name)}
    return paths[name]


def header_file(given: str | os.PathLike[str], config: bool = False) -> Path:
    """The path of a GGUF file of which only the header is there if it is on the Hub.

    With `config` the address may be a checkpoint's: then the path of a directory with its config.json.
    """
    found = address.find(given)
    if found is None:
        return Path(given)
    repository = Repository.open(found)
    if config and (found.file.endswith(".json") or (not found.file and "config.json" in repository.files)):
        name = found.file or "config.json"
        folder = headers.texts(repository, [name])
        return folder / name if found.file else folder
    return headers.gguf_file(repository, _gguf_name(repository))


def checkpoint_address(given: object) -> Address | None:
    """The address of a repository with a checkpoint; None for a path, and for the address of a file."""
    if not isinstance(given, (str, os.PathLike)):
        return None
    found = address.find(os.fspath(given))
    return found if found is not None and not found.file else None


def _gguf_name(repository: Repository) -> str:
    """The GGUF file that an address means: its file, or the only one of the repository."""
    where = repository.address
    if where.file:
        repository.file(where.file)
        if not where.file.endswith(".gguf"):
            raise OptionError(f"{where}: not a .gguf file")
        return where.file
    names = sorted(name for name in repository.files if name.endswith(".gguf"))
    first = [name for name in names if headers.gguf_shards(repository, name)[0] == name]
    if len(first) == 1:
        return first[0]
    if not names:
        raise HubError(f"{where}: no .gguf file in the repository; `quantkit convert` makes one from a checkpoint")
    listed = printable(", ".join(first[:10]) + (", …" if len(first) > 10 else ""))
    raise OptionError(f"{where}: {len(first)} GGUF files; write {where}/FILE with one of {listed}")
