"""Lists of all kernels, for tests and benchmarks: those of each type, and those that no type has."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.runtime.kernels.cuda import (
    activations,
    attention,
    decode_attention,
    delta,
    elementwise,
    floats,
    fused,
    indexer,
    mamba2,
    routing,
    streams,
    weights,
)
from quantkit.runtime.kernels.cuda.codecs.registry import CODECS
from quantkit.runtime.kernels.cuda.dispatch import FLOAT_IDS
from quantkit.runtime.kernels.cuda.kernel import CudaKernel


def of_type(ggml_type: int) -> Iterator[CudaKernel]:
    """Every kernel of a type."""
    module = floats if ggml_type in FLOAT_IDS else weights
    for output in weights.OUTPUTS:
        yield module.dequantize(ggml_type, output)
    for tokens in weights.TOKENS:
        yield module.matvec(ggml_type, tokens)


def of_types() -> dict[str, int]:
    """Types that have kernels: their ids by name."""
    return dict(sorted({**{c.name: i for i, c in CODECS.items()}, **{n: i for i, n in FLOAT_IDS.items()}}.items()))


# (types of keys and values, their dims, whether the values are the keys'): what the tests compile of `attend`, which is
# made for any of `attention.CACHES` and any size of heads.
ATTENTIONS = (
    ("f16", "f16", 128, 128, False), ("f32", "f32", 64, 64, False), ("bf16", "f16", 256, 256, False),
    ("q8_0", "q4_0", 128, 128, False), ("q8_0", "q8_0", 576, 512, True), ("f16", "f16", 192, 128, False),
)  # fmt: skip
# The same of `attend_one`: types of keys and values, dims, query heads of a key/value head.
DECODE_ATTENTIONS = (("f16", "f16", 128, 4), ("q8_0", "q8_0", 128, 8), ("bf16", "f32", 64, 3), ("f16", "f16", 256, 2))

# The same of `fused.rope_append`: types of keys and values, dims, whether heads are normed.
FUSED_CACHES = (("f16", "f16", 128, 128, False), ("q8_0", "q8_0", 128, 128, True), ("bf16", "f32", 192, 128, True))


def not_of_a_type() -> Iterator[CudaKernel]:
    """Every kernel that does not depend on a type of weights."""
    yield activations.quantize()
    yield elementwise.rms_norm()
    yield from (elementwise.activate(name) for name in elementwise.ACTIVATIONS)
    yield from (elementwise.activate_rounded(name) for name in elementwise.ACTIVATIONS)
    yield from (make() for make in (elementwise.add, elementwise.mix, elementwise.rope))
    yield from (make() for make in (elementwise.argmax, elementwise.sample, delta.step, mamba2.step))
    yield delta.step(by_rows=True)
    yield from (routing.route(sigmoid, biased) for sigmoid in (False, True) for biased in (False, True))
    yield from (attention.attend(*shape) for shape in ATTENTIONS)
    yield from (decode_attention.attend_one(*shape) for shape in DECODE_ATTENTIONS)
    yield from (attention.merge(sinks, quantized) for sinks in (False, True) for quantized in (False, True))
    yield from (indexer.scores(kind, 128) for kind in ("f16", "q8_0"))
    yield streams.hyper_weights(4)
    yield from map(fused.add_norm, (1, 2))
    yield from (fused.activate(name) for name in elementwise.ACTIVATIONS)
    yield from (fused.rope_append(*shape) for shape in FUSED_CACHES)
    yield from (attention.append(kind) for kind in ("f32", "f16", "bf16", "q8_0"))
