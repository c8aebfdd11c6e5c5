"""The host's side of a GPU: memory as torch tensors, launches on torch's streams, products of packed matrices.

    gpu = Gpu(0)                                 UnsupportedError, with a message of one line, where there is none
    w = gpu.matrices(data, kind, rows, n)        uint8 of one matrix, or of several one after another
    y = w(x)                                     float32[tokens, rows] of float32[tokens, n] on the GPU
    y = w(x, exact=True)                         with weights decoded to float32, and activations as they are
    y = w.of_experts(x, ids)                     [tokens, used, rows]: each token by its own matrices; x [tokens, n], or
                                                 [tokens, used, n] with one row for each
    w.decoded(start, stop)                       bfloat16[stop - start, n], with exact=True float32
    graph = gpu.capture(step); graph.replay()    the launches of a function, as one

Up to MAX_PACKED_VECTORS vectors are multiplied by packed weights, with 8-bit activations. For more, tiles of the
weights are decoded to bfloat16 and multiplied by torch; for experts, matrix by matrix with the tokens routed to it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quantkit.errors import DataError, UnsupportedError
from quantkit.runtime.kernels.cuda import driver
from quantkit.runtime.kernels.cuda.dispatch import FLOAT_IDS, product

if TYPE_CHECKING:
    import torch

    from quantkit.runtime.kernels.cuda.kernel import CudaKernel
    from quantkit.types import QuantType

MIN_CAPABILITY = (8, 0)  # compute capability with bfloat16; the tests compile for it
MAX_PACKED_VECTORS = 8  # products with up to this many vectors read packed weights
TILE_ELEMENTS = 1 << 26  # decoded at a time: 128 MiB of bfloat16
_GRID_Y = 65535
_OF_TORCH = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # types that torch has


def torch_with_cuda() -> Any:
    """The module torch, where it reaches a GPU. UnsupportedError says in one line what is missing."""
    missing = [name for name in ("numba_cuda", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"no CUDA GPU: {' and '.join(missing)} cannot be imported; {driver.REMEDY}")
    driver.library()
    import torch

    if torch.version.cuda is None:
        raise UnsupportedError(f"no CUDA GPU: torch {torch.__version__} is built without CUDA; {driver.REMEDY}")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"no CUDA GPU: the driver answers, but torch {torch.__version__} finds none; {driver.REMEDY}"
        )
    return torch


class Gpu:
    """One GPU. UnsupportedError where there is none of that number, or it is too old."""

    def __init__(self, index: int = 0):
        self.torch = torch_with_cuda()
        count = self.torch.cuda.device_count()
        if not 0 <= index < count:
            raise UnsupportedError(f"no CUDA GPU number {index}: there are {count}, counted from 0")
        self.index = index
        self.capability: tuple[int, int] = self.torch.cuda.get_device_capability(index)
        self.name: str = self.torch.cuda.get_device_name(index)
        if self.capability < MIN_CAPABILITY:
            raise UnsupportedError(
                f"{self.name} has compute capability {'.'.join(map(str, self.capability))}; kernels need "
                f"{'.'.join(map(str, MIN_CAPABILITY))}"
            )
        self.torch_device = self.torch.device("cuda", index)
        self.torch.zeros(1, device=self.torch_device)  # makes the context
        self._functions: dict[str, driver.Function] = {}
        self._float_results = tuple(map(int, self.torch.__version__.split(".")[:2])) >= (2, 8)

    def bind_thread(self) -> None:
        """Make this GPU the calling thread's current device, with a context, which the driver needs for launches."""
        self.torch.cuda.set_device(self.torch_device)
        self.torch.zeros(1, device=self.torch_device)

    def array(self, values: np.ndarray) -> torch.Tensor:
        """A copy of a numpy array, of as many dimensions; unsigned ones as torch knows them, by their bits."""
        values = np.ascontiguousarray(values)
        bits = {"u2": np.int16, "u4": np.int32}.get(values.dtype.str[1:])
        result: torch.Tensor = self.torch.from_numpy(values.view(bits) if bits else values.copy()).to(self.torch_device)
        return result

    def upload(self, values: np.ndarray) -> torch.Tensor:
        """As `array`, by memory that the GPU reads by itself; work that follows on the stream waits for it.

        For what is uploaded again and again: torch keeps such memory for the next time.
        """
        dtype = self.torch.from_numpy(np.empty(0, values.dtype)).dtype
        host = self.torch.empty(values.shape, dtype=dtype, pin_memory=True)
        host.numpy()[...] = values
        result: torch.Tensor = host.to(self.torch_device, non_blocking=True)
        return result

    def empty(self, *shape: int, kind: str = "float32") -> torch.Tensor:
        """A tensor of this GPU, not initialized; `kind` is the name of a torch dtype."""
        result: torch.Tensor = self.torch.empty(shape, dtype=getattr(self.torch, kind), device=self.torch_device)
        return result

    def zeros(self, shape: Sequence[int], kind: str = "float32") -> torch.Tensor:
        """A tensor of zeros on this GPU."""
        result: torch.Tensor = self.torch.zeros(tuple(shape), dtype=getattr(self.torch, kind), device=self.torch_device)
        return result

    def pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 memory of the host that the GPU reads by itself."""
        result: torch.Tensor = self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=True)
        return result

    def stream(self) -> torch.cuda.Stream:
        """A new stream."""
        result: torch.cuda.Stream = self.torch.cuda.Stream(self.torch_device)
        return result

    def current_stream(self) -> torch.cuda.Stream:
        """The stream of the calling thread, on which `launch` puts kernels."""
        result: torch.cuda.Stream = self.torch.cuda.current_stream(self.torch_device)
        return result

    def on(self, stream: torch.cuda.Stream) -> Any:
        """A context in which work goes to a stream."""
        return self.torch.cuda.stream(stream)

    def event(self) -> torch.cuda.Event:
        """A new event."""
        result: torch.cuda.Event = self.torch.cuda.Event()
        return result

    def record(self, event: torch.cuda.Event) -> None:
        """Let an event happen when all that was launched so far has ended."""
        event.record(self.current_stream())

    def free_bytes(self) -> int:
        """Bytes of GPU memory that are not allocated, those included that torch keeps for later."""
        cuda = self.torch.cuda
        kept = int(cuda.memory_reserved(self.index)) - int(cuda.memory_allocated(self.index))
        return int(cuda.mem_get_info(self.index)[0]) + kept

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self.torch.cuda.synchronize(self.torch_device)

    def _function(self, kernel: CudaKernel) -> driver.Function:
        function = self._functions.get(kernel.name)
        if function is None:
            code, entry = kernel.cubin(self.capability)
            with self.torch.cuda.device(self.torch_device):
                function = driver.Function(code, entry, kernel.packed)
            self._functions[kernel.name] = function
        return function

    def launch(self, kernel: CudaKernel, blocks: int | Sequence[int], threads: int, *arguments: Any) -> None:
        """Run a kernel on torch's current stream. Arrays are contiguous tensors of this GPU, of any shape.

        TypeError for one that is not: the kernel would read other elements, or none of its memory.
        """
        values, here = list(arguments), self.torch_device
        for i in kernel.packed.arrays:
            tensor = arguments[i]
            if not tensor.is_contiguous() or tensor.device != here:
                where = f"{tensor.device} is not a contiguous one on {here}"
                raise TypeError(f"{kernel.name}: a tensor on {where}")
            values[i] = tensor.data_ptr(), tensor.numel()
        function, cuda, stream = self._function(kernel), self.torch.cuda, self.current_stream().cuda_stream
        grid = (blocks,) if isinstance(blocks, int) else blocks
        packed = kernel.packed.values(values)
        if cuda.current_device() == self.index:
            function.launch(grid, threads, stream, packed)
        else:
            with cuda.device(self.torch_device):
                function.launch(grid, threads, stream, packed)

    def launch_each(self, kernel: CudaKernel, count: int, threads: int, *arguments: Any) -> None:
        """Run a kernel that has one thread for each of `count` elements, `threads` to a block."""
        self.launch(kernel, -(-count // threads), threads, *arguments)

    def capture(self, step: Callable[[], Any], pool: Any = None) -> torch.cuda.CUDAGraph:
        """Capture the launches of `step` as a CUDA graph. `step` runs twice before, to load code and allocate memory.

        `step` must read what differs between replays (positions, tokens) from memory and allocate by torch alone.
        Graphs that are always replayed one after another can share the memory of a `graph_pool`.
        """
        stream = self.torch.cuda.Stream(self.torch_device)
        stream.wait_stream(self.torch.cuda.current_stream(self.torch_device))
        with self.torch.cuda.stream(stream):
            for _ in range(2):
                step()
        self.torch.cuda.current_stream(self.torch_device).wait_stream(stream)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, pool=pool, stream=stream):
            step()
        result: torch.cuda.CUDAGraph = graph
        return result

    def graph_pool(self) -> Any:
        """Memory for what several graphs allocate."""
        return self.torch.cuda.graph_pool_handle()

    def release_unused(self) -> None:
        """Give memory back that torch keeps for later allocations of its size."""
        self.torch.cuda.empty_cache()

    def matrices(self, data: np.ndarray, kind: QuantType, rows: int, n: int) -> Matrices:
        """Packed matrices of `rows` rows each, uint8 of any shape, on this GPU."""
        return Matrices(self, self.array(np.ascontiguousarray(data).reshape(-1)), kind, rows, n)

    def multiply_bfloats(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """float32 product of two bfloat16 matrices; torch before 2.8 rounds it to bfloat16 on the way."""
        if not self._float_results:
            return (a @ b).float()
        result: torch.Tensor = self.torch.mm(a, b, out_dtype=self.torch.float32)
        return result

    def quantize(self, x: torch.Tensor) -> Activations:
        """float32[vectors, n], n a multiple of 32, also as bytes."""
        from quantkit.runtime.kernels.cuda import activations

        result, count = self.activations(x), x.numel()
        self.launch(activations.quantize(), -(-count // activations.THREADS), activations.THREADS, x, count,
                    *result.as_bytes)  # fmt: skip
        return result

    def activations(self, x: torch.Tensor) -> Activations:
        """float32[vectors, n], with memory for the same as bytes, which is not written."""
        count = x.numel()
        codes, scales, sums = self.empty(count, kind="int8"), self.empty(count // 32), self.empty(count // 16)
        return Activations(x, codes, scales, sums)


class Activations(NamedTuple):
    """Vectors float32[vectors, n] on a GPU, also as bytes: codes, scales and sums of `kernels/cuda/activations.py`."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor

    @property
    def as_bytes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What kernels write beside x."""
        return self.codes, self.scales, self.sums


class Matrices:
    """Packed matrices on a GPU, all of one type and shape; see the module. DataError where the bytes do not fit."""

    def __init__(self, gpu: Gpu, data: torch.Tensor, kind: QuantType, rows: int, n: int):
        if not product(kind):
            raise UnsupportedError(f"there are no CUDA kernels for {kind.name}; keep such tensors on the CPU")
        if rows % kind.interleave:
            raise DataError(f"{rows} rows of {kind.name}, which interleaves {kind.interleave}, are not whole groups")
        self.gpu, self.data, self.kind, self.rows, self.n = gpu, data, kind, rows, n
        self.row_bytes = kind.row_bytes(n)
        self.nbytes = rows * self.row_bytes  # of one matrix
        if data.numel() == 0 or data.numel() % self.nbytes:
            raise DataError(
                f"{data.numel()} bytes are not whole matrices of {rows} x {n} in {kind.name}, {self.nbytes} bytes each"
            )
        self.count = data.numel() // self.nbytes
        self.is_float = kind.ggml_type in FLOAT_IDS

    @functools.cached_property
    def _words(self) -> torch.Tensor:
        """The data of a float type, by its elements."""
        torch = self.gpu.torch
        return self.data.view(torch.float32 if self.kind.name == "f32" else torch.int16)

    @functools.cached_property
    def _first(self) -> torch.Tensor:
        """The number of the first matrix, int32[1]."""
        return self.gpu.zeros((1,), "int32")

    def __call__(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """float32[tokens, rows] of float32[tokens, n], by the first matrix."""
        if 0 < len(x) <= MAX_PACKED_VECTORS and not exact:
            return self._multiply_packed(x)
        return self._multiply_decoded(x if exact else x.bfloat16(), 0)

    def multiply(self, a: Activations, out: torch.Tensor) -> None:
        """The product with one vector, by the first matrix, to float32[rows]."""
        self._product(a, self._first, 1, 1, out)

    def of_experts(self, x: torch.Tensor, ids: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """float32[tokens, used, rows]: slot (t, j) by matrix ids[t, j] of x[t] or x[t, j]; ids int32[tokens, used].

        Slots of -1 are left out: they give zeros.
        """
        tokens, used = ids.shape
        if tokens <= MAX_PACKED_VECTORS and not exact:
            share = used if x.dim() == 2 else 1
            out = self.gpu.empty(tokens * used, 1, self.rows)
            self._product(x.reshape(-1, self.n), ids.reshape(-1), share, 1, out)
            return out.view(tokens, used, self.rows)
        return self._grouped(x, ids, exact)

    def decoded(self, start: int = 0, stop: int | None = None, matrix: int = 0, exact: bool = False) -> torch.Tensor:
        """bfloat16[stop - start, n], or float32, of whole groups of rows of a matrix."""
        from quantkit.runtime.kernels.cuda import floats, weights

        stop = self.rows if stop is None else stop
        rows, gpu, result = stop - start, self.gpu, "float32" if exact else "bfloat16"
        if self.kind.name in _OF_TORCH:
            matrices = self.data.view(getattr(gpu.torch, _OF_TORCH[self.kind.name])).view(self.count, self.rows, self.n)
            return matrices[matrix, start:stop].to(getattr(gpu.torch, result))
        output, out = "f32" if exact else "bf16", gpu.empty(rows, self.n, kind=result)
        if self.is_float:
            first = (matrix * self.rows + start) * self.n
            blocks = -(-self.n // floats.THREADS), min(rows, _GRID_Y)
            kernel = floats.dequantize(self.kind.ggml_type, output)
            words = out.view(gpu.torch.int32 if exact else gpu.torch.int16)
            gpu.launch(kernel, blocks, floats.THREADS, self._words, first, rows, self.n, words)
            return out
        first = matrix * self.nbytes + start * self.row_bytes
        kernel = weights.dequantize(self.kind.ggml_type, output)
        gpu.launch_each(kernel, rows * self.n // 32, weights.THREADS, self.data, first, self.row_bytes, rows, self.n,
                        out.view(gpu.torch.int32))  # fmt: skip
        return out

    def all_decoded(self) -> torch.Tensor:
        """float32[count, rows, n] of all matrices."""
        as_one = Matrices(self.gpu, self.data, self.kind, self.count * self.rows, self.n)
        return as_one.decoded(exact=True).view(self.count, self.rows, self.n)

    def _multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        """Products of up to MAX_PACKED_VECTORS vectors, padded to a number for which there is a kernel."""
        from quantkit.runtime.kernels.cuda import weights

        gpu, tokens = self.gpu, len(x)
        padded = next(t for t in weights.TOKENS if t >= tokens)
        if padded > tokens:
            x = gpu.torch.nn.functional.pad(x, (0, 0, 0, padded - tokens))
        out = gpu.empty(1, padded, self.rows)
        self._product(x, self._first, 1, padded, out)
        return out[0, :tokens]

    def _product(
        self, x: torch.Tensor | Activations, ids: torch.Tensor, share: int, tokens: int, out: torch.Tensor
    ) -> None:
        from quantkit.runtime.kernels.cuda import floats, weights

        gpu, slots = self.gpu, (len(ids) // share, share)
        if self.is_float:
            kernel, blocks = floats.matvec(self.kind.ggml_type, tokens), -(-self.rows // floats.ROWS_OF_BLOCK)
            vectors = x.x if isinstance(x, Activations) else x.contiguous()
            gpu.launch(kernel, (blocks, *slots), floats.THREADS, self._words, self.rows * self.n, ids, self.rows,
                       self.n, vectors, out)  # fmt: skip
            return
        _, codes, scales, sums = x if isinstance(x, Activations) else gpu.quantize(x.contiguous())
        kernel, split = weights.matvec(self.kind.ggml_type, tokens), weights.split_of(self.kind.ggml_type, tokens)
        blocks = -(-self.rows // weights.rows_of_block(self.n, split))
        lanes, words = weights.lanes_of_row(self.n, split.pairs), codes.view(gpu.torch.int32)
        gpu.launch(kernel, (blocks, *slots), weights.THREADS, self.data, self.nbytes, ids, self.row_bytes, self.rows,
                   self.n, words, scales, sums, lanes, out)  # fmt: skip

    def _multiply_decoded(self, x: torch.Tensor, matrix: int) -> torch.Tensor:
        """float32[tokens, rows] of bfloat16[tokens, n], or of float32 with exact weights, tile after tile."""
        step = max(1, TILE_ELEMENTS // self.n // 16) * 16  # whole groups of all types
        if self.rows <= step:
            return self._multiply_tile(x, matrix, 0, self.rows)
        out = self.gpu.empty(len(x), self.rows)
        for start in range(0, self.rows, step):
            stop = min(self.rows, start + step)
            out[:, start:stop] = self._multiply_tile(x, matrix, start, stop)
        return out

    def _multiply_tile(self, x: torch.Tensor, matrix: int, start: int, stop: int) -> torch.Tensor:
        """`_multiply_decoded` of some rows."""
        if x.dtype == self.gpu.torch.float32:
            return x @ self.decoded(start, stop, matrix, exact=True).T
        return self.gpu.multiply_bfloats(x, self.decoded(start, stop, matrix).T)

    def _grouped(self, x: torch.Tensor, ids: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Sort slots by matrix, multiply each run by its matrix. Waits for the GPU once, for the runs' lengths."""
        torch = self.gpu.torch
        tokens, used = ids.shape
        order = torch.argsort(ids.reshape(-1), stable=True)
        source = order if x.dim() == 3 else order // used
        sorted_x = x.reshape(-1, self.n)[source]
        sorted_x = sorted_x if exact else sorted_x.bfloat16()
        start, *counts = torch.bincount(ids.reshape(-1) + 1, minlength=self.count + 1).tolist()  # left out ones first
        sorted_out = self.gpu.empty(tokens * used, self.rows)
        sorted_out[:start] = 0
        for number, count in enumerate(counts):
            if count:
                sorted_out[start : start + count] = self._multiply_decoded(sorted_x[start : start + count], number)
            start += count
        out = self.gpu.empty(tokens * used, self.rows)
        out[order] = sorted_out
        return out.view(tokens, used, self.rows)
