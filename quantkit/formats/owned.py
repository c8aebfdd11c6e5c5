"""Opening files whose names quantkit chooses: partial files, journals, saved runs. Others can guess these names.

In a folder that others can write to, such as /tmp, another user may have put a link, a pipe or a file under
such a name. So quantkit creates such a file with O_EXCL. It opens an existing one only if the file is

- no symbolic link (O_NOFOLLOW) and no pipe, socket or device; opening never waits (O_NONBLOCK);
- a regular file with one name: writing to a hard link would change the file behind its other name;
- owned by the user who runs quantkit, by root, or by the owner of the folder, who could replace it at any time.

For anything else, a QuantkitError says what was found; nothing is changed or removed.

The user chooses the names of outputs. A symbolic link there stays a link: the file it points to is written, as `cp`
and `llama-quantize` do. Links of other users in folders like /tmp are refused, as the kernel refuses them for `open`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from quantkit.errors import QuantkitError

_MAX_LINKS = 40  # the limit of Linux
# Of these, Windows has only O_BINARY.
_SAFELY = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_NOT_FOLLOWED = (
    errno.ELOOP,
    errno.EMLINK,
    getattr(errno, "EFTYPE", errno.ELOOP),
)  # errors of `open` for a symbolic link


def open_new(path: Path, mode: int = 0o666) -> int:
    """Create a file and open it for reading and writing; FileExistsError if the name is taken."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, mode)


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file that an earlier run left. FileNotFoundError if it is missing; QuantkitError for any other file."""
    try:
        fd = os.open(path, flags | _SAFELY)
    except OSError as error:
        if error.errno in _NOT_FOLLOWED:
            raise _foreign(path, "is a symbolic link") from None
        if error.errno == errno.ENXIO:  # a pipe or a socket without another end
            raise _foreign(path, "is not a regular file") from None
        raise
    try:
        _require_own(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_own(path: Path) -> bytes:
    """The content of a file that an earlier run left. Errors as of `open_own`."""
    with os.fdopen(open_own(path), "rb") as file:
        return file.read()


def require_own(path: Path) -> None:
    """QuantkitError if there is a file of this name that no run of this user left."""
    try:
        os.close(open_own(path))
    except FileNotFoundError:
        return


def followed(path: Path) -> Path:
    """The path to write for an output: `path` with symbolic links resolved, whether the file exists or not."""
    named = path
    for _ in range(_MAX_LINKS):
        try:
            found = os.lstat(path)
        except OSError:  # missing; other errors come up when the file is opened
            return path
        if not stat.S_ISLNK(found.st_mode):
            return path
        folder = os.stat(path.parent)
        if folder.st_mode & stat.S_IWOTH and not _trusted(found, folder):
            raise QuantkitError(
                f"{path}: a symbolic link that user {found.st_uid} put into a folder that all can write to; remove it "
                "or write to another name"
            )
        path = path.parent / os.readlink(path)
    raise QuantkitError(f"{named}: over {_MAX_LINKS} symbolic links, one after the other; write to another name")


def _require_own(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _foreign(path, "is not a regular file")
    if found.st_nlink > 1:
        raise _foreign(path, f"is one of {found.st_nlink} names of the same file")
    if not _trusted(found, os.stat(path.parent)):
        raise _foreign(path, f"belongs to user {found.st_uid}")


def _trusted(found: os.stat_result, folder: os.stat_result) -> bool:
    """Whether a file belongs to this user, to root or to the owner of its folder. Always true on Windows."""
    return not hasattr(os, "geteuid") or found.st_uid in (os.geteuid(), 0, folder.st_uid)


def _foreign(path: Path, what: str) -> QuantkitError:
    return QuantkitError(f"{path}: {what}, so no earlier run left it here; remove it or write to another folder")
