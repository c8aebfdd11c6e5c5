"""A repository on the Hub: the list of its files, ranges of their bytes, whole files in the cache.

    repository = Repository.open(address)              one request; offline: what the cache has
    repository.read("config.json", 0, 100)             bytes of a range
    repository.chunks("model.safetensors", 0, size)    the same as an iterator
    repository.download("model.gguf")                  the path of the file in the cache

All of it goes through huggingface_hub, so token, cache, HF_ENDPOINT and HF_HUB_OFFLINE are what its users know. A
revision is resolved once: all reads are of one commit.

What may pass is tried again: no connection, one that breaks, and the statuses 408, 429 and 5xx. The wait is what
Retry-After says, else 1, 2, 4 … seconds. A broken range continues where it broke.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from quantkit.errors import FormatError, QuantkitError, printable
from quantkit.hub.address import Address
from quantkit.progress import ProgressBar

T = TypeVar("T")

ATTEMPTS = 6  # in a row, none of which brings a byte
FIRST_WAIT = 1.0  # seconds; doubled after each attempt
MAX_WAIT = 30.0
MAX_RETRY_AFTER = 600.0  # a server that says more is down for now
BLOCK = 1 << 20  # bytes that are read from a file at a time
_STATUSES = (408, 429, 500, 502, 503, 504)


class HubError(QuantkitError):
    """The Hub refused a request, or cannot be reached."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its size in bytes, and its SHA-256 where the Hub has one (Git LFS), else its git id."""

    name: str
    size: int
    sha256: str | None
    git_id: str | None = None


class Repository:
    """An opened repository: `commit`, and `files` by name. `folder` is its copy in the cache, if the Hub is offline."""

    def __init__(self, address: Address, commit: str, files: dict[str, RemoteFile], folder: Path | None = None):
        self.address, self.commit, self.files, self.folder = address, commit, files, folder

    @classmethod
    def open(cls, address: Address) -> Repository:
        """List a repository. HubError if it is not there, if access needs a token, or if the Hub cannot be reached."""
        from huggingface_hub import HfApi, constants

        if constants.is_offline_mode():
            return cls._offline(address)
        api, timeout = HfApi(library_name="quantkit"), constants.HF_HUB_DOWNLOAD_TIMEOUT
        info = retried(
            address,
            lambda: api.model_info(address.repo, revision=address.revision, files_metadata=True, timeout=timeout),
        )
        files = {
            s.rfilename: RemoteFile(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else None, s.blob_id)
            for s in info.siblings or ()
        }
        return cls(address, info.sha or "", files)

    @classmethod
    def _offline(cls, address: Address) -> Repository:
        """What the cache has of a repository. A cached file's name in the cache is its hash."""
        from huggingface_hub import snapshot_download

        with hub_errors(address):
            folder = Path(snapshot_download(address.repo, revision=address.revision, local_files_only=True))
        files = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name, digest = path.relative_to(folder).as_posix(), path.resolve().name
                sha256, git_id = (digest if len(digest) == n else None for n in (64, 40))
                files[name] = RemoteFile(name, path.stat().st_size, sha256, git_id)
        return cls(address, folder.name, files, folder)

    def file(self, name: str) -> RemoteFile:
        """The entry of a file; HubError with the names that are there."""
        if name not in self.files:
            listed = ", ".join(sorted(self.files)[:20]) + (", …" if len(self.files) > 20 else "")
            raise HubError(f"{self.address.of(name)}: no such file; the repository has {printable(listed) or 'none'}")
        return self.files[name]

    def cached(self, name: str) -> Path | None:
        """The path of a file that the cache has at this commit; None if it is not there."""
        from huggingface_hub import try_to_load_from_cache

        if self.folder is not None:
            return self.folder / name
        found = try_to_load_from_cache(self.address.repo, name, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def download(self, name: str) -> Path:
        """The path of a whole file in the cache. It is fetched if it is not there, with a bar."""
        from huggingface_hub import hf_hub_download

        self.file(name)
        if (path := self.cached(name)) is not None:
            return path
        repo, commit, bar = self.address.repo, self.commit, cast(Any, partial(_TransferBar, Path(name).name))
        return Path(
            retried(
                self.address.of(name),
                lambda: hf_hub_download(repo, name, revision=commit, library_name="quantkit", tqdm_class=bar),
            )
        )

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes of a range of a file."""
        return b"".join(self.chunks(name, start, stop))

    def chunks(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes of a range of a file, in blocks. From the cache, if it has the file."""
        if (path := self.cached(name)) is not None:
            yield from file_chunks(path, start, stop)
            return
        failures = 0
        while start < stop:
            failures += 1
            try:
                with hub_errors(self.address.of(name)):
                    for block in self._request(name, start, stop):
                        start, failures = start + len(block), 0
                        yield block
            except _Passing as error:
                _wait(error, failures)

    def _request(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """One request for a range. _Passing if it fails in a way that may pass, or ends before its end."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.address.repo, name, revision=self.commit)
        headers = build_hf_headers(library_name="quantkit") | {
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
        }
        left = stop - start
        with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            if response.status_code != 206 and start > 0:
                raise HubError(
                    f"{self.address.of(name)}: the server ignores ranges (status {response.status_code} for bytes "
                    f"{start} to {stop}); fetch the repository first: hf download {self.address.repo}"
                )
            for block in response.iter_bytes():  # as they arrive: nothing is lost with the connection
                yield block[:left]
                left -= len(block[:left])
                if not left:
                    return
        raise _Passing(f"{self.address.of(name)}: the connection ended {left} bytes too early", None)


def file_chunks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """The bytes of a range of a file on the disk, in blocks. FormatError if the file is shorter."""
    with open(path, "rb") as stream:
        stream.seek(start)
        while start < stop:
            block = stream.read(min(BLOCK, stop - start))
            if not block:
                raise FormatError(
                    f"{path}: the file ends at byte {start}, {stop} are needed; remove it to fetch it anew"
                )
            start += len(block)
            yield block


# ------------------------------------------------------------------------------------------------------------- failures


class _Passing(HubError):
    """A failure that may pass. `retry_after` is what the server asks to wait, in seconds; `answered`: it did answer."""

    def __init__(self, message: str, retry_after: float | None, answered: bool = True):
        super().__init__(message)
        self.retry_after, self.answered = retry_after, answered


def _wait(error: _Passing, failures: int) -> None:
    """Wait before the next attempt, after `failures` in a row. Raises HubError after the last one."""
    backed_off = min(MAX_WAIT, FIRST_WAIT * 2 ** max(0, failures - 1))  # 0 failures: some bytes came
    seconds = error.retry_after if error.retry_after is not None else backed_off
    if failures >= ATTEMPTS or seconds > MAX_RETRY_AFTER:
        after = f"; the server asks to wait {seconds:.0f} s" if error.retry_after else ""
        raise HubError(
            f"{error} ({failures} attempt{'s' * (failures != 1)}{after}); run the same command again later"
        ) from error
    time.sleep(seconds)


def retried(address: Address, call: Callable[[], T]) -> T:
    """The result of a request, which is repeated while it fails in a way that may pass."""
    failures = 0
    while True:
        try:
            with hub_errors(address):
                return call()
        except _Passing as error:
            failures += 1
            if address.given and not error.answered:  # it is rather a mistyped path
                raise HubError(f"{error}; if {address.repo} is on the Hub, write hf://{address.repo}") from error
            _wait(error, failures)


@contextlib.contextmanager
def hub_errors(address: Address) -> Iterator[None]:
    """Turn the exceptions of huggingface_hub and of its HTTP library into HubErrors that name the address."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import httpx

    where, endpoint = str(address), constants.ENDPOINT
    if address.given:
        where = f"{printable(address.given)}: no such file or directory here, so it was looked for at {endpoint}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{where}: access to {address.repo} has to be granted: accept its terms at {endpoint}/{address.repo}, then "
            "log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{where}: {address.repo} has no revision {address.revision} at {endpoint}") from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(where, address, error) from error
        raise HubError(f"{where}: no such file at {endpoint}") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{where}: {endpoint} has no model {address.repo} that you may see; for a private one log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        url = str(error.response.url).partition("?")[0]  # what follows may be a token of a storage host
        message = f"{where}: {url} answers {status} {error.response.reason_phrase}".rstrip()
        if status in _STATUSES:
            raise _Passing(message, _retry_after(error.response.headers)) from error
        raise HubError(f"{message}: {printable(error.server_message or '')}".rstrip(": ")) from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError(f"{where}: {_not_cached(address)}") from error
    except errors.HFValidationError as error:
        raise HubError(f"{where}: {printable(str(error))}") from error
    except httpx.TransportError as error:
        reason = printable(str(error)) or type(error).__name__
        raise _Passing(f"{where}: {endpoint} cannot be reached: {reason}", None, answered=False) from error


def _unreachable(where: str, address: Address, error: Exception) -> HubError:
    """The error of a file that is not in the cache and was not fetched: huggingface_hub hides the reason in a cause."""
    from huggingface_hub import constants, errors

    if constants.is_offline_mode():
        return HubError(f"{where}: {_not_cached(address)}")
    cause, retry_after = error.__cause__, None
    if isinstance(cause, errors.HfHubHTTPError):
        retry_after = _retry_after(cause.response.headers)
        where += f": status {cause.response.status_code}"
    return _Passing(f"{where}: {constants.ENDPOINT} cannot be reached, and the cache does not have it", retry_after)


def _not_cached(address: Address) -> str:
    what = address.file or address.repo
    return f"HF_HUB_OFFLINE is set and the cache does not have {what}; unset it, or fetch: hf download {address.repo}"


def _retry_after(headers: Any) -> float | None:
    """Seconds that a Retry-After header names, as a number or as a date; None without one."""
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------------------- progress


class _TransferBar:
    """What huggingface_hub reports a download to, drawn by `quantkit.progress`: the part of tqdm that it uses."""

    def __init__(self, label: str, *, total: int | None = None, initial: int = 0, **_: object):
        self.n, self.total = initial, total
        self._bar = ProgressBar(label, total, unit="B", after=0.5)
        self._bar.initial = initial
        self._bar.__enter__()

    def update(self, n: float | None = 1) -> None:
        """Count `n` bytes more."""
        self.n += int(n or 0)
        self._bar.show(self.n, self.total)

    def close(self) -> None:
        """Erase the bar."""
        self._bar.close()

    def set_description(self, desc: str = "", refresh: bool = True) -> None:
        """Nothing: the label is the file's name."""

    def refresh(self) -> None:
        """Nothing: the bar draws itself."""

    def __enter__(self) -> _TransferBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
