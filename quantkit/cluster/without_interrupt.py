"""A preload module of dask: local worker processes ignore Ctrl-C, which ends them through the coordinator."""

from __future__ import annotations

import signal


def dask_setup(worker: object) -> None:
    """Ignore SIGINT; dask calls this in the main thread of a worker that starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
