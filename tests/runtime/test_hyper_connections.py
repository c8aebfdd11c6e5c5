"""Hyper-connections as operations: against the plain forms, and in both plans against the exact model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import stream_record_bytes
from quantkit.runtime.blocks import hyper_connections as plain
from quantkit.runtime.kernels.cpu import hyper_connections, prefill_ops
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.loading import load
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too
from tests.runtime.test_experts import EMBD, TOKENS, check
from tests.runtime.test_experts import moe as moe  # a fixture
from tests.runtime.test_step import changed, spread


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


class _Run:
    """A runner whose products give logits."""

    def __init__(self, logits: np.ndarray, vectors: dict[str, np.ndarray]):
        self.logits, self.vectors = logits, vectors

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        return x

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        return self.logits.copy()

    def vector(self, name: str) -> np.ndarray:
        return self.vectors[name]


def _add(
    ops: OpList, name: str, tokens: int, streams: hyper_connections.Streams, mixing: hyper_connections.Mixing
) -> None:
    """Append an operation for one token, or for a batch."""
    streams_at, mixing_at = ops.record(streams).address, ops.record(mixing).address
    if tokens == 1:
        parameters: Any = hyper_connections.TokenParameters(streams_at, mixing_at, 32)
    else:
        state = ops.keep(np.array(prefill_ops.BatchState(tokens, 0, 1), np.int64)).ctypes.data
        parameters = hyper_connections.BatchParameters(state, streams_at, mixing_at)
    operation = getattr(hyper_connections, f"{name}_{'token' if tokens == 1 else 'batch'}")
    ops.add(operation, parameters, barrier=True)


@pytest.mark.parametrize(("n", "width", "iterations"), [(1, 32, 1), (2, 96, 3), (3, 200, 20), (4, 64, 20)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_the_operations_are_the_plain_forms(n: int, width: int, iterations: int, tokens: int) -> None:
    rng = np.random.default_rng(n)
    count = (2 + n) * n
    logits, x = (
        3 * rng.standard_normal((tokens, count), np.float32),
        rng.standard_normal((tokens, n, width), np.float32),
    )
    made, vectors = (
        rng.standard_normal((tokens, width), np.float32),
        {"scale": rng.standard_normal(3, np.float32), "base": rng.standard_normal(count, np.float32)},
    )
    part = blocks.HyperConnection(blocks.Linear(""), "base", "scale", blocks.Norm("", 0), n, iterations, 1e-3)
    run: Any = _Run(logits, vectors)
    pre, post, mixing = plain.weights(run, part, x)
    read = np.einsum("ti,tiw->tw", pre, x)
    written = post[:, :, None] * made[:, None] + np.einsum("tjk,tjw->tkw", mixing, x)
    head = blocks.StreamHead(blocks.Linear(""), "base", "scale", blocks.Norm("", 0), n, 1e-3)
    of_head: Any = _Run(
        logits.reshape(-1)[: tokens * n].reshape(tokens, n),
        {"scale": vectors["scale"][:1], "base": vectors["base"][:n]},
    )
    collapsed = plain.collapse(of_head, head, x.reshape(tokens, -1))
    for threads in (1, 3):
        ops = OpList(threads)
        streams, out = ops.keep(x.copy()), ops.keep(np.full((tokens, width), np.nan, np.float32))
        entering, given = ops.keep(out.copy()), ops.keep(logits.copy())
        nbytes = stream_record_bytes(n)
        weights, stride = ops.buffer("weights", max(tokens, threads) * nbytes), nbytes
        record = hyper_connections.Streams(
            streams.ctypes.data, n, width, out.ctypes.data, entering.ctypes.data, given.ctypes.data, weights, stride
        )
        numbers = {name: ops.keep(array.copy()).ctypes.data for name, array in vectors.items()}
        own = hyper_connections.Mixing(**numbers, eps=ops.constant(1e-3), iterations=iterations)
        last = own._replace(iterations=0)
        _add(ops, "read", tokens, record, last)
        ops.run()
        np.testing.assert_allclose(out, collapsed, rtol=1e-4, atol=1e-5)
        _add(ops, "read", tokens, record, own)
        ops.run()
        np.testing.assert_allclose(entering, read, rtol=1e-4, atol=1e-5)
        assert not out.any()
        out[:] = made
        writing = OpList(threads)  # the buffers are those of the first list
        _add(writing, "write", tokens, record, own)
        writing.run()
        np.testing.assert_allclose(streams, written, rtol=1e-4, atol=1e-5)
        _add(writing, "spread", tokens, record, own)
        writing.run()
        assert (streams == made[:, None]).all()


@pytest.mark.parametrize("n", [2, 3])
def test_plans_of_models_with_streams(n: int, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """qwen3moe with hyper-connections, whose numbers differ between parts."""
    arch, rng = archs.get("qwen3moe"), np.random.default_rng(n)
    count = (2 + n) * n
    extra: dict[str, np.ndarray] = {}
    for stem, rows, scales in [*((f"blk.{i}.hc_{p}", count, 3) for i in range(2) for p in (0, 1)), ("hc", n, 1)]:
        extra |= {
            f"{stem}_fn.weight": rng.standard_normal((rows, n * EMBD)).astype(np.float32) / 16,
            f"{stem}_base.weight": rng.standard_normal(rows).astype(np.float32),
            f"{stem}_scale.weight": rng.standard_normal(scales).astype(np.float32),
        }
    path = changed(moe, tmp_path / "m.gguf", {}, extra)
    block_of, head_of = arch.block, arch.head

    def fields(stem: str) -> tuple[blocks.Linear, str, str, blocks.Norm, int]:
        return (
            blocks.Linear(f"{stem}_fn.weight"), f"{stem}_base.weight", f"{stem}_scale.weight", blocks.Norm("", 1e-6), n
        )  # fmt: skip

    def block(hp: blocks.HParams, i: int) -> blocks.Block:
        hyper = tuple(blocks.HyperConnection(*fields(f"blk.{i}.hc_{p}"), 5, 1e-4) for p in (0, 1))
        return replace(block_of(hp, i), hyper=hyper)

    monkeypatch.setattr(arch, "block", block)
    monkeypatch.setattr(arch, "head", lambda hp: replace(head_of(hp), streams=blocks.StreamHead(*fields("hc"), 1e-4)))
    check(path, 1e-5)
    check(path, 1e-5, threads=3)
    fast, exact = load(path, numerics="fast", cache_type="f32"), load(path, cache_type="f32")
    caches = [fast.new_cache(64) for _ in range(2)]
    ends = fast.forward_batch([(TOKENS[:5], caches[0]), (TOKENS[30:], caches[1])])
    for found, ids in zip(ends, (TOKENS[:5], TOKENS[30:])):
        assert spread(found[None], exact.logits(ids)[-1:]) < 1e-5
