"""Names and row orders: a range of rows equals that range of the whole tensor, and every transform has an inverse."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common.tensors import (
    ShuffleRows,
    Stack,
    Unstack,
    interleave_halves,
    join_name,
    pieces,
    split_name,
)
from quantkit.archs.common.transforms import RepeatFirstRow
from quantkit.errors import FormatError


@pytest.mark.parametrize("order", [(0,), (2, 0, 1), (3, 1, 0, 2)])
def test_ranges_of_rows_equal_the_whole(order: tuple[int, ...]) -> None:
    x = np.arange(24).reshape(12, 2)
    transform = ShuffleRows(order)
    whole = np.concatenate([x[b : b + len(order)][list(order)] for b in range(0, 12, len(order))])
    for start in range(12):
        for stop in range(start + 1, 13):
            got = transform.rows([lambda a, b: x[a:b]], start, stop)
            np.testing.assert_array_equal(got, whole[start:stop])
    back = transform.inverse().rows([lambda a, b: whole[a:b]], 0, 12)
    np.testing.assert_array_equal(back, x)


def test_rope_order_is_that_of_the_format() -> None:
    """GGUF row h*D + 2j + s is checkpoint row h*D + s*D/2 + j."""
    heads, dim = 3, 8
    x = np.arange(heads * dim).reshape(-1, 1)
    got = interleave_halves(dim).rows([lambda a, b: x[a:b]], 0, heads * dim)[:, 0]
    for h in range(heads):
        for j in range(dim // 2):
            for s in (0, 1):
                assert got[h * dim + 2 * j + s] == h * dim + s * dim // 2 + j


def test_ranges_of_stacked_rows_equal_the_whole() -> None:
    experts = np.arange(24).reshape(3, 4, 2)
    sources = [lambda a, b, x=x: x[a:b] for x in experts]
    whole = experts.reshape(12, 2)
    for start in range(12):
        for stop in range(start + 1, 13):
            np.testing.assert_array_equal(Stack(4).rows(sources, start, stop), whole[start:stop])
    for number, expert in enumerate(experts):
        np.testing.assert_array_equal(Unstack(number, 4).rows([lambda a, b: whole[a:b]], 1, 4), expert[1:])


def test_ranges_of_a_matrix_with_repeated_rows_equal_the_whole() -> None:
    x = np.arange(10).reshape(5, 2)
    whole, transform = np.concatenate([x, x[:1], x[:1], x[:1]]), RepeatFirstRow(5, 8)
    for start in range(8):
        for stop in range(start + 1, 9):
            np.testing.assert_array_equal(transform.rows([lambda a, b: x[a:b]], start, stop), whole[start:stop])
            assert transform.locate(start, stop) == ((0, start) if stop <= 5 else None)
    assert transform.shape((5, 2)) == (8, 2)
    for wrong, shape in ((transform, (6, 2)), (transform, (5,)), (RepeatFirstRow(9, 8), (9, 2))):
        with pytest.raises(FormatError, match="rows was expected"):
            wrong.shape(shape)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("blk.13.attn_q.weight", ("blk.N.attn_q", 13, "weight")),
        ("model.layers.0.self_attn.q_proj.bias", ("model.layers.N.self_attn.q_proj", 0, "bias")),
        ("output_norm.weight", ("output_norm", None, "weight")),
    ],
)
def test_names_split_and_join(name: str, parts: tuple[str, int | None, str]) -> None:
    assert split_name(name) == parts
    assert join_name(*parts) == name


def test_order_is_natural_and_by_use() -> None:
    arch = archs.get("llama")
    shapes = {"lm_head.weight": (8, 4), "model.norm.weight": (4,)}
    for i in (10, 2, 1):
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (4, 8)
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (4,)
    shapes["model.embed_tokens.weight"] = (8, 4)
    found = [piece.name for piece in pieces(arch.rules, shapes, None, to_gguf=True)]
    layers = [f"blk.{i}.{stem}.weight" for i in (1, 2, 10) for stem in ("attn_norm", "ffn_down")]
    assert found == ["token_embd.weight", *layers, "output_norm.weight", "output.weight"]


def test_rows_that_do_not_fill_heads_are_refused() -> None:
    arch = archs.get("llama")
    hparams = arch.hparams({key: value for key, (value, _) in arch.metadata(arch.EXAMPLE).items()})
    with pytest.raises(FormatError, match=r"q_proj\.weight: 60 rows are not a multiple of the 16"):
        pieces(arch.rules, {"model.layers.0.self_attn.q_proj.weight": (60, 64)}, hparams, to_gguf=True)
