"""hf://… with --cluster: workers fetch the files, and the output has the bytes of a local directory."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import quantkit
from quantkit import ConvertOptions, QuantizeOptions, cluster
from quantkit.cluster.tasks import Grouped
from quantkit.errors import OptionError, QuantkitError
from quantkit.pipelines.resume import unfinished
from tests.cluster.processes import another_worker
from tests.hub.fake import FakeHub, Fault
from tests.hub.test_stream import NAME, SOURCE

if TYPE_CHECKING:
    from distributed import Client


@pytest.fixture
def workers(hub: FakeHub, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A cluster whose workers, two unless a test says otherwise, see the fake Hub."""
    with cluster.connect(f"local:{getattr(request, 'param', 2)}") as client:
        yield client


def leftovers(client: Client) -> list[str]:
    """Names of safetensors files in the directories of the workers."""

    def listed(dask_worker: object = None) -> list[str]:
        return [str(path) for path in Path(dask_worker.local_directory).rglob("*.safetensors")]  # type: ignore[attr-defined]

    return list(itertools.chain.from_iterable(client.run(listed).values()))


@pytest.mark.parametrize("workers", [1, 2, 4], indirect=True)
def test_the_bytes_of_a_directory(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, workers: Client, request: pytest.FixtureRequest
) -> None:
    """Each file is fetched about once, whatever the number of workers; nothing stays."""
    hub.add(NAME, checkpoint)
    workers.wait_for_workers(len(workers.scheduler_info(n_workers=-1)["workers"]))
    files = sorted(checkpoint.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in files)
    said: list[str] = []
    quantkit.convert(checkpoint, tmp_path / "local.gguf")
    made = quantkit.convert(SOURCE, tmp_path / "hub.gguf", client=workers, on_message=said.append)
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    assert {path.name for path in files} == {line.split()[1] for line in said if line.startswith("checked: ")}
    assert sum(work.bytes_written for work in made.workers.values()) > 0
    assert leftovers(workers) == []
    largest = max(path.stat().st_size for path in files)
    headers = (1 + len(workers.nthreads())) * len(files) * (1 << 18)
    # a tensor across two files, and help for the last workers, fetch some of them again
    assert total < hub.sent("cdn") < total + (len(files) / 2 + len(workers.nthreads())) * largest + headers


def test_quantize_on_workers(hub: FakeHub, checkpoint: Path, tmp_path: Path, workers: Client) -> None:
    hub.add(NAME, checkpoint)
    options = QuantizeOptions(split_max_tensors=10)
    quantkit.quantize(checkpoint, tmp_path / "local.gguf", "Q4_K_M", options)
    made = quantkit.quantize(SOURCE, tmp_path / "hub.gguf", "Q4_K_M", options, client=workers)
    local, remote = sorted(tmp_path.glob("local*")), sorted(tmp_path.glob("hub*"))
    assert len(local) == len(remote) > 1
    assert [path.read_bytes() for path in remote] == [path.read_bytes() for path in local]
    assert made.workers


def test_a_wrong_hash_ends_the_job_and_it_resumes(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, workers: Client
) -> None:
    hub.add(NAME, checkpoint)
    last, out = max(path.name for path in checkpoint.glob("*.safetensors")), tmp_path / "x.gguf"
    hub.repos[NAME].claimed[last] = "0" * 64
    with pytest.raises(QuantkitError, match=f"{last}: its SHA-256 is .*, the Hub says 000"):
        quantkit.convert(SOURCE, out, client=workers)
    assert not out.exists()
    assert leftovers(workers) == []
    hub.repos[NAME].claimed.clear()
    quantkit.convert(checkpoint, tmp_path / "local.gguf")
    quantkit.convert(SOURCE, out, client=workers)
    assert out.read_bytes() == (tmp_path / "local.gguf").read_bytes()
    assert unfinished(out) is None


def test_faults_of_the_hub_are_tried_again(hub: FakeHub, checkpoint: Path, tmp_path: Path, workers: Client) -> None:
    hub.add(NAME, checkpoint)

    def on_message(line: str) -> None:
        if line.startswith("results of tasks"):  # the next to read are the workers
            for path in sorted(checkpoint.glob("*.safetensors"))[:2]:
                hub.faults += [Fault(path.name, status=503, retry_after=0), Fault(path.name, status=429, retry_after=0)]
                hub.faults.append(Fault(path.name, cut=300_000, times=2))

    quantkit.convert(checkpoint, tmp_path / "local.gguf")
    quantkit.convert(SOURCE, tmp_path / "hub.gguf", client=workers, on_message=on_message)
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    assert [fault.times for fault in hub.faults] == [0] * 6


def test_a_worker_without_the_hub_is_named(hub: FakeHub, checkpoint: Path, tmp_path: Path, workers: Client) -> None:
    hub.add(NAME, checkpoint)
    with (
        another_worker(workers, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty")) as address,
        pytest.raises(QuantkitError, match=f"not fit for this job:\n  worker {address}: hf://{NAME}@"),
    ):
        quantkit.convert(SOURCE, tmp_path / "hub.gguf", client=workers)
    assert not (tmp_path / "hub.gguf").exists()


def test_a_worker_that_joins_without_the_hub_gets_no_tasks(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, workers: Client
) -> None:
    hub.add(NAME, checkpoint)
    hub.bytes_per_second = 2_000_000
    said: list[str] = []
    joined = threading.Event()

    def join() -> None:
        with another_worker(workers, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty")):
            joined.set()
            done.wait(60)

    done, thread = threading.Event(), threading.Thread(target=join)

    def on_message(line: str) -> None:
        said.append(line)
        if line.startswith("results of tasks"):
            thread.start()
            joined.wait(60)

    quantkit.convert(SOURCE, tmp_path / "hub.gguf", client=workers, on_message=on_message)
    done.set()
    thread.join()
    quantkit.convert(checkpoint, tmp_path / "local.gguf")
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    assert any("gets no more tasks: hf://" in line for line in said), said


def test_workers_that_die(hub: FakeHub, checkpoint: Path, tmp_path: Path, workers: Client) -> None:
    """Killed in the middle of a file: another one fetches it."""
    import os
    import signal

    hub.add(NAME, checkpoint)
    hub.bytes_per_second = 1_500_000
    pids = workers.run(os.getpid)

    def kill() -> None:
        while not hub.sent("cdn") > 1_000_000:
            time.sleep(0.01)
        os.kill(next(iter(pids.values())), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    quantkit.convert(SOURCE, tmp_path / "hub.gguf", client=workers)
    killer.join()
    quantkit.convert(checkpoint, tmp_path / "local.gguf")
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()


def test_what_does_not_go_with_it(hub: FakeHub, checkpoint: Path, tmp_path: Path, workers: Client) -> None:
    hub.add(NAME, checkpoint)
    with pytest.raises(OptionError, match="--keep-shards"):
        quantkit.convert(SOURCE, tmp_path / "x.gguf", "auto", ConvertOptions(keep_shards=True), client=workers)
    quantkit.convert(checkpoint, tmp_path / "old.gguf")
    with pytest.raises(OptionError, match="--reuse"):
        quantkit.quantize(
            SOURCE, tmp_path / "x.gguf", "Q8_0", QuantizeOptions(reuse=tmp_path / "old.gguf"), client=workers
        )
    with pytest.raises(QuantkitError, match=r"--disk is 1000 bytes, \d+ are needed"):
        quantkit.convert(SOURCE, tmp_path / "x.gguf", "auto", ConvertOptions(disk=1000), client=workers)
    assert sorted(path.name for path in tmp_path.glob("x.gguf")) == []


def test_groups_stay_with_a_worker_until_none_is_left() -> None:
    groups = Grouped([[1, 2, 3], [4], iter([5, 6]), []])
    order = [groups.take(worker) for worker in ("a", "b", "a", "b", "c")]
    assert order == [1, 4, 2, 5, 3]  # c helps with the group of a
    assert groups.take("c") == 6
    for worker in ("a", "b", "c", "d"):
        with pytest.raises(StopIteration):
            groups.take(worker)
