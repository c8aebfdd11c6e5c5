"""Mamba-2 mixers: operations against the formulas, compiled plans against layer by layer, states of sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common.blocks import Recurrence
from quantkit.errors import DataError, FormatError, QuantkitError, UnsupportedError
from quantkit.formats import gguf
from quantkit.runtime.kernels import reference
from quantkit.runtime.kernels.cpu import delta_net, gated_activations, mamba2, prefill_ops
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs.files import changed as with_keys
from tests.archs.files import written
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too
from tests.runtime.conftest import rewrite
from tests.runtime.test_step import HALVES, changed, spread

TOKENS = np.random.default_rng(3).integers(2, 320, 210)
ARCHS = ("nemotron_h", "nemotron_h_moe")
ODD = {"mamba_num_heads": 6, "mamba_head_dim": 48, "ssm_state_size": 24, "n_groups": 3, "conv_kernel": 3}
SIZES = [  # kernel, groups, heads, elements of a state's column, of a row; values of all heads are whole 32
    (4, 2, 4, 64, 64), (3, 2, 6, 24, 48), (1, 1, 1, 16, 32), (2, 2, 32, 20, 33), (6, 1, 4, 5, 8), (4, 8, 8, 128, 80),
]  # fmt: skip


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


# ----------------------------------------------------------------------------------------------------------- operations


class Layer:
    """One mixer's operations over random states of several sequences, and the formulas in float64."""

    def __init__(self, sizes: Recurrence, counts: list[int]):
        rng = np.random.default_rng(sum(counts))
        self.sizes, self.counts, tokens = sizes, counts, sum(counts)
        shape = (len(counts), sizes.value_heads, sizes.head_dim_k, sizes.head_dim_v)
        self.states = rng.standard_normal(shape, np.float32)
        self.inputs = rng.standard_normal((len(counts), sizes.kernel - 1, sizes.channels), np.float32)
        self.x = rng.standard_normal((tokens, sizes.channels), np.float32)
        self.gates = rng.standard_normal((tokens, sizes.inner), np.float32)
        self.rates = rng.standard_normal((tokens, sizes.value_heads), np.float32)
        self.a = -(rng.exponential(1, sizes.value_heads).astype(np.float32) ** 4)  # from none to all is forgotten
        self.dt, self.skip = rng.standard_normal((2, sizes.value_heads), np.float32)
        self.taps = rng.standard_normal((sizes.kernel, sizes.channels), np.float32)
        self.bias = rng.standard_normal(sizes.channels, np.float32)
        self.weight = rng.standard_normal(sizes.inner, np.float32)

    def spans(self) -> list[slice]:
        ends = np.cumsum(self.counts)
        return [slice(end - count, end) for end, count in zip(ends, self.counts)]

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What enters the state space; the normed outputs; states after the tokens."""
        sizes, states = self.sizes, self.states.astype(np.float64)
        mixed, out = np.empty_like(self.x), np.empty((len(self.x), sizes.inner))
        dt = np.logaddexp(0, self.rates.astype(np.float64) + self.dt)
        for rows, inputs, state in zip(self.spans(), self.inputs, states):
            whole = np.concatenate([inputs, self.x[rows]]).astype(np.float64)
            for t in range(rows.stop - rows.start):
                y = self.bias + (whole[t : t + sizes.kernel] * self.taps).sum(0)
                mixed[rows.start + t] = y / (1 + np.exp(-y))
            for t in range(rows.start, rows.stop):
                out[t] = self._step(mixed[t].astype(np.float64), dt[t], state)
        hidden = out * self.gates / (1 + np.exp(-self.gates.astype(np.float64)))
        groups = hidden.reshape(len(out), sizes.key_heads, -1)
        groups /= np.sqrt((groups**2).mean(2, keepdims=True) + 1e-5)
        return mixed, groups.reshape(out.shape) * self.weight, states

    def _step(self, x: np.ndarray, dt: np.ndarray, state: np.ndarray) -> np.ndarray:
        sizes = self.sizes
        u, b, c = np.split(x, [sizes.inner, sizes.inner + sizes.keys])
        u = u.reshape(sizes.value_heads, -1)
        each = sizes.value_heads // sizes.key_heads
        b, c = (np.repeat(part.reshape(sizes.key_heads, -1), each, axis=0) for part in (b, c))
        state *= np.exp(self.a * dt)[:, None, None]
        state += b[:, :, None] * (dt[:, None] * u)[:, None, :]
        return (np.einsum("hkv,hk->hv", state, c) + self.skip[:, None] * u).reshape(-1)

    def run(self, threads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """As `expected`, and the inputs that are kept; by the operation for one token where there is one."""
        sizes, ops = self.sizes, OpList(threads)
        x, inputs, states = (ops.keep(a.copy()) for a in (self.x, self.inputs, self.states))
        out = ops.keep(np.full((len(x), sizes.inner), np.nan, np.float32))
        records = [prefill_ops.SpanState(rows.start, rows.stop - rows.start, 0) for rows in self.spans()]
        header = prefill_ops.BatchState(len(x), 0, len(records))
        state = ops.keep(np.array([n for record in (header, *records) for n in record], np.int64)).ctypes.data
        places = ops.keep(np.array([(i.ctypes.data, s.ctypes.data) for i, s in zip(inputs, states)], np.int64))
        view = ops.record(delta_net.StatesView(places.ctypes.data)).address
        given = {
            name: ops.keep(getattr(self, name)).ctypes.data
            for name in ("taps", "bias", "rates", "a", "dt", "skip", "gates", "weight")
        }
        counter = ops.buffer("next", 8)
        convolve = delta_net.ConvolveParameters(
            state=state, qkv=x.ctypes.data, taps=given["taps"], layer_states=view, channels=sizes.channels,
            bias=given["bias"], keys=0, dim_k=1, query_scale=ops.constant(1.0), multiple=8, next_head=counter,
        )  # fmt: skip
        ops.add(delta_net.convolve(sizes.kernel), convolve, barrier=True)
        heads = delta_net.HeadFields(sizes.key_heads, sizes.value_heads, sizes.head_dim_k, sizes.head_dim_v, 0)
        fields = mamba2.ScanFields(
            x=x.ctypes.data, out=out.ctypes.data, **{name: given[name] for name in ("rates", "a", "dt", "skip")}
        )
        common: dict[str, Any] = {
            "heads": ops.record(heads).address, "fields": ops.record(fields).address, "layer_states": view,
        }  # fmt: skip
        if len(x) == 1:
            ops.add(mamba2.update, mamba2.UpdateParameters(**common), barrier=True)
        else:
            ops.add(mamba2.scan, mamba2.ScanParameters(state=state, next_head=counter, **common), barrier=True)
        norm = mamba2.GatedNormFields(
            activation=gated_activations.activation("swiglu", None).address, gates=given["gates"], x=out.ctypes.data,
            weight=given["weight"], n=sizes.inner, group=sizes.inner // sizes.key_heads, eps=ops.constant(1e-5),
        )  # fmt: skip
        ops.add(mamba2.norm_batch, mamba2.BatchNormParameters(state=state, fields=ops.record(norm).address))
        ops.add_barrier()
        ops.run()
        return x, out, states, inputs


def assert_near(result: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(result - expected).max() < 2e-5 * (1 + np.abs(expected).max())


@pytest.mark.parametrize("counts", [[1], [2], [5], [65], [3, 1, 70, 6], [1, 1]])
@pytest.mark.parametrize("dims", SIZES)
def test_operations_follow_the_formula(dims: tuple[int, ...], counts: list[int]) -> None:
    layer = Layer(Recurrence(*dims), counts)
    results = [layer.run(threads) for threads in (1, 2, 3)]
    for other in results[1:]:  # any number of threads gives the same bits
        for a, b in zip(results[0], other):
            np.testing.assert_array_equal(a, b)
    *computed, inputs = results[0]
    for result, expected in zip(computed, layer.expected()):
        assert_near(result, expected)
    for rows, before, after in zip(layer.spans(), layer.inputs, inputs):
        np.testing.assert_array_equal(after, np.concatenate([before, layer.x[rows]])[rows.stop - rows.start :])


def test_the_plain_kernel_is_the_operation() -> None:
    layer = Layer(Recurrence(4, 2, 4, 40, 24), [90])
    sizes, (x, _, states, _) = layer.sizes, layer.run(1)
    dt = np.logaddexp(np.float32(0), layer.rates + layer.dt)
    for head in range(sizes.value_heads):
        after, out = np.empty_like(states[0, head]), np.empty((90, sizes.inner), np.float32)
        u, b = head * sizes.head_dim_v, sizes.inner + head // 2 * sizes.head_dim_k
        decay, step = np.exp(layer.a[head] * dt[:, head]), dt[:, head].copy()
        reference.state_space(
            x, u, b, b + sizes.keys, decay, step, layer.skip[head], layer.states[0, head], after, out, u
        )
        assert_near(states[0, head], after)


# --------------------------------------------------------------------------------------------------------------- models


def models(path: Path, **options: Any) -> tuple[Model, Model]:
    """Exact and fast."""
    fast = load(path, numerics="fast", cache_type="f32", **options)
    assert fast.fallback_reason is None
    return load(path, cache_type="f32"), fast


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("odd") / "m.gguf", "nemotron_h", **ODD)


@pytest.mark.parametrize("change", [{}, ODD], ids=["example", "odd"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_prompt_and_its_continuation(arch: str, change: dict[str, Any], tmp_path: Path) -> None:
    exact, fast = models(written(tmp_path / "m.gguf", arch, **change))
    whole = exact.logits(TOKENS)
    assert spread(fast.logits(TOKENS), whole) < 2e-5
    for model in (exact, fast):
        for bounds in ((1, 2, 4, 5), (63, 127, 128), (65, 200)):
            cache = model.new_cache(len(TOKENS))
            rows = [model.forward(part, cache) for part in np.split(TOKENS, bounds)]
            assert spread(np.concatenate(rows), whole) < 2e-5
    cache = fast.new_cache(len(TOKENS))
    steps = [fast.forward([token], cache) for token in TOKENS[:70]]
    assert spread(np.concatenate([*steps, fast.forward(TOKENS[70:], cache)]), whole) < 2e-5


@pytest.mark.parametrize("fused", [True, False])
def test_experts_without_a_gate(fused: bool, tmp_path: Path) -> None:
    """One operation or several; few tokens of an expert and many."""
    exact, fast = models(written(tmp_path / "m.gguf", "nemotron_h_moe"), fused_experts=fused)
    whole, cache = exact.logits(TOKENS), fast.new_cache(len(TOKENS))
    rows = [fast.forward(part, cache) for part in np.split(TOKENS, (1, 2, 7, 100))]
    assert spread(np.concatenate(rows), whole) < 2e-5


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("latent", "width"), [(64, 96), (160, 64)])
def test_experts_of_latents(latent: int, width: int, fused: bool, tmp_path: Path) -> None:
    """Fewer elements than a hidden state has, or more; the experts' inputs are observed as latents."""
    path = written(tmp_path / "m.gguf", "nemotron_h_moe", moe_latent_size=latent, hidden_size=width)
    exact, fast = models(path, fused_experts=fused)
    seen: dict[str, int] = {}
    exact.observer = lambda name, x, *_: seen.update({name: x.shape[1]})
    whole, cache = exact.logits(TOKENS), fast.new_cache(len(TOKENS))
    rows = [fast.forward(part, cache) for part in np.split(TOKENS, (1, 2, 7, 100))]
    assert spread(np.concatenate(rows), whole) < 2e-5
    columns = {"latent_down": width, "up_exps": latent, "down_exps": 32, "latent_up": latent, "up_shexp": width}
    assert {name: seen[f"blk.1.ffn_{name}.weight"] for name in columns} == columns


@pytest.mark.parametrize("kind", ["q8_0", "q8_0_r8"])
def test_quantized_experts_of_latents(kind: str, tmp_path: Path) -> None:
    path = rewrite(written(tmp_path / "m.gguf", "nemotron_h_moe", moe_latent_size=160), tmp_path / "q.gguf", kind)
    exact, fast = models(path)
    assert fast.weights["blk.1.ffn_latent_up.weight"].type.name == kind
    assert spread(fast.logits(TOKENS[:80]), exact.logits(TOKENS[:80])) < HALVES


@pytest.mark.parametrize(
    ("size", "message"),
    [(None, r"ffn_up_exps.* \(8, 32, 32\)"), (64, r"ffn_.* \(.*32.*64"), (0, "moe_latent_size = 0")],
)
def test_latent_sizes_that_contradict_the_tensors(size: int | None, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "nemotron_h_moe", moe_latent_size=32)
    entry = None if size is None else (size, "u32")
    with pytest.raises(QuantkitError, match=message):
        load(with_keys(path, tmp_path / "bad.gguf", {"nemotron_h_moe.moe_latent_size": entry}))


def test_states_are_saved_marked_and_restored_and_never_cut(odd: Path) -> None:
    for model in models(odd):
        cache = model.new_cache(len(TOKENS))
        assert set(cache.states) == {0, 2}
        assert [k.nbytes for k in cache.k if k.nbytes > 1] == [2 * len(TOKENS) * 32 * 4]
        model.forward(TOKENS[:80], cache)
        saved = cache.save()
        cache.mark()
        first = model.forward(TOKENS[80:90], cache)
        cache.truncate(80)
        np.testing.assert_array_equal(model.forward(TOKENS[80:90], cache), first)
        with pytest.raises(DataError, match="cannot truncate a cache of 90 tokens to 85"):
            cache.truncate(85)
        other = model.new_cache(300)
        model.forward(TOKENS[:7], other)
        for into in (other, cache):
            into.restore(saved)
            np.testing.assert_array_equal(model.forward(TOKENS[80:90], into), first)
        cache.length = 12
        with pytest.raises(DataError, match="state of recurrent layer 0 is that after 90 tokens, the cache holds 12"):
            model.forward(TOKENS[:1], cache)


def test_the_inputs_of_a_projection_are_observed_once(odd: Path) -> None:
    model, seen = load(odd), []
    model.observer = lambda name, x, *_: seen.append((name, x.shape))
    model.logits(TOKENS[:9])
    assert seen.count(("blk.0.ssm_in.weight", (9, 64))) == 1
    assert seen.count(("blk.0.ssm_out.weight", (9, 288))) == 1


@pytest.mark.parametrize("kind", ["q8_0", "q8_0_r8"])
def test_quantized_weights(kind: str, tmp_path: Path) -> None:
    """Rows of one packed matrix are gates, inputs and steps; also where groups of rows are interleaved."""
    exact, fast = models(rewrite(written(tmp_path / "m.gguf", "nemotron_h"), tmp_path / "q.gguf", kind))
    assert fast.weights["blk.0.ssm_in.weight"].type.name == kind
    assert spread(fast.logits(TOKENS[:80]), exact.logits(TOKENS[:80])) < HALVES


def test_what_is_not_finite_is_named(odd: Path, tmp_path: Path) -> None:
    poisoned = gguf.open(odd).tensors["blk.2.ssm_out.weight"].dequantize().copy()
    poisoned[5, 6] = np.nan
    path = changed(odd, tmp_path / "bad.gguf", {}, {"blk.2.ssm_out.weight": poisoned})
    for numerics in ("exact", "fast"):
        with pytest.raises(DataError, match=r"blk\.2\.ssm_out\.weight"):
            load(path, numerics=numerics).logits(TOKENS[:5])


# ------------------------------------------------------------------------------------------------- what is not accepted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers_block_type": None}, "has neither 'hybrid_override_pattern' nor 'layers_block_type'"),
        ({"layers_block_type": ["mamba", "ssm"]}, r"layers_block_type\[1\] = 'ssm'; known: linear_attention"),
        ({"layers_block_type": None, "hybrid_override_pattern": "MX*"}, "hybrid_override_pattern = 'MX[*]'"),
        ({"layers_block_type": None, "hybrid_override_pattern": 7}, "hybrid_override_pattern = 7; it has to be"),
        ({"hybrid_override_pattern": "M-M*M"}, "layers_block_type says M-M[*]-, but hybrid_override_pattern M-M[*]M"),
        ({"num_hidden_layers": 4}, "num_hidden_layers = 4, but layers_block_type names 5 layers"),
        ({"layers_block_type": ["mamba", "mlp"]}, "both Mamba-2 .M. and attention"),
        ({"mamba_num_heads": 0}, "mamba_num_heads = 0; it has to be"),
        ({"mamba_num_heads": 7}, "ssm.time_step_rank 7 and ssm.group_count 2 must be multiples"),
        ({"ssm_state_size": None}, "has no 'ssm_state_size'"),
        ({"intermediate_size": -1}, "intermediate_size = -1; it has to be"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported by quantkit; accepted: 'relu2'"),
        ({"use_bias": True}, "use_bias = True is not supported"),
        ({"use_conv_bias": False}, "use_conv_bias = False is not supported"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit = \[0.001, 0.1\]; files have no key"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str) -> None:
    config = archs.get("nemotron_h").EXAMPLE | change
    with pytest.raises(QuantkitError, match=message):
        archs.from_hf(archs.language_model(config)).tensors(archs.language_model(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_latent_size": 0}, "moe_latent_size = 0; it has to be"),
        ({"moe_latent_size": -64}, "moe_latent_size = -64; it has to be"),
        ({"moe_latent_size": 1 << 40}, "moe_latent_size = 1099511627776; it has to be"),
        ({"moe_latent_size": "64"}, "moe_latent_size = '64'; it has to be"),
        ({"moe_latent_size": [32, 64]}, r"moe_latent_size = \[32, 64\]; it has to be"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"moe_shared_expert_intermediate_size": 0}, "moe_shared_expert_intermediate_size = 0; it has to be 1 or more"),
        ({"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, "layers of both kinds, mlp .-. and moe .E."),
        ({"num_experts_per_tok": 9}, "expert_used_count is 9 of expert_count 8"),
    ],
)
def test_settings_of_experts_that_are_refused(change: dict[str, Any], message: str) -> None:
    config = archs.get("nemotron_h_moe").EXAMPLE | change
    with pytest.raises(QuantkitError, match=message):
        archs.from_hf(archs.language_model(config)).tensors(archs.language_model(config))


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("attention.head_count_kv", [0] * 5, FormatError, "no layer has KV heads"),
        ("attention.head_count_kv", [0, 2, 0, 2, 0], UnsupportedError, "layer 1 has 2 KV heads and a feed_forward"),
        ("attention.head_count_kv", [0, 0, 2], FormatError, "has 3 entries"),
        ("feed_forward_length", [0, 96, 0, 0, 64], UnsupportedError, "feed_forward_length has different numbers"),
    ],
)
def test_keys_that_are_refused(
    key: str, value: list[int], error: type[QuantkitError], message: str, odd: Path, tmp_path: Path
) -> None:
    path = with_keys(odd, tmp_path / "m.gguf", {f"nemotron_h.{key}": (value, "u32")})
    with pytest.raises(error, match=message):
        load(path)
