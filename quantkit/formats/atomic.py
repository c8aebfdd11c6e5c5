"""Files that appear whole or not at all.

A file is written as `NAME.partial-<pid>` beside its final name, made durable with fsync, and renamed with `os.replace`.
Until then nothing stands under the final name, whatever kills the process; an exception removes the partial file. Some
writers do without the fsync (stream.py says when).

A writer holds a lock (flock) on its partial file. The kernel drops the lock when the process dies, so a later writer of
the same name can tell a dead writer's leavings, which it removes, from those of a live one, which it leaves alone.

A file that is `kept` is written as `NAME.partial-job` and stays when its writer ends early, for the next one to resume;
`NAME.partial-job.journal` (journal.py) says what in it is done.

Names of partial files can be guessed: owned.py says which existing files are opened under them. An output that replaces
a file gets its permissions and its group; a new one gets what the umask leaves. Where the output's name is a symbolic
link, all of this happens beside the file that it points to, and the link stays.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import glob
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from quantkit.errors import QuantkitError
from quantkit.formats.owned import followed, open_new, open_own, require_own

try:
    import fcntl
except ImportError:  # Windows: no locks there, so partial files of dead writers are left for the user to remove
    fcntl = None  # type: ignore[assignment]

KEPT = ".partial-job"  # after the name of a file that is to be gone on with
JOURNAL = ".journal"  # after that
_BUFFER = 1 << 20
# Bytes of a write. Of larger ones Linux makes larger pieces of its cache, which it takes from memory long unused. Under
# a hypervisor that may have been given back: fetching it takes three times as long as all the rest of a write.
_AT_ONCE = 1 << 18


@contextmanager
def os_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError into a QuantkitError that names the file and what was being done to it."""
    try:
        yield
    except OSError as error:
        raise QuantkitError(f"{path}: cannot {doing}: {error.strerror or error}") from error


class AtomicFile:
    """A file being written. `stream` takes the bytes; `publish` or `discard` ends it.

    Of one that is `kept` there may be something already: what an earlier writer left of it. A file of quantkit's `own`
    has a name that the user did not choose: it replaces nothing but such a file.
    """

    def __init__(self, path: str | os.PathLike[str], kept: bool = False, own: bool = False):
        named = Path(path)
        self.path = named if own else followed(named)
        refuse_irregular(self.path)  # what `replace` would find out only when all is written
        self.temporary = self.path.with_name(self.path.name + (KEPT if kept else f".partial-{os.getpid()}"))
        with os_errors(self.path, "write"):
            if self.path == named:  # where a link leads nowhere, a disk may be missing
                self.path.parent.mkdir(parents=True, exist_ok=True)
            if own:
                require_own(self.path)
            if not kept:
                remove_stale(self.path)
            self.stream: BinaryIO = _create(self.temporary, kept, _mode_of(self.path))
        self._writing = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Give the empty file its size, and the blocks of the disk where the file system can.

        A disk that is too full is told at once, and the writes are spared a sixth of their time.
        """
        descriptor = self.stream.fileno()
        if (fallocate := _fallocate()) and fallocate(descriptor, 0, 0, nbytes):
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(number, os.strerror(number))
        os.ftruncate(descriptor, nbytes)

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset. Several threads may; the place of `stream` is undefined afterwards.

        One writes at a time, as the system would have it anyway: its waiting threads spin, ours let others work.
        """
        with self._writing:
            if not hasattr(os, "pwrite"):  # Windows
                self.stream.seek(offset)
                self.stream.write(data)
                return
            while len(data):
                done = os.pwrite(self.stream.fileno(), data[:_AT_ONCE], offset)
                data, offset = data[done:], offset + done

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes at an offset, fewer where the file ends."""
        if not hasattr(os, "pread"):  # Windows
            with open(self.temporary, "rb") as stream:
                stream.seek(offset)
                return stream.read(nbytes)
        return os.pread(self.stream.fileno(), nbytes, offset)

    def seal(self, durable: bool = True) -> None:
        """Have the system take what was written and, if `durable`, keep it on the disk."""
        with os_errors(self.temporary, "write"):
            self.stream.flush()
            if durable:
                os.fsync(self.stream.fileno())
            else:  # file systems of a network tell when a descriptor is closed what could not be written
                os.close(os.dup(self.stream.fileno()))

    def replace(self) -> None:
        """Give the sealed file its final name. The lock is held until then."""
        with os_errors(self.path, "rename the finished file to this name"):
            _take_permissions(self.stream.fileno(), self.path)
            if fcntl is None:  # Windows renames no open file
                self.stream.close()
            os.replace(self.temporary, self.path)
            self.stream.close()

    def discard(self, keep: bool = False) -> None:
        """Close the partial file and, unless it is to `keep`, remove it. Does nothing after `replace`."""
        if not self.stream.closed:
            # Closing flushes what is buffered, which may fail, on a full disk for one. The file is closed all the same,
            # and its bytes are unwanted.
            with suppress(OSError):
                self.stream.close()
            if not keep:
                self.temporary.unlink(missing_ok=True)


def publish(files: Sequence[AtomicFile], durable: bool = True) -> None:
    """Make all files durable, then rename them, the last one first, and make the renames durable.

    The first file of a set is what readers open, so it appears when all others are in place.
    """
    for file in files:
        file.seal(durable)
    for file in reversed(files):
        file.replace()
    if durable:
        for directory in {file.path.parent for file in files}:
            sync_directory(directory)


@contextmanager
def writing(path: str | os.PathLike[str], own: bool = False) -> Iterator[BinaryIO]:
    """`with writing(path) as stream:` for a file that is written in one go; `own` as for AtomicFile.

    An OSError that names no file is that of the stream, whose disk may be full: it becomes a QuantkitError.
    """
    file = AtomicFile(path, own=own)
    try:
        try:
            yield file.stream
        except OSError as error:
            if error.filename is not None:
                raise
            raise QuantkitError(f"{file.path}: cannot write: {error.strerror or error}") from error
        publish([file])
    finally:
        file.discard()


def remove_stale(path: Path) -> None:
    """Remove the partial files that dead writers of `path` left behind, those that were to be resumed too."""
    for name in glob.glob(glob.escape(str(followed(path))) + ".partial-*"):
        if name.endswith(JOURNAL):  # goes with its file
            continue
        with suppress(OSError, QuantkitError):  # gone by now, or no file of ours
            fd = open_own(Path(name), os.O_RDWR)
            try:
                if _lock(fd) is True and os.path.samestat(os.fstat(fd), os.lstat(name)):
                    Path(name + JOURNAL).unlink(missing_ok=True)
                    os.unlink(name)
            finally:
                os.close(fd)


def refuse_directory(path: Path) -> None:
    """QuantkitError where a directory has the name that a file is to get."""
    if path.is_dir():
        raise QuantkitError(f"{path}: this is a directory; name the file to write in it")


def refuse_irregular(path: Path) -> None:
    """QuantkitError where the name that a file is to get has a directory, a device or a pipe."""
    refuse_directory(path)
    if path.exists() and not path.is_file():  # /dev/null, which root's `replace` would do away with
        raise QuantkitError(f"{path}: exists and is no regular file; write to another name")


def refuse_live(path: Path) -> None:
    """QuantkitError where another writer is writing the partial file at `path`, or no writer left what is there."""
    try:
        fd = open_own(path, os.O_RDWR)
    except OSError:  # not there
        return
    try:
        if _lock(fd) is False:
            raise QuantkitError(f"{path}: another writer is writing this file")
    finally:
        os.close(fd)


def require_space(directory: Path, nbytes: int) -> None:
    """Raise QuantkitError when the file system of `directory` has not `nbytes` free: better now than after hours."""
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise QuantkitError(
            f"{directory}: the output takes {nbytes} bytes ({nbytes / 2**30:.2f} GiB), the file system has {free} "
            f"({free / 2**30:.2f} GiB) free"
        )


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files so that `count` more fit; QuantkitError when the system forbids it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    needed = count + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise QuantkitError(
            f"{count} shards need as many open files; the system allows {hard}: raise `ulimit -n`, or merge shards"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """Linux's fallocate(fd, mode, offset, length). (Where a file system has none, os.posix_fallocate writes zeros.)"""
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return None
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def _lock(fd: int) -> bool | None:
    """Try to lock an open file: True when got, False when another writer has it, None where locks do not exist."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None


def _create(path: Path, kept: bool, mode: int) -> BinaryIO:
    """Create `path`, lock it and open it empty, or as it is."""
    while True:
        try:
            fd = open_new(path, mode)
        except FileExistsError:
            try:
                fd = open_own(path, os.O_RDWR)
            except FileNotFoundError:
                continue
        if _lock(fd) is False:
            os.close(fd)
            raise QuantkitError(f"{path}: another writer is writing this file")
        try:
            # Between open and lock another process may have taken it for stale and removed it.
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                # Of files that were cut ext4 begins to write all out when they are closed, and close waits for half of
                # it: only what a dead writer left is cut.
                if not kept and os.fstat(fd).st_size:
                    os.ftruncate(fd, 0)
                return os.fdopen(fd, "wb", buffering=_BUFFER)
        except FileNotFoundError:
            pass
        os.close(fd)


def _mode_of(path: Path) -> int:
    """The permissions that a partial file may have at most: no more than the file that it is to replace."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR
    except OSError:  # a new file
        return 0o666


def _take_permissions(fd: int, path: Path) -> None:
    """Give an open file the permissions and the group of the file that it is to replace, if there is one."""
    if not hasattr(os, "fchmod"):  # Windows
        return
    try:
        old = os.stat(path)
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(old.st_mode) & 0o777
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(fd, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
        except OSError:  # not a member of that group: the own group gets no more than others have
            mode = mode & ~0o070 | (mode & 0o007) << 3 & mode
    os.fchmod(fd, mode)


def sync_directory(directory: Path) -> None:
    """fsync a directory, so that a rename in it survives a power cut. Not all systems can."""
    try:
        fd = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        return
    finally:
        os.close(fd)


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path]) -> None:
    """QuantkitError, before the work, where a file cannot be made under its name or would take an input's."""
    given = [path for path in inputs if path.exists()]
    for path in outputs:
        if path is not None:
            path = followed(path)
            refuse_irregular(path)
            refuse_inputs([path], given)
            above = next(parent for parent in path.absolute().parents if parent.exists())  # the others are made
            if not (above.is_dir() and os.access(above, os.W_OK)):
                raise QuantkitError(f"{path}: cannot be written: {above} is no directory that can be written to")


def refuse_inputs(outputs: Iterable[Path], inputs: Sequence[Path]) -> None:
    """QuantkitError where an output that exists is one of the inputs."""
    for path in outputs:
        if path.exists() and any(os.path.samefile(path, other) for other in inputs):
            raise QuantkitError(f"{path}: this is the input; write to another name")
