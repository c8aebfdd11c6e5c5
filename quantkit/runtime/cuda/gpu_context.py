"""What the parts of a GPU's work in files of their own ask of the worker that they are parts of."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.archs.common import blocks
from quantkit.formats.gguf import Tensor
from quantkit.runtime.blocks.spans import Span

if TYPE_CHECKING:
    from quantkit.runtime.kernels.cuda.device import Gpu, Matrices


class GpuContext(Protocol):
    """`cuda_worker.CudaWorker`, as its parts see it. Activations are float32 tensors [tokens, n] on the GPU."""

    gpu: Gpu
    exact: bool  # numerics
    threads: int
    weights: Mapping[str, Tensor]

    def vector(self, name: str) -> Any: ...

    def matrices(self, name: str, rows: int | None = None) -> Matrices: ...

    def norm(self, norm: blocks.Norm, x: Any) -> Any: ...

    def linear(self, linear: blocks.Linear, x: Any) -> Any: ...

    def activate(self, name: str, gate: Any, up: Any) -> Any: ...

    def sigmoid(self, x: Any) -> Any: ...

    def check(self, what: str, y: Any) -> None: ...

    def run_block(self, block: blocks.Block, x: Any, spans: list[Span]) -> Any: ...

    def reading_position(self, position: Any, n_ctx: int) -> contextlib.AbstractContextManager[None]: ...

    def rope_tables(self) -> list[Any]: ...
