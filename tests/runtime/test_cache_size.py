"""Sizes of caches from metadata; published figures are in tests/recipe/test_sizes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import quantkit
from quantkit import archs, types
from quantkit.errors import DataError
from quantkit.placement.kv_size import TYPES, of_layers
from quantkit.runtime.kv.cache import Cache

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


def test_a_cache_of_the_runtime_is_as_large(smollm2_q4_1: Path) -> None:
    file = quantkit.open(smollm2_q4_1)
    hparams = archs.get("llama").hparams(file.metadata, file.tensors.keys())
    for name in TYPES:
        kind = types.layout(name)
        assert sum(of_layers(file.metadata, 100, kind, kind)) == Cache(hparams, 100, name).nbytes
