"""Checkpoints from the Hub: the bytes of a directory, bounded disk, resumed runs, checked hashes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import quantkit
from quantkit import ConvertOptions, QuantizeOptions, VerifyOptions
from quantkit.cli import main
from quantkit.errors import OptionError, QuantkitError
from quantkit.formats.journal import read as read_journal
from quantkit.hub import checkpoint as hub_checkpoint
from quantkit.hub.address import parse
from quantkit.hub.client import HubError
from quantkit.hub.stream import CheckpointStream
from quantkit.pipelines.conversion.remote import plan_remote
from tests.archs.adapters import save_adapter
from tests.archs.checkpoints import loaded, tiny
from tests.archs.quantized import quantized
from tests.hub.conftest import sharded
from tests.hub.fake import COMMIT, FakeHub, Fault

NAME = "org/Tiny-Llama"
SOURCE = f"hf://{NAME}"


def used(folder: Path) -> int:
    """Bytes on the disk below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


class Watch:
    """Measures the disk that a run takes beside its output, every millisecond."""

    def __init__(self, folder: Path):
        self.folder, self.peak, self._stop = folder, 0, threading.Event()

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, *(used(path) for path in self.folder.glob("*.partial-hub")), 0)


@pytest.mark.parametrize("outtype", ["auto", "q8_0", "f32"])
def test_convert_gives_the_bytes_of_a_directory(hub: FakeHub, checkpoint: Path, tmp_path: Path, outtype: str) -> None:
    hub.add(NAME, checkpoint)
    quantkit.convert(checkpoint, tmp_path / "local.gguf", outtype)
    done = quantkit.convert(SOURCE, tmp_path / "{name}-{ftype}.gguf", outtype)
    assert done.paths == [tmp_path / f"Tiny-Llama-{done.outtype.name}.gguf"]
    assert done.paths[0].read_bytes() == (tmp_path / "local.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["local.gguf", done.paths[0].name])


def test_quantize_gives_the_bytes_of_a_directory(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    """Every file of weights is read once, and a bare ORG/NAME means the same."""
    hub.add(NAME, checkpoint)
    quantkit.quantize(checkpoint, tmp_path / "local.gguf", "Q4_0")
    lines: list[str] = []
    quantkit.quantize(SOURCE, tmp_path / "hub.gguf", "Q4_0", on_message=lines.append)
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    for path in checkpoint.glob("*.safetensors"):
        once = path.stat().st_size
        assert once <= hub.sent(path.name) <= 2 * once  # and its header, which is all of a small file
        assert f"checked: {path.name} has the hash {hub.sha256(path)}" in lines
    quantkit.quantize(NAME, tmp_path / "bare.gguf", "Q4_0", QuantizeOptions(split_max_tensors=9))
    quantkit.quantize(checkpoint, tmp_path / "local.gguf", "Q4_0", QuantizeOptions(split_max_tensors=9))
    for path in tmp_path.glob("bare-*.gguf"):
        assert path.read_bytes() == path.with_name(path.name.replace("bare", "local")).read_bytes()


@pytest.mark.parametrize("arch", ["deepseek2", "gpt-oss"])
def test_stacked_experts_and_codes_with_scales(hub: FakeHub, tmp_path: Path, arch: str) -> None:
    """Outputs made from many tensors that are spread over several files."""
    directory = tmp_path / "Experts"
    tiny(directory, "bfloat16", arch=arch)
    sharded(directory, 200_000)
    hub.add("org/Experts", directory)
    quantkit.quantize(directory, tmp_path / "local.gguf", "Q8_0")
    quantkit.quantize("hf://org/Experts", tmp_path / "hub.gguf", "Q8_0")
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()


def test_numbers_of_layers_are_fetched_before_the_header_is_written(hub: FakeHub, tmp_path: Path) -> None:
    """Tensors that become GGUF keys: fetched alone, and compared when their file is streamed."""
    directory = tmp_path / "Apertus"
    tiny(directory, "bfloat16", arch="apertus")
    sharded(directory, 100_000)
    hub.add("org/Apertus", directory)
    quantkit.quantize(directory, tmp_path / "local.gguf", "Q8_0")
    quantkit.quantize("hf://org/Apertus", tmp_path / "hub.gguf", "Q8_0")
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    planned = plan_remote(parse("hf://org/Apertus"), "bf16", ConvertOptions(), "auto")
    stream, name = planned.arrivals, "model.layers.1.mlp.act_fn.alpha_n"
    assert isinstance(stream, CheckpointStream)
    stream.remote.early[name] = stream.remote.early[name] ^ 1
    stream.begin(tmp_path / "x.gguf", {key: tensor.inputs for key, tensor in planned.tensors.items()})
    try:
        with pytest.raises(HubError, match=f"tensor {name} changed while it was read"):
            stream.finish()
    finally:
        stream.close()


@pytest.mark.parametrize("kind", ["gptq", "nvfp4", "nf4"])
def test_published_quantized_checkpoints(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    """Matrices of several tensors in several files; settings in a file of their own."""
    tiny(tmp_path / "plain", "bfloat16", "llama")
    directory = quantized(kind, tmp_path / "plain", tmp_path / "Codes")
    sharded(directory, 50_000)
    if kind == "gptq":
        config = json.loads((directory / "config.json").read_text())
        (directory / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
        (directory / "config.json").write_text(json.dumps(config))
    hub.add("org/Codes", directory)
    quantkit.quantize(directory, tmp_path / "local.gguf", "Q8_0")
    quantkit.quantize("hf://org/Codes", tmp_path / "hub.gguf", "Q8_0")
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    if kind == "nvfp4":
        quantkit.convert(directory, tmp_path / "local.gguf", "stored")
        quantkit.convert("hf://org/Codes", tmp_path / "hub.gguf", "stored")
        assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
        assert "blk.0.attn_q.scale" in quantkit.open(tmp_path / "hub.gguf").tensors


def test_the_disk_is_bounded(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    """The bound is less than a file of the checkpoint."""
    hub.add(NAME, checkpoint)
    biggest = max(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    quantkit.quantize(checkpoint, tmp_path / "local.gguf", "IQ4_NL")
    with Watch(tmp_path) as watch:
        quantkit.quantize(SOURCE, tmp_path / "hub.gguf", "IQ4_NL", QuantizeOptions(disk=biggest - 1))
    assert 0 < watch.peak < biggest
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()


def test_too_little_disk_is_refused_before_anything_is_fetched(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add(NAME, checkpoint)
    with pytest.raises(QuantkitError, match=r"--disk is 5000 bytes, \d+ are needed: .* give --disk \d+M or more"):
        quantkit.convert(SOURCE, tmp_path / "x.gguf", options=ConvertOptions(disk=5000))
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="--disk bounds it; drop one"):
        quantkit.convert(SOURCE, tmp_path / "x.gguf", options=ConvertOptions(disk=10**9, keep_shards=True))
    with pytest.raises(OptionError, match="is not a checkpoint on the Hub"):
        quantkit.convert(checkpoint, tmp_path / "x.gguf", options=ConvertOptions(disk=10**9))


@pytest.mark.parametrize("where", ["partial_requant", "reuse"])
def test_unchanged_tensors_of_an_older_file(hub: FakeHub, checkpoint: Path, tmp_path: Path, where: str) -> None:
    """Each tensor is compared when it arrives; those whose type changed, and those of a changed file, are made anew."""
    repo = hub.add(NAME, checkpoint)
    old = tmp_path / ("x.gguf" if where == "partial_requant" else "old.gguf")
    quantkit.quantize(checkpoint, old, "Q4_0")
    changed_dir = tmp_path / "changed" / "Tiny-Llama"
    shutil.copytree(checkpoint, changed_dir)
    last = sorted(changed_dir.glob("*.safetensors"))[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    repo.files[last.name] = last
    options = QuantizeOptions(
        custom_q=[r"ffn_up\.weight=q5_0"],
        partial_requant=where == "partial_requant",
        reuse=old if where == "reuse" else None,
    )
    lines: list[str] = []
    done = quantkit.quantize(SOURCE, tmp_path / "x.gguf", "Q4_0", options, on_message=lines.append)
    local = quantkit.quantize(
        changed_dir, tmp_path / "local.gguf", "Q4_0", QuantizeOptions(custom_q=[r"ffn_up\.weight=q5_0"])
    )
    assert (tmp_path / "x.gguf").read_bytes() == local.paths[0].read_bytes()
    tensors = len(done.plan.tensors)
    assert done.reused == tensors - 3 - 1  # ffn_up of three layers, and the tensor whose last byte changed
    assert f"reused: {done.reused} of {tensors} tensors are in {old}" in lines


def test_verify_compares_a_stream(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = hub.add(NAME, checkpoint)
    made = tmp_path / "x.gguf"
    quantkit.quantize(checkpoint, made, "Q4_0")
    found = quantkit.verify(made, VerifyOptions(SOURCE, threads=1, disk=3_000_000))
    assert found.rerun is True
    assert found.hashed == len(found.file.tensors)
    with pytest.raises(QuantkitError, match=r"--disk is 5000 bytes, \d+ are needed"):
        quantkit.verify(made, VerifyOptions(SOURCE, disk=5000))
    with pytest.raises(OptionError, match="--disk is about a --source on the Hub"):
        quantkit.verify(made, VerifyOptions(disk=5000))
    last = sorted(checkpoint.glob("*.safetensors"))[-1]
    changed = tmp_path / last.name
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    repo.files[last.name] = changed
    assert main(["verify", str(made), "--source", SOURCE]) == 0
    text = capsys.readouterr().out
    assert text.count("its source has changed") == 1
    assert "other bytes, in 1 tensors" in text
    repo.claimed[last.name] = "ab" * 32
    with pytest.raises(QuantkitError, match="its SHA-256 is"):
        quantkit.verify(made, VerifyOptions(SOURCE))
    assert not list(tmp_path.glob("*.partial-hub"))


def test_kept_files_are_a_checkpoint(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add(NAME, checkpoint)
    quantkit.convert(SOURCE, tmp_path / "a.gguf", options=ConvertOptions(keep_shards=True))
    for path in checkpoint.iterdir():
        assert (tmp_path / "Tiny-Llama" / path.name).read_bytes() == path.read_bytes()
    hub.requests.clear()
    quantkit.convert(SOURCE, tmp_path / "b.gguf", options=ConvertOptions(keep_shards=True))  # reads them instead
    quantkit.convert(tmp_path / "Tiny-Llama", tmp_path / "c.gguf")
    assert len({(tmp_path / f"{name}.gguf").read_bytes() for name in "abc"}) == 1
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    assert all(hub.sent(name) <= size for name, size in sizes.items())  # the headers alone


def test_a_wrong_hash_is_refused_and_nothing_is_lost(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    """The error names the file, both hashes and the remedy. Files that were right are not read again."""
    repo = hub.add(NAME, checkpoint)
    files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    repo.claimed[files[-1]] = "ab" * 32
    command = [sys.executable, "-m", "quantkit", "quantize", SOURCE, str(tmp_path / "x.gguf"), "Q4_0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    error = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    actual = hub.sha256(checkpoint / files[-1])
    for part in (f"{SOURCE}/{files[-1]}", "ab" * 32, actual, "run the same command again"):
        assert part in error
    assert not (tmp_path / "x.gguf").exists()
    stored = read_journal(tmp_path / "x.gguf.partial-job.journal")
    assert stored is not None
    assert 0 < len(stored.entries) < int(stored.header["tensors"])
    assert [f"{SOURCE}/{files[0]}", (checkpoint / files[0]).stat().st_size, hub.sha256(checkpoint / files[0])] in (
        stored.header["sources"]
    )
    # The claimed hash is part of what the job was begun from. With the right one the sources have changed.
    repo.claimed.clear()
    quantkit.quantize(SOURCE, tmp_path / "x.gguf", "Q4_0")
    quantkit.quantize(checkpoint, tmp_path / "local.gguf", "Q4_0")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()


def test_bytes_damaged_on_their_way(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    """The same command goes on: only the damaged file is read again."""
    damaged_dir = tmp_path / "damaged"
    damaged_dir.mkdir()
    repo = hub.add(NAME, checkpoint)
    last = sorted(path for path in checkpoint.glob("*.safetensors"))[-1]
    bad = bytearray(last.read_bytes())
    bad[-3] ^= 1
    (damaged_dir / last.name).write_bytes(bad)
    repo.claimed[last.name] = hub.sha256(last)
    repo.files[last.name] = damaged_dir / last.name
    with pytest.raises(QuantkitError, match=f"{last.name}: its SHA-256 is {hub.sha256(damaged_dir / last.name)}"):
        quantkit.convert(SOURCE, tmp_path / "x.gguf")
    repo.files[last.name] = last
    hub.requests.clear()
    lines: list[str] = []
    quantkit.convert(SOURCE, tmp_path / "x.gguf", on_message=lines.append)
    assert lines[0].startswith("resumed: ")
    assert [line for line in lines if line.startswith("checked")] == [
        f"checked: {last.name} has the hash {hub.sha256(last)}"
    ]
    quantkit.convert(checkpoint, tmp_path / "local.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()


def test_a_run_with_another_adapter_is_not_resumed(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    """Tensors that an interrupted run merged with another adapter are made again."""
    model = loaded(checkpoint)
    adapters = [save_adapter(tmp_path / name, model, {"lora_alpha": alpha}) for name, alpha in (("a", 4), ("b", 8))]
    repo = hub.add(NAME, checkpoint)
    last = sorted(checkpoint.glob("*.safetensors"))[-1]
    (tmp_path / last.name).write_bytes(last.read_bytes()[:-1] + b"\xff")
    repo.claimed[last.name] = hub.sha256(last)
    repo.files[last.name] = tmp_path / last.name
    with pytest.raises(QuantkitError, match="its SHA-256 is"):
        quantkit.convert(SOURCE, tmp_path / "x.gguf", options=ConvertOptions(merge_lora=adapters[0]))
    assert (tmp_path / "x.gguf.partial-job").exists()
    repo.files[last.name] = last
    for source, out in ((SOURCE, "x.gguf"), (checkpoint, "local.gguf")):
        quantkit.convert(source, tmp_path / out, options=ConvertOptions(merge_lora=adapters[1]))
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_killed_and_resumed(hub: FakeHub, checkpoint: Path, tmp_path: Path, command: str) -> None:
    hub.add(NAME, checkpoint)
    hub.bytes_per_second = 1_500_000
    out = tmp_path / "x.gguf"
    words = [sys.executable, "-m", "quantkit", command, SOURCE, str(out), *["Q4_0"] * (command == "quantize")]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    journal = tmp_path / "x.gguf.partial-job.journal"
    end = time.monotonic() + 120
    while time.monotonic() < end and running.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > 2:
            break
        time.sleep(0.01)
    assert running.poll() is None, running.communicate()[0]
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not out.exists()
    hub.bytes_per_second = 0
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resumed: " in done.stdout + done.stderr
    local = tmp_path / "local.gguf"
    quantkit.convert(checkpoint, local) if command == "convert" else quantkit.quantize(checkpoint, local, "Q4_0")
    assert out.read_bytes() == local.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local.gguf", "x.gguf"]


def test_faults_pass(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    """429 and 503 with Retry-After, and connections that are cut: ranges continue where they broke."""
    hub.add(NAME, checkpoint)
    first, second, *_ = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    hub.faults += [
        Fault("/api/models/", status=503, retry_after=0, times=2),
        Fault(f"/resolve/{COMMIT}/{second}", status=429, retry_after=1),
        Fault(f"cdn/{NAME}/{first}", cut=100_000, times=3),
        Fault(f"cdn/{NAME}/{second}", status=502),
    ]
    started = time.monotonic()
    quantkit.convert(SOURCE, tmp_path / "x.gguf")
    assert time.monotonic() - started >= 1
    assert not any(fault.times for fault in hub.faults)
    starts = [request.start for request in hub.requests if request.path == f"/cdn/{NAME}/{first}"]
    assert any(0 < start < (checkpoint / first).stat().st_size for start in starts)
    quantkit.convert(checkpoint, tmp_path / "local.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()


def test_a_fault_that_stays(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add(NAME, checkpoint)
    hub.faults.append(Fault("/api/models/", status=503, times=99))
    with pytest.raises(QuantkitError, match=r"answers 503 .* \(6 attempts\); run the same command again later"):
        quantkit.convert(SOURCE, tmp_path / "x.gguf")
    hub.faults[0] = Fault("/api/models/", status=429, retry_after=86400, times=99)
    with pytest.raises(QuantkitError, match="asks to wait 86400 s"):
        quantkit.convert(SOURCE, tmp_path / "x.gguf")


def test_the_cache_and_offline(hub: FakeHub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the cache has are read from there, checked all the same; offline nothing is asked for."""
    from huggingface_hub import constants, snapshot_download

    hub.add(NAME, checkpoint)
    quantkit.convert(checkpoint, tmp_path / "local.gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(QuantkitError, match="HF_HUB_OFFLINE is set and the cache does not have org/Tiny-Llama"):
        quantkit.convert(SOURCE, tmp_path / "x.gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    lines: list[str] = []
    quantkit.convert(SOURCE, tmp_path / "x.gguf", on_message=lines.append)
    assert not hub.requests
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    last = max(checkpoint.glob("*.safetensors"))
    assert f"checked: {last.name} has the hash {hub.sha256(last)}" in lines


def test_a_tensor_that_is_not_there_is_an_error(hub: FakeHub, checkpoint: Path) -> None:
    """Never zeros: what is large is refused before it was streamed, what is small is fetched alone."""
    hub.add(NAME, checkpoint)
    remote = hub_checkpoint.open_checkpoint(parse(SOURCE))
    tensors = sorted(remote.checkpoint.tensors.values(), key=lambda tensor: tensor.nbytes)
    local = quantkit.formats.safetensors.open_checkpoint(checkpoint)  # type: ignore[attr-defined]
    assert tensors[0].raw().tobytes() == local.tensors[tensors[0].name].raw().tobytes()
    with pytest.raises(QuantkitError, match="is not on the disk now"):
        tensors[-1].raw()
    with pytest.raises(OptionError):
        CheckpointStream(remote, disk=1, keep=True)


def test_planning_reads_no_weights(hub: FakeHub, checkpoint: Path) -> None:
    hub.add(NAME, checkpoint)
    found = quantkit.plan(SOURCE, "Q4_K_M")
    assert found.to_json() == quantkit.plan(checkpoint, "Q4_K_M").to_json()
    assert not [request for request in hub.requests if ".safetensors" in request.path]
    config = quantkit.plan(f"{SOURCE}/config.json", "Q4_K_M")
    assert json.dumps(config.to_json()["tensors"]) == json.dumps(found.to_json()["tensors"])
    assert os.environ["HF_ENDPOINT"] == hub.url


def test_the_commands(
    hub: FakeHub,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Outputs without a name are in the working directory; a dry run fetches headers at most."""
    hub.add(NAME, checkpoint)
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", SOURCE, "Q4_0", "--dry-run"]) == 0
    assert not hub.sent(".safetensors")
    assert main(["convert", SOURCE, "--dry-run"]) == 0
    assert not list(tmp_path.iterdir())
    assert main(["quantize", SOURCE, "Q4_0", "--disk", "3M"]) == 0
    assert main(["convert", NAME]) == 0
    assert "checked: model-00001-of-" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Tiny-Llama-BF16.gguf", "ggml-model-Q4_0.gguf"]
    assert main(["quantize", SOURCE, "Q4_0", "--calibrate", "text.txt", "--keep-shards"]) == 2
    assert "hf download org/Tiny-Llama" in " ".join(capsys.readouterr().err.replace("│", " ").split())
