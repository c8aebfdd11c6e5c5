"""Caches of every type: their rows, and attention over them, compiled against plain and plain against the reference."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import pytest

from quantkit import types
from quantkit.archs.common.blocks import Attention, HParams, Linear, Norm, Rope
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import simd_intrinsic
from quantkit.errors import DataError, UnknownNameError, UnsupportedError
from quantkit.placement import kernel_sizes
from quantkit.runtime.blocks import float_attention, float_ops
from quantkit.runtime.blocks.float_attention import AttentionOptions
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kernels.cpu import decode_attention, kv_rows, prefill_attention, prefill_ops
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.kv.cache_type import CacheType
from tests.other_cpus import is_other_cpu, next_simpler, run_tests, test_that_this_is_the_path  # noqa: F401

ALL = kv_rounding.FLOATS + kv_rounding.QUANTIZED
# Kernels of attention take seconds to compile: elsewhere only a few types are tested, here one of each kind of reading.
TYPES = ("f16", "q5_1") if is_other_cpu() else ("bf16", "q8_KV", "q6_0", "q4_1", "iq4_nl")
OTHERS = () if is_other_cpu() else tuple(name for name in ALL if name not in TYPES)


def hard_rows(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """float32[count, dim]: rows of all sizes, rows of zeros, halves of rows of zeros, ties of the extremes."""
    x = rng.standard_normal((count, dim)) * 10.0 ** rng.integers(-6, 4, (count, 1))
    x[0], x[1, : dim // 2], x[2], x[3, ::2] = 0, 0, 1e-30, 0
    x[4, :2] = np.abs(x[4]).max() * np.array([-1, 1])
    x[5, :2] = np.abs(x[5]).max() * np.array([1, -1])
    return x.astype(np.float32)


# ------------------------------------------------------------------------------------------------------------ rows


@functools.cache
def keeper(ggml_type: int, dim: int, size: int) -> Callable:
    @kernel
    def run(x, out, count):
        for row in range(count):
            kv_rows.store_row(ggml_type, x + row * dim * 4, dim, out + row * size)

    return run


@functools.cache
def reader(ggml_type: int, dim: int, size: int) -> Callable:
    @simd_intrinsic("void")
    def read(ir, row, out):
        for c, v in kv_rows.row_floats(ir, ggml_type, row, 0, dim):
            for lane in range(16):
                if c + lane < dim:
                    ir.store(v.lane(lane), out + 4 * (c + lane))

    @kernel
    def run(data, out, count):
        for row in range(count):
            read(data + row * size, out + row * dim * 4)

    return run


@pytest.mark.parametrize(
    ("name", "dim"),
    [(name, dim) for name in ALL for dim in (64, 96)]
    + [(name, dim) for name in kv_rounding.FLOATS for dim in (16, 100, 23)],
)
def test_rows_are_kept_and_read_as_the_plain_ones_are(name: str, dim: int, rng: np.random.Generator) -> None:
    x, t = hard_rows(rng, 40, dim), types.get(name)
    expected = kv_rounding.encode(name, x)
    result = np.zeros_like(expected)
    keeper(t.ggml_type, dim, t.row_bytes(dim))(x.ctypes.data, result.ctypes.data, len(x))
    np.testing.assert_array_equal(result, expected)
    values = np.zeros_like(x)
    reader(t.ggml_type, dim, t.row_bytes(dim))(result.ctypes.data, values.ctypes.data, len(x))
    np.testing.assert_array_equal(values, t.dequantize(expected, dim))


@pytest.mark.parametrize("name", kv_rounding.QUANTIZED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(name: str, bad: float, rng: np.random.Generator) -> None:
    x, t = rng.standard_normal((3, 64)).astype(np.float32), types.get(name)
    x[1, 40] = bad
    stored = np.zeros((3, t.row_bytes(64)), np.uint8)
    keeper(t.ggml_type, 64, t.row_bytes(64))(x.ctypes.data, stored.ctypes.data, 3)
    for data in (stored, kv_rounding.encode(name, x)):
        with np.errstate(invalid="ignore"):
            values = t.dequantize(data, 64)
        assert np.isfinite(values[[0, 2]]).all()
        assert not np.isfinite(values[1, 32:]).any()


@pytest.mark.parametrize("name", kv_rounding.QUANTIZED)
def test_rounding_is_the_references(name: str, rng: np.random.Generator) -> None:
    """The same codes but for ties; the reference fits some scales a little better, by 1.3% of the error at most."""
    from tests.conformance import ggml

    x, t = rng.standard_normal((300, 128)).astype(np.float32), types.get(name)
    data = np.zeros((len(x), t.row_bytes(128)), np.uint8)
    quantize = getattr(ggml.library(), f"quantize_row_{t.name}")
    quantize.restype, quantize.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    for i in range(len(x)):
        quantize(x[i].ctypes.data, data[i].ctypes.data, 128)
    error, reference_error = (((t.dequantize(d, 128) - x) ** 2).sum() for d in (kv_rounding.encode(name, x), data))
    assert error == pytest.approx(reference_error, rel=0.02)


@functools.cache
def rotator(dim: int, block: int) -> Callable:
    @kernel
    def run(x, count):
        for row in range(count):
            kv_rows.rotate(x + row * dim * 4, dim, block)

    return run


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 192, 256, 576])
def test_rotation(dim: int, rng: np.random.Generator) -> None:
    block = kv_rounding.rotation_block(dim)
    assert block == {192: 64, 576: 64}.get(dim, dim)
    x = rng.standard_normal((5, dim)).astype(np.float32)
    y = x.copy()
    rotator(dim, block)(y.ctypes.data, 5)
    np.testing.assert_allclose(y, kv_rounding.rotate(x, block), atol=2e-6)
    np.testing.assert_allclose(kv_rounding.rotate(y, block), x, atol=2e-6)
    assert kv_rounding.rotation_block(80) is None


# ------------------------------------------------------------------------------------------------------- attention


def model_of(heads: int, kv_heads: int, dim_k: int, dim_v: int, window: int | None) -> tuple[HParams, Attention]:
    numbers = {"n_layer": 1, "n_ctx_train": 4096, "n_embd": 64, "n_ff": 64, "n_vocab": 10, "norm_eps": 1e-5}
    rope = Rope("neox", dim_k // 2, 1e4)
    hp = HParams(arch="x", rope=rope, n_head=heads, n_head_kv=kv_heads, head_dim_k=dim_k, head_dim_v=dim_v, **numbers)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim_k": dim_k, "head_dim_v": dim_v}
    names = dict.fromkeys(("q", "k", "v", "out"), Linear("w"))
    return hp, Attention(norm=Norm("n", 1e-5), **names, **shape, scale=dim_k**-0.5, rope=rope, window=window)


class Compiled:
    """The operations of attention, alone: rope, cache and attention of tokens of several sequences."""

    def __init__(self, part: Attention, kind: CacheType, threads: int, span: int, tokens: int):
        k, v = (types.get(name).ggml_type for name in (kind.k, kind.v))
        rotations = kind.rotations(part.head_dim_k, part.head_dim_v)
        self.heads = kv_rows.KernelHeads(
            part.heads // part.kv_heads, part.head_dim_k, part.head_dim_v, k, v, *rotations
        )
        self.part, self.threads, self.span, self.tokens = part, threads, span, tokens

    def _view(self, ops: OpList, caches: list[Cache]) -> int:
        records = [kv_rows.LayerCache(c.k[0].ctypes.data, c.v[0].ctypes.data, c.n_ctx) for c in caches]
        n_ctx = max(c.n_ctx for c in caches)
        cos, sin = (ops.keep(x).ctypes.data for x in float_ops.rope_tables(self.part.rope, n_ctx))
        places = ops.keep(np.array(records, np.int64)).ctypes.data
        return ops.record(kv_rows.LayerView(cos, sin, places, self.part.window or n_ctx)).address

    def _heads(self, ops: OpList, *arrays: np.ndarray) -> dict[str, int]:
        q, k, v = (ops.keep(x.copy()).ctypes.data for x in arrays)
        rope = {"rope_dim": self.part.rope.dim, "pair_step": 1, "pair_stride": self.part.rope.dim // 2}
        return {"q": q, "k": k, "v": v, "kv_heads": self.part.kv_heads, "scale": ops.constant(self.part.scale), **rope}

    def token(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, cache: Cache) -> np.ndarray:
        part, ops = self.part, OpList(self.threads)
        position = ops.keep(np.array([cache.length], np.int64)).ctypes.data
        nbytes = kernel_sizes.decode_attention_bytes(part.heads, part.head_dim_k, self.heads.group, self.span)
        scratch, stride = ops.private_buffer("scratch", nbytes)
        partial = ops.buffer("partial", kernel_sizes.partial_bytes(self.threads, part.heads, part.head_dim_v))
        attention = decode_attention.AttentionParameters(
            position=position, layer_view=self._view(ops, [cache]), span=self.span, partial=partial, scratch=scratch,
            private_stride=stride, **self._heads(ops, q, k, v),
        )  # fmt: skip
        ops.add(decode_attention.attention(self.heads), attention, barrier=True)
        width = part.heads * part.head_dim_v
        nbytes = kernel_sizes.whole_lines(kernel_sizes.activation_bytes(width))
        merged = ops.keep(np.zeros((self.threads, nbytes // 4), np.float32))
        merge = decode_attention.MergeParameters(
            partial=partial,
            heads=part.heads,
            dim=part.head_dim_v,
            gates=0,
            buffer=merged.ctypes.data,
            private_stride=nbytes,
        )
        ops.add(decode_attention.merge(self.heads.rotate_v), merge)
        ops.run()
        for each in merged[1:]:  # every thread has all of it
            np.testing.assert_array_equal(each, merged[0])
        return merged[:1, :width]

    def prompt(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, spans: list[Span]) -> np.ndarray:
        part, ops = self.part, OpList(self.threads)
        view, heads = self._view(ops, [span.cache for span in spans]), self._heads(ops, q, k, v)
        records = [prefill_ops.SpanState(span.start, span.stop - span.start, span.cache.length) for span in spans]
        header = prefill_ops.BatchState(tokens=len(q), next_piece=0, spans=len(spans))
        table = [x for record in (header, *records) for x in record]
        state = ops.keep(np.array(table, np.int64)).ctypes.data
        ops.add(
            prefill_ops.rope(self.heads),
            prefill_ops.RopeParameters(state=state, layer_view=view, **heads),
            barrier=True,
        )
        out = ops.keep(np.zeros((len(q), part.heads * part.head_dim_v), np.float32))
        nbytes = kernel_sizes.prefill_attention_bytes(
            self.heads.group, self.heads.dim_k, self.heads.dim_v, self.tokens, self.span
        )
        scratch, stride = ops.private_buffer("scratch", nbytes)
        attention = prefill_attention.AttentionParameters(
            state=state, q=heads["q"], kv_heads=part.kv_heads, layer_view=view, span=self.span, out=out.ctypes.data,
            scratch=scratch, private_stride=stride,
        )  # fmt: skip
        ops.add(prefill_attention.attention(self.heads, self.tokens), attention, barrier=True)
        ops.run()
        return out


def filled(hp: HParams, kind: CacheType, past: int, room: int, rng: np.random.Generator) -> Cache:
    cache = Cache(hp, past + room, kind)
    k = rng.standard_normal((past, hp.n_head_kv * hp.head_dim_k), np.float32)
    v = rng.standard_normal((past, hp.n_head_kv * hp.head_dim_v), np.float32)
    if past:
        float_attention.append_rows(k, v, cache, 0)
    cache.length = past
    return cache


def copied(cache: Cache, hp: HParams) -> Cache:
    other = Cache(hp, cache.n_ctx, cache.type)
    other.k[0][:], other.v[0][:], other.length = cache.k[0], cache.v[0], cache.length
    return other


def plain(part: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray, spans: list[Span]) -> np.ndarray:
    """The same, layer by layer."""
    q, k = q.copy(), k.copy()
    positions = np.concatenate([np.arange(s.stop - s.start) + s.cache.length for s in spans])
    tables = float_ops.rope_tables(part.rope, int(positions.max()) + 1)
    float_ops.apply_rope(q, "neox", part.head_dim_k, tables, positions, 1)
    float_ops.apply_rope(k, "neox", part.head_dim_k, tables, positions, 1)
    for span in spans:
        float_attention.append_rows(k[span.start : span.stop], v[span.start : span.stop], span.cache, 0)
    return float_attention.attend(float_attention.Heads.of(part), 0, q, spans, 1)


def decoded(cache: Cache, part: Attention) -> np.ndarray:
    """All keys, then all values."""
    sides = ((cache.type.k, cache.k[0], part.head_dim_k), (cache.type.v, cache.v[0], part.head_dim_v))
    values = [types.get(name).dequantize(x.reshape(-1, x.shape[2]), dim) for name, x, dim in sides]
    return np.concatenate([v.reshape(-1) for v in values])


def compare(hp: HParams, part: Attention, kind: CacheType, past: int, at_once: bool, rng: np.random.Generator) -> None:
    """A token, then a prompt of two sequences, against the plain form over caches of the same bytes."""
    room = 40
    span = -(-(past + room) // 128) * 128
    caches = [filled(hp, kind, past, room, rng), filled(hp, kind, past // 3, room + 5, rng)]
    for spans in ([Span(0, 1, caches[0])], [Span(0, 31, caches[0]), Span(31, 38, caches[1])]):
        n = spans[-1].stop
        q = rng.standard_normal((n, part.heads * part.head_dim_k), np.float32) * 2
        k = rng.standard_normal((n, part.kv_heads * part.head_dim_k), np.float32)
        v = rng.standard_normal((n, part.kv_heads * part.head_dim_v), np.float32)
        reference_spans = [span._replace(cache=copied(span.cache, hp)) for span in spans]
        expected = plain(part, q, k, v, reference_spans)
        if n == 1:
            result = Compiled(part, kind, 3, span if at_once else 64, 0).token(q, k, v, spans[0].cache)
        else:
            result = Compiled(part, kind, 2, span if at_once else 128, 9).prompt(q, k, v, spans)
        for cached, reference_span in zip(spans, reference_spans):
            stored, reference = (decoded(span.cache, part) for span in (cached, reference_span))
            # Rope and rotation round apart a little: rarely a code falls the other way.
            assert np.sqrt(np.mean((stored - reference) ** 2)) < 0.01 * np.std(reference)
        np.testing.assert_allclose(result, expected, atol=0.02)
        assert np.sqrt(np.mean((result - expected) ** 2)) < 1e-3


@pytest.mark.parametrize("name", [*TYPES, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_attention_over_caches_of_each_type(name: str, rng: np.random.Generator) -> None:
    hp, part = model_of(3, 1, 64, 64, None)
    compare(hp, part, CacheType.parse(f"{name} khad"), 203, False, rng)


@pytest.mark.parametrize(
    ("shape", "kind", "past", "at_once"),  # shape: heads, key/value heads, their dimensions, window
    [
        ((3, 1, 64, 64, None), "q8_0/q4_0", 0, False),
        ((16, 2, 128, 128, 50), "q6_0/q5_1 vhad", 70, False),
        ((2, 2, 192, 128, None), "q4_0/iq4_nl khad vhad", 129, False),
        ((4, 4, 64, 32, 97), "q4_1/f16", 300, True),
        ((6, 2, 80, 80, 61), "f16/bf16", 150, False),
        ((6, 2, 100, 20, 61), "f16/f32", 150, False),
        ((4, 4, 24, 120, None), "f32", 130, True),
    ],
)
def test_attention_of_each_shape(shape: tuple, kind: str, past: int, at_once: bool, rng: np.random.Generator) -> None:
    if is_other_cpu() and "f16" not in kind:
        pytest.skip("tested on this CPU's own path")
    hp, part = model_of(*shape)
    compare(hp, part, CacheType.parse(kind), past, at_once, rng)


@pytest.mark.parametrize("name", ["f32", "f16", "q8_0", "q4_0 khad vhad"])
def test_plain_attention_is_flash_attention(name: str, rng: np.random.Generator) -> None:
    """Also with memory for the scores of a few queries only."""
    hp, part = model_of(8, 2, 64, 64, None)
    cache = filled(hp, CacheType.parse(name), 700, 40, rng)
    q = rng.standard_normal((40, 8 * 64), np.float32)
    spans = [Span(0, 40, cache)]
    expected = float_attention.attend(float_attention.Heads.of(part), 0, q, spans, 2)
    for how in (AttentionOptions(flash=False), AttentionOptions(False, 0), AttentionOptions(False, 1)):
        np.testing.assert_allclose(
            float_attention.attend(float_attention.Heads.of(part), 0, q, spans, 2, how), expected, atol=1e-5
        )


def test_the_bound_on_scores() -> None:
    assert AttentionOptions().query_rows(3, 1 << 30, 8) == float_attention.QUERY_ROWS
    bound = AttentionOptions(False, 1)
    assert bound.query_rows(3, 8192, 2) == 12  # 64 KiB a query
    assert bound.query_rows(3, 8193, 2) == 12
    assert bound.query_rows(3, 16384, 2) == 6
    with pytest.raises(DataError, match=r"-amb 1: .* over 16384 positions take 2 MiB .* with 2 threads"):
        bound.query_rows(8, 16384, 2)


# ---------------------------------------------------------------------------------------------------------- the types


@pytest.mark.parametrize("text", ["f16", "q8_0/q4_0", "q8_KV", "q4_0/f32 khad", "bf16 vhad", "iq4_nl/q5_1 khad vhad"])
def test_a_cache_type_reads_its_own_text(text: str) -> None:
    kind = CacheType.parse(text)
    assert str(kind) == text
    pair, *marks = text.split()
    assert CacheType.parse(" ".join([pair.upper(), *marks])) == kind


def test_what_cannot_be_is_refused() -> None:
    for text in ("q9_0", "", "q3_K", "f16 had", "f16/q8_0/q4_0"):
        with pytest.raises(UnknownNameError):
            CacheType.parse(text)
    with pytest.raises(UnknownNameError, match=r"did you mean q4_0.*; caches can be f32, f16"):
        CacheType.parse("q40")
    hp, _ = model_of(4, 2, 80, 80, None)
    for text, message in (
        ("q8_0", "-ctk q8_0: .* heads of 80 .* can be f32, f16, bf16"),
        ("f16/q4_0", "-ctv q4_0"),
        ("f16 khad", "-khad: heads of 80"),
        ("f16 vhad", "-vhad"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            Cache(hp, 10, text)


@pytest.mark.parametrize("text", [*ALL, "q8_0/q4_0"])
def test_the_bytes_of_a_cache(text: str) -> None:
    hp, _ = model_of(4, 2, 64, 128, None)
    kind = CacheType.parse(text)
    cache = Cache(hp, 33, kind)
    assert cache.nbytes == sum(x.nbytes for x in (*cache.k, *cache.v))
    bits = [types.get(name).bits_per_weight(dim) for name, dim in ((kind.k, 64), (kind.v, 128))]
    assert cache.nbytes == 33 * 2 * (bits[0] * 64 + bits[1] * 128) / 8


def test_another_cpu() -> None:
    run_tests(__file__, next_simpler())
