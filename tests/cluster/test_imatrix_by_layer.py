"""`imatrix --by-layer` on workers has the bytes of a run in one process, also when workers die."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quantkit import cluster
from quantkit.errors import QuantkitError, UnsupportedError
from quantkit.evaluate.imatrix import layers_on_workers
from quantkit.evaluate.imatrix.run import ImatrixOptions
from tests.evaluate.test_by_layer import CTX, OPTIONS, folder, measured  # noqa: F401  # a fixture: models and texts

if TYPE_CHECKING:
    from distributed import Client

BY_LAYER = replace(OPTIONS, by_layer=True)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [("llama", {"shares": (1, 2), "no_ppl": True, "process_output": False}), ("qwen3moe", {"second_moments": "rank:8"}),
     ("deepseek2", {"second_moments": ""}), ("qwen3next", {}), ("glm-dsa", {}), ("deepseek4", {}),
     ("gemma4-e", {}), ("gemma3n", {}),
     ("mtp", {"batch_size": 4096})],
)  # fmt: skip
@pytest.mark.parametrize("stages", [2, 4])
def test_the_same_bytes(
    folder: Path, tmp_path: Path, dask_client: Client, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
    arch: str, changes: dict[str, Any], stages: int,
) -> None:  # fmt: skip
    """Sketches too, which depend on the order of chunks. With four stages, each worker reads its layers in turn."""
    monkeypatch.setattr(layers_on_workers, "stages_of", lambda path, client: stages)
    here = measured(folder, arch, tmp_path / "here.gguf", replace(OPTIONS, **changes))
    there = measured(folder, arch, tmp_path / "there.gguf", replace(BY_LAYER, **changes), client=dask_client)
    assert here.path.read_bytes() == there.path.read_bytes()
    for text, ppl in here.perplexities.items():
        np.testing.assert_array_equal(ppl.nll, there.perplexities[text].nll)
    workers = there.conditions["workers"]
    assert isinstance(workers, dict)
    batches = 2 * -(-5 // max(1, changes.get("batch_size", 2 * CTX) // CTX))
    assert sum(worker["batches"] for worker in workers.values()) == stages * batches


def test_sums_travel_in_parts(
    folder: Path, tmp_path: Path, dask_client: Client, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Parts of one weight each."""
    monkeypatch.setattr(layers_on_workers, "_in_pieces", _one_by_one)
    for name, options, client in (("here", OPTIONS, None), ("there", BY_LAYER, dask_client)):
        measured(folder, "qwen3moe", tmp_path / f"{name}.gguf", options, client=client)
    assert (tmp_path / "here.gguf").read_bytes() == (tmp_path / "there.gguf").read_bytes()


def _one_by_one(collector: Any) -> Any:
    """`_in_pieces` on a worker, with the smallest parts."""
    from quantkit.evaluate.imatrix import on_workers

    before, on_workers.PART_BYTES = on_workers.PART_BYTES, 1
    try:
        pieces = _IN_PIECES(collector)
    finally:
        on_workers.PART_BYTES = before
    assert len(pieces) == len(collector.sums) + len(collector.moments.sums)
    return pieces


_IN_PIECES = layers_on_workers._in_pieces


@pytest.mark.parametrize("all_of_them", [False, True])
def test_tasks_of_killed_workers_run_again(folder: Path, tmp_path: Path, all_of_them: bool) -> None:  # noqa: F811
    measured(folder, "qwen3moe", tmp_path / "here.gguf", OPTIONS)
    killed: list[int] = []
    with cluster.connect("local:2") as client:

        def kill(progress: object) -> None:
            if not killed:
                processes: dict[str, int] = client.run(os.getpid)
                killed.extend(list(processes.values())[: 2 if all_of_them else 1])
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)

        measured(folder, "qwen3moe", tmp_path / "there.gguf", BY_LAYER, client=client, progress=kill)
    assert len(killed) == 1 + all_of_them
    assert (tmp_path / "here.gguf").read_bytes() == (tmp_path / "there.gguf").read_bytes()


def test_what_does_not_go_together(folder: Path, tmp_path: Path, dask_client: Client) -> None:  # noqa: F811
    with pytest.raises(UnsupportedError, match="exact numerics only"):
        measured(folder, "llama", tmp_path / "x.gguf", replace(BY_LAYER, numerics="fast"), client=dask_client)
    failing = ImatrixOptions(ctx_size=4, chunks=1, missing_experts="error", by_layer=True)
    with pytest.raises(QuantkitError, match="measurements are saved"):
        measured(folder, "qwen3moe", tmp_path / "x.gguf", failing, client=dask_client)
    with pytest.raises(QuantkitError, match="another model, text, version or options"):
        measured(folder, "qwen3moe", tmp_path / "x.gguf", failing)
    filled = replace(failing, missing_experts="weight-one")
    measured(folder, "qwen3moe", tmp_path / "x.gguf", filled, client=dask_client)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]
