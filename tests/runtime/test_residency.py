"""--no-mmap, -thp and --mlock: where weights are, and that the results are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.cli import main
from quantkit.errors import FormatError
from quantkit.formats import gguf
from quantkit.formats.mapping import is_mapped
from quantkit.runtime import residency
from quantkit.runtime.loading import load

TOKENS = [5, 17, 300, 2]


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("repack", [False, True])
def test_weights_in_memory_give_the_same_logits(tiny: Path, numerics: str, repack: bool) -> None:
    mapped = load(tiny, numerics=numerics, repack=repack)
    read = load(tiny, numerics=numerics, repack=repack, mmap=False)
    np.testing.assert_array_equal(read.logits(TOKENS), mapped.logits(TOKENS))
    assert mapped.read is None
    assert read.read is not None
    assert not any(is_mapped(tensor.data) for tensor in read.weights.values())
    assert read.read.huge_bytes is None
    repacked = read.repacked.nbytes if read.repacked else 0  # read by `repack` alone
    assert read.read.nbytes == sum(tensor.nbytes for tensor in read.weights.values()) - repacked


def test_memory_is_read_only_and_keeps_its_bytes_when_it_is_released(tiny: Path) -> None:
    """`release` gives a mapped file's pages back; of memory it must not, because they would come back as zeros."""
    file = gguf.open(tiny)
    tensors, done = residency.read(file.tensors, lambda tensor: "ffn" in tensor.name)
    assert done.nbytes == sum(t.nbytes for t in file.tensors.values() if "ffn" in t.name)
    for name, tensor in tensors.items():
        assert is_mapped(tensor.data) == ("ffn" not in name)
        assert not tensor.data.flags.writeable
        tensor.release()
        np.testing.assert_array_equal(tensor.data, file.tensors[name].data)
        assert (tensor.shape, tensor.type, tensor.path) == (file.tensors[name].shape, file.tensors[name].type, tiny)


def test_a_file_that_became_shorter_is_an_error(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny.read_bytes())
    file = gguf.open(path)
    last = max(file.tensors.values(), key=lambda tensor: tensor.offset)
    with path.open("r+b") as stream:
        stream.truncate(last.offset + 100)
    with pytest.raises(FormatError, match=f"{last.name} has {last.nbytes} bytes, the file ends after 100"):
        residency.read(file.tensors, lambda tensor: tensor is last)


def test_huge_pages(tmp_path: Path) -> None:
    """Memory for huge pages begins at one; weights smaller than one have none."""
    data = residency._memory(5 << 20, huge_pages=True)
    assert data.ctypes.data % (2 << 20) == 0
    assert data.nbytes == 5 << 20
    small = residency.ReadWeights(1000, 0)
    assert small.why_no_huge_pages()
    assert "1000" in small.why_no_huge_pages() or "transparent_hugepage" in small.why_no_huge_pages()


def test_what_the_kernel_says_about_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    monkeypatch.setattr(residency, "_THP", setting)
    weights = residency.ReadWeights(9 << 20, 0)
    assert "is unknown" in weights.why_no_huge_pages()
    setting.write_text("always madvise [never]\n", encoding="ascii")
    assert "is never" in weights.why_no_huge_pages()
    setting.write_text("always [madvise] never\n", encoding="ascii")
    assert "had no huge page free" in weights.why_no_huge_pages()


def locked_bytes() -> int:
    """Bytes of this process that are locked in memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmLck")).split()[1])


def test_locked_weights_are_locked(tiny: Path) -> None:
    before = locked_bytes()
    model = load(tiny, mlock=True)
    assert model.locked is not None
    if not model.locked.complete:
        pytest.skip(f"this system locks at most {model.locked.limit} bytes")
    assert model.locked.locked == model.locked.nbytes == sum(t.nbytes for t in model.weights.values())
    assert locked_bytes() - before >= model.locked.nbytes


def test_a_refused_lock_is_told_with_both_numbers(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model runs; as many weights as the limit allows are locked."""
    refuse_after = iter(["", "Cannot allocate memory"])
    monkeypatch.setattr(residency, "_mlock", lambda data: next(refuse_after))
    monkeypatch.setattr(residency, "_lock_limit", lambda: 8 << 20)
    first = next(iter(gguf.open(tiny).tensors.values())).nbytes
    about = ["sweep-bench", str(tiny), "-c", "16", "-b", "8", "--mlock"]
    assert main(about) == 0
    said = next(line for line in capsys.readouterr().err.splitlines() if "--mlock" in line)
    assert said.startswith(f"warning: --mlock: {first / 2**20:.2f} MiB of ")
    assert "Cannot allocate memory; the limit (RLIMIT_MEMLOCK) is 8.00 MiB; raise it: ulimit -l" in said
