"""BlockRunner of tensors hold the values of those parts, in every type; cuts are where blocks and groups end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.errors import DataError, UnknownNameError, UnsupportedError
from quantkit.formats import gguf
from quantkit.placement import sharding
from quantkit.placement.offload import Offload, parse_ops
from quantkit.runtime.parallel import tensor_shards

ENCODED = [t.name for t in types.all() if t.encode_rows is not None]


def stored(path: Path, kind: str, shape: tuple[int, ...] = (2, 32, 768)) -> gguf.Tensor:
    quant = types.get(kind)
    x = np.random.default_rng(0).standard_normal((int(np.prod(shape[:-1])), shape[-1])).astype(np.float32)
    metadata = gguf.Metadata()
    metadata.set("general.architecture", "llama", "str")
    with gguf.Writer(path / "one.gguf", metadata, [gguf.TensorSpec("a", shape, quant)]) as writer:
        writer.write("a", quant.quantize(x, np.ones(shape[-1], np.float32) if quant.requires_imatrix else None))
    return gguf.open(path / "one.gguf").tensors["a"]


@pytest.mark.parametrize("kind", ENCODED)
def test_parts_hold_their_values(kind: str, tmp_path: Path) -> None:
    whole = stored(tmp_path, kind)
    values = whole.dequantize()
    for axis, first, stop in ((0, 1, 2), (1, 16, 32), (2, 256, 768), (2, 0, 256), (1, 0, 32)):
        part = tensor_shards.part(whole, axis, first, stop)
        np.testing.assert_array_equal(part.dequantize(), np.take(values, range(first, stop), axis=axis))
        assert part.nbytes == part.stored.size == part.type.tensor_bytes(part.shape)
    inner = tensor_shards.part(tensor_shards.part(whole, 0, 1, 2), 2, 256, 512)
    np.testing.assert_array_equal(inner.dequantize(), values[1:, :, 256:512])


def test_cuts_within_blocks_and_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tensor a: q4_K can be cut at multiples of 256 columns, not at 32 and 768"):
        tensor_shards.part(stored(tmp_path, "q4_K"), 2, 32, 768)
    with pytest.raises(DataError, match=r"q4_k_r4 interleaves 4 rows and can be cut between groups, not at 2 and 8"):
        tensor_shards.part(stored(tmp_path, "q4_k_r4"), 1, 2, 8)
    with pytest.raises(DataError, match="has 2 elements on axis 0, not 1 to 3"):
        tensor_shards.part(stored(tmp_path, "f32"), 0, 1, 3)


# ------------------------------------------------------------------------------------------------------------ the cuts


def spec(name: str, kind: str, *shape: int) -> gguf.TensorSpec:
    return gguf.TensorSpec(name, shape, types.get(kind))


def attention(heads: int, kv_heads: int, dim: int) -> blocks.Attention:
    norm, linear = blocks.Norm("n", 1e-5), blocks.Linear
    rope = blocks.Rope("norm", dim, 1e4)
    return blocks.Attention(
        norm, linear("q"), linear("k"), linear("v"), linear("o"), heads, kv_heads, dim, dim, 1, rope
    )


def attention_cuts(heads: int, kv_heads: int, dim: int, kind: str, shares: list[float]) -> dict[str, sharding.Sharding]:
    n = heads * dim
    tensors = {t.name: t for t in (spec("q", kind, n, n), spec("k", kind, kv_heads * dim, n),
                                   spec("v", kind, kv_heads * dim, n), spec("o", kind, n, n))}  # fmt: skip
    head = blocks.Head("e", blocks.Norm("n", 1e-5), blocks.Linear("out"))
    return sharding.of_model(
        [blocks.Block(0, (attention(heads, kv_heads, dim),))], head, tensors, tensors, {0: tuple(shares)}
    )


def test_attention_is_cut_between_groups_of_heads_at_whole_blocks() -> None:
    result = attention_cuts(64, 4, 128, "q4_K", [0.5, 0.5])
    assert result["q"] == sharding.Sharding(0, (0, 4096, 8192))
    assert result["o"] == sharding.Sharding(1, (0, 4096, 8192))
    assert result["k"] == result["v"] == sharding.Sharding(0, (0, 256, 512))
    assert result["k"].shape((512, 8192), 1) == (256, 8192)
    # Heads of 64, each of its own: only every fourth begins at a block of 256.
    assert attention_cuts(12, 12, 64, "q4_K", [0.5, 0.5])["o"].bounds == (0, 512, 768)
    assert attention_cuts(12, 12, 64, "q8_0", [0.5, 0.5])["o"].bounds == (0, 384, 768)
    assert attention_cuts(12, 12, 64, "q8_0", [0.7, 0.3])["o"].bounds == (0, 512, 768)
    # Two groups for three devices: one attends to nothing.
    assert attention_cuts(8, 2, 64, "f32", [0.25, 0.25, 0.5])["k"].bounds == (0, 0, 64, 128)


def test_where_alignment_leaves_no_cut_the_tensor_and_the_numbers_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"o: q4_K can be split at multiples of 256 columns, so its 256 cannot"):
        attention_cuts(4, 4, 64, "q4_K", [0.5, 0.5])
    assert attention_cuts(4, 1, 64, "q4_K", [0.5, 0.5])["o"].bounds == (0, 0, 256)  # one head: nothing to cut


def recurrent_cuts(kind: str, tiled: bool, shares: list[float]) -> dict[str, sharding.Sharding]:
    """Of a recurrent layer of Qwen3.5-27B."""
    norm, linear, sizes = blocks.Norm("n", 1e-6), blocks.Linear, blocks.Recurrence(4, 16, 48, 128, 128)
    rates = None, linear("beta"), linear("alpha"), "conv", "a", "dt"
    part = blocks.DeltaNet(norm, linear("qkv"), linear("gate"), *rates, norm, linear("out"), sizes, tiled)
    made = (spec("qkv", kind, 10240, 5120), spec("gate", kind, 6144, 5120), spec("beta", "f32", 48, 5120),
            spec("alpha", "f32", 48, 5120), spec("conv", "f32", 10240, 4), spec("a", "f32", 48), spec("dt", "f32", 48),
            spec("out", kind, 5120, 6144))  # fmt: skip
    tensors = {t.name: t for t in made}
    head = blocks.Head("e", norm, linear("output"))
    return sharding.of_model([blocks.Block(0, (part,))], head, tensors, tensors, {0: tuple(shares)})


def test_recurrent_layers_are_cut_by_key_heads_in_each_segment() -> None:
    result = recurrent_cuts("q8_0", False, [0.25, 0.75])
    assert result["qkv"].ranges(0) == [(0, 512), (2048, 2560), (4096, 5632)]
    assert result["conv"].ranges(1) == [(512, 2048), (2560, 4096), (5632, 10240)]
    assert result["out"].ranges(1) == [(1536, 6144)]
    assert result["a"].ranges(0) == [(0, 12)]
    tiled = recurrent_cuts("q4_K", True, [0.25, 0.75])  # value head h reads key head h % 16
    assert tiled["gate"].ranges(0) == tiled["out"].ranges(0) == [(0, 512), (2048, 2560), (4096, 4608)]
    assert tiled["beta"].ranges(1) == [(4, 16), (20, 32), (36, 48)]
    assert [tiled["qkv"].width(i) for i in range(2)] == [512 + 512 + 1536, 7680]
    assert recurrent_cuts("q4_K", True, [0.3, 0.7])["out"].width(0) == 3 * 512  # an even number of heads of 128


@pytest.mark.parametrize("kind", ["q4_K", "iq4_ks", "q4_k_r4", "iq1_s_r4", "f32"])
def test_ranges_stand_one_after_another(kind: str, tmp_path: Path) -> None:
    whole = stored(tmp_path, kind, (16, 1024))
    values = whole.dequantize()
    columns = tensor_shards.ranges(whole, 1, [(0, 256), (512, 1024)])
    np.testing.assert_array_equal(columns.dequantize(), np.concatenate([values[:, :256], values[:, 512:]], axis=1))
    rows = tensor_shards.ranges(whole, 0, [(0, 4), (4, 4), (8, 16)])
    np.testing.assert_array_equal(rows.dequantize(), np.concatenate([values[:4], values[8:]]))
    assert columns.nbytes == columns.stored.size
    assert tensor_shards.ranges(whole, 1, [(0, 0), (512, 512)]).nbytes == 0


# ------------------------------------------------------------------------------------------------------------- offload


def test_batches_that_a_gpu_takes_part_in() -> None:
    assert Offload().min_tokens("MUL_MAT_ID", 256, 8) == 1024
    assert Offload(64).min_tokens("MOE_FUSED_UP_GATE", 128, 8) == 1024
    assert Offload().min_tokens("MUL_MAT", 256, 8) == 32
    assert Offload().offloads_experts(512, 128, 8)
    assert not Offload().offloads_experts(511, 128, 8)
    for op in ("MUL_MAT_ID", "MOE_FUSED_UP_GATE"):  # experts go as a whole
        assert parse_ops(f"{op},0").min_tokens_of_experts(128, 8) is None
    found = parse_ops("MUL_MAT_ID,0, 31,0")
    assert found.min_tokens("MUL_MAT_ID", 256, 8) is found.min_tokens("MOE_FUSED_UP_GATE") is None
    assert found.min_tokens("MUL_MAT") == 32
    assert parse_ops("-1,0,mul_mat=1").forbidden == {"MUL_MAT_ID", "FUSED_UP_GATE", "MOE_FUSED_UP_GATE"}
    with pytest.raises(UnknownNameError, match="MUL_MAT"):
        parse_ops("MULMAT,0")
    for wrong in ("MUL_MAT", "MUL_MAT,2"):
        with pytest.raises(DataError, match="-op"):
            parse_ops(wrong)
    with pytest.raises(DataError, match="--offload-threshold 0"):
        Offload(0)
