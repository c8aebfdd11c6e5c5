"""Files of a repository with their headers alone: what is read of a model before its weights.

A header is written to a sparse file of the remote file's size, so that the readers of `formats` open and check it like
a local one. The files are in a temporary directory that is named as the repository and removed when Python ends. Only
what needs no weights may open them: the data are holes, which read as zeros.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats import gguf
from quantkit.formats.gguf.reader import MAX_HEADER as MAX_GGUF_HEADER
from quantkit.formats.safetensors.reader import MAX_HEADER, MAX_INDEX
from quantkit.formats.safetensors.writer import INDEX_NAME
from quantkit.hub.client import Repository
from quantkit.inputs import json_input

_AT_ONCE = 8  # requests for headers at a time
_FIRST = 1 << 18  # bytes of a file that are asked for first
_TEXTS = (".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")  # files beside the weights that `convert` may read
_MAX_TEXT = 64 << 20  # bytes of one of them
_SHARD_OF_SET = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)


@cache
def _workspace() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="quantkit-hub-")  # removed when it is finalized, at the latest at exit


def directory(repository: Repository) -> Path:
    """An empty directory, named as the repository: converters take the model's name from it."""
    path = Path(tempfile.mkdtemp(dir=_workspace().name)) / repository.address.name
    path.mkdir()
    return path


def texts(repository: Repository, only: Iterable[str] | None = None) -> Path:
    """A directory with the files beside the weights: configuration, tokenizer, card; or with those of `only`."""
    names = [name for name in repository.files if "/" not in name and name.endswith(_TEXTS)] if only is None else only
    path = directory(repository)
    for name in names:
        if (size := repository.file(name).size) > _MAX_TEXT:
            raise FormatError(f"{repository.address.of(name)}: {size} bytes, such files have up to {_MAX_TEXT}")
        os.symlink(repository.download(name).resolve(), path / name)
    return path


def checkpoint(repository: Repository) -> Path:
    """A directory that `open_checkpoint` reads: the files beside the weights, and the headers of the weights."""
    path = texts(repository)
    weights = [name for name in repository.files if "/" not in name and name.endswith(".safetensors")]
    if not weights:
        raise UnsupportedError(
            f"{repository.address}: no *.safetensors in the repository; other weights are read from a directory: "
            f"hf download {repository.address.repo} --local-dir {repository.address.name}"
        )
    if (path / INDEX_NAME).exists():
        weights = [name for name in weights if name in _listed(path / INDEX_NAME)]
    elif "model.safetensors" in weights:
        weights = ["model.safetensors"]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="quantkit-headers") as pool:
        list(pool.map(lambda name: _safetensors_header(repository, name, path / name), weights))
    return path


def _listed(index: Path) -> set[str]:
    """The files of an index. What is wrong with it, `open_checkpoint` says."""
    if index.stat().st_size > MAX_INDEX:
        return set()
    found = json_input.parse(index.read_bytes(), str(index))
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    return {name for name in weight_map.values() if isinstance(name, str)} if isinstance(weight_map, dict) else set()


def _safetensors_header(repository: Repository, name: str, path: Path) -> None:
    size = repository.file(name).size
    data = repository.read(name, 0, min(size, _FIRST))
    stop = min(size, 8 + int.from_bytes(data[:8], "little"))
    if 8 + MAX_HEADER >= stop > len(data):  # a longer one is refused when it is opened
        data += repository.read(name, len(data), stop)
    write_sparse(path, data[:stop], size)


def write_sparse(path: Path, data: bytes, size: int) -> None:
    """Write a file of `size` bytes that begins with `data`; the rest takes no space."""
    with open(path, "wb") as file:
        file.write(data)
        file.truncate(size)


def gguf_shards(repository: Repository, name: str) -> list[str]:
    """The names of all shards of the set that a GGUF file is in; of a single file its own."""
    found = _SHARD_OF_SET.fullmatch(name)
    if found is None:
        return [name]
    return [f"{found[1]}-{number:05d}-of-{found[2]}.gguf" for number in range(1, int(found[2]) + 1)]


def gguf_file(repository: Repository, name: str) -> Path:
    """The path of a GGUF file of which only the headers are there, those of all its shards."""
    folder = directory(repository)
    for shard in gguf_shards(repository, name):
        _gguf_header(repository, shard, folder / Path(shard).name)
    return folder / Path(name).name


def _gguf_header(repository: Repository, name: str, path: Path) -> None:
    """Fetch more and more of a file, until its header is complete or is an error whatever follows."""
    size, data, wanted = repository.file(name).size, b"", _FIRST
    while True:
        stop = min(size, wanted)
        data += repository.read(name, len(data), stop)
        write_sparse(path, data, size)
        is_all = stop == size or stop > MAX_GGUF_HEADER
        try:
            if gguf.Shard(path).data_start <= stop or is_all:
                return
        except FormatError:
            if is_all:
                raise
        wanted = 4 * stop
