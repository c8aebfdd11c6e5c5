"""Sizes and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.cli.common.launch import context_size
from quantkit.cli.common.options import parse_size
from quantkit.cli.common.output import gib, table
from quantkit.errors import QuantkitError
from tests.recipe.configs import QWEN3_30B


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("50G", 50 * 10**9),
        ("800M", 8 * 10**8),
        ("1.5GiB", 3 << 29),
        ("1000000", 10**6),
        ("2 gb", 2 * 10**9),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--size") == size


@pytest.mark.parametrize("text", ["", "G", "50X", "-3G", "0", "1e9", "5IB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(QuantkitError, match="is not a size"):
        parse_size(text, "--size")


@pytest.mark.parametrize("text", ["30", "1", "999999", "0.5"])
def test_small_numbers_without_a_unit_are_asked_about(text: str) -> None:
    with pytest.raises(QuantkitError, match=rf"'{text}' without a unit is .* bytes; write {text}G"):
        parse_size(text, "--size")


def test_published_form() -> None:
    assert gib(226.003 * 2**30) == "226.003 GiB"


def test_table() -> None:
    assert table(("a", "number"), [("x", 1), ("long", 22)]) == "a     number\n----  ------\nx          1\nlong      22"


def test_a_context_of_0_is_that_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    assert (context_size(0, tmp_path), context_size(7, tmp_path)) == (QWEN3_30B["max_position_embeddings"], 7)
