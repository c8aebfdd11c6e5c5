"""Processes of clusters that tests start and end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import quantkit

if TYPE_CHECKING:
    from distributed import Client


def start_worker(scheduler: str, **variables: str) -> subprocess.Popen[bytes]:
    """A worker process of one thread that a test has to end, with these variables of the environment."""
    command = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler, "--no-nanny", "--nthreads", "1",
               "--memory-limit", "0", "--no-dashboard"]  # fmt: skip
    path = os.pathsep.join([variables.pop("PYTHONPATH", ""), *sys.path])  # functions of tests, too
    env = os.environ | variables | {"PYTHONPATH": path}
    return subprocess.Popen(command, cwd=os.sep, env=env, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def another_worker(client: Client, **variables: str) -> Iterator[str]:
    """A further worker of a cluster; its address."""
    before = set(client.scheduler_info(n_workers=-1)["workers"])
    with start_worker(client.scheduler.address, **variables) as process:
        try:
            client.wait_for_workers(len(before) + 1, timeout=60)
            (address,) = set(client.scheduler_info(n_workers=-1)["workers"]) - before
            yield address
        finally:
            process.kill()
    while len(client.scheduler_info(n_workers=-1)["workers"]) > len(before):
        pass


def other_version(folder: Path) -> Path:
    """A folder for PYTHONPATH with a copy of quantkit that calls itself 9.9.9."""
    package = folder / "other" / "quantkit"
    shutil.copytree(Path(quantkit.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = package / "__init__.py"
    source.write_text(source.read_text().replace(f'"{quantkit.__version__}"', '"9.9.9"'))
    return folder / "other"


def first_to(folder: str) -> bool:
    """Whether this worker is the first that asks in `folder`."""
    pid = Path(folder, "pid")
    with contextlib.suppress(FileExistsError), open(pid, "x") as file:
        file.write(str(os.getpid()))
    while not (found := pid.read_text()):
        pass
    return found == str(os.getpid())


def free_port() -> int:
    """A port of this machine that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def scheduler_and_worker(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A scheduler at a port, with a worker of one thread."""
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", f"tcp://127.0.0.1:{port}",
               "--no-dashboard", "--no-show"]  # fmt: skip
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        subprocess.Popen(command, cwd=os.sep, env=env, stderr=subprocess.DEVNULL) as scheduler,
        start_worker(f"tcp://127.0.0.1:{port}") as worker,
    ):
        try:
            _wait_for_listener(port)
            yield scheduler
        finally:
            worker.kill()
            scheduler.kill()


def _wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def kill_workers_before(owner: object, name: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all workers killed at the first call of `owner.name`, which gets the result of a task that has ended."""
    original, killed = getattr(owner, name), threading.Event()

    def wrapped(*args: Any, **options: Any) -> Any:
        if not killed.is_set():
            killed.set()
            before = set(client.nthreads())
            for pid in client.run(os.getpid).values():
                os.kill(pid, signal.SIGKILL)
            while set(client.nthreads()) & before or not client.nthreads():
                time.sleep(0.05)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, wrapped)
