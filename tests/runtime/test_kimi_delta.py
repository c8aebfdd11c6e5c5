"""Kimi Delta Attention: the operations against the formula, models as compiled plans, caches and sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import recipe, types
from quantkit.formats import gguf
from quantkit.pipelines.convert_mla import plan_relayout, write_relayout
from quantkit.placement import kv_size
from quantkit.runtime.kernels.cpu import delta_net, kimi_delta, prefill_ops
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too

TOKENS = np.random.default_rng(3).integers(2, 320, 150)


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


@pytest.mark.parametrize("counts", [[1], [2], [70], [3, 1, 40]])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 24), (2, 128)])
@pytest.mark.parametrize("strength", [0.01, 1, 30])
def test_the_operations_follow_the_formula(heads: int, dim: int, counts: list[int], strength: float) -> None:
    rng = np.random.default_rng(sum(counts))
    tokens, inner, ends = sum(counts), heads * dim, np.cumsum(counts)
    qkv = rng.standard_normal((tokens, 3, heads, dim), np.float32) / np.float32(dim**0.5)
    rates, beta = (
        rng.standard_normal((tokens, heads, dim), np.float32),
        rng.standard_normal((tokens, heads), np.float32),
    )
    a = (-strength * rng.uniform(0.5, 2, heads)).astype(np.float32)
    dt, start = rng.standard_normal(inner, np.float32), rng.standard_normal((len(counts), heads, dim, dim), np.float32)
    g = a[:, None].astype(np.float64) * np.logaddexp(0, rates.astype(np.float64) + dt.reshape(heads, dim))
    states, expected = start.astype(np.float64), np.empty((tokens, heads, dim))
    for s, (end, count) in enumerate(zip(ends, counts)):
        for t in range(end - count, end):
            for h in range(heads):
                q, k, v = qkv[t, :, h].astype(np.float64)
                state = states[s, h] * np.exp(g[t, h])[:, None]
                state += np.outer(k, (v - state.T @ k) / (1 + np.exp(-np.float64(beta[t, h]))))
                states[s, h], expected[t, h] = state, state.T @ q
    found = []
    for threads in (1, 2, 3):
        ops = OpList(threads)
        kept, out = ops.keep(start.copy()), ops.keep(np.full((tokens, inner), np.nan, np.float32))
        spans = [prefill_ops.SpanState(end - count, count, 0) for end, count in zip(ends, counts)]
        records = (prefill_ops.BatchState(tokens, 0, len(spans)), *spans)
        state_at = ops.keep(np.array([n for record in records for n in record], np.int64)).ctypes.data
        places = ops.keep(np.array([(0, rows.ctypes.data) for rows in kept], np.int64))
        view = ops.record(delta_net.StatesView(places.ctypes.data)).address
        sizes = ops.record(delta_net.HeadFields(heads, heads, dim, dim, 0)).address
        arrays = (ops.keep(x.copy()).ctypes.data for x in (qkv, rates, beta, a, dt))
        fields = ops.record(kimi_delta.RuleFields(*arrays, out.ctypes.data)).address
        if counts == [1]:
            ops.add(kimi_delta.update, kimi_delta.UpdateParameters(sizes, fields, view, dim), barrier=True)
        else:
            next_head = ops.keep(np.zeros(1, np.int64)).ctypes.data
            parameters = kimi_delta.AttendParameters(state_at, sizes, fields, view, next_head)
            ops.add(kimi_delta.attend, parameters, barrier=True)
        ops.run()
        found.append((out, kept))
    for out, kept in found:
        np.testing.assert_array_equal(out, found[0][0])  # any number of threads gives the same bits
        assert np.abs(out.reshape(expected.shape) - expected).max() < 1e-5 * (1 + np.abs(expected).max())
        assert np.abs(kept - states).max() < 1e-5 * (1 + np.abs(states).max())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_three_outputs_are_joined(threads: int) -> None:
    rng = np.random.default_rng(1)
    parts, ops = rng.standard_normal((3, 7, 96), np.float32), OpList(threads)
    out = ops.keep(np.full((7, 3 * 96), np.nan, np.float32))
    state = ops.keep(np.array([*prefill_ops.BatchState(7, 0, 1)], np.int64)).ctypes.data
    addresses = (ops.keep(part.copy()).ctypes.data for part in parts)
    parameters = kimi_delta.JoinParameters(state, *addresses, inner=96, multiple=96, qkv=out.ctypes.data)
    ops.add(kimi_delta.join, parameters, barrier=True)
    ops.run()
    np.testing.assert_array_equal(out, np.concatenate(list(parts), axis=1))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("kimi") / "m.gguf", "kimi-linear")


@pytest.mark.parametrize("layout", ["kv_b", "both"])
def test_layouts_of_latent_attention_give_the_same(path: Path, tmp_path: Path, layout: str) -> None:
    expected = load(path, cache_type="f32").logits(TOKENS)
    write_relayout(plan_relayout(gguf.open(path), layout), tmp_path / "m.gguf")
    write_relayout(plan_relayout(gguf.open(tmp_path / "m.gguf"), "k_b+v_b"), tmp_path / "back.gguf")
    for made in ("m.gguf", "back.gguf"):
        model = load(tmp_path / made, cache_type="f32", numerics="fast")
        assert model.fallback_reason is None
        assert np.abs(model.logits(TOKENS) - expected).max() < 1e-4
    before, after = (gguf.open(p).metadata for p in (path, tmp_path / "back.gguf"))
    assert {key: after[key] for key in before} == {key: before[key] for key in before}


@pytest.mark.parametrize("mla", [0, 3])
def test_sizes_are_those_of_the_cache(path: Path, mla: int) -> None:
    model, f32 = load(path, cache_type="f32", mla=mla), types.layout("f32")
    found = kv_size.of_layers(gguf.open(path).metadata, 100, f32, f32, mla)
    kda = 4 * (3 * 3 * 128 + 4 * 32 * 32)
    assert found == [kda, kda, kda, 100 * 4 * (96 if mla else 4 * (64 + 32)), kda]
    assert sum(found) == model.new_cache(100).nbytes


def test_small_tensors_stay_as_they_are(path: Path) -> None:
    file = gguf.open(path)
    plan = recipe.plan(file.tensors.values(), "Q4_0", metadata=file.metadata)
    kinds = {t.name: t.type.name for t in plan.tensors}
    kept = ("ssm_conv1d_q.weight", "ssm_conv1d_v.weight", "ssm_a", "ssm_dt.bias", "ssm_norm.weight")
    assert {kinds[f"blk.0.{name}"] for name in kept} == {"f32"}
    assert {kinds[f"blk.0.{name}.weight"] for name in ("ssm_f_a", "ssm_g_b", "ssm_beta")} == {"q4_0"}
