"""quantize and convert on a cluster: the bytes of one machine, whatever happens to workers and coordinator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import quantkit
from quantkit import cluster, types
from quantkit.errors import DataError, OptionError, QuantkitError
from quantkit.formats import gguf, imatrix, journal
from quantkit.formats.gguf import TensorSpec, Writer
from quantkit.formats.imatrix.second_moments import pack
from quantkit.pipelines import on_cluster, resume
from quantkit.pipelines.options import ConvertOptions, QuantizeOptions
from quantkit.pipelines.pieces import Encoded, Piece
from tests.archs.checkpoints import tiny
from tests.cli.running import printed, refused
from tests.cluster.models import COLUMNS, RULES, TYPES, contents, importance, make, write_model

if TYPE_CHECKING:
    from distributed import Client

PIECES = 8  # of each matrix of `large`


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "in.gguf")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two matrices of several pieces."""
    return write_model(tmp_path_factory.mktemp("large") / "in.gguf", 2, PIECES * 512, 1024)


# ------------------------------------------------------------------------------------------------------------ the bytes


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("limit", [None, 10])
def test_the_bytes_are_those_of_one_machine(
    model: Path, tmp_path: Path, dask_client: Client, shared: bool, limit: int | None
) -> None:
    """Of many types at once, trellis and interleaved ones among them, with importance, of experts, in shards."""
    options: dict[str, Any] = {"rules": RULES, "matrix": importance(), "split_max_tensors": limit}
    make(model, tmp_path / "one.gguf", **options)
    written = make(model, tmp_path / "out.gguf", dask_client, shared_output=shared, **options)
    assert {tensor.type.name for tensor in quantkit.open(written.paths[0]).tensors.values()} == {"f32", *TYPES}
    assert len(written.paths) == (1 if limit is None else 3)
    assert contents(*sorted(tmp_path.glob("out*"))) == contents(*sorted(tmp_path.glob("one*")))
    assert set(written.workers) <= set(dask_client.nthreads())
    assert sum(work.bytes_written for work in written.workers.values()) == sum(
        t.nbytes for path in tmp_path.glob("one*") for t in quantkit.formats.gguf.open_parts([path]).tensors.values()
    )


@pytest.mark.parametrize("processes", [1, 4])
def test_other_numbers_of_processes(model: Path, tmp_path: Path, processes: int) -> None:
    options: dict[str, Any] = {"rules": RULES, "matrix": importance(), "split_max_tensors": 10}
    make(model, tmp_path / "one.gguf", **options)
    with cluster.connect(f"local:{processes}") as client:
        client.wait_for_workers(processes)
        written = make(model, tmp_path / "out.gguf", client, **options)
    assert 1 <= len(written.workers) <= processes
    assert len(written.paths) == 3
    assert contents(*sorted(tmp_path.glob("out*"))) == contents(*sorted(tmp_path.glob("one*")))


def test_a_task_takes_all_threads_of_a_worker(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed

    threads = set[int]()

    def noted(piece: Piece) -> Encoded:
        threads.add(threading.get_ident())
        time.sleep(0.01)  # so that one thread cannot do all
        return encode(piece)

    make(large, tmp_path / "one.gguf")
    encode = Piece.encode
    monkeypatch.setattr(Piece, "encode", noted)
    options = {"n_workers": 1, "threads_per_worker": 3, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(**options) as local, distributed.Client(local) as client:
        written = make(large, tmp_path / "out.gguf", client)
    (work,) = written.workers.values()
    assert len(threads) == 3
    assert work.tasks < work.pieces == 2 * PIECES + 2 * 3 + 1
    assert contents(tmp_path / "out.gguf") == contents(tmp_path / "one.gguf")


def test_second_moments_are_read_by_the_workers(tmp_path: Path, dask_client: Client) -> None:
    """They are too large for tasks: the matrix has to be a file."""
    model, file = write_model(tmp_path / "in.gguf", 1), tmp_path / "imatrix.gguf"
    x = np.random.default_rng(2).standard_normal((4 * COLUMNS, COLUMNS)) + 0.5
    packed = pack([np.corrcoef(x.T).astype(np.float32)])[None]
    moments = imatrix.SecondMoments(COLUMNS, COLUMNS, packed, np.array([1 << 40]))
    matrix = replace(importance(1), second_moments={"blk.0.attn_q.weight": moments})
    imatrix.write(file, matrix)
    options = QuantizeOptions(imatrix=file, effort="best")
    quantkit.quantize(model, tmp_path / "one.gguf", "Q4_K_M", options)
    quantkit.quantize(model, tmp_path / "out.gguf", "Q4_K_M", options, client=dask_client)
    quantkit.quantize(model, tmp_path / "without.gguf", "Q4_K_M", replace(options, no_second_moments=True))
    assert contents(tmp_path / "out.gguf") == contents(tmp_path / "one.gguf") != contents(tmp_path / "without.gguf")
    in_memory = replace(options, imatrix=matrix, fresh=True)
    with pytest.raises(OptionError, match="pass the importance matrix as a file"):
        quantkit.quantize(model, tmp_path / "out.gguf", "Q4_K_M", in_memory, client=dask_client)


def test_a_checkpoint_is_converted_and_quantized(tmp_path: Path, dask_client: Client) -> None:
    tiny(tmp_path / "hf")
    quantkit.convert(tmp_path / "hf", tmp_path / "one.gguf", "bf16")
    for shared in (False, True):
        done = quantkit.convert(
            tmp_path / "hf", tmp_path / "out.gguf", "bf16", ConvertOptions(shared_output=shared), client=dask_client
        )
        assert done.workers
        assert contents(tmp_path / "out.gguf") == contents(tmp_path / "one.gguf")
    quantkit.quantize(tmp_path / "hf", tmp_path / "one.gguf", "Q8_0")
    quantkit.quantize(tmp_path / "hf", tmp_path / "out.gguf", "Q8_0", client=dask_client)
    assert contents(tmp_path / "out.gguf") == contents(tmp_path / "one.gguf")


def test_scales_of_nvfp4(tmp_path: Path, dask_client: Client) -> None:
    """Read from another shard than their tensor, and new ones."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((128, 256)).astype("<f4") * np.float32(0.02)
    specs = [TensorSpec("blk.0.ffn_up.weight", x.shape, types.get("nvfp4")),
             TensorSpec("blk.0.ffn_up.scale", (1,), types.get("f32")),
             TensorSpec("blk.0.ffn_down.weight", x.shape, types.get("f32"))]  # fmt: skip
    data = types.get("nvfp4").quantize(x * 128), np.full(1, 2.0**-7, "<f4").view(np.uint8), x.view(np.uint8)
    with Writer(tmp_path / "in.gguf", {"general.architecture": "llama"}, specs, split_max_tensors=1) as writer:
        for spec, values in zip(specs, data):
            writer.write(spec.name, values)
    source = tmp_path / "in-00001-of-00003.gguf"
    for target, options in (
        ("Q8_0", QuantizeOptions(allow_requantize=True)), ("NVFP4", QuantizeOptions(scale_nvfp4=True, pure=True)),
    ):  # fmt: skip
        quantkit.quantize(source, tmp_path / "here.gguf", target, options)
        quantkit.quantize(source, tmp_path / "there.gguf", target, options, client=dask_client)
        assert (tmp_path / "there.gguf").read_bytes() == (tmp_path / "here.gguf").read_bytes()
        scaled = {t.name: t.scales is not None for t in gguf.open(tmp_path / "here.gguf").tensors.values()}
        assert scaled["blk.0.ffn_down.weight"] == (target == "NVFP4")


def test_values_that_are_not_finite_are_named(tmp_path: Path, dask_client: Client) -> None:
    model = write_model(tmp_path / "in.gguf", 1)
    tensor = quantkit.open(model).tensors["blk.0.attn_q.weight"]
    with open(model, "r+b") as file:
        file.seek(tensor.offset + 4 * (5 * COLUMNS + 3))
        file.write(np.float32("nan").tobytes())
    with pytest.raises(DataError, match=r"in.gguf: blk.0.attn_q.weight: row 5, column 3"):
        make(model, tmp_path / "out.gguf", dask_client)


# -------------------------------------------------------------------------------------------------- faults and resuming


def log_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial-job.journal")


def pieces_of(name: str) -> int:
    """Pieces of a tensor of `large`."""
    return PIECES if "attn_q" in name else 3 if "exps" in name else 1


class Stop(Exception):
    """What a test raises in place of a fault of the coordinator."""


def stop_after(pieces: int, large: Path, out: Path, **options: Any) -> None:
    """A run that ends after so many pieces, when a tensor is done in part; their journal is on the disk."""
    calls = 0

    def progress(done: int, total: int, label: str) -> None:
        nonlocal calls
        calls += 1
        if calls > pieces:
            time.sleep(0.3)  # until the journal's thread has written what is done
            found = journal.read(log_of(out))
            if found is not None and found.pieces:
                raise Stop

    with pytest.raises(Stop):
        make(large, out, progress=progress, **options)


@pytest.mark.parametrize("shared", [False, True])
def test_pieces_are_not_encoded_twice(large: Path, tmp_path: Path, dask_client: Client, shared: bool) -> None:
    make(large, tmp_path / "one.gguf")
    out, said = tmp_path / "out.gguf", list[str]()
    stop_after(5, large, out, client=dask_client, shared_output=shared)
    found = journal.read(log_of(out))
    assert found is not None
    bounds = [entry["pieces"] for entries in found.pieces.values() for entry in entries]
    finished = sum(int(stop) - int(first) for first, stop in bounds)
    assert finished
    shown: list[str] = []

    def progress(done: int, total: int, label: str) -> None:
        shown.append(label)

    written = make(large, out, dask_client, shared_output=shared, on_message=said.append, progress=progress)
    assert said[0].startswith("resumed: ")
    assert f"and {finished} pieces of" in said[0]
    done = finished + sum(map(pieces_of, found.entries))
    left = 2 * PIECES + 2 * 3 + 1 - done
    assert sum(work.pieces for work in written.workers.values()) == left
    assert shown[-1].startswith(f"{left}/{left} pieces, ")
    assert contents(out) == contents(tmp_path / "one.gguf")


def test_a_run_here_goes_on_where_a_cluster_was(large: Path, tmp_path: Path, dask_client: Client) -> None:
    make(large, tmp_path / "one.gguf")
    out, said = tmp_path / "out.gguf", list[str]()
    stop_after(5, large, out, client=dask_client)
    assert make(large, out, on_message=said.append).workers == {}
    assert "pieces of" in said[0]
    assert contents(out) == contents(tmp_path / "one.gguf")


def test_pieces_that_changed_on_the_disk_are_encoded_again(large: Path, tmp_path: Path, dask_client: Client) -> None:
    make(large, tmp_path / "one.gguf")
    out, said = tmp_path / "out.gguf", list[str]()
    stop_after(5, large, out, client=dask_client)
    part = resume.partial(out)
    size = part.stat().st_size
    with open(part, "r+b") as file:  # all tensor data
        file.seek(size // 20)
        file.write(bytes(size - size // 20))
    make(large, out, dask_client, on_message=said.append)
    assert "pieces of" not in said[0]
    assert contents(out) == contents(tmp_path / "one.gguf")


def test_workers_that_are_killed(large: Path, tmp_path: Path) -> None:
    make(large, tmp_path / "one.gguf", target="Q6_K")
    with cluster.connect("local:2") as client:
        pids, killed = client.run(os.getpid), list[str]()

        def progress(done: int, total: int, label: str) -> None:
            if len(killed) < 2 and done > total * len(killed) // 2:
                address = list(pids)[len(killed)]
                os.kill(pids[address], signal.SIGKILL)
                killed.append(address)

        written = make(large, tmp_path / "out.gguf", client, target="Q6_K", progress=progress)
    assert len(killed) == 2
    assert len(written.workers) >= 2  # dask starts others in their place
    assert contents(tmp_path / "out.gguf") == contents(tmp_path / "one.gguf")


def test_a_coordinator_that_is_killed(large: Path, tmp_path: Path, dask_client: Client) -> None:
    make(large, tmp_path / "one.gguf", target="IQ4_K")
    out = tmp_path / "out.gguf"
    log = log_of(out)
    code = f"""
import distributed
from pathlib import Path
from tests.cluster.models import make
with distributed.Client({dask_client.scheduler.address!r}) as client:
    make(Path({str(large)!r}), Path({str(out)!r}), client, target="IQ4_K", shared_output=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2]) as process:
        while process.poll() is None and (not log.exists() or b'"pieces"' not in log.read_bytes()):
            time.sleep(0.02)
        process.kill()
    assert not out.exists()
    said: list[str] = []
    make(large, out, dask_client, target="IQ4_K", shared_output=True, on_message=said.append)
    assert "resumed" in said[0]
    assert "pieces of" in said[0]
    assert contents(out) == contents(tmp_path / "one.gguf")


def _fill_disk() -> None:
    """On a worker: every further write of an output fails."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    on_cluster.os.pwrite = full  # type: ignore[attr-defined]


def test_a_full_disk_on_one_worker(large: Path, tmp_path: Path) -> None:
    make(large, tmp_path / "one.gguf")
    said: list[str] = []
    with cluster.connect("local:2") as client:
        full = next(iter(client.nthreads()))
        client.run(_fill_disk, workers=[full])
        written = make(large, tmp_path / "out.gguf", client, shared_output=True, on_message=said.append)
    assert full not in written.workers
    assert [text for text in said if full in text and "No space left" in text]
    assert contents(tmp_path / "out.gguf") == contents(tmp_path / "one.gguf")


def _hide(path: str) -> None:
    """On a worker: a file is not there."""
    import builtins

    real = builtins.open

    def hidden(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file) == path:
            raise FileNotFoundError(2, "No such file or directory")
        return real(file, *arguments, **options)

    builtins.open = hidden  # type: ignore[assignment]


def test_a_worker_without_the_source_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    with cluster.connect("local:2") as client:
        without = next(iter(client.nthreads()))
        client.run(_hide, str(model), workers=[without])
        with pytest.raises(QuantkitError) as error:
            make(model, tmp_path / "out.gguf", client)
    assert f"worker {without}: {model} cannot be read there" in str(error.value)
    assert str(error.value).count("worker ") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_worker_writes_only_into_the_file_of_its_job(large: Path, tmp_path: Path) -> None:
    """A task that is left over from a job finds the file of another one, or none."""
    path = tmp_path / "out.gguf.partial-job"
    place = on_cluster.Place(str(path), 4, "0" * 64, 0)
    with pytest.raises(cluster.UnfitWorker, match="needs a shared file system"):
        on_cluster._open_output(place)
    path.write_bytes(b"another job")
    with pytest.raises(cluster.UnfitWorker, match="not the output of this job"):
        on_cluster._open_output(place)
    assert path.read_bytes() == b"another job"


def test_an_encoder_that_gives_other_bytes_is_refused(model: Path, tmp_path: Path) -> None:
    input = on_cluster.Input((cluster.workers.FileIdentity.of(model),))
    task = on_cluster.PieceTask(
        input, "blk.0.attn_q.weight", (48, COLUMNS), "f32", "q4_0", 0, 1, None, None, "normal", False, "0" * 16
    )
    with pytest.raises(cluster.UnfitWorker, match="encoder of q4_0 gives other bytes"):
        on_cluster.encode_pieces(task)


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command(
    model: Path, tmp_path: Path, dask_client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    scheduler = dask_client.scheduler.address
    make(model, tmp_path / "one.gguf")
    out = printed(capsys, "quantize", model, tmp_path / "a.gguf", "Q8_0", "--cluster", scheduler)
    assert f"cluster {scheduler}: 2 worker(s), 2 thread(s), dashboard http://" in out
    assert next(iter(dask_client.nthreads())) in out
    found = json.loads(
        printed(capsys, "quantize", model, tmp_path / "b.gguf", "Q8_0", "--cluster", scheduler, "--json")
    )
    assert sum(row["pieces"] for row in found["workers"]) > 0
    assert all(row["seconds"] > 0 and row["address"].startswith("tcp://") for row in found["workers"])
    code = "import sys; from quantkit.cli import main; main(sys.argv[1:]); print('distributed' in sys.modules)"
    bare = [sys.executable, "-c", code, "quantize", str(model), str(tmp_path / "c.gguf"), "Q8_0"]
    assert subprocess.run(bare, capture_output=True, text=True, check=True).stdout.endswith("False\n")
    files = contents(tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "c.gguf")
    assert files[0] == files[1] == files[2]


def test_options_that_do_not_go_together(
    model: Path, tmp_path: Path, dask_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    assert "pass --cluster" in refused(capsys, "quantize", model, out, "Q8_0", "--shared-output", status=2)
    assert "write local, local:N" in refused(capsys, "quantize", model, out, "Q8_0", "--cluster", "here", status=2)
    with pytest.raises(OptionError, match="--calibrate"):
        on_cluster.require_input(quantkit.open(model), object(), False)
    assert QuantizeOptions().shared_output is False
