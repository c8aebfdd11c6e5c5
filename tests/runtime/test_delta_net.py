"""Recurrent layers in the compiled plans: operations against the plain kernels, models against layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs, recipe
from quantkit.archs.common.blocks import Recurrence
from quantkit.errors import DataError
from quantkit.formats import gguf
from quantkit.placement import kernel_sizes, workspace
from quantkit.recipe.models import from_config
from quantkit.runtime.blocks import recurrent
from quantkit.runtime.blocks.float_linear import FloatLinear
from quantkit.runtime.compiled import unsupported
from quantkit.runtime.kernels import reference
from quantkit.runtime.kernels.cpu import delta_net, prefill_ops
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs.files import written
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too
from tests.recipe.configs import QWEN35_27B
from tests.runtime.conftest import rewrite
from tests.runtime.test_kernels import rounded
from tests.runtime.test_recurrent import part_of, plainly
from tests.runtime.test_step import HALVES, ROUNDED, changed, spread

TOKENS = np.random.default_rng(3).integers(2, 320, 210)
ARCHS = ("qwen3next", "qwen35", "qwen35moe")
ODD = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 48,
       "linear_conv_kernel_dim": 3, "num_hidden_layers": 5, "full_attention_interval": 3}  # fmt: skip
SIZES = [  # kernel, key heads, value heads, elements of a key, of a value
    (4, 2, 4, 64, 64), (3, 2, 6, 24, 40), (1, 1, 1, 16, 32), (2, 3, 3, 20, 33), (6, 1, 4, 5, 8), (4, 2, 2, 128, 128),
]  # fmt: skip


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


# ----------------------------------------------------------------------------------------------------------- operations


class Layer:
    """One layer's operations over random states of several sequences. `run` takes float32 arrays of their tokens."""

    def __init__(self, sizes: Recurrence, tiled: bool, together: bool, counts: list[int]):
        rng = np.random.default_rng(sum(counts))
        self.sizes, self.tiled, self.together, self.counts = sizes, tiled, together, counts
        shape = (len(counts), sizes.value_heads, sizes.head_dim_k, sizes.head_dim_v)
        self.states = rng.standard_normal(shape, np.float32)
        self.inputs = rng.standard_normal((len(counts), sizes.kernel - 1, sizes.channels), np.float32)
        self.x = rng.standard_normal((sum(counts), sizes.channels), np.float32)
        self.beta, self.alpha = rng.standard_normal((2, sum(counts), sizes.value_heads), np.float32)
        self.a = -(rng.exponential(1, sizes.value_heads).astype(np.float32) ** 4)  # from none to all is forgotten
        self.dt = rng.standard_normal(sizes.value_heads, np.float32)
        self.taps = rng.standard_normal((sizes.kernel, sizes.channels), np.float32)

    def spans(self) -> list[slice]:
        ends = np.cumsum(self.counts)
        return [slice(end - count, end) for end, count in zip(ends, self.counts)]

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values; outputs; states after the tokens."""
        sizes, part = self.sizes, part_of(self.sizes, self.tiled)
        mixed, states = np.empty_like(self.x), self.states.astype(np.float64)
        out = np.empty((len(self.x), sizes.inner))
        g = self.a * np.logaddexp(0, self.alpha.astype(np.float64) + self.dt)
        beta = 1 / (1 + np.exp(-self.beta.astype(np.float64)))
        for rows, inputs, state in zip(self.spans(), self.inputs, states):
            reference.short_conv(inputs, self.x[rows], self.taps, np.zeros(sizes.channels, np.float32), mixed[rows])
            reference.l2_norm_heads(mixed[rows], 0, sizes.key_heads, sizes.head_dim_k, sizes.head_dim_k**-0.5)
            reference.l2_norm_heads(mixed[rows], sizes.keys, sizes.key_heads, sizes.head_dim_k, 1.0)
            out[rows] = plainly(part, mixed[rows], g[rows], beta[rows], state)
        return mixed, out, states

    def _rates(self, ops: OpList) -> int:
        group = self.sizes.value_heads // (self.sizes.key_heads if self.together else 1)
        first, second = (x.reshape(len(x), -1, group) for x in (self.beta, self.alpha))
        both = ops.keep(np.ascontiguousarray(np.concatenate([first, second], axis=2)))
        fields = delta_net.RateFields(
            beta=both.ctypes.data, alpha=both.ctypes.data + 4 * group, row=2 * self.sizes.value_heads, group=group,
            stride=2 * group, a=ops.keep(self.a).ctypes.data, dt=ops.keep(self.dt).ctypes.data,
        )  # fmt: skip
        return ops.record(fields).address

    def run(self, threads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """As `expected`, and the inputs that are kept; by operations for one token where there is one."""
        sizes, ops = self.sizes, OpList(threads)
        x, inputs, states = (ops.keep(a.copy()) for a in (self.x, self.inputs, self.states))
        out = ops.keep(np.full((len(x), sizes.inner), np.nan, np.float32))
        records = [prefill_ops.SpanState(rows.start, rows.stop - rows.start, 0) for rows in self.spans()]
        header = prefill_ops.BatchState(len(x), 0, len(records))
        state = ops.keep(np.array([n for record in (header, *records) for n in record], np.int64)).ctypes.data
        places = ops.keep(np.array([(i.ctypes.data, s.ctypes.data) for i, s in zip(inputs, states)], np.int64))
        view = ops.record(delta_net.StatesView(places.ctypes.data)).address
        key_dim, value_dim = sizes.head_dim_k, sizes.head_dim_v
        counter, none = ops.buffer("next", 8), ops.keep(np.zeros(sizes.channels, np.float32))
        convolve = delta_net.ConvolveParameters(
            state=state, qkv=x.ctypes.data, taps=ops.keep(self.taps).ctypes.data, layer_states=view,
            channels=sizes.channels, bias=none.ctypes.data, keys=sizes.keys, dim_k=key_dim,
            query_scale=ops.constant(key_dim**-0.5), multiple=key_dim, next_head=counter,
        )  # fmt: skip
        ops.add(delta_net.convolve(sizes.kernel), convolve, barrier=True)
        fields = delta_net.HeadFields(sizes.key_heads, sizes.value_heads, key_dim, value_dim, int(self.tiled))
        common: dict[str, Any] = {
            "heads": ops.record(fields).address, "rates": self._rates(ops), "qkv": x.ctypes.data, "layer_states": view,
            "out": out.ctypes.data,
        }  # fmt: skip
        if len(x) == 1:
            ops.add(delta_net.update, delta_net.UpdateParameters(multiple=value_dim, **common))
        else:
            scratch, stride = ops.private_buffer("chunk", kernel_sizes.delta_chunk_bytes(key_dim, value_dim))
            widths = kernel_sizes.delta_widths(key_dim, value_dim)
            chunk = ops.record(delta_net.ChunkSizes(key_dim, value_dim, *widths)).address
            attend = delta_net.AttendParameters(
                state=state, sizes=chunk, next_head=counter, scratch=scratch, private_stride=stride, **common
            )
            ops.add(delta_net.attend, attend)
        ops.add_barrier()
        ops.run()
        return x, out, states, inputs


def assert_near(result: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(result - expected).max() < 2e-5 * (1 + np.abs(expected).max())


@pytest.mark.parametrize("counts", [[1], [2], [4], [5], [63], [64], [65], [200], [3, 1, 70, 6], [1, 1]])
@pytest.mark.parametrize("dims", SIZES)
def test_operations_follow_the_formula(dims: tuple[int, ...], counts: list[int]) -> None:
    layer = Layer(Recurrence(*dims), len(counts) > 1 or counts[0] % 2 == 0, counts[0] % 3 > 0, counts)
    results = [layer.run(threads) for threads in (1, 2, 3)]
    for other in results[1:]:  # any number of threads gives the same bits
        for a, b in zip(results[0], other):
            np.testing.assert_array_equal(a, b)
    *computed, inputs = results[0]
    for result, expected in zip(computed, layer.expected()):
        assert_near(result, expected)
    for rows, before, after in zip(layer.spans(), layer.inputs, inputs):
        np.testing.assert_array_equal(after, np.concatenate([before, layer.x[rows]])[rows.stop - rows.start :])


def test_chunks_are_those_of_layer_by_layer() -> None:
    """Where nothing is forgotten, sums over 200 tokens differ by rounding only."""
    layer = Layer(Recurrence(4, 2, 4, 64, 64), False, True, [200])
    layer.a[:] = -1e-4
    x, out, states, _ = layer.run(2)
    part, g = part_of(layer.sizes, False), layer.a * np.logaddexp(np.float32(0), layer.alpha + layer.dt)
    expected, after = np.empty_like(out), np.empty_like(states[0])
    recurrent.attend(part, x, g, 1 / (1 + np.exp(-layer.beta)), layer.states[0], after, expected, 1)
    assert_near(out, expected)
    assert_near(states[0], after)


# --------------------------------------------------------------------------------------------------------------- models


def models(path: Path, **options: Any) -> tuple[Model, Model]:
    """Exact and fast."""
    fast = load(path, numerics="fast", cache_type="f32", **options)
    assert fast.fallback_reason is None
    return load(path, cache_type="f32"), fast


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("odd") / "m.gguf", "qwen35", **ODD)


@pytest.mark.parametrize("change", [{}, ODD], ids=["example", "odd"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_prompt_and_its_continuation(arch: str, change: dict[str, Any], tmp_path: Path) -> None:
    exact, fast = models(written(tmp_path / "m.gguf", arch, **change))
    whole = exact.logits(TOKENS)
    assert spread(fast.logits(TOKENS), whole) < 2e-5
    for bounds in ((1, 2, 4, 5), (63, 127, 128), (65, 200)):
        cache = fast.new_cache(len(TOKENS))
        rows = [fast.forward(part, cache) for part in np.split(TOKENS, bounds)]
        assert spread(np.concatenate(rows), whole) < 2e-5
    cache = fast.new_cache(len(TOKENS))
    steps = [fast.forward([token], cache) for token in TOKENS[:70]]
    assert spread(np.concatenate([*steps, fast.forward(TOKENS[70:], cache)]), whole) < 2e-5


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int, odd: Path) -> None:
    exact, fast = models(odd, threads=threads)
    expected, cache = exact.logits(TOKENS), fast.new_cache(len(TOKENS))
    assert spread(fast.forward(TOKENS[:90], cache), expected[:90]) < 2e-5
    assert spread(np.concatenate([fast.forward([t], cache) for t in TOKENS[90:100]]), expected[90:100]) < 2e-5


def test_states_are_saved_marked_and_restored(odd: Path) -> None:
    exact, fast = models(odd)
    whole, cache = exact.logits(TOKENS), fast.new_cache(len(TOKENS))
    fast.forward(TOKENS[:80], cache)
    saved = cache.save()
    cache.mark()
    first = fast.forward(TOKENS[80:90], cache)
    for _ in range(2):
        cache.truncate(80)
        np.testing.assert_array_equal(fast.forward(TOKENS[80:90], cache), first)
    with pytest.raises(DataError, match="cannot truncate a cache of 90 tokens to 85"):
        cache.truncate(85)
    other = fast.new_cache(300)
    fast.forward(TOKENS[:7], other)
    for into in (other, cache):
        into.restore(saved)
        np.testing.assert_array_equal(fast.forward(TOKENS[80:90], into), first)
    steps = np.concatenate([fast.forward([token], cache) for token in TOKENS[90:95]])
    assert spread(steps, whole[90:95]) < 2e-5
    cache.truncate(0)
    assert spread(fast.forward(TOKENS[:20], cache), whole[:20]) < 2e-5


def test_a_state_of_another_length_is_refused(odd: Path) -> None:
    _, fast = models(odd)
    cache = fast.new_cache(60)
    fast.forward(TOKENS[:20], cache)
    cache.length = 12
    with pytest.raises(DataError, match="state of recurrent layer 0 is that after 20 tokens, the cache holds 12"):
        fast.forward(TOKENS[:1], cache)


@pytest.mark.parametrize("tokens", [1, 5])
def test_what_is_not_finite_is_named_and_the_cache_is_refused_until_cleared(
    tokens: int, odd: Path, tmp_path: Path
) -> None:
    poisoned = gguf.open(odd).tensors["blk.3.ssm_out.weight"].dequantize().copy()
    poisoned[5, 6] = np.nan
    good = load(odd, numerics="fast", cache_type="f32")
    bad = load(changed(odd, tmp_path / "bad.gguf", {}, {"blk.3.ssm_out.weight": poisoned}), numerics="fast",
               cache_type="f32")  # fmt: skip
    cache = good.new_cache(50)
    good.forward(TOKENS[:10], cache)
    with pytest.raises(DataError, match=r"blk\.3\.ssm_out\.weight"):
        bad.forward(TOKENS[10 : 10 + tokens], cache)
    assert cache.length == 10
    with pytest.raises(DataError, match=f"after {10 + tokens} tokens, the cache holds 10"):
        good.forward(TOKENS[:1], cache)
    cache.clear()
    assert spread(good.forward(TOKENS[:20], cache), good.logits(TOKENS[:20])) < 1e-6


def test_a_state_that_is_not_finite(odd: Path) -> None:
    _, fast = models(odd)
    cache = fast.new_cache(50)
    fast.forward(TOKENS[:10], cache)
    cache.states[0].heads[:] = np.inf
    with pytest.raises(DataError, match=r"a state of a recurrent layer is beyond float32; clear\(\) the cache"):
        fast.forward(TOKENS[:3], cache)


@pytest.mark.parametrize("arch", ["qwen3next", "qwen35"])
def test_quantized_weights_are_those_of_layer_by_layer(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of small outputs enlarge what 8-bit activations change, so layer by layer rounds them too."""
    exact, fast = models(rewrite(written(tmp_path / "m.gguf", arch), tmp_path / "q.gguf", "q8_0"))
    assert spread(fast.logits(TOKENS[:80]), exact.logits(TOKENS[:80])) < HALVES
    cache, product = fast.new_cache(80), FloatLinear.__call__
    steps = np.concatenate([fast.forward([token], cache) for token in TOKENS[:80]])

    def with_rounded(self: FloatLinear, x: np.ndarray) -> np.ndarray:
        return product(self, x if self.tensor.type.name == "f32" else rounded(np.ascontiguousarray(x), 4, 127))

    monkeypatch.setattr(FloatLinear, "__call__", with_rounded)
    assert spread(steps, exact.logits(TOKENS[:80])) < ROUNDED


def test_interleaved_weights(tmp_path: Path) -> None:
    exact, fast = models(rewrite(written(tmp_path / "m.gguf", "qwen35moe"), tmp_path / "q.gguf", "q8_0_r8"))
    assert fast.weights["blk.0.attn_qkv.weight"].type.name == "q8_0_r8"
    whole, cache = exact.logits(TOKENS[:80]), fast.new_cache(80)
    assert spread(np.concatenate([fast.forward([token], cache) for token in TOKENS[:80]]), whole) < HALVES


def test_older_files_with_one_projection(tmp_path: Path) -> None:
    """ssm_in has of each key head query, key, the values and the gates of its value heads."""
    new = gguf.open(written(tmp_path / "new.gguf", "qwen3next"))
    sizes = Recurrence(4, 2, 4, 64, 64)
    tensors = {name: t.dequantize() for name, t in new.tensors.items()}
    for i in range(3):
        q, k, v = np.split(tensors.pop(f"blk.{i}.attn_qkv.weight"), [sizes.keys, 2 * sizes.keys])
        gate = tensors.pop(f"blk.{i}.attn_gate.weight")
        each = [x.reshape(sizes.key_heads, -1, x.shape[1]) for x in (q, k, v, gate)]
        tensors[f"blk.{i}.ssm_in.weight"] = np.concatenate(each, axis=1).reshape(-1, q.shape[1])
    f32 = next(iter(new.tensors.values())).type
    specs = [gguf.TensorSpec(name, x.shape, f32) for name, x in tensors.items()]
    with gguf.Writer(tmp_path / "old.gguf", new.metadata, specs) as writer:
        for name, x in tensors.items():
            writer.write(name, np.ascontiguousarray(x).reshape(-1, x.shape[-1]).view(np.uint8))
    exact, fast = models(tmp_path / "old.gguf")
    whole, cache = exact.logits(TOKENS), fast.new_cache(len(TOKENS))
    rows = [fast.forward(part, cache) for part in np.split(TOKENS, (1, 2, 80, 81))]
    assert spread(np.concatenate(rows), whole) < 2e-5


QWEN3_NEXT_80B = archs.get("qwen3next").EXAMPLE | {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144, "rope_theta": 10000000.0,
}  # fmt: skip


@pytest.mark.parametrize("config", [QWEN3_NEXT_80B, archs.language_model(QWEN35_27B)], ids=["80B-A3B", "27B"])
def test_full_size_models_have_operations_for_everything(config: dict[str, Any]) -> None:
    specs, metadata = from_config(config)
    weights = {t.name: t for t in recipe.plan(specs, "Q4_K", metadata=metadata).tensors}
    arch = archs.get(metadata["general.architecture"])
    hparams = arch.hparams(metadata, weights.keys())
    assert unsupported.unsupported_feature(weights, arch.blocks(hparams), arch.head(hparams)) is None
    assert workspace.work_bytes(weights, metadata, 4096, 2) < 1 << 30
