"""Repacking at load (-rtr): tensors interleaved in memory as `quantkit repack` interleaves them in a file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.codegen import jit
from quantkit.formats.gguf import Tensor
from quantkit.placement.rules import Placement
from quantkit.repack.eligible import interleaved
from quantkit.types import QuantType
from quantkit.types.families.interleave import Interleaved


class _InMemory(Tensor):
    """A tensor of a file with its rows interleaved."""

    __slots__ = ()

    def __init__(self, tensor: Tensor, form: Interleaved, threads: int):
        data = form.interleave_rows(tensor.data, threads=threads)
        super().__init__(tensor.name, tensor.shape, form, data.nbytes, 0, tensor.path)
        self._file = jit.readonly(data.reshape(-1))


@dataclass(frozen=True)
class Repacked:
    """What repacking at load did: of each tensor that changed, its type before and after; bytes and seconds of all."""

    types: dict[str, tuple[QuantType, Interleaved]]
    nbytes: int
    seconds: float

    def __len__(self) -> int:
        return len(self.types)

    @property
    def slower(self) -> Counter[tuple[str, str]]:
        """Numbers of tensors, by (type before, after), that lost a kernel for `fast` numerics by being repacked."""
        from quantkit.runtime.kernels import dispatch  # loads numba

        return Counter(
            (before.name, after.name)
            for before, after in self.types.values()
            if dispatch.product(before) is not None and dispatch.product(after) is None
        )


def repack(tensors: Mapping[str, Tensor], placement: Placement, threads: int) -> tuple[dict[str, Tensor], Repacked]:
    """Interleave the tensors on the CPU that have a lossless interleaved form. Returns all tensors and the changes."""
    started = time.perf_counter()
    result, changed = dict(tensors), {}
    for name, tensor in tensors.items():
        if (form := _form(tensor, placement)) is not None:
            result[name] = _InMemory(tensor, form, threads)
            changed[name] = tensor.type, form
    nbytes = sum(result[name].nbytes for name in changed)
    return result, Repacked(changed, nbytes, time.perf_counter() - started)


def is_repacked(tensor: Tensor, placement: Placement) -> bool:
    """Whether `repack` interleaves a tensor, and so copies it to memory."""
    return _form(tensor, placement) is not None


def _form(tensor: Tensor, placement: Placement) -> Interleaved | None:
    """The interleaved type of a tensor on the CPU; None if it has none or is elsewhere."""
    if not placement.on_cpu(tensor.name):
        return None
    return interleaved(tensor.name, tensor.shape, tensor.type, named=True)[0]
