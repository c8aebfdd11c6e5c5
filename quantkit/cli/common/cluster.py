"""--cluster: commands that run on the workers of a dask cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from distributed import Client

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
