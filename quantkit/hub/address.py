"""Addresses of models and files on the Hugging Face Hub: hf://ORG/NAME[@REVISION][/FILE].

    hf://HuggingFaceTB/SmolLM2-135M                a checkpoint, at its newest commit
    hf://HuggingFaceTB/SmolLM2-135M@v1.0           at a branch, tag or commit; refs/pr/3 is a pull request
    hf://bartowski/SomeModel-GGUF/SomeModel-Q4_K_M.gguf
    HuggingFaceTB/SmolLM2-135M                     the same, where nothing on the disk has this name

`pathlib` makes one slash of two: hf:/ORG/NAME is read as hf://ORG/NAME. A revision with a slash is written as the Hub's
other tools write it: refs/pr/N as it is, others with %2F.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from quantkit.errors import OptionError, printable

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_ADDRESS = re.compile(rf"hf:/+({_PART}/{_PART})(?:@(refs/pr/\d+|[^/@]+))?(?:/(.+))?", re.DOTALL)
_BARE = re.compile(rf"({_PART}/{_PART})(?:@(refs/pr/\d+|[^/@]+))?")
_FILES = (".gguf", ".json", ".safetensors", ".bin", ".dat", ".txt")  # ends of names that are no repositories'


@dataclass(frozen=True)
class Address:
    """A repository on the Hub, or a file in it.

    repo      "ORG/NAME"                     file   the file's path in the repository; "" for the repository
    revision  branch, tag or commit; None: the default branch
    given     what the user wrote, where that was no hf:// address
    """

    repo: str
    revision: str | None = None
    file: str = ""
    given: str = ""

    @property
    def name(self) -> str:
        """The repository's name without the organization: that of the directory into which users download it."""
        return self.repo.rpartition("/")[2]

    def of(self, file: str) -> Address:
        """The address of a file in the same repository."""
        return replace(self, file=file, given="")

    def __str__(self) -> str:
        revision = self.revision or ""
        if not revision.startswith("refs/pr/"):
            revision = quote(revision, safe="")
        return printable(
            "hf://" + self.repo + ("@" + revision if revision else "") + ("/" + self.file) * bool(self.file)
        )


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether a path is written as an address, valid or not."""
    return os.fspath(path).startswith("hf:/")


def parse(text: str | os.PathLike[str]) -> Address:
    """Read an address; OptionError if it is malformed."""
    found = _ADDRESS.fullmatch(os.fspath(text).rstrip("/"))
    if found is None or any(part in ("", ".", "..") for part in (found[3] or "x").split("/")):
        raise OptionError(f"'{printable(os.fspath(text))}' is not an address: write hf://ORG/NAME[@REVISION][/FILE]")
    return Address(found[1], unquote(found[2]) if found[2] else None, found[3] or "")


def find(path: str | os.PathLike[str]) -> Address | None:
    """The address that a path is, or that it can only be: ORG/NAME where no file or directory has this name."""
    text = os.fspath(path)
    if is_address(text):
        return parse(text)
    bare = _BARE.fullmatch(text)
    if bare is None or bare[1].endswith(_FILES) or Path(text).exists():
        return None
    return Address(bare[1], unquote(bare[2]) if bare[2] else None, given=text)
