"""`Kernel`: a GPU kernel, which is a Python function and the types of its parameters, compiled and cached on disk.

    k = CudaKernel("dequantize_q4_K_bf16", function, "u8[] i64 i64 i32 i32 u32[]")
    k.ptx((9, 0))             PTX for a compute capability; needs no driver
    k.cubin((9, 0))           machine code, cached on disk; needs no driver
    k.simulate(blocks, threads, *arrays)   with NUMBA_ENABLE_CUDASIM=1: run it on numpy arrays

The cache holds machine code, not PTX: a driver refuses PTX that is newer than itself, but runs machine code of its own
major version. numba's own cache needs a function at a line of a file, but these functions are made per type. The key is
the kernel's name, in a folder named by all that the code depends on: versions of numba-cuda and of the compiler, the
digest of the sources (`digests.source_digest`), and the capability.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.codegen import digests, disk_cache
from quantkit.errors import QuantkitError
from quantkit.runtime.kernels.cuda import driver


class CudaKernel:
    """`function` over arrays ("f32[]") and numbers ("i32") of one dimension; `device.py` launches it."""

    def __init__(self, name: str, function: Callable[..., None], parameters: str):
        self.name, self.function, self.parameters = name, function, parameters.split()
        self.packed = driver.Parameters(self.parameters)
        self._making = threading.Lock()  # GPUs of one model have threads of their own

    @functools.cached_property
    def _dispatcher(self) -> Any:
        from quantkit.runtime.kernels.cuda.hardware import cuda

        return cuda.jit(self.function)

    def simulate(self, blocks: int | tuple[int, ...], threads: int, *arguments: Any) -> None:
        """Run it on numpy arrays, in the simulator."""
        self._dispatcher[blocks, threads](*arguments)

    def ptx(self, capability: tuple[int, int]) -> str:
        """PTX of the kernel for a compute capability, (9, 0) for sm_90."""
        from quantkit.runtime.kernels.cuda.hardware import cuda, types

        numbers = {"u8": types.uint8, "i8": types.int8, "u16": types.uint16, "u32": types.uint32, "i32": types.int32,
                   "i64": types.int64, "f32": types.float32}  # fmt: skip
        kinds = tuple(
            types.Array(numbers[p.removesuffix("[]")], 1, "C") if p.endswith("[]") else numbers[p]
            for p in self.parameters
        )
        text, _ = cuda.compile_ptx(self.function, kinds, cc=capability)
        return str(text)

    def cubin(self, capability: tuple[int, int]) -> tuple[bytes, str]:
        """Machine code for a compute capability and the name of its entry, from disk where it was made before."""
        folder = _folder(capability)
        path = None if folder is None else folder / f"{self.name}.cubin"
        with self._making:
            if path is not None and (cached := disk_cache.read(path)) is not None:
                first, _, code = cached.partition(b"\n")
                return code, first.decode()
            text = self.ptx(capability)
            code, entry = link(text, capability)[0], entry_of(text)
            if path is not None:
                disk_cache.write(path, entry.encode() + b"\n" + code)
            return code, entry


def entry_of(ptx: str) -> str:
    """The name of a module's kernel."""
    return ptx.split(".visible .entry ", 1)[1].split("(", 1)[0].strip()


def link(ptx: str, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Machine code of PTX, and what the assembler says of it: registers, spilled bytes."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=f"sm_{capability[0]}{capability[1]}", ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    code = linker.link("cubin").code
    if not isinstance(code, bytes):
        raise QuantkitError("the CUDA linker gave no machine code")
    return code, linker.get_info_log()


@functools.cache
def _folder(capability: tuple[int, int]) -> Path | None:
    versions = "-".join(_version(name) for name in ("numba-cuda", "nvidia-nvvm"))
    digest = digests.source_digest("quantkit.runtime.kernels.cuda.kernels")
    if digest is None:
        return None
    return disk_cache.root() / f"cuda-{versions}" / f"sm_{capability[0]}{capability[1]}-{digest[:16]}"


def _version(package: str) -> str:
    """Of an installed package; "system" where the CUDA toolkit of the system stands in for it."""
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "system"
