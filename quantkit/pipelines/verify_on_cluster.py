"""`verify` on the workers of a cluster: a task is some tensors, which a worker reads and checks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.cluster.in_order import KeptRun, WorkerTime
from quantkit.errors import OptionError
from quantkit.formats import gguf, imatrix
from quantkit.formats.imatrix import Imatrix
from quantkit.formats.pipeline import Bar
from quantkit.pipelines.options import VerifyOptions
from quantkit.pipelines.planning import open_model
from quantkit.pipelines.verify import Checked, Checker

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.formats.pipeline import Progress

TASK_BYTES = 1 << 30  # of tensors


def make_checker(path: str, options: VerifyOptions, threads: int) -> Checker:
    """The state of a worker: the open file and what it was made from."""
    source = open_model(options.source, weights=True).file if options.source is not None else None
    matrix = options.imatrix
    if matrix is not None and not isinstance(matrix, Imatrix):
        matrix = imatrix.read(matrix)
    return Checker(gguf.open(path), source, matrix, options.threads or threads)


def check_tensors(checker: Checker, names: Sequence[str]) -> list[list[Checked]]:
    """A task: check tensors."""
    return [checker.check_all(names)]


def check_on_workers(
    client: Client,
    file: gguf.GGUF,
    options: VerifyOptions,
    progress: Progress | bool,
    on_message: Callable[[str], None],
    times: dict[str, WorkerTime],
    names: Sequence[str],
) -> Iterator[Checked]:
    """Check tensors on workers; yield what was found, in the order of `names`.

    `progress` reports bytes, `on_message` is told of refused workers, `times` gets what each worker did.
    """
    if isinstance(options.imatrix, Imatrix):
        raise OptionError("workers read the importance matrix themselves: with a cluster, pass its file")
    source, matrix = (None if p is None else os.path.abspath(p) for p in (options.source, options.imatrix))
    absolute = VerifyOptions(source, matrix, options.threads)
    read = [] if matrix is None else [Path(matrix)]
    if source is not None:
        opened = open_model(source, weights=True).file
        assert opened is not None
        read += opened.paths
    make = functools.partial(make_checker, os.path.abspath(file.path), absolute)
    total = sum(tensor.nbytes for tensor in file.tensors.values())
    with KeptRun(client, make, [*file.paths, *read], on_message) as run, Bar(total, progress) as bar:
        for parts in run.results(check_tensors, list(_groups(file, names))):
            for part in parts:
                for checked in part:
                    bar.update(checked.nbytes, checked.name)
                    yield checked
    times.update(run.workers)


def _groups(file: gguf.GGUF, names: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive tensors of about TASK_BYTES."""
    group, size = list[str](), 0
    for name in names:
        group.append(name)
        size += file.tensors[name].nbytes
        if size >= TASK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
