"""Gated short convolutions: the operation against the formula, models as compiled plans, caches and sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import recipe, types
from quantkit.formats import gguf
from quantkit.placement import kv_size
from quantkit.runtime.kernels.cpu import delta_net, prefill_ops, short_conv
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


@pytest.mark.parametrize("counts", [[1], [2], [5], [64], [3, 1, 70, 6], [1, 1]])
@pytest.mark.parametrize(("kernel", "channels"), [(2, 32), (3, 96), (5, 160), (4, 1024)])
def test_the_operation_follows_the_formula(kernel: int, channels: int, counts: list[int]) -> None:
    rng = np.random.default_rng(sum(counts))
    ends, tokens = np.cumsum(counts), sum(counts)
    inputs = rng.standard_normal((len(counts), kernel - 1, channels), np.float32)
    projected = rng.standard_normal((tokens, 3, channels), np.float32)
    taps = rng.standard_normal((kernel, channels), np.float32)
    expected, kept = np.empty((tokens, channels)), []
    for end, count, before in zip(ends, counts, inputs):
        b, c, z = projected[end - count : end].astype(np.float64).transpose(1, 0, 2)
        entering = np.concatenate([before, b * z])
        expected[end - count : end] = c * sum(taps[j] * entering[j : j + count] for j in range(kernel))
        kept.append(entering[count:])
    found = []
    for threads in (1, 2, 3):
        ops = OpList(threads)
        past, out = ops.keep(inputs.copy()), ops.keep(np.full((tokens, channels), np.nan, np.float32))
        spans = [prefill_ops.SpanState(end - count, count, 0) for end, count in zip(ends, counts)]
        records = (prefill_ops.BatchState(tokens, 0, len(spans)), *spans)
        state = ops.keep(np.array([n for record in records for n in record], np.int64))
        places = ops.keep(np.array([(rows.ctypes.data, 0) for rows in past], np.int64))
        parameters = short_conv.GatedConvParameters(
            state=state.ctypes.data, projected=ops.keep(projected).ctypes.data, taps=ops.keep(taps).ctypes.data,
            layer_states=ops.record(delta_net.StatesView(places.ctypes.data)).address, channels=channels, multiple=32,
            out=out.ctypes.data, quantizes=0,
        )  # fmt: skip
        ops.add(short_conv.gated_conv(kernel), parameters, barrier=True)
        ops.run()
        found.append((out, past))
    for out, past in found:
        np.testing.assert_array_equal(out, found[0][0])  # any number of threads gives the same bits
        assert np.abs(out - expected).max() < 2e-5 * (1 + np.abs(expected).max())
        assert np.abs(past - np.array(kept)).max() < 1e-5


@pytest.fixture(scope="module", params=["lfm2", "lfm2moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("short-conv") / "m.gguf", request.param)


def test_sizes_are_those_of_the_cache(path: Path) -> None:
    model, f32 = load(path, cache_type="f32"), types.layout("f32")
    found = kv_size.of_layers(gguf.open(path).metadata, 100, f32, f32)
    assert found == [2 * 64 * 4, 2 * 64 * 4, 100 * 2 * 2 * 16 * 4, 2 * 64 * 4]
    assert sum(found) == model.new_cache(100).nbytes


def test_convolutions_stay_as_they_are(path: Path) -> None:
    file = gguf.open(path)
    plan = recipe.plan(file.tensors.values(), "Q4_0", metadata=file.metadata)
    kinds = {t.name: t.type.name for t in plan.tensors}
    assert kinds["blk.0.shortconv.conv.weight"] == "f32"
    assert kinds["blk.0.shortconv.in_proj.weight"] == kinds["blk.0.shortconv.out_proj.weight"] == "q4_0"
