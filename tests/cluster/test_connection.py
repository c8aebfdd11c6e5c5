"""What --cluster may name, and the checks of workers: version, sources, files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import quantkit
from quantkit import cluster
from quantkit.cluster.connection import local_processes
from quantkit.cluster.workers import FileIdentity
from quantkit.errors import OptionError, QuantkitError
from tests.cluster.processes import another_worker, other_version

if TYPE_CHECKING:
    from distributed import Client


def test_names_of_clusters(tmp_path: Path) -> None:
    assert local_processes("local:3") == 3
    assert (local_processes("local") or 0) >= 1
    assert local_processes("tcp://10.0.0.1:8786") is None
    (tmp_path / "scheduler.json").write_text("{}")
    assert local_processes(str(tmp_path / "scheduler.json")) is None


@pytest.mark.parametrize(
    "spec", ["", "local:0", "local:x", "10.0.0.1:8786", "tcp://host", "http://host:1", "none.json"]
)
def test_other_texts_are_refused(spec: str) -> None:
    with pytest.raises(OptionError, match="write local, local:N"):
        local_processes(spec)


def test_a_scheduler_that_is_not_there(tmp_path: Path) -> None:
    address, file = "tcp://127.0.0.1:9", tmp_path / "scheduler.json"
    with pytest.raises(QuantkitError, match=f"^{address}: no connection .* refused"), cluster.connect(address):
        pass
    file.write_text(f'{{"address": "{address}"}}')
    with pytest.raises(QuantkitError, match=f"scheduler.json: no connection .*{address}"), cluster.connect(str(file)):
        pass
    file.write_text("{}")
    with pytest.raises(QuantkitError, match="not a scheduler file"), cluster.connect(str(file)):
        pass


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
    cluster.require_same(dask_client, [__file__])


def test_importing_does_not_load_distributed() -> None:
    code = "import quantkit.cluster, quantkit.cli.common.cluster, sys; print('distributed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
