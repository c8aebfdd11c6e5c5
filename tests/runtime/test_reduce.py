"""All-reduce: the calls of NCCL process groups, simulated without GPUs; no rank waits for one that failed."""

from __future__ import annotations

import datetime
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.errors import UnsupportedError
from quantkit.runtime.parallel.all_reduce import AllReduce, Gloo, Nccl


class Options:
    _timeout: Any = None


class Group:
    """ProcessGroupNCCL of torch 2.13, of tensors of the CPU: a wait returns the sum if all ranks have called."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options):
        assert isinstance(store, torch.distributed.HashStore)
        assert options._timeout == datetime.timedelta(hours=1)
        self.store, self.rank, self.size, self.turn = store, rank, size, 0
        self.thread = threading.current_thread()

    def allreduce(self, tensors: list[Any]) -> Any:
        assert threading.current_thread() is self.thread
        (x,) = tensors
        time.sleep(0.01 * self.rank)
        self.turn += 1
        self.store.set(f"{self.turn} {self.rank}", x.numpy().tobytes())
        return SimpleNamespace(wait=lambda: self._sum(x))

    def _sum(self, x: Any) -> None:
        names = [f"{self.turn} {rank}" for rank in range(self.size)]
        assert self.store.check(names), "a rank waits before all have called"
        x.copy_(sum(torch.frombuffer(bytearray(self.store.get(name)), dtype=x.dtype) for name in names))


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> AllReduce:
    """Three devices whose sums go through `Group`."""
    places = [torch.device("cpu")] * 3
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    all_reduce = AllReduce(places)
    assert isinstance(all_reduce._groups, Gloo)  # none of them is a GPU's
    all_reduce._groups = Nccl(places, all_reduce)
    assert len({group.thread for group in all_reduce._groups._of}) == 3
    return all_reduce


def test_gpus_add_up_in_their_memory(nccl: AllReduce) -> None:
    given = [torch.full((2, 3), float(rank + 1)) for rank in range(3)]
    for _ in range(3):
        for result in nccl.run_on_all(lambda rank: nccl.sum(rank, given[rank])):
            assert result.dtype == torch.float32
            assert result.tolist() == [[6.0] * 3] * 2
    assert [float(x[0, 0]) for x in given] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_arrays_and_tensors_add_up_through_the_host(kind: str) -> None:
    all_reduce = AllReduce([None, torch.device("cpu")], kind)
    given = np.full((2, 2), 1.25, np.float32), torch.full((2, 2), 2.0)
    array, tensor = all_reduce.run_on_all(lambda rank: all_reduce.sum(rank, given[rank]))
    assert array.dtype == np.float32
    assert (array == 3.25).all()
    assert torch.equal(tensor, torch.full((2, 2), 3.25))


@pytest.mark.parametrize("how", ["nccl", "gloo"])
def test_nobody_waits_for_one_that_failed(how: str, nccl: AllReduce) -> None:
    all_reduce = nccl if how == "nccl" else AllReduce([None] * 3)

    def add(rank: int) -> float:
        return float(all_reduce.sum(rank, torch.ones(2))[0])

    def fails(rank: int) -> None:
        add(rank)
        if rank == 1:
            raise ValueError("out of memory")
        add(rank)

    with pytest.raises(ValueError, match="out of memory"):
        all_reduce.run_on_all(fails)
    assert all_reduce.run_on_all(add) == [3, 3, 3]


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    with pytest.raises(UnsupportedError, match="NCCL, which adds up between GPUs; take -sm layer"):
        AllReduce([torch.device("cuda", 0), torch.device("cuda", 1)])
