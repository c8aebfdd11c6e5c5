"""Several machines: connections to dask.distributed, and checks that its workers are fit for a job.

    cluster.check("tcp://10.0.0.1:8786")                      an error if the text names no cluster
    with cluster.connect("tcp://10.0.0.1:8786") as client:    a distributed.Client; also local, local:4, scheduler.json
        cluster.require_same(client, [Path("model.gguf")])    same quantkit and files, else QuantkitError with names
        for done in cluster.TaskRun(client, function, tasks): a function of a module over many tasks, faults included

Tasks name files and ranges; they never carry weights. A worker maps the files itself and may keep what it has opened in
a module-level cache of the function's module (`functools.lru_cache`): a worker is a process, and one process may run
several tasks at a time, in threads. Tasks are deterministic, so that any of them may be run again, on any worker.

dask counts the mapped pages of a file as memory of a worker and pauses or ends workers for it. Workers are therefore
started with `--memory-limit 0`; those of `local` are.

Commands take the option `cli.common.cluster.Cluster` and open it with `cli.common.cluster.connected`; functions take
`client: distributed.Client | None`. Tests take the fixture `dask_client`, a local cluster of two processes.

Importing the package does not import distributed, which is the extra `quantkit[cluster]`. It imports `errors`, `inputs`
and `codegen`. A cluster runs the code that its scheduler and clients send: `connect` only to one whose users are
trusted.
"""

from quantkit.cluster.connection import check, connect
from quantkit.cluster.tasks import TaskRun, UnfitWorker
from quantkit.cluster.threads import in_threads
from quantkit.cluster.workers import require_same

__all__ = ["TaskRun", "UnfitWorker", "check", "connect", "in_threads", "require_same"]
