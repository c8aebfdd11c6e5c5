"""`quantize` on the workers of a dask cluster: consecutive pieces of a tensor are a task.

    coordinator   names of the input's files, rows, types, importance of the columns  ->  a task
    worker        maps the files, encodes the pieces in all of its threads  ->  their hashes, and their bytes
                  or, with a shared output, writes the bytes into the partial file and syncs them
    coordinator   writes the bytes, counts the pieces, and records them in the journal

A task holds no weights. Each worker opens an input once and checks that it is the coordinator's (`FileIdentity`), and
that its encoder gives the bytes of the coordinator's (`provenance.codec`), whatever its CPU. So the output has the
bytes of a run on one machine.

A checkpoint on the Hub is fetched by the workers (`hub_on_worker`), file by file. Tensors whose first file is the same
are tasks of one worker, as long as others have files of their own, so that each file is fetched about once.

A worker with a shared output opens the partial file before it encodes, and writes only if the file's header is that of
the job: a task that outlives its coordinator cannot touch the file of another job. If two workers run the same task,
both write the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quantkit import cluster, types
from quantkit.cluster.fetching import fetched
from quantkit.cluster.task_sizes import RETURNED_BYTES, WRITTEN_BYTES, TaskSizes
from quantkit.cluster.tasks import Finished, Grouped, TaskRun, UnfitWorker
from quantkit.cluster.workers import FileIdentity
from quantkit.errors import OptionError
from quantkit.formats import gguf, imatrix, provenance
from quantkit.formats.atomic import os_errors
from quantkit.formats.owned import open_own
from quantkit.formats.pipeline import Bar
from quantkit.formats.stream import Layout, StreamWriter, partial
from quantkit.hub.client import HubError
from quantkit.pipelines import hub_on_worker
from quantkit.pipelines.conversion.tensor import OutputTensor
from quantkit.pipelines.hub_on_worker import HubInput
from quantkit.pipelines.pieces import Piece, QuantizeSource, SourceTensor, TensorProgress
from quantkit.pipelines.second_moments import PreparedMoments
from quantkit.recipe import PlannedTensor

if TYPE_CHECKING:
    from distributed import Client

_CLOSING_SECONDS = 10.0

# ------------------------------------------------------------------------------------------------------------ the tasks


class Place(NamedTuple):
    """Where a worker writes: a partial file, the bytes of its header and their SHA-256, and the first byte to write."""

    path: str
    header: int
    digest: str
    offset: int


class Input(NamedTuple):
    """The files that a tensor is read from.

    checkpoint  arguments of `plan_conversion` for a checkpoint; None for GGUF: the file of the tensor, and the one with
                its scales if that is another shard
    hub         the checkpoint where it is on the Hub; then there are no files
    """

    files: tuple[FileIdentity, ...]
    checkpoint: tuple[Any, ...] | None = None
    hub: HubInput | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.files[0].path if self.hub is None else self.hub.address


@dataclass(frozen=True)
class PieceTask:
    """Pieces `first` to `stop - 1` of a tensor, as plain data.

    importance  float32[matrices, columns] from the matrix of the first piece on; None for none
    moments     the importance matrix file and the entry whose second moments are used; None for none
    codec       the version of the encoder that the output records
    place       where a worker writes; None: it returns the bytes
    scale       what values are divided by before they are encoded; None: nothing
    """

    input: Input
    name: str
    shape: tuple[int, ...]
    source: str
    type: str
    first: int
    stop: int
    importance: np.ndarray | None
    moments: tuple[FileIdentity, str] | None
    effort: str
    verbatim: bool
    codec: str
    place: Place | None = None
    scale: float | None = None

    def __str__(self) -> str:
        return f"{self.input.name}: {self.name}, pieces {self.first} to {self.stop - 1}"


class Done(NamedTuple):
    """What a task gives: hashes of the source and of the bytes of each piece, and the bytes, unless they are written.

    `read` and `nbytes` are the sizes of both in bytes, `seconds` is the time of all threads together. `verified` are
    the files of the Hub that the worker has fetched, and their hashes.
    """

    name: str
    first: int
    stop: int
    source: list[bytes]
    hashes: list[bytes]
    read: int
    nbytes: int
    seconds: float
    data: np.ndarray | None
    verified: Mapping[str, str]


def encode_pieces(task: PieceTask) -> Done:
    """Encode the pieces of a task; executed by a worker."""
    try:
        return _encode(task)
    except HubError as error:
        raise UnfitWorker(str(error)) from error


def _encode(task: PieceTask) -> Done:
    tensor = _tensor(task)
    kinds = types.layout(task.source), types.layout(task.type)
    planned = PlannedTensor(task.name, task.shape, *kinds, "", scale=task.scale)
    _require_codec(task)
    ranges = list(provenance.row_pieces(task.shape))[task.first : task.stop]
    begin, row_bytes = ranges[0][0], planned.type.row_bytes(task.shape[-1])
    data = np.empty((ranges[-1][1] - begin, row_bytes), np.uint8)
    descriptor = _open_output(task.place) if task.place is not None else None

    def encode(start: int, stop: int) -> tuple[bytes, bytes, float]:
        """Encode a piece into `data`; the hashes of its source and of its bytes, and its seconds."""
        started = time.perf_counter()
        importance, moments = _importance(task, start, begin)
        piece = Piece(planned, tensor, start, stop, importance, moments, task.effort, task.verbatim)
        encoded = piece.encode()
        data[start - begin : stop - begin] = encoded.data.reshape(-1, row_bytes)
        return encoded.source, encoded.hash, time.perf_counter() - started

    try:
        source, hashes, seconds = zip(*cluster.in_threads(encode, ranges))
        if task.place is not None and descriptor is not None:
            _write(descriptor, task.place, data)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    read = len(data) * planned.source.row_bytes(task.shape[-1])
    sent = data if task.place is None else None
    checked = {} if task.input.hub is None else hub_on_worker.verified(task.input.hub)
    pieces = task.name, task.first, task.stop, list(source), list(hashes)
    return Done(*pieces, read, data.nbytes, sum(seconds), sent, checked)


def _tensor(task: PieceTask) -> SourceTensor:
    """The task's tensor, of an input that is opened once."""
    tensor = _tensors(task.input).get(task.name)
    if tensor is None or tuple(tensor.shape) != task.shape or tensor.type.name != task.source:
        found = "is missing" if tensor is None else f"is {tensor.type.name} {tensor.shape}"
        raise UnfitWorker(f"{task.input.name}: {task.name} {found} there, {task.source} {task.shape} here")
    return tensor


def _tensors(input: Input) -> Mapping[str, SourceTensor]:
    if input.hub is not None:
        assert input.checkpoint is not None
        return hub_on_worker.tensors(input.hub, input.checkpoint[1:])
    return _opened(input)


@functools.lru_cache(maxsize=64)  # shards of a set are inputs of their own
def _opened(input: Input) -> Mapping[str, SourceTensor]:
    for file in input.files:
        _require_same(file)
    if input.checkpoint is None:
        tensors = gguf.open_parts([file.path for file in input.files]).tensors
        for tensor in tensors.values():
            tensor.is_complete = True  # the coordinator, which has all shards open, named the file of its scales
        return tensors
    from quantkit.pipelines.conversion.plan import plan_conversion

    return plan_conversion(*input.checkpoint).tensors


@functools.lru_cache(maxsize=2)
def _moments(file: FileIdentity) -> PreparedMoments:
    _require_same(file)
    return PreparedMoments(imatrix.read(file.path))


def _require_same(file: FileIdentity) -> None:
    if text := file.difference():
        raise UnfitWorker(f"{file.path} {text}")


def _importance(task: PieceTask, start: int, begin: int) -> tuple[np.ndarray | None, Callable[[], Any] | None]:
    """The importance of the columns for the piece at row `start`, and what gives its second moments."""
    if task.importance is None:
        return None, None
    rows = task.shape[-2] if len(task.shape) > 1 else 1
    matrix = start // rows
    moments = None
    if task.moments is not None:
        file, entry = task.moments
        moments = functools.partial(_moments(file).get, entry, matrix)
    return task.importance[matrix - begin // rows], moments


def _require_codec(task: PieceTask) -> None:
    """UnfitWorker if this machine's encoder gives other bytes than the coordinator's."""
    if task.codec == provenance.COPY:
        return
    here = provenance.codec(task.type, task.effort, task.moments is not None, task.scale)
    if here != task.codec:
        raise UnfitWorker(
            f"its encoder of {task.type} gives other bytes than the coordinator's: version {here} instead of "
            f"{task.codec}"
        )


def _open_output(place: Place) -> int:
    """Open the partial file that a worker writes to, and check that it is the job's."""
    try:
        descriptor = open_own(Path(place.path), os.O_RDWR)
    except FileNotFoundError:
        raise UnfitWorker(
            f"{place.path}: the output is not there; --shared-output needs a shared file system"
        ) from None
    if hashlib.sha256(os.pread(descriptor, place.header, 0)).hexdigest() != place.digest:
        os.close(descriptor)
        raise UnfitWorker(f"{place.path}: there, this is not the output of this job")
    return descriptor


def _write(descriptor: int, place: Place, data: np.ndarray) -> None:
    """Write the bytes of a task at their place and sync them."""
    view, offset = data.data.cast("B"), place.offset
    with os_errors(Path(place.path), "write"):
        while len(view):
            done = os.pwrite(descriptor, view, offset)
            view, offset = view[done:], offset + done
        os.fsync(descriptor)


# ------------------------------------------------------------------------------------------------------ the coordinator


@dataclass
class WorkerWork:
    """What a worker did: tasks, pieces, seconds of its threads, bytes of the source and of the output."""

    tasks: int = 0
    pieces: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0


def require_input(source: QuantizeSource, calibration: object | None, reuses: bool) -> None:
    """An error for what workers cannot do: run the model, or find what an older file has of a checkpoint on the Hub."""
    if calibration is not None:
        raise OptionError("--calibrate runs the model on this machine: with --cluster, pass --imatrix")
    stream = getattr(source, "arrivals", None)
    if stream is None:
        return
    if stream.keep:
        raise OptionError("--keep-shards: the workers of a cluster keep no files; run `hf download`, or drop --cluster")
    if reuses:
        raise OptionError(
            "--reuse and --partial-requant compare the checkpoint with what an older file was made from, and with "
            "--cluster only workers read it; drop one of them"
        )


def by_file(source: QuantizeSource, tensors: Sequence[PlannedTensor]) -> list[list[PlannedTensor]]:
    """The tensors in groups for `Workers.encode`: for a checkpoint on the Hub, of the same first file."""
    if getattr(source, "arrivals", None) is None:
        return [list(tensors)]
    groups: dict[str, list[PlannedTensor]] = {}
    for planned in tensors:
        tensor = source.tensors.get(planned.name)
        inputs = tensor.inputs if isinstance(tensor, OutputTensor) else ()
        groups.setdefault(min((t.path.name for t in inputs), default=""), []).append(planned)
    return list(groups.values())


def shared_files(writer: StreamWriter, layouts: Sequence[Layout]) -> dict[str, Place]:
    """Start the files of an output that workers write to: the place of each tensor."""
    writer.open_files()
    found = {}
    for layout in layouts:
        path, digest = os.path.abspath(partial(layout.path)), hashlib.sha256(layout.header).hexdigest()
        for slot in layout.slots:
            found[slot.name] = Place(path, len(layout.header), digest, slot.offset)
    return found


class Workers:
    """Encodes tensors on the workers of a cluster.

    work  by address: what each worker has done
    """

    def __init__(
        self,
        client: Client,
        source: QuantizeSource,
        imatrix_file: str,
        shared: Mapping[str, Place] | None,
        on_message: Callable[[str], None],
    ):
        """Check that all workers have this quantkit and the files: QuantkitError with names otherwise.

        `shared` is what `shared_files` gave; None: workers return bytes.
        """
        self.work: dict[str, WorkerWork] = {}
        self._client, self._source, self._shared, self._on_message = client, source, shared, on_message
        self._checkpoint: tuple[Any, ...] | None = getattr(source, "reopen", ()) or None
        stream = getattr(source, "arrivals", None)
        self._hub = None if stream is None else HubInput.of(stream.remote, stream.disk)
        paths = [] if self._hub is not None else [*source.paths, *self._config()]
        more = None if self._hub is None else functools.partial(hub_on_worker.problems, self._hub)
        identities = cluster.require_same(client, [*paths, imatrix_file] if imatrix_file else paths, more=more)
        self._files = dict(zip(map(str, paths), identities))
        self._imatrix = identities[-1] if imatrix_file else None

    def _config(self) -> list[Path]:
        """Files of a checkpoint that decide how its tensors are read, beside those that hold them."""
        return [] if self._checkpoint is None else [Path(self._checkpoint[0]) / "config.json"]

    def close(self) -> None:
        """Have the workers remove what they have fetched, those that answer within _CLOSING_SECONDS."""
        if self._hub is None or self._client.status != "running":
            return
        deadline = time.monotonic() + _CLOSING_SECONDS

        def look() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError

        with contextlib.suppress(OSError):  # TimeoutError is one; else the scheduler is gone
            fetched(lambda: self._client.run(hub_on_worker.forget, on_error="ignore"), look)

    def encode(
        self,
        groups: Iterable[Iterable[tuple[TensorProgress, Callable[[int], Piece], provenance.Record]]],
        pieces: int,
        nbytes: int,
        write: Callable[[Done], None],
        bar: Bar,
    ) -> None:
        """Encode tensors, each given by its progress, what makes its pieces, and the record that it will have.

        Those of a group go to one worker, if the input is on the Hub (`by_file`). `pieces` are those of all, which the
        bar shows, and `nbytes` about the bytes, by which tasks are sized. `write` gets the results as they come.
        """
        most = RETURNED_BYTES if self._shared is None else WRITTEN_BYTES
        sizes = TaskSizes(nbytes, most)
        self._on_message(f"results of tasks take up to {sizes.worker_bytes / 1e6:.0f} MB of memory on each worker")
        tasks = (self._tasks(group, sizes, lambda: run.workers) for group in groups)
        run: TaskRun[PieceTask, Done] = TaskRun(
            self._client,
            encode_pieces,
            itertools.chain.from_iterable(tasks) if self._hub is None else Grouped(tasks),
            threads=lambda task: task.stop - task.first,
            name="quantkit-encode",
            on_message=self._on_message,
        )
        started, read, ended = time.monotonic(), 0, 0
        for finished in run:
            done = finished.result
            write(done)
            sizes.count(finished.task.type, done.stop - done.first, done.seconds)
            self._count(finished)
            read, ended = read + done.read, ended + done.stop - done.first
            each = read / max(time.monotonic() - started, 1e-9) / 1e9 / len(self.work)
            rate = f"{len(self.work)} workers, {each:.3g} GB/s each"
            bar.update(done.nbytes, f"{ended}/{pieces} pieces, {rate}, {done.name}")  # its end is cut if need be

    def _count(self, finished: Finished[PieceTask, Done]) -> None:
        done, work = finished.result, self.work.setdefault(finished.worker, WorkerWork())
        work.tasks += 1
        work.pieces += done.stop - done.first
        work.seconds += done.seconds
        work.bytes_read += done.read
        work.bytes_written += done.nbytes

    def _tasks(
        self,
        tensors: Iterable[tuple[TensorProgress, Callable[[int], Piece], provenance.Record]],
        sizes: TaskSizes,
        workers: Callable[[], Mapping[str, int]],
    ) -> Iterator[PieceTask]:
        """Tasks of consecutive pieces, sized for the workers that are there when a task is made."""
        for progress, make, expected in tensors:
            left = progress.missing
            while left:
                there = workers()
                sizes.workers, sizes.threads = max(1, len(there)), max(1, sum(there.values()))
                first = left[0]
                count = sizes.pieces(progress.planned.type.name, progress.nbytes(first))
                run = next((i for i, number in enumerate(left[:count]) if number != first + i), min(count, len(left)))
                left = left[run:]
                sizes.hand_out(sum(map(progress.nbytes, range(first, first + run))))
                yield self._task(progress, make, expected, first, first + run)

    def _task(
        self,
        progress: TensorProgress,
        make: Callable[[int], Piece],
        expected: provenance.Record,
        first: int,
        stop: int,
    ) -> PieceTask:
        planned, piece = progress.planned, make(first)
        rows = planned.shape[-2] if len(planned.shape) > 1 else 1
        of_matrix: dict[int, int] = {}  # the first piece of each matrix
        for number in range(first, stop):
            of_matrix.setdefault(progress.ranges[number][0] // rows, number)
        uses = planned.type.uses_imatrix and not piece.verbatim
        found = [make(number).importance for number in of_matrix.values()] if uses else []
        weights = [values for values in found if values is not None]
        place = None
        if self._shared is not None:
            shared = self._shared[planned.name]
            place = shared._replace(offset=shared.offset + progress.offset(first))
        return PieceTask(
            self._input(piece.tensor),
            planned.name,
            tuple(planned.shape),
            planned.source.name,
            planned.type.name,
            first,
            stop,
            np.stack(weights) if weights else None,
            self._moments_of(planned, expected),
            piece.effort,
            piece.verbatim,
            expected.codec,
            place,
            planned.scale,
        )

    def _input(self, tensor: SourceTensor) -> Input:
        if self._hub is not None:
            return Input((), self._checkpoint, self._hub)
        if self._checkpoint is None:
            scale = getattr(tensor, "scale", None)
            paths = dict.fromkeys([str(tensor.path), *([] if scale is None else [str(scale.path)])])
            return Input(tuple(self._files[path] for path in paths))
        return Input(tuple(self._files.values()), self._checkpoint)

    def _moments_of(self, planned: PlannedTensor, expected: provenance.Record) -> tuple[FileIdentity, str] | None:
        """The importance matrix file that holds the second moments of a tensor, and its entry; None without them."""
        if not provenance.has_moments(expected.importance):
            return None
        if self._imatrix is None or planned.importance is None:
            raise OptionError(
                "second moments are read by the workers: with a cluster, pass the importance matrix as a file"
            )
        return self._imatrix, planned.importance
