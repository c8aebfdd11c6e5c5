"""Atomic files: an output appears under its name complete, or not at all.

A file is written as `NAME.partial-<pid>` beside its final name, synced, and renamed with `os.replace`. Until then there
is no file under the final name, whatever kills the process. An exception removes the partial file. Some writers do
without the sync (stream.py says when).

A writer holds a lock (flock) on its partial file. The kernel drops the lock when the process dies. So a later writer of
the same name removes the partial files of dead writers and leaves those of live ones alone.

A `resumable` file is written as `NAME.partial-job` and stays when its writer ends early, for the next one to resume.
`NAME.partial-job.journal` (journal.py) lists the parts that are complete.

Others can guess the names of partial files: owned.py says which existing files are opened. An output that replaces a
file gets its permissions and its group; a new one gets those that the umask leaves. If the output's name is a symbolic
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

PARTIAL_JOB = ".partial-job"  # suffix of a resumable partial file
JOURNAL = ".journal"  # suffix of its journal, after that
_BUFFER = 1 << 20
# Bytes of a write. For larger ones Linux allocates larger folios of page cache, from memory that was long unused. Under
# a hypervisor that memory may have been given back: fetching it takes three times as long as the rest of the write.
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

    resumable   the partial file stays after `discard(keep=True)`, and one that an earlier writer left is opened
    own         quantkit chose the name, not the user: the file replaces only a file that an earlier run left
    """

    def __init__(self, path: str | os.PathLike[str], resumable: bool = False, own: bool = False):
        named = Path(path)
        self.path = named if own else followed(named)
        refuse_irregular(self.path)  # what `replace` would find out only when all is written
        self.temporary = self.path.with_name(self.path.name + (PARTIAL_JOB if resumable else f".partial-{os.getpid()}"))
        with os_errors(self.path, "write"):
            if self.path == named:  # where a link leads nowhere, a disk may be missing
                self.path.parent.mkdir(parents=True, exist_ok=True)
            if own:
                require_own(self.path)
            if not resumable:
                remove_stale(self.path)
            self.stream: BinaryIO = _create(self.temporary, resumable, _mode_of(self.path))
        self._writing = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Give the empty file its size, and allocate its blocks if the file system can.

        A full disk is an OSError at once, and writes take a sixth less time.
        """
        descriptor = self.stream.fileno()
        if (fallocate := _fallocate()) and fallocate(descriptor, 0, 0, nbytes):
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(number, os.strerror(number))
        os.ftruncate(descriptor, nbytes)

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset. Several threads may; the position of `stream` is undefined afterwards.

        One thread writes at a time. The system would serialize the writes anyway, with spinning threads; a lock lets
        the others work.
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
        """Bytes at an offset, fewer at the end of the file."""
        if not hasattr(os, "pread"):  # Windows
            with open(self.temporary, "rb") as stream:
                stream.seek(offset)
                return stream.read(nbytes)
        return os.pread(self.stream.fileno(), nbytes, offset)

    def seal(self, durable: bool = True) -> None:
        """Flush the stream and, if `durable`, sync the file."""
        with os_errors(self.temporary, "write"):
            self.stream.flush()
            if durable:
                os.fsync(self.stream.fileno())
            else:  # network file systems report failed writes when a descriptor is closed
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
            # Closing flushes the buffer, which may fail, for example on a full disk. The file is closed anyway,
            # and its bytes are not needed.
            with suppress(OSError):
                self.stream.close()
            if not keep:
                self.temporary.unlink(missing_ok=True)


def publish(files: Sequence[AtomicFile], durable: bool = True) -> None:
    """Sync all files, rename them, the last one first, and sync their directories.

    Readers open the first file of a set, so it appears when all others are in place.
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
    """`with writing(path) as stream:` writes a whole file atomically; `own` is as for AtomicFile.

    An OSError without a file name comes from the stream, whose disk may be full: it becomes a QuantkitError.
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
    """Remove the partial files that dead writers of `path` left, resumable ones included."""
    for name in glob.glob(glob.escape(str(followed(path))) + ".partial-*"):
        if name.endswith(JOURNAL):  # removed with its file
            continue
        with suppress(OSError, QuantkitError):  # removed meanwhile, or not a file of ours
            fd = open_own(Path(name), os.O_RDWR)
            try:
                if _lock(fd) is True and os.path.samestat(os.fstat(fd), os.lstat(name)):
                    Path(name + JOURNAL).unlink(missing_ok=True)
                    os.unlink(name)
            finally:
                os.close(fd)


def refuse_directory(path: Path) -> None:
    """QuantkitError if `path`, a file to be written, is a directory."""
    if path.is_dir():
        raise QuantkitError(f"{path}: this is a directory; name the file to write in it")


def refuse_irregular(path: Path) -> None:
    """QuantkitError if `path`, a file to be written, is a directory, a device or a pipe."""
    refuse_directory(path)
    if path.exists() and not path.is_file():  # such as /dev/null, which root would replace
        raise QuantkitError(f"{path}: exists and is not a regular file; write to another name")


def refuse_live(path: Path) -> None:
    """QuantkitError if a live writer holds the partial file at `path`, or if no writer left it (`owned`)."""
    try:
        fd = open_own(path, os.O_RDWR)
    except OSError:  # there is none
        return
    try:
        if _lock(fd) is False:
            raise QuantkitError(f"{path}: another writer is writing this file")
    finally:
        os.close(fd)


def require_space(directory: Path, nbytes: int, what: str = "the output takes", remedy: str = "") -> None:
    """QuantkitError if the file system of `directory` has less than `nbytes` free: better now than after hours.

    what, remedy   the beginning and the end of its message
    """
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise QuantkitError(
            f"{directory}: {what} {nbytes} bytes ({nbytes / 2**30:.2f} GiB), the file system has {free} "
            f"({free / 2**30:.2f} GiB) free{remedy}"
        )


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files so that `count` more fit; QuantkitError if the system forbids it."""
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
    """Linux's fallocate(fd, mode, offset, length); None elsewhere. (os.posix_fallocate may write zeros instead.)"""
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return None
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def _lock(fd: int) -> bool | None:
    """Try to lock an open file: True if locked, False if another writer holds the lock, None if there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None


def _create(path: Path, resumable: bool, mode: int) -> BinaryIO:
    """Create `path` or open the existing file, lock it, and empty it unless it is resumable."""
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
            # Between open and lock another process may have removed the file as stale.
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                # When a truncated file is closed, ext4 starts to write it out, and close waits for half of it. So only
                # a file that a dead writer left is truncated.
                if not resumable and os.fstat(fd).st_size:
                    os.ftruncate(fd, 0)
                return os.fdopen(fd, "wb", buffering=_BUFFER)
        except FileNotFoundError:
            pass
        os.close(fd)


def _mode_of(path: Path) -> int:
    """Permissions of a partial file: at most those of the file that it will replace."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR
    except OSError:  # a new file
        return 0o666


def _take_permissions(fd: int, path: Path) -> None:
    """Give an open file the permissions and the group of the file that it will replace, if there is one."""
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
        except OSError:  # not a member of that group: the user's group gets no more than others have
            mode = mode & ~0o070 | (mode & 0o007) << 3 & mode
    os.fchmod(fd, mode)


def sync_directory(directory: Path) -> None:
    """Sync a directory, so that a rename in it survives a power loss. Not all systems can."""
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
    """QuantkitError, before the work starts, if an output cannot be written or would replace an input."""
    given = [path for path in inputs if path.exists()]
    for path in outputs:
        if path is not None:
            path = followed(path)
            refuse_irregular(path)
            refuse_inputs([path], given)
            above = next(parent for parent in path.absolute().parents if parent.exists())  # missing ones are created
            if not (above.is_dir() and os.access(above, os.W_OK)):
                raise QuantkitError(
                    f"{path}: cannot be written: {above} is not a directory that this user can write to"
                )


def refuse_inputs(outputs: Iterable[Path], inputs: Sequence[Path]) -> None:
    """QuantkitError if an existing output is one of the inputs."""
    for path in outputs:
        if path.exists() and any(os.path.samefile(path, other) for other in inputs):
            raise QuantkitError(f"{path}: this is the input; write to another name")
