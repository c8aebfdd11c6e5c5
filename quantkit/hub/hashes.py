"""The hash of a file on the Hub: SHA-256 where the Hub has one (Git LFS), else its git id."""

from __future__ import annotations

import hashlib
from typing import Any

from quantkit.hub.address import Address
from quantkit.hub.client import HubError, RemoteFile


def digest_of(file: RemoteFile) -> Any:
    """An object of hashlib that is to get the bytes of a file."""
    return hashlib.sha256() if file.sha256 or not file.git_id else hashlib.sha1(f"blob {file.size}\0".encode())


def require_hash(repository: Address, file: RemoteFile, found: str) -> None:
    """HubError unless a file that was read has the hash that the Hub states."""
    expected, where = file.sha256 or file.git_id, repository.of(file.name)
    if expected is None:
        raise HubError(f"{where}: the Hub gives no hash of this file, so it cannot be checked")
    if found != expected:
        kind = "SHA-256" if file.sha256 else "git id"
        raise HubError(
            f"{where}: its {kind} is {found}, the Hub says {expected}: the bytes were damaged on their way, or in the "
            "cache; what was made from this file is dropped, the rest is kept: run the same command again; if the hash "
            f"is wrong again, remove the file from the cache, or tell the owners of {repository.repo}"
        )
