"""What --cluster may name, and the checks of workers: version, sources, files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import dask
import psutil
import pytest

import quantkit
from quantkit import cli, cluster
from quantkit.cluster import connection
from quantkit.cluster.workers import FileIdentity
from quantkit.codegen.thread_pool import available_cpus
from quantkit.errors import OptionError, QuantkitError
from tests.cluster.processes import another_worker, other_version

if TYPE_CHECKING:
    from distributed import Client


def test_names_of_clusters(tmp_path: Path) -> None:
    assert cluster.check("local:3") == 3
    assert cluster.check("local") == available_cpus()
    assert cluster.check("tcp://10.0.0.1:8786") == "tcp://10.0.0.1:8786"
    (tmp_path / "scheduler.json").write_text('{"address": "tls://10.0.0.1:8786"}')
    assert cluster.check(str(tmp_path / "scheduler.json")) == "tls://10.0.0.1:8786"


@pytest.mark.parametrize(
    "spec", ["", "local:0", "local:x", "10.0.0.1:8786", "tcp://host", "http://host:1", "none.json"]
)
def test_other_texts_are_refused(spec: str) -> None:
    with pytest.raises(OptionError, match="write local, local:N"):
        cluster.check(spec)


def test_more_processes_than_a_machine_runs_are_refused() -> None:
    with pytest.raises(OptionError, match=rf"9999 processes on {available_cpus()} CPUs; write at most local:"):
        cluster.check("local:9999")


def test_a_scheduler_that_is_not_there(tmp_path: Path) -> None:
    address, file = "tcp://127.0.0.1:9", tmp_path / "scheduler.json"
    with pytest.raises(QuantkitError, match=f"^{address}: no connection .* refused"), cluster.connect(address):
        pass
    file.write_text(f'{{"address": "{address}"}}')
    with pytest.raises(QuantkitError, match=f"scheduler.json: no connection .*{address}"), cluster.connect(str(file)):
        pass
    for text in ("{}", '{"address": 7}', '{"address": "foo://10.0.0.1:1"}'):
        file.write_text(text)
        with pytest.raises(QuantkitError, match="not a scheduler file"), cluster.connect(str(file)):
            pass


def test_an_idle_local_cluster_leaves_the_cpus_alone(dask_client: Client) -> None:
    """With dask's own intervals it takes 13 % of a core, 2.6 s in 20 s."""
    for key, wanted in (("tick.interval", "500ms"), ("system-monitor.interval", "5s")):
        assert set(dask_client.run(dask.config.get, f"distributed.admin.{key}").values()) == {wanted}
    processes = [psutil.Process(), *map(psutil.Process, dask_client.run(os.getpid).values())]
    time.sleep(0.5)  # what tests before have left

    def seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = seconds()
    time.sleep(5)
    assert seconds() - before < 0.4


def test_what_is_no_scheduler_is_refused_soon(dask_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard waits for the rest of a request; a worker answers."""
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 1.0)
    dashboard = urlsplit(dask_client.dashboard_link).netloc
    started = time.monotonic()
    with pytest.raises(QuantkitError, match=r"is no dask scheduler: .* within 1 s; is it the dashboard's port\?"):
        cluster.connect(f"tcp://{dashboard}").__enter__()
    worker = next(iter(dask_client.nthreads()))
    with pytest.raises(QuantkitError, match="is no dask scheduler: it is a dask Worker"):
        cluster.connect(worker).__enter__()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "words",
    [
        ["quantize", "none.gguf", "out.gguf", "Q8_0", "--dry-run"],
        ["convert", "none"],
        ["verify", "none.gguf"],
        ["imatrix", "none.gguf", "-f", "none.txt", "--dry-run"],
        ["recipe", "fit", "none.gguf", "--costs", "none", "--verify", "none.txt"],
    ],
)
def test_commands_check_the_option_first(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--cluster", "local:9999"]) == 2
    caught = capsys.readouterr()
    assert "--cluster local:9999: 9999 processes" in caught.err
    assert not caught.out


def test_a_scheduler_file_and_an_address(dask_client: Client, tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    dask_client.write_scheduler_file(str(file))
    for spec in (str(file), dask_client.scheduler.address):
        with cluster.connect(spec) as client:
            assert client.submit(FileIdentity.of, __file__).result() == FileIdentity.of(__file__)


def test_files_of_workers_are_compared(dask_client: Client, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(3 << 20))
    (identity,) = cluster.require_same(dask_client, [path])
    assert identity == FileIdentity.of(path)
    assert identity.difference() == ""
    path.write_bytes(b"short")
    assert identity.difference() == f"has 5 bytes there and {3 << 20} here"
    path.unlink()
    assert identity.difference() == "cannot be read there: No such file or directory"


def test_another_model_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    path, data = tmp_path / "model.gguf", bytearray(os.urandom(3 << 20))
    path.write_bytes(data)
    identity = FileIdentity.of(path)
    data[2 << 20 :] = os.urandom(1 << 20)  # all after the header
    path.write_bytes(data)
    assert "has other bytes there" in identity.difference()


def test_a_worker_of_another_version_is_refused_by_name(dask_client: Client, tmp_path: Path) -> None:
    with another_worker(dask_client, PYTHONPATH=str(other_version(tmp_path))) as address:
        with pytest.raises(QuantkitError) as error:
            cluster.require_same(dask_client, [__file__])
        cluster.require_same(dask_client, [__file__], [w for w in dask_client.nthreads() if w != address])
    (line,) = str(error.value).splitlines()[1:]
    assert line.strip().startswith(f"worker {address}: has quantkit 9.9.9 (")
    assert f"here it is {quantkit.__version__} (" in line


def test_a_worker_that_dies_during_the_check_is_no_reason_to_refuse(
    dask_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed.comm import CommClosedError

    run = dask_client.run
    dead = {"tcp://10.0.0.9:1": CommClosedError("Connection reset by peer")}
    monkeypatch.setattr(dask_client, "run", lambda *arguments, **options: run(*arguments, **options) | dead)
    (found,) = cluster.require_same(dask_client, [__file__])
    assert found.path == __file__


def test_importing_does_not_load_distributed() -> None:
    code = "import quantkit.cluster, quantkit.cli.common.cluster, sys; print('distributed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
