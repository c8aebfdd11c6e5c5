"""Mapped files give their memory back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.files.mapping import map_file, release


def resident() -> int:
    """Bytes of this process that are backed by files and in memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc tells a process's memory here")
    return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("RssFile"))


def test_released_memory_is_given_back_and_read_again(tmp_path: Path) -> None:
    size = 64 << 20
    content = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    content.tofile(tmp_path / "a")
    mapped = map_file(tmp_path / "a")
    before = resident()
    total = int(mapped.sum())
    assert resident() - before > size // 2
    release(mapped[100 : 1 << 20].reshape(-1, 4))
    for start in range(0, size, 1 << 20):  # pieces that begin and end anywhere leave nothing behind either
        release(mapped[start + 5 : start + (1 << 20) + 5])
    assert resident() - before < size // 8
    assert int(mapped.sum()) == total
    np.testing.assert_array_equal(mapped, content)


def test_other_arrays_are_left_alone() -> None:
    array = np.arange(100_000)
    for each in (array, array[10:], np.frombuffer(bytes(array), np.uint8), array[:0]):
        release(each)
    np.testing.assert_array_equal(array, np.arange(100_000))
