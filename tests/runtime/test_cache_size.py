"""Sizes of caches from metadata; published figures are in tests/recipe/test_sizes.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit import archs, types
from quantkit.errors import DataError, FormatError
from quantkit.formats import gguf
from quantkit.pipelines.api import plan
from quantkit.pipelines.options import PlanOptions
from quantkit.pipelines.planning import PlanInput
from quantkit.placement.kv_size import TYPES, of_layers
from quantkit.runtime.kv.cache import Cache
from tests.archs.files import written
from tests.refusals import Refusals

LLAMA = {"general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 128,
         "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}  # fmt: skip


def test_heads_of_other_lengths_and_layers_of_other_heads() -> None:
    f16, q8 = types.get("f16"), types.get("q8_0")
    assert of_layers(LLAMA, 10, f16, f16) == [10 * 2 * (64 + 64)] * 2
    assert of_layers(LLAMA, 10, q8, f16) == [10 * 2 * (34 + 64)] * 2
    lengths = {"llama.attention.key_length": 32, "llama.attention.value_length": 16}
    assert of_layers(LLAMA | lengths, 10, f16, f16) == [10 * 2 * (32 + 16) * 2] * 2
    assert of_layers(LLAMA | {"llama.attention.head_count_kv": [1, 2]}, 1, f16, f16) == [128, 256]
    with pytest.raises(DataError, match="multiple of 32"):
        of_layers(LLAMA | {"llama.attention.key_length": 8}, 10, q8, f16)


def test_layers_with_a_window_have_their_own_lengths() -> None:
    f16 = types.get("f16")
    keys = {"llama.attention.key_length": 64, "llama.attention.value_length": 64,
            "llama.attention.key_length_swa": 32, "llama.attention.value_length_swa": 16,
            "llama.attention.sliding_window_pattern": [True, False]}  # fmt: skip
    assert of_layers(LLAMA | keys, 10, f16, f16) == [10 * 2 * (32 + 16) * 2, 10 * 2 * (64 + 64) * 2]


@pytest.mark.parametrize("name", [arch.name for arch in archs.all()])
def test_plans_of_contradictory_metadata_end_in_errors_of_ours(name: str, tmp_path: Path) -> None:
    """Each key with values of other types, lists that are too short, and numbers out of bounds."""
    file = gguf.open(written(tmp_path / "m.gguf", name, tokenizer=True))
    ways = [
        PlanOptions(ctx_size=100),
        PlanOptions(ctx_size=64, fit=True, vram=(0.01,), ram=1),
        PlanOptions(ctx_size=64, mla=0, placement="-ngl 99 -sm graph", vram=(1, 1)),
    ]
    tensors, tried = list(file.tensors.values()), Refusals()
    for key in [key for key in file.metadata if key.startswith(f"{name}.")]:
        for value in (0, 3, -1, float("nan"), "x", True, [], [0], [1], [1, 2, 3], [0, 1, 1, 1], ["x"] * 4, {}, None):
            metadata = {k: v for k, v in {**file.metadata, key: value}.items() if v is not None}
            for way in ways:
                tried.call(plan, PlanInput(tensors, metadata, None), "Q4_0", way)
    tried.check_both()


@pytest.mark.parametrize(
    ("key", "value"), [("attention.head_count_kv", [2]), ("attention.sliding_window_pattern", [True])]
)
def test_lists_that_lack_a_layer_are_refused(key: str, value: list[Any]) -> None:
    with pytest.raises(FormatError, match=rf"llama\.{key} has 1 entries, .* llama\.block_count is 2"):
        of_layers(LLAMA | {f"llama.{key}": value}, 10, types.get("f16"), types.get("f16"))


def test_a_cache_of_the_runtime_is_as_large(smollm2_q4_1: Path) -> None:
    file = quantkit.open(smollm2_q4_1)
    hparams = archs.get("llama").hparams(file.metadata, file.tensors.keys())
    for name in TYPES:
        kind = types.layout(name)
        assert sum(of_layers(file.metadata, 100, kind, kind)) == Cache(hparams, 100, name).nbytes
