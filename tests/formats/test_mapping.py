"""Mapped files give their memory back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import FormatError
from quantkit.formats import gguf
from quantkit.formats.kld import base_file
from quantkit.formats.mapping import map_file, release, require_whole
from quantkit.formats.safetensors import open_checkpoint


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


# ------------------------------------------------------------------------------- files that become shorter meanwhile


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def test_a_file_that_became_shorter_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(1 << 20))
    mapped = map_file(path)
    part = mapped[5:100].reshape(-1, 5)
    require_whole(part, path)
    with path.open("ab") as file:  # longer is no danger
        file.write(b"more")
    require_whole(part, path)
    path.rename(tmp_path / "b")  # nor another file of that name
    path.write_bytes(b"")
    require_whole(part, path)
    shorten(tmp_path / "b")
    with pytest.raises(FormatError, match="the file has 524288 bytes, it had 1048576 when it was opened"):
        require_whole(part, path)
    require_whole(np.zeros(5, np.uint8), path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    metadata = gguf.Metadata()
    metadata.set("general.architecture", "llama", "str")
    spec = gguf.TensorSpec("output.weight", (512, 256), types.get("q8_0"))
    with gguf.Writer(path, metadata, [spec]) as writer:
        writer.write(spec.name, spec.type.quantize(np.ones((512, 256), np.float32)))
    return path


def test_tensors_of_a_gguf_that_became_shorter_are_errors(model: Path) -> None:
    tensor = gguf.open(model).tensors["output.weight"]
    tensor.dequantize()
    shorten(model)
    for read in (tensor.dequantize, lambda: tensor.data, lambda: tensor.stored, lambda: tensor.rows(0, 8)):
        with pytest.raises(FormatError, match="when it was opened"):
            read()


def test_tensors_of_a_checkpoint_that_became_shorter_are_errors(tmp_path: Path) -> None:
    header = b'{"x": {"dtype": "F32", "shape": [512, 256], "data_offsets": [0, 524288]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(524288))
    tensor = open_checkpoint(path).tensors["x"]
    tensor.dequantize()
    shorten(path)
    with pytest.raises(FormatError, match="when it was opened"):
        tensor.dequantize()


def test_chunks_of_a_base_that_became_shorter_are_errors(tmp_path: Path) -> None:
    path, tokens = tmp_path / "x.kld", np.zeros((2, 64), np.int32)
    with base_file.BaseWriter(path, tokens, 500) as writer:
        for _ in tokens:
            writer.write(np.zeros((31, 500), np.float32))
    reader = base_file.BaseReader(path)
    reader.chunk(1)
    shorten(path)
    with pytest.raises(FormatError, match="when it was opened"):
        reader.chunk(1)


@pytest.mark.parametrize("job", ["quantize", "repack", "diff", "merge"])
def test_jobs_end_with_an_error_and_no_output(job: str, model: Path, tmp_path: Path) -> None:
    """The file is truncated after it was opened, in a process that a SIGBUS may end."""
    out = tmp_path / "out.gguf"
    words = {
        "quantize": ["quantize", str(model), str(out), "Q4_0", "--allow-requantize"],
        "repack": ["repack", str(model), str(out)],
        "diff": ["diff", str(model), str(model)],
        "merge": ["merge", str(model), str(out)],
    }[job]
    code = f"""
import os, sys
from pathlib import Path
from quantkit.cli import main
from quantkit.formats import gguf
opened = gguf.GGUF.__init__
def init(self, *args, **kwargs):
    opened(self, *args, **kwargs)
    os.truncate({str(model)!r}, 40960)
gguf.GGUF.__init__ = init
sys.exit(main({words!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr.count("error:")) == (1, 1), done.stderr
    assert not out.exists()
