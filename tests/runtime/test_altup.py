"""AltUp, LAuReL and sparse gates as operations: against the plain forms, and in both plans against the exact model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import altup_record_bytes
from quantkit.runtime.blocks import altup as plain
from quantkit.runtime.blocks import float_ops
from quantkit.runtime.kernels.cpu import altup, prefill_ops
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too
from tests.runtime.conftest import rewrite
from tests.runtime.test_experts import TOKENS
from tests.runtime.test_features import by_steps, check, pair
from tests.runtime.test_step import spread
from tests.test_architectures import OTHERS

EPS, LEAST = 1e-3, 0.5
RNG = np.random.default_rng(5)


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


class _Run:
    """A runner whose products and norms are given by name."""

    def __init__(self, products: dict[str, np.ndarray], vectors: dict[str, np.ndarray]):
        self.products, self.vectors = products, vectors

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        return self.products[f"{linear.weight}{linear.number or 0}"]

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        return float_ops.rms_norm(x, self.vectors[norm.weight], norm.eps, 1)

    def vector(self, name: str) -> np.ndarray:
        return self.vectors[name].reshape(-1)


class _Operations:
    """The operations on the streams of one token, or of a batch, and their arrays."""

    def __init__(self, n: int, width: int, tokens: int, threads: int):
        self._ops, self._tokens = OpList(threads), tokens
        shape = (tokens, width)
        self.streams, self.products = (self._ops.keep(np.zeros((n, *shape), np.float32)) for _ in range(2))
        self.x, self.entering, self.y, self.product = (self._ops.keep(np.zeros(shape, np.float32)) for _ in range(4))
        self.logits = self._ops.keep(np.zeros((tokens, n), np.float32))
        weights = self._ops.private_buffer("weights", altup_record_bytes(n))
        addresses = (array.ctypes.data for array in (self.x, self.entering, self.logits, self.products))
        record = altup.Streams(
            self.streams.ctypes.data, self.streams[0].nbytes, n, width, *addresses, self._ops.constant(LEAST), *weights
        )
        self._record = self._ops.record(record).address

    def run(self, name: str, numbers: Any = None) -> None:
        """Run an operation once, in a list of its own over the same arrays."""
        ops = OpList(self._ops.threads)
        at = ops.record(numbers).address if numbers is not None else 0
        if self._tokens == 1:
            parameters: Any = altup.TokenParameters(self._record, at, 32)
        else:
            state = ops.keep(np.array(prefill_ops.BatchState(self._tokens, 0, 1), np.int64)).ctypes.data
            parameters = altup.BatchParameters(state, self._record, at)
        ops.add(getattr(altup, f"{name}_{'token' if self._tokens == 1 else 'batch'}"), parameters, barrier=True)
        ops.run()

    def coefficients(self, run: _Run) -> altup.Coefficients:
        return altup.Coefficients(*(run.vectors[name].ctypes.data for name in ("predict", "correct", "scale")))

    def laurel(self, weight: np.ndarray) -> altup.LaurelSum:
        y, product = self.y.ctypes.data, self.product.ctypes.data
        return altup.LaurelSum(y, 0, product, weight.ctypes.data, self._ops.constant(EPS))


def _random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("n", "width"), [(2, 96), (3, 200), (4, 64)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_the_operations_are_the_plain_forms(n: int, width: int, tokens: int, threads: int) -> None:
    """Also where a product is smaller than the least size, and a logit so large that tanh is 1."""
    logits = _random(tokens, n)
    logits[0, 0] = 1e3
    streams, z = _random(tokens, n, width), _random(tokens, width)
    vectors = {"predict": _random(n * n, n), "correct": _random(n, n), "scale": _random(width), "norm": _random(width)}
    part = blocks.AltUp(blocks.Linear("router"), blocks.Norm("norm", EPS), "predict", "correct", "scale", n)
    run: Any = _Run({"router0": logits}, vectors)
    predicted = plain.predict(run, part, streams)
    corrected = plain.correct(run, part, predicted, z)
    ops = _Operations(n, width, tokens, threads)
    ops.streams[:], ops.logits[:] = streams.transpose(1, 0, 2), logits
    ops.run("predict", ops.coefficients(run))
    np.testing.assert_allclose(ops.streams, predicted.transpose(1, 0, 2), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ops.x, ops.streams[0])
    ops.x[:] = z
    ops.run("correct", ops.coefficients(run))
    np.testing.assert_allclose(ops.streams, corrected.transpose(1, 0, 2), rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(ops.entering, ops.streams[0] * vectors["scale"])
    assert not ops.x.any()
    ops.x[:] = z
    before = ops.streams.copy()
    ops.run("add")
    np.testing.assert_array_equal(ops.streams[0], before[0])
    np.testing.assert_array_equal(ops.streams[1:], before[1:] + z)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 37])
def test_streams_before_and_after_all_blocks(tokens: int, threads: int) -> None:
    n, width = 4, 96
    products = {f"{name}{i}": _random(tokens, width) for name in ("project", "merge") for i in range(n - 1)}
    products["merge1"] *= 1e-3
    of_head = (tuple(blocks.Linear(name, number=i) for i in range(n - 1)) for name in ("project", "merge"))
    head, run = blocks.AltUpHead(*of_head, n, LEAST), _Run(products, {})
    x, ops = _random(tokens, width), _Operations(n, width, tokens, threads)
    streams = plain.spread(run, head, x)
    ops.x[:] = x
    ops.products[: n - 1] = np.stack([products[f"project{i}"] for i in range(n - 1)])
    ops.run("spread")
    np.testing.assert_allclose(ops.streams, streams.reshape(tokens, n, width).transpose(1, 0, 2), rtol=1e-5, atol=1e-6)
    ops.products[: n - 1] = np.stack([products[f"merge{i}"] for i in range(n - 1)])
    ops.run("merge")
    np.testing.assert_allclose(ops.x, plain.merge(run, head, streams), rtol=1e-4, atol=1e-5)
    size = np.sqrt(np.square(streams.reshape(tokens, n, width)).mean(2))
    np.testing.assert_allclose(size, np.repeat(size[:, :1], n, 1), rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 37])
def test_laurel(tokens: int, threads: int) -> None:
    width, weight = 96, _random(96)
    ops = _Operations(2, width, tokens, threads)
    x, ops.y[:], ops.product[:] = _random(tokens, width), _random(tokens, width), _random(tokens, width)
    ops.x[:] = x
    normed = ops.product / np.sqrt(np.square(ops.product).mean(1, keepdims=True) + EPS) * weight
    ops.run("laurel", ops.laurel(weight))
    np.testing.assert_allclose(ops.x, (x + ops.y + normed) * 2**-0.5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("n", "cutoff"), [(96, 1.64), (200, 0.0), (64, -1.0), (64, 9.0)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_gates_above_the_cutoff(n: int, cutoff: float, tokens: int, threads: int) -> None:
    """Also of gates whose mean is large beside their deviation; NaN spreads."""
    for offset in (0.0, 30.0):
        gate = _random(tokens, n) + np.float32(offset)
        expected = plain.largest_gates(gate, cutoff)
        assert (expected > 0).any() == (cutoff < 9)
        np.testing.assert_allclose(_largest(gate, cutoff, threads), expected, rtol=1e-4, atol=1e-5 + 1e-6 * offset)
    gate[0, 3] = np.nan
    for found in (_largest(gate, cutoff, threads), plain.largest_gates(gate, cutoff)):
        assert np.isnan(found[0]).all()
        assert np.isfinite(found[1:]).all()


def _largest(gate: np.ndarray, cutoff: float, threads: int) -> np.ndarray:
    ops, (tokens, n) = OpList(threads), gate.shape
    out, given = ops.keep(np.zeros_like(gate)), ops.keep(gate.copy())
    if tokens == 1:
        one = altup.TokenGatesParameters(given.ctypes.data, n, ops.constant(cutoff), 32, out.ctypes.data)
        ops.add(altup.largest_gates_token, one, barrier=True)
    else:
        out = given
        state = ops.keep(np.array(prefill_ops.BatchState(tokens, 0, 1), np.int64)).ctypes.data
        batch = altup.BatchGatesParameters(state, given.ctypes.data, n, ops.constant(cutoff))
        ops.add(altup.largest_gates_batch, batch, barrier=True)
    ops.run()
    return out


@pytest.mark.parametrize("threads", [1, 3])
def test_plans(threads: int, tmp_path: Path) -> None:
    """A model whose last layers read the keys of others, and sequences that go on together."""
    path = written(tmp_path / "m.gguf", "gemma3n", **OTHERS["gemma3n"])
    check(path, threads=threads)
    _, fast = pair(path, threads=threads)
    alone, caches, done = by_steps(fast, TOKENS[:12]), [fast.new_cache(64) for _ in range(3)], [0, 0, 0]
    for counts in ((5, 1, 3), (1, 4, 1), (6, 1, 1)):
        found = fast.forward_batch([(TOKENS[d : d + n], c) for d, n, c in zip(done, counts, caches)])
        done = [d + n for d, n in zip(done, counts)]
        assert spread(found, alone[[d - 1 for d in done]]) < 1e-5


@pytest.mark.parametrize(("kind", "limit"), [("q8_0", 0.1), ("bf16", 1e-3)])
def test_quantized_streams(kind: str, limit: float, tmp_path: Path) -> None:
    """The matrices of the head are stacks; those of LAuReL and of the router are small."""
    names = ["altup_proj", "altup_unembd_proj", "blk.0.laurel_l", "blk.1.laurel_r", "blk.2.altup_router"]
    path = written(tmp_path / "m.gguf", "gemma3n")
    check(rewrite(path, tmp_path / "q.gguf", "f32", **{f"{name}.weight": kind for name in names}), limit)


def test_layer_by_layer_with_fast_numerics(tmp_path: Path) -> None:
    """Observed models do not run as plans; their products are those of fast numerics."""
    path = rewrite(written(tmp_path / "m.gguf", "gemma3n"), tmp_path / "q.gguf", "q8_0")
    exact, fast = load(path, cache_type="f32"), load(path, numerics="fast", cache_type="f32")
    seen: dict[str, list[tuple[int, ...]]] = {}
    fast.observer = lambda name, x, *which: seen.setdefault(name, []).append((*which, *x.shape))
    assert spread(fast.logits(TOKENS), exact.logits(TOKENS)) < 0.1
    for name in ("altup_proj.weight", "altup_unembd_proj.weight"):
        assert seen[name] == [(i, 3, len(TOKENS), 64) for i in range(3)]
    assert seen["blk.1.altup_router.weight"] == [(len(TOKENS), 64)] * 2
    assert seen["blk.1.laurel_r.weight"] == [(len(TOKENS), 64)]
