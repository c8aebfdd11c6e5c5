"""`quantize --calibrate hf://…`: the bytes of a directory, bounded disk, checked hashes, files fetched about once."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit import CalibrationOptions, QuantizeOptions, quantize_calibrated
from quantkit.errors import OptionError, QuantkitError
from quantkit.pipelines.resume import unfinished
from tests.evaluate import test_imatrix
from tests.hub.fake import FakeHub
from tests.hub.test_stream import NAME, SOURCE, Watch

text = test_imatrix.text  # fixture
SETTINGS = CalibrationOptions(ctx_size=test_imatrix.CTX, chunks=2, second_moments="blocks:64")


def calibrated(source: object, out: Path, text: Path, **options: object) -> bytes:
    """The bytes of a file that is calibrated while it is written."""
    settings = QuantizeOptions(**options)  # type: ignore[arg-type]
    quantize_calibrated(source, out, "Q4_0", text, settings, SETTINGS)  # type: ignore[arg-type]
    return out.read_bytes()


def test_the_bytes_of_a_directory_within_the_disk(hub: FakeHub, checkpoint: Path, tmp_path: Path, text: Path) -> None:
    """A file that is needed after others have taken its room is fetched again; most are fetched once."""
    hub.add(NAME, checkpoint)
    local = calibrated(checkpoint, tmp_path / "local.gguf", text)
    files = sorted(checkpoint.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in files)
    with pytest.raises(QuantkitError, match=r"--disk is 1000000 bytes, (\d+) are needed: .* a layer is in") as error:
        calibrated(SOURCE, tmp_path / "x.gguf", text, disk=1_000_000)
    needed = int(str(error.value).split(" bytes, ")[1].split(" ")[0])
    assert needed < total
    assert all(request.sent <= 1 << 18 for request in hub.requests)  # headers
    hub.requests.clear()
    with Watch(tmp_path) as watch:
        assert calibrated(SOURCE, tmp_path / "x.gguf", text, disk=needed) == local
    assert 0 < watch.peak <= needed
    assert total < hub.sent("cdn") < 2 * total
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".txt") == ["local.gguf", "x.gguf"]


def test_a_wrong_hash_is_refused_and_the_job_resumes(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, text: Path
) -> None:
    hub.add(NAME, checkpoint)
    last, out = max(path.name for path in checkpoint.glob("*.safetensors")), tmp_path / "x.gguf"
    hub.repos[NAME].claimed[last] = "0" * 64
    with pytest.raises(
        QuantkitError, match=f"{last}: its SHA-256 is {hub.sha256(checkpoint / last)}, the Hub says 000"
    ):
        calibrated(SOURCE, out, text)
    hub.repos[NAME].claimed.clear()
    local = calibrated(checkpoint, tmp_path / "local.gguf", text)
    assert calibrated(SOURCE, out, text) == local
    assert unfinished(out) is None


def test_shards_are_not_kept(hub: FakeHub, checkpoint: Path, tmp_path: Path, text: Path) -> None:
    hub.add(NAME, checkpoint)
    with pytest.raises(OptionError, match="hf download org/Tiny-Llama"):
        calibrated(SOURCE, tmp_path / "x.gguf", text, keep_shards=True)
