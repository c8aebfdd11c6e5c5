"""Files appear whole or not at all: exceptions, kills, leavings of dead writers, two writers at once."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.formats import atomic, gguf, stream
from quantkit.formats.gguf import TensorSpec, Writer

SPECS = [TensorSpec(f"t{i}", (64, 1024), "f32") for i in range(4)]
CHUNK = np.zeros((8, 4096), np.uint8)

SLOW_WRITER = """
import sys, time
from tests.formats.test_atomic import CHUNK, SPECS
from quantkit.formats.gguf import Writer
with Writer(sys.argv[1], {}, SPECS, split_max_tensors=2) as writer:
    for spec in SPECS:
        for _ in range(8):
            writer.write(spec.name, CHUNK)
            print(spec.name, flush=True)
            time.sleep(0.01)
"""


def write(path, **limits):
    with Writer(path, {}, SPECS, **limits) as writer:
        for spec in SPECS:
            writer.write(spec.name, np.zeros((64, 4096), np.uint8))
    return writer.paths


@pytest.mark.parametrize("lines", [1, 12, 20, 31])
def test_a_killed_writer_leaves_nothing_under_a_final_name(tmp_path, lines):
    path = tmp_path / "m.gguf"
    process = subprocess.Popen([sys.executable, "-c", SLOW_WRITER, path], stdout=subprocess.PIPE, text=True)
    for _ in range(lines):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = [p.name for p in tmp_path.iterdir()]
    assert left
    assert all(name.endswith(f".partial-{process.pid}") for name in left)
    paths = write(path, split_max_tensors=2)
    assert sorted(tmp_path.iterdir()) == paths  # the dead writer's files are gone too
    assert len(gguf.open(paths[1]).tensors) == 4


def test_an_interrupt_removes_what_was_written(tmp_path):
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path / "m.gguf", {}, SPECS) as writer:  # noqa: PT012
        writer.write("t0", CHUNK)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_old_file_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), Writer(path, {}, SPECS) as writer:  # noqa: PT012
        writer.write("t0", CHUNK)
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    write(path)
    assert len(gguf.open(path).tensors) == 4


def test_a_file_can_be_written_over_while_it_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    write(path)
    source = gguf.open(path)
    with Writer(path, {}, SPECS[:1]) as writer:
        writer.write("t0", source.tensors["t3"].data)
    assert list(gguf.open(path).tensors) == ["t0"]
    assert source.tensors["t3"].data.shape == (64, 4096)


def test_two_writers_of_one_file(tmp_path):
    path = tmp_path / "m.gguf"
    with Writer(path, {}, SPECS) as first:
        with pytest.raises(QuantkitError, match="another writer"):
            Writer(path, {}, SPECS)
        for spec in SPECS:
            first.write(spec.name, np.zeros((64, 4096), np.uint8))
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_live_writer_of_another_process_is_left_alone(tmp_path):
    path = tmp_path / "m.gguf"
    process = subprocess.Popen([sys.executable, "-c", SLOW_WRITER, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline()
    theirs = tmp_path / f"m-00001-of-00002.gguf.partial-{process.pid}"
    atomic.remove_stale(tmp_path / "m-00001-of-00002.gguf")
    assert theirs.exists()
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 5
    while theirs.exists() and time.monotonic() < deadline:
        atomic.remove_stale(tmp_path / "m-00001-of-00002.gguf")
    assert not theirs.exists()


def test_stale_files_are_matched_by_name_only(tmp_path):
    for name in ("a.gguf.partial-1", "[a].gguf.partial-1", "b.gguf.partial-1", "a.gguf"):
        (tmp_path / name).touch()
    atomic.remove_stale(tmp_path / "[a].gguf")
    assert sorted(os.listdir(tmp_path)) == ["a.gguf", "a.gguf.partial-1", "b.gguf.partial-1"]


def test_a_small_file(tmp_path):
    with atomic.writing(tmp_path / "new" / "f.txt") as stream:
        stream.write(b"x")
        assert os.listdir(tmp_path / "new") == [f"f.txt.partial-{os.getpid()}"]
    assert (tmp_path / "new" / "f.txt").read_bytes() == b"x"
    with pytest.raises(ValueError, match="no"), atomic.writing(tmp_path / "g") as stream:  # noqa: PT012
        stream.write(b"x")
        raise ValueError("no")
    assert os.listdir(tmp_path) == ["new"]


def test_errors_of_the_system_name_the_file(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(QuantkitError, match=r"file/m\.gguf: cannot write: "):
        write(tmp_path / "file" / "m.gguf")
    with pytest.raises(QuantkitError, match=r"folder\.gguf: this is a directory"):  # before anything is written
        Writer(tmp_path / "folder.gguf", {}, SPECS)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.gguf"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this system")
def test_only_regular_files_are_replaced(tmp_path):
    """A pipe here, /dev/null in practice: renaming over a device would remove it."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", ""):
        with pytest.raises(QuantkitError, match=r"not a regular file|this is a directory"):
            atomic.AtomicFile(path)
    with pytest.raises(QuantkitError, match="this is a directory"):
        Writer("", {}, SPECS, split_max_tensors=2)
    assert (tmp_path / "pipe").is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk(tmp_path):
    file = atomic.AtomicFile(tmp_path / "m.gguf")
    with open("/dev/full", "r+b", buffering=0) as full:
        os.dup2(full.fileno(), file.stream.fileno())
    file.stream.write(b"x" * 100)
    with pytest.raises(QuantkitError, match=r"m\.gguf\.partial-.*cannot write: No space left"):
        file.seal()
    file.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux reserves blocks")
def test_reserved_blocks(tmp_path, monkeypatch):
    """A full disk is told before anything is written; a file system that cannot reserve gives the size alone."""
    file = atomic.AtomicFile(tmp_path / "x")
    file.reserve(1 << 20)
    assert os.fstat(file.stream.fileno()).st_size == 1 << 20
    file.discard()
    for number, told in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EOPNOTSUPP, False)):
        monkeypatch.setattr(atomic, "_fallocate", lambda number=number: lambda *_: ctypes.set_errno(number) or -1)
        if told:
            with pytest.raises(QuantkitError, match=r"x\.gguf\.partial-\d+: cannot write the header: .*(space|quota)"):
                write(tmp_path / "x.gguf")
            assert list(tmp_path.iterdir()) == []
        else:
            assert write(tmp_path / "x.gguf")[0].stat().st_size > 4 * 64 * 4096


def test_a_sync_that_fails_on_the_way_is_told(tmp_path, monkeypatch):
    """What a thread is told by the disk, once, must not be lost: the sync at the end may succeed."""

    def fail(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(stream, "_SYNC_EVERY", 1 << 16)
    synced = []
    monkeypatch.setattr(stream, "_sync_data", synced.append)
    write(tmp_path / "good.gguf")
    assert synced
    monkeypatch.setattr(stream, "_sync_data", fail)
    with pytest.raises(QuantkitError, match=r"bad\.gguf\.partial-\d+: cannot write.*: Input/output error"):
        write(tmp_path / "bad.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["good.gguf"]


@pytest.mark.parametrize("durable", [True, False])
def test_who_need_not_be_durable_is_not_synced(tmp_path, monkeypatch, durable):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Writer(tmp_path / "x.gguf", {}, [TensorSpec("a", (4,), "f32")], durable=durable) as writer:
        writer.write("a", bytes(16))
    assert bool(synced) is durable
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]
