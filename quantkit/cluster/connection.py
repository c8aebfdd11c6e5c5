"""`connect`: a client of the cluster that a text names.

    local[:N]             N worker processes on this machine, for as long as the client is open; N: the CPUs
    tcp://HOST:PORT       a running scheduler; tls://HOST:PORT with TLS
    FILE                  the scheduler file of a running scheduler (`dask scheduler --scheduler-file FILE`)

TLS is configured as dask documents it: `distributed.comm.tls` in its configuration, or the variables
`DASK_DISTRIBUTED__COMM__TLS__CA_FILE`, `…__CLIENT__CERT` and `…__CLIENT__KEY`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import re
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import OptionError, QuantkitError, UnsupportedError
from quantkit.inputs.json_input import read_object

if TYPE_CHECKING:
    from distributed import Client

CONNECT_SECONDS = 15.0
RECONNECT_SECONDS = 120.0  # for a scheduler that is restarted during a job
ANSWER_SECONDS = 5.0  # of a scheduler, which may be busy
WORKER_SECONDS = 60.0  # to wait for the first worker: a batch system starts them when it likes
_PROCESSES_PER_CPU = 4  # of `local`, at most: each takes 150 MB before it does anything
_ADDRESS = r"(tcp|tls|ws|wss)://\S+:\d+"


@contextlib.contextmanager
def connect(spec: str, *, wait: float = WORKER_SECONDS) -> Iterator[Client]:
    """A `distributed.Client` of the cluster `spec`, within `with`; it has at least one worker.

    wait  seconds to wait for the first worker

    OptionError for a text that names no cluster, UnsupportedError without the extra `cluster`, QuantkitError for a
    scheduler that cannot be reached or has no workers.
    """
    place = check(spec)
    import distributed

    with contextlib.ExitStack() as stack:
        if isinstance(place, str):
            client = stack.enter_context(_remote(spec, place))
        else:
            cluster = stack.enter_context(_local(place))
            client = stack.enter_context(distributed.Client(cluster, set_as_default=False))
        try:
            client.wait_for_workers(1, timeout=wait)
        except TimeoutError:
            address = client.scheduler.address
            raise QuantkitError(
                f"{spec}: the scheduler at {address} has no worker after {wait:.0f} s; start some with "
                f"`dask worker {address} --memory-limit 0`"
            ) from None
        yield client


def check(spec: str) -> int | str:
    """N of `local:N`, or the address of a scheduler. Connects to nothing and imports little.

    OptionError for a text that names no cluster, UnsupportedError without the extra `cluster`.
    """
    processes = _local_processes(spec)
    if importlib.util.find_spec("distributed") is None:
        raise UnsupportedError("--cluster needs distributed: pip install 'quantkit[cluster]'")
    if processes is not None:
        return processes
    return spec if "://" in spec else _address_in(Path(spec))


def _local_processes(spec: str) -> int | None:
    """N of `local:N`, the CPUs for `local`; None for another cluster. OptionError for a text that names none."""
    from quantkit.codegen.thread_pool import available_cpus

    cpus = available_cpus()
    if spec == "local":
        return cpus
    if match := re.fullmatch(r"local:(\d{1,4})", spec):
        if (count := int(match[1])) > _PROCESSES_PER_CPU * cpus:
            raise OptionError(
                f"--cluster {spec}: {count} processes on {cpus} CPUs; write at most local:{_PROCESSES_PER_CPU * cpus}"
            )
        if count:
            return count
    elif re.fullmatch(_ADDRESS, spec) or ("://" not in spec and Path(spec).is_file()):
        return None
    raise OptionError(
        f"--cluster {spec}: write local, local:N (N processes), tcp://HOST:PORT, tls://HOST:PORT or the name of an "
        "existing scheduler file"
    )


def _address_in(file: Path) -> str:
    """The address in a scheduler file."""
    address = read_object(file).get("address")
    if not isinstance(address, str) or not re.fullmatch(_ADDRESS, address):
        raise QuantkitError(f"{file}: not a scheduler file: its address is {address!r}, not tcp://HOST:PORT")
    return address


def _remote(spec: str, address: str) -> Client:
    """A client of a running scheduler."""
    import distributed

    try:
        if address.startswith(("tls:", "wss:")):
            _require_certificates(spec)
        _require_listener(address)
        _require_scheduler(spec, address)
        return distributed.Client(address, timeout=RECONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        cause = error.__cause__ or error  # distributed says only which call failed
        raise QuantkitError(
            f"{spec}: no connection to a dask scheduler at {address}: {str(cause) or type(cause).__name__}; start one "
            "with `dask scheduler`, and check the address, the versions of distributed and, with tls://, the "
            "certificates"
        ) from None


def _require_scheduler(spec: str, address: str) -> None:
    """QuantkitError if something else than a scheduler listens there: a client would wait for minutes."""
    import distributed

    async def identity() -> object:
        connection = distributed.Security().get_connection_args("client")
        async with distributed.rpc(address, connection_args=connection) as remote:
            return await asyncio.wait_for(remote.identity(), ANSWER_SECONDS)

    try:
        with ThreadPoolExecutor(1) as pool:  # a loop of its own, also where this thread runs one
            found = pool.submit(asyncio.run, identity()).result()
    except asyncio.TimeoutError:
        answer = f"nothing answers within {ANSWER_SECONDS:.0f} s"
    else:
        kind = found.get("type") if isinstance(found, dict) else None
        if kind == "Scheduler":
            return
        answer = f"it is a dask {kind}" if kind else "another program answers"
    raise QuantkitError(
        f"{spec}: what listens at {address} is no dask scheduler: {answer}; is it the dashboard's port? A scheduler "
        "prints its address when it starts, most often with port 8786"
    )


def _require_certificates(spec: str) -> None:
    """QuantkitError unless dask's configuration has the files of TLS; OSError for those that cannot be used."""
    import distributed

    if distributed.Security().get_connection_args("client")["ssl_context"] is None:
        name = "DASK_DISTRIBUTED__COMM__TLS__"
        raise QuantkitError(
            f"{spec}: TLS needs certificates: set {name}CA_FILE, {name}CLIENT__CERT and {name}CLIENT__KEY to the "
            "names of their files"
        )


def _require_listener(address: str) -> None:
    """OSError if nothing listens at an address. A client that fails to connect can block the next one for a while."""
    if match := re.fullmatch(r"(?:tcp|tls)://(.+):(\d+)", address):
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=CONNECT_SECONDS).close()


def _local(processes: int) -> contextlib.AbstractContextManager[object]:
    """Worker processes on this machine that share its CPUs."""
    import dask
    import distributed

    from quantkit.codegen.thread_pool import available_cpus

    with dask.config.set(_worker_config(dask.config.get("distributed.nanny.pre-spawn-environ"))):
        cluster: contextlib.AbstractContextManager[object] = distributed.LocalCluster(
            n_workers=processes,
            threads_per_worker=max(1, available_cpus() // processes),
            processes=True,
            memory_limit=0,  # mapped pages count as memory
            dashboard_address="127.0.0.1:0",
            preload=["quantkit.cluster.without_interrupt"],
            silence_logs=logging.ERROR,
        )
    return cluster


def _worker_config(variables: Mapping[str, object]) -> dict[str, object]:
    """dask's configuration for a scheduler and workers on a machine that encodes with all of its cores.

    Its profiler looks at all threads a hundred times a second, which takes a twentieth of the time. The clocks of four
    event loops, which find those that do not answer, and what the dashboard shows of a process take 13 % of a core;
    with these intervals 3 %. dask makes glibc return freed memory at once: the system then clears the same pages for
    every piece. `variables`: those that it sets.
    """
    kept = {"MALLOC_TRIM_THRESHOLD_": 1 << 28, "MALLOC_MMAP_THRESHOLD_": 1 << 25}  # bytes; 32 MiB is glibc's largest
    return {
        "distributed.worker.profile.enabled": False,
        "distributed.admin.tick.interval": "500ms",
        "distributed.admin.system-monitor.interval": "5s",
        "distributed.nanny.pre-spawn-environ": {**variables, **kept},
    }
