"""--cluster: commands that run on the workers of a dask cluster."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.output import print_table

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.cluster.in_order import WorkerTime
    from quantkit.pipelines.on_cluster import WorkerWork

PANEL = "Several machines"

Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="local[:N]|ADDRESS|FILE",
        help="Run on a dask cluster: N processes here, tcp://HOST:PORT of a scheduler, or its scheduler file.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]

SharedOutput = Annotated[
    bool,
    typer.Option(
        "--shared-output",
        help="With --cluster: workers write into OUT themselves, on a file system that they share with this machine.",
        rich_help_panel=PANEL,
    ),
]


def check_cluster(spec: str | None) -> None:
    """An error for a --cluster that names no cluster: for the start of a command that reads much before it connects."""
    if spec is not None:
        from quantkit.cluster import check

        check(spec)


@contextlib.contextmanager
def connected(spec: str | None, on_message: Callable[[str], None]) -> Iterator[Client | None]:
    """The client of --cluster, within `with`; None without the option.

    `on_message` is called with a line that names the scheduler, its workers and the link of the dashboard.
    """
    if spec is None:
        yield None
        return
    from quantkit import cluster

    with cluster.connect(spec) as client:
        threads = client.nthreads().values()
        on_message(
            f"cluster {client.scheduler.address}: {len(threads)} worker(s), {sum(threads)} thread(s), dashboard "
            f"{client.dashboard_link}"
        )
        yield client


def worker_rows(work: Mapping[str, WorkerWork | WorkerTime]) -> list[dict[str, Any]]:
    """What each worker did, for JSON: address, tasks, seconds; of encoding also pieces and bytes."""
    return [{"address": address, **dataclasses.asdict(done)} for address, done in sorted(work.items())]


def print_workers(work: Mapping[str, WorkerWork]) -> None:
    """Print what each worker did, if any."""
    rows = [
        (address, done.pieces, f"{done.seconds:.1f}", f"{done.bytes_read / max(done.seconds, 1e-9) / 1e9:.3f}")
        for address, done in sorted(work.items())
    ]
    if rows:
        print_table(("worker", "pieces", "seconds", "GB/s per thread"), rows)
