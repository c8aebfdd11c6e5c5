"""Evaluation on the workers of a cluster has the bits of a run in one process, also when workers die."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import quantkit
from quantkit import cli, cluster
from quantkit.cluster.in_order import WorkerTime
from quantkit.errors import QuantkitError
from quantkit.evaluate.compare import CompareOptions, compare
from quantkit.evaluate.divergence import DivergenceOptions, divergence
from quantkit.evaluate.imatrix.run import ImatrixOptions, imatrix
from quantkit.evaluate.layers.on_workers import stage_count
from quantkit.evaluate.perplexity import Perplexity, PerplexityOptions, perplexity
from quantkit.evaluate.progress import ChunkProgress
from quantkit.evaluate.sensitivity.run import SensitivityOptions, sensitivity
from quantkit.pipelines import api
from quantkit.pipelines.options import VerifyOptions
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.evaluate.test_imatrix import CTX, model, text  # noqa: F401  # fixtures: a small mixture of experts

if TYPE_CHECKING:
    from distributed import Client

CHUNKS = PerplexityOptions(ctx_size=CTX, chunks=6, batch_size=2 * CTX)


@pytest.mark.parametrize("base", ["base.kld", "base.qkld"])
def test_perplexity_and_divergence_have_the_same_bits(
    model: Path, text: Path, tmp_path: Path, dask_client: Client, base: str  # noqa: F811
) -> None:  # fmt: skip
    files = {name: tmp_path / f"{name}-{base}" for name in ("here", "there")}
    here, there = (
        perplexity(model, text, PerplexityOptions(**vars(CHUNKS) | {"kl_divergence_base": files[name]}), client=client)
        for name, client in (("here", None), ("there", dask_client))
    )
    np.testing.assert_array_equal(here.nll, there.nll)
    workers = there.conditions["workers"]
    assert isinstance(workers, dict)
    assert sum(worker["batches"] for worker in workers.values()) == 3
    assert "workers" not in here.conditions
    bases = [path.read_bytes() for path in files.values()]
    assert bases[0] == bases[1] or base.endswith(".qkld")  # which has the path of the file that it was made with
    options = DivergenceOptions(batch_size=2 * CTX, numerics="fast")
    found = [divergence(model, files["here"], None, options, client=client) for client in (None, dask_client)]
    assert found[0].kld.any()
    for name in ("nll", "nll_base", "kld", "same_top"):
        np.testing.assert_array_equal(getattr(found[0], name), getattr(found[1], name))


@pytest.mark.parametrize("moments", ["", "blocks:64"])
def test_an_importance_matrix_has_the_same_bytes(
    model: Path, text: Path, tmp_path: Path, dask_client: Client, moments: str  # noqa: F811
) -> None:  # fmt: skip
    options = ImatrixOptions(ctx_size=CTX, chunks=5, batch_size=2 * CTX, second_moments=moments, process_output=True)
    outputs = tmp_path / "here.gguf", tmp_path / "there.gguf"
    for output, client in zip(outputs, (None, dask_client)):
        imatrix(model, text, output, options, client=client)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_what_workers_cannot_sum_is_refused(
    model: Path, text: Path, tmp_path: Path, dask_client: Client  # noqa: F811
) -> None:  # fmt: skip
    options = ImatrixOptions(ctx_size=CTX, second_moments="rank:8")
    with pytest.raises(QuantkitError, match=r"rank:8 .* depend on the order"):
        imatrix(model, text, tmp_path / "x.gguf", options, client=dask_client)
    with pytest.raises(QuantkitError, match="pass the path"):
        perplexity(load(model), text, CHUNKS, client=dask_client)


def test_layers_are_a_pipeline(model: Path, text: Path, dask_client: Client) -> None:  # noqa: F811
    options = PerplexityOptions(**vars(CHUNKS) | {"by_layer": True})
    here = perplexity(model, text, options)
    there = perplexity(model, text, options, client=dask_client)
    np.testing.assert_array_equal(here.nll, there.nll)
    workers = there.conditions["workers"]
    assert isinstance(workers, dict)
    assert set(workers) == set(dask_client.nthreads())
    batches = [worker["batches"] for worker in workers.values()]  # dask may move one to a worker that waits
    assert sum(batches) == 6
    assert min(batches) >= 1


def test_selected_positions_go_from_stage_to_stage(tmp_path: Path, dask_client: Client) -> None:
    """The third of four layers, the first of its stage, attends to what the second has selected."""
    path, text = written(tmp_path / "m.gguf", "glm-dsa", tokenizer=True), tmp_path / "text.txt"  # noqa: F811
    text.write_text("the quick brown fox jumps over the lazy dog 0123456789 " * 12)
    options = PerplexityOptions(ctx_size=64, chunks=3, batch_size=128)
    here = perplexity(path, text, options)
    there = perplexity(path, text, replace(options, by_layer=True), client=dask_client)
    np.testing.assert_array_equal(here.nll, there.nll)


def test_stages_follow_from_memory() -> None:
    assert stage_count(10, [100, 100]) == 2
    assert stage_count(700, [100, 100]) == 10


def test_a_comparison_has_the_same_figures(model: Path, text: Path, dask_client: Client) -> None:  # noqa: F811
    options = CompareOptions(ctx_size=CTX, chunks=4, batch_size=2 * CTX)
    here, there = (compare(model, [model], text, options, client=client) for client in (None, dask_client))
    assert here.noise is not None
    assert there.noise is not None
    np.testing.assert_array_equal(here.noise.paired.divergence.kld, there.noise.paired.divergence.kld)
    assert here.candidates[0].ppl == there.candidates[0].ppl
    with pytest.raises(QuantkitError, match="--speed"):
        compare(model, [model], text, CompareOptions(speed=True), client=dask_client)


def test_chunks_of_a_killed_worker_are_run_again(model: Path, text: Path) -> None:  # noqa: F811
    options = PerplexityOptions(**vars(CHUNKS) | {"chunks": 12})
    here = perplexity(model, text, options)
    killed = []
    with cluster.connect("local:2") as client:

        def kill(progress: object) -> None:
            if not killed:
                processes: dict[str, int] = client.run(os.getpid)
                killed.append(processes.popitem()[1])
                os.kill(killed[0], signal.SIGKILL)

        there = perplexity(model, text, options, client=client, progress=kill)
    assert killed
    np.testing.assert_array_equal(here.nll, there.nll)


def test_a_run_resumes_on_a_cluster(model: Path, text: Path, tmp_path: Path, dask_client: Client) -> None:  # noqa: F811
    log = tmp_path / "log.jsonl"

    def stop(progress: ChunkProgress[Perplexity]) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    options = PerplexityOptions(**vars(CHUNKS) | {"jsonl": log})
    with pytest.raises(KeyboardInterrupt):
        perplexity(model, text, options, client=dask_client, progress=stop)
    messages: list[str] = []
    there = perplexity(model, text, options, client=dask_client, on_message=messages.append)
    assert any("2 chunks are already" in line for line in messages)
    np.testing.assert_array_equal(perplexity(model, text, CHUNKS).nll, there.nll)


def test_sensitivity_has_the_same_numbers(
    model: Path, text: Path, tmp_path: Path, dask_client: Client  # noqa: F811
) -> None:  # fmt: skip
    options = SensitivityOptions(ctx_size=CTX, chunks=2, rows=4, types=["q4_0", "q8_0"])
    outputs = tmp_path / "here.json", tmp_path / "there.json"
    times: dict[str, WorkerTime] = {}
    here, there = (
        sensitivity(model, text, output, options, client=client, on_workers=times.update)
        for output, client in zip(outputs, (None, dask_client))
    )
    assert set(times) == set(dask_client.nthreads())
    assert all(each.tasks and each.seconds for each in times.values())
    assert here.tensors == there.tensors
    assert any(cost.kld > 0 for cost in here.tensors.values())


def test_verify_finds_the_same(model: Path, tmp_path: Path, dask_client: Client) -> None:  # noqa: F811
    made = tmp_path / "made.gguf"
    quantkit.quantize(model, made, "Q8_0")
    data = bytearray(made.read_bytes())
    data[-100] ^= 1
    made.write_bytes(data)
    options = VerifyOptions(source=model)
    here, there = (api.verify(made, options, client=client) for client in (None, dask_client))
    assert here.to_json() == there.to_json()
    assert not here.workers
    assert sum(times.tasks for times in there.workers.values()) == 1
    assert len(here.damage) == 1
    assert here.hashed == len(here.file.tensors) - 1


def test_commands_take_the_option(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:  # noqa: F811
    flags = ["-f", text, "-c", CTX, "--chunks", 4, "-b", 2 * CTX, "--cluster", "local:1", "--json"]
    assert cli.main([str(a) for a in ("perplexity", model, *flags)]) == 0
    caught = capsys.readouterr()
    found = json.loads(caught.out)
    assert "dashboard" in caught.err
    (worker,) = found["conditions"]["workers"].values()
    assert worker["batches"] == 2
    assert found["ppl"] == perplexity(model, text, PerplexityOptions(**vars(CHUNKS) | {"chunks": 4})).value
