"""Arrays that take long to compute, cached on disk as kernels are."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quantkit.codegen import digests, disk_cache

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def disk_cached(function: Callable[..., tuple[NDArray[Any], ...]], *args: np.ndarray | int) -> tuple[NDArray[Any], ...]:
    """The arrays that `function(*args)` returns: from disk, or computed and written there.

    The file's name holds a digest of the sources of the function's module and of the arguments.
    """
    import numpy as np

    source = digests.source_digest(function.__module__)
    if source is None:
        return function(*args)
    digest = hashlib.sha256(f"{source} {function.__qualname__}".encode())
    for x in map(np.ascontiguousarray, args):
        digest.update(f"{x.dtype} {x.shape} ".encode() + x.tobytes())
    path = disk_cache.root() / "arrays" / f"{digest.hexdigest()}.npz"
    if (data := disk_cache.read(path)) is not None:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return tuple(file[name] for name in file)
    arrays = function(*args)
    buffer = io.BytesIO()
    np.savez(buffer, *arrays)
    disk_cache.write(path, buffer.getbuffer())
    return arrays
