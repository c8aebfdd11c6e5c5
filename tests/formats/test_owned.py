"""What stands under a guessable name is not trusted: links, pipes, other users' files; outputs keep links and modes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.evaluate.chunk_log import ChunkLog
from quantkit.evaluate.imatrix.saved_run import SavedRun
from quantkit.formats import atomic, gguf, journal, owned
from quantkit.formats.gguf import Metadata, TensorSpec, Writer, header
from quantkit.formats.kld.chunk_file import ChunkFile, LoggedChunks
from quantkit.pipelines.resume import unfinished

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such links, pipes and owners")

SPECS = [TensorSpec("t", (4, 32), "f32")]
OTHER_USER = 54321

# What each writer makes under a name of its own, given the output's path.
WRITERS = {
    "output": lambda out: atomic.AtomicFile(out).discard(),
    "kept": lambda out: atomic.AtomicFile(out, resumable=True).discard(),
    "journal": lambda out: journal.Journal(out, {}, lambda: None).close(),
    "journal-read": lambda out: journal.read(out),
    "unfinished": unfinished,
    "chunks": lambda out: ChunkFile(out, b"head", LoggedChunks([], 1), lambda read, at: 0).leave(),
    "saved": lambda out: SavedRun("run").save(out),
    "saved-read": lambda out: SavedRun.load(out),
    "log": lambda out: ChunkLog(out, "run", 1, 1, {}),
    "quantize": lambda out: quantize(out),
}
NAMES = {
    "output": f".partial-{os.getpid()}", "kept": ".partial-job", "unfinished": ".partial-job.journal",
    "chunks": ".partial-job", "quantize": ".partial-job",
}  # fmt: skip


def quantize(out: Path) -> None:
    from quantkit import recipe
    from quantkit.pipelines.quantize import quantize_with_plan

    source = out.with_name("in.gguf")
    write(source)
    file = gguf.open(source)
    quantize_with_plan(file, out, recipe.plan(file.tensors.values(), "Q8_0", metadata=file.metadata))


def write(path: Path) -> None:
    with Writer(path, {}, SPECS) as writer:
        writer.write("t", np.zeros(512, np.uint8))


@pytest.mark.parametrize("writer", WRITERS)
def test_links_are_not_followed(tmp_path: Path, writer: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    out = tmp_path / "out"
    name = Path(f"{out}{NAMES.get(writer, '')}")
    for make in (os.symlink, os.link):
        make(victim, name)
        if writer == "log" and make is os.symlink:  # its name is the user's
            os.unlink(name)
            continue
        with pytest.raises(QuantkitError, match=r"symbolic link|names of the same file"):
            WRITERS[writer](out)
        assert victim.read_bytes() == b"precious"
        assert name.exists()
        os.unlink(name)


@pytest.mark.parametrize("writer", WRITERS)
def test_pipes_do_not_hang(tmp_path: Path, writer: str) -> None:
    """In a process of its own, which can be stopped."""
    out = tmp_path / "out"
    os.mkfifo(f"{out}{NAMES.get(writer, '')}")
    script = f"""
import sys
from pathlib import Path
from quantkit.errors import QuantkitError
from tests.formats.test_owned import WRITERS
try:
    WRITERS[{writer!r}](Path(sys.argv[1]))
except QuantkitError as error:
    sys.exit("not a regular file" not in str(error))
sys.exit(2)
"""
    if writer == "output":  # of another process's number
        os.rename(f"{out}{NAMES[writer]}", out)
    assert subprocess.run([sys.executable, "-c", script, out], timeout=60).returncode == 0


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "output"])
def test_files_of_other_users_are_not_resumed(tmp_path: Path, writer: str) -> None:
    out = tmp_path / "out"
    name = Path(f"{out}{NAMES.get(writer, '')}")
    name.write_bytes(b'{"journal": 1}\n')
    os.chown(name, OTHER_USER, OTHER_USER)
    with pytest.raises(QuantkitError, match=f"belongs to user {OTHER_USER}"):
        WRITERS[writer](out)
    assert name.read_bytes() == b'{"journal": 1}\n'
    os.chown(tmp_path, OTHER_USER, OTHER_USER)  # the owner of a folder could do anything in it
    if writer in ("kept", "chunks", "journal-read", "unfinished"):
        WRITERS[writer](out)


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="only root gives files to others")
def test_stale_files_of_others_stay(tmp_path: Path) -> None:
    theirs = tmp_path / "out.partial-1"
    theirs.write_bytes(b"theirs")
    os.chown(theirs, OTHER_USER, OTHER_USER)
    os.symlink(tmp_path / "nowhere", tmp_path / "out.partial-2")
    (tmp_path / "out.partial-3").write_bytes(b"ours")
    atomic.remove_stale(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out.partial-1", "out.partial-2"]


def test_an_output_that_is_a_link_stays_one(tmp_path: Path) -> None:
    """As with cp and llama-quantize, whether the file is there or not; relative links, links of links."""
    disk, work = tmp_path / "disk", tmp_path / "work"
    disk.mkdir()
    work.mkdir()
    os.symlink("../disk/big.gguf", work / "relative.gguf")
    os.symlink("relative.gguf", work / "out.gguf")
    for _ in range(2):
        write(work / "out.gguf")
        assert (work / "out.gguf").is_symlink()
        assert os.listdir(disk) == ["big.gguf"]
        assert sorted(os.listdir(work)) == ["out.gguf", "relative.gguf"]
        assert len(gguf.open(work / "out.gguf").tensors) == 1
    changed = Metadata()
    changed.set("general.name", "x" * 100, "str")
    header.rewrite(work / "out.gguf", changed, set())
    assert (work / "out.gguf").is_symlink()
    assert gguf.open(disk / "big.gguf").metadata["general.name"] == "x" * 100


def test_a_job_whose_output_is_a_link(tmp_path: Path) -> None:
    """Its partial file and its journal are on the disk that gets the output."""
    disk, work = tmp_path / "disk", tmp_path / "work"
    disk.mkdir()
    work.mkdir()
    os.symlink(disk / "big.gguf", work / "out.gguf")
    head = {"journal": 1, "job": "another", "tensors": 3, "files": ["big.gguf.partial-job"]}
    (disk / "big.gguf.partial-job.journal").write_text(json.dumps(head) + "\n")
    write(disk / "big.gguf.partial-job")
    assert unfinished(work / "out.gguf") == (0, 3)
    quantize(work / "out.gguf")
    assert sorted(os.listdir(work)) == ["in.gguf", "out.gguf"]
    assert os.listdir(disk) == ["big.gguf"]
    assert (work / "out.gguf").is_symlink()


def test_a_link_to_a_folder_that_is_missing(tmp_path: Path) -> None:
    """Where a disk is not mounted no folder is made in its place."""
    os.symlink(tmp_path / "missing" / "x", tmp_path / "out")
    with pytest.raises(QuantkitError, match=r"missing/x: cannot write: No such file"):
        atomic.AtomicFile(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_links_in_a_circle(tmp_path: Path) -> None:
    os.symlink("b", tmp_path / "a")
    os.symlink("a", tmp_path / "b")
    with pytest.raises(QuantkitError, match=r"/a: over 40 symbolic links"):
        atomic.AtomicFile(tmp_path / "a")


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="only root gives links to others")
def test_links_of_others_in_a_public_folder(tmp_path: Path) -> None:
    """The kernel refuses to follow them; os.readlink alone would not."""
    (tmp_path / "victim").write_bytes(b"precious")
    public = tmp_path / "public"
    public.mkdir()
    os.chmod(public, 0o1777)
    os.symlink(tmp_path / "victim", public / "out")
    with atomic.writing(public / "out") as file:  # one's own is followed
        file.write(b"mine")
    os.lchown(public / "out", OTHER_USER, OTHER_USER)
    with pytest.raises(QuantkitError, match=f"a symbolic link that user {OTHER_USER} put into a folder"):
        atomic.AtomicFile(public / "out")
    assert (tmp_path / "victim").read_bytes() == b"mine"


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o400])
def test_permissions_of_what_is_replaced_are_kept(tmp_path: Path, mode: int) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")
    out.chmod(mode)
    file = atomic.AtomicFile(out)
    assert permissions(file.temporary) & ~(mode | 0o600) == 0  # nor does anybody read it before
    atomic.publish([file])
    assert permissions(out) == mode


def test_permissions_of_a_new_file_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "out")
    finally:
        os.umask(before)
    assert permissions(tmp_path / "out") == 0o640


def test_a_group_that_cannot_be_given_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members of the new file's group are not those who could read the old one."""
    out = tmp_path / "out"
    out.write_bytes(b"old")
    out.chmod(0o664)

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    real = os.stat

    def other_group(path: str | Path, **options: bool) -> os.stat_result:
        found = real(path, **options)
        if os.fspath(path) == os.fspath(out):
            found = os.stat_result((*found[:5], found.st_gid + 1, *found[6:]))
        return found

    monkeypatch.setattr(os, "stat", other_group)
    with atomic.writing(out) as file:
        file.write(b"new")
    monkeypatch.undo()
    assert permissions(out) == 0o644


def test_what_was_read_is_what_was_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert owned.read_own(tmp_path / "a") == b"x"
    with pytest.raises(FileNotFoundError):
        owned.read_own(tmp_path / "b")
    owned.require_own(tmp_path / "b")
