"""Loads of devices and whether they fit; published figures are in tests/recipe/test_sizes.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantkit import archs, recipe
from quantkit.errors import DataError, UnknownNameError
from quantkit.placement.budget import GIB, Budget, CacheSettings, budget, experts_to_keep
from quantkit.placement.devices import CPU, Device
from quantkit.placement.fit import fit
from quantkit.placement.rules import Flags, parse_flags
from quantkit.recipe.models import from_config
from tests.recipe.configs import DEEPSEEK_V3, LLAMA_8B, QWEN3_30B

SPECS, METADATA = from_config(QWEN3_30B)
PLAN = recipe.plan(SPECS, "Q8_0", metadata=METADATA)
TENSORS = {t.name: t for t in PLAN.tensors}


def of(text: str = "", **more: object) -> Budget:
    return budget(TENSORS, METADATA, parse_flags(text), **more)  # type: ignore[arg-type]


def test_all_is_on_the_cpu_where_nothing_is_said_of_gpus() -> None:
    found = of(cache=CacheSettings(1024), ram=64 * GIB)
    assert [load.device for load in found.loads] == ["CPU"]
    load = found.loads[0]
    assert (load.weights, load.cache) == (PLAN.bytes_after, 48 * 1024 * 2 * 4 * 128 * 2)
    assert load.total == load.weights + load.cache + load.buffers
    assert 50 << 20 < load.buffers < 200 << 20  # prompts of 512 tokens through 8 experts of 768 columns each
    assert any("buffers: quantkit's runtime" in note for note in found.notes)
    assert found.loads[0].margin == 0
    assert found.fits
    assert of().fits is None
    of_quantkit = budget(TENSORS, METADATA, Flags(runtime="quantkit"), CacheSettings(1024), ram=64 * GIB)
    assert of_quantkit.loads == found.loads


@pytest.mark.parametrize("flags", ["-ngl 20", "-ngl 99 -ot exps=CPU", "-ts 3,1", "-ot exps=CPU", "--n-cpu-moe 10"])
def test_nothing_is_lost_or_counted_twice(flags: str) -> None:
    found = of(flags, cache=CacheSettings(4096, "q8_0", "q8_0"))
    assert sum(load.weights for load in found.loads) == PLAN.bytes_after
    assert sum(load.tensors for load in found.loads) == len(TENSORS)
    assert sum(load.cache for load in found.loads) == 48 * 4096 * 2 * 4 * 128 * 34 // 32
    assert len(found.loads) == (3 if "-ts" in flags else 2)


def test_caches_live_where_their_layer_does() -> None:
    found = {load.device: load for load in of("-ngl 13 -ot exps=CPU", cache=CacheSettings(1000)).loads}
    one = 1000 * 2 * 4 * 128 * 2
    assert found["CUDA0"].cache == 13 * one
    assert found["CPU"].cache == 35 * one


def test_the_fewest_experts_that_must_stay() -> None:
    limits = ([12 * GIB, 8 * GIB], 32 * GIB)
    count = experts_to_keep(TENSORS, METADATA, Flags(), CacheSettings(8192), *limits)
    assert count
    for kept, fits in ((count - 1, False), (count, True)):
        assert of(f"--n-cpu-moe {kept}", cache=CacheSettings(8192), vram=limits[0], ram=limits[1]).fits is fits
    assert experts_to_keep(TENSORS, METADATA, Flags(), CacheSettings(8192), [12 * GIB], 8 * GIB) is None
    assert experts_to_keep(TENSORS, METADATA, Flags(), None, [64 * GIB], None) is None
    specs, metadata = from_config(LLAMA_8B)
    assert experts_to_keep({s.name: s for s in specs}, metadata, Flags(), None, [GIB], None) is None


def test_what_does_not_fit_is_said() -> None:
    found = of(vram=[8 * GIB], ram=64 * GIB, margin=2 * GIB)
    assert found.fits is False
    load = next(load for load in found.loads if load.device == "CUDA0")
    assert load.left == 6 * GIB - load.total
    assert len(found.warnings) == 1
    assert "CUDA0 holds" in found.warnings[0]
    assert "less 2.0 for buffers" in found.warnings[0]
    assert "smaller types" in of(ram=GIB).warnings[0]
    assert found.to_json()["fits"] is False


def test_contexts_that_are_none() -> None:
    with pytest.raises(DataError, match="1 token or more"):
        CacheSettings(0)
    with pytest.raises(UnknownNameError, match="-ctv"):
        CacheSettings(1, "f16", "q7_0")


def test_what_follows_from_a_placement_is_told() -> None:
    assert of("-ngl 99 -ot exps=CPU", cache=CacheSettings(64, "q8_0")).notes == (
        "cache for 64 tokens, keys q8_0, values f16",
        "batches (-b, -ub) of fewer than 512 tokens run the CPU's experts on the CPU; larger ones offload "
        "them to a GPU",
    )
    assert of("-ngl 99").notes == of("-ngl 0").notes == ()
    specs, metadata = from_config(DEEPSEEK_V3)
    found = budget({s.name: s for s in specs}, metadata, parse_flags("--cpu-moe"), CacheSettings(64, "q8_0"))
    assert found.notes[0] == "cache for 64 tokens, latent q8_0"
    assert "fewer than 1024 tokens" in found.notes[1]


def test_what_sparse_attention_selects_in_tensor_parallel_is_told() -> None:
    specs, metadata = from_config(archs.get("deepseek32").EXAMPLE)
    tensors, top_k = {s.name: s for s in specs}, metadata["deepseek32.attention.indexer.top_k"]

    def is_told(flags: str, n_ctx: int, runtime: str = "quantkit") -> bool:
        placed = replace(parse_flags(flags), runtime=runtime)
        notes = budget(tensors, metadata, placed, CacheSettings(n_ctx)).notes
        return any(f"texts of up to {top_k} tokens with -sm graph" in note for note in notes)

    graph = "--devices cuda:0,cuda:1 -sm graph -ngl 99"
    assert is_told(graph, top_k + 1)
    assert not is_told(graph, top_k)
    assert not is_told(graph, top_k + 1, "ik_llama.cpp")
    assert not is_told("-ngl 99", top_k + 1)


def test_a_tied_embedding_is_loaded_once_more() -> None:
    """As the output matrix, where that would be: by ik_llama.cpp, unless a rule places the embedding."""
    specs, metadata = from_config(LLAMA_8B | {"tie_word_embeddings": True})
    tensors = {s.name: s for s in specs}
    assert "output.weight" not in tensors
    copy = tensors["token_embd.weight"].type.tensor_bytes(tensors["token_embd.weight"].shape)

    def further(flags: str) -> int:
        """Bytes that ik_llama.cpp loads and quantkit does not."""
        placed = parse_flags(flags)
        found, own = (
            budget(tensors, metadata, replace(placed, runtime=runtime), vram=[64 * GIB, 64 * GIB])
            for runtime in ("ik_llama.cpp", "quantkit")
        )
        assert not any("once more" in note for note in own.notes)
        size = sum(load.weights for load in found.loads) - sum(load.weights for load in own.loads)
        assert any("loads the embedding once more" in note for note in found.notes) is (size > 0)
        return size

    assert further("-ngl 99") == copy
    assert copy <= further("-ngl 99 -sm graph") <= copy + 1
    assert not further("-ngl 32")  # the output is on the CPU
    assert not further("-ngl 99 -ot token_embd=CPU")
    untied, about = from_config(LLAMA_8B)
    assert not any("once more" in note for note in budget({s.name: s for s in untied}, about, Flags()).notes)


@pytest.mark.parametrize("mode", ["layer", "graph"])
def test_fitted_flags_have_room_for_a_tied_embedding(mode: str) -> None:
    specs, metadata = from_config(LLAMA_8B | {"tie_word_embeddings": True})
    tensors = {s.name: s for s in specs}
    for gib in (4, 8, 12, 20):
        devices = [CPU, *(Device(f"CUDA{i}", gib * GIB) for i in range(2))]
        fitted = fit(tensors, metadata, devices, flags=Flags(split_mode=mode))
        vram, flags = [gib * GIB] * 2, replace(fitted.flags, devices=())
        assert budget(tensors, metadata, flags, vram=vram).fits, (gib, fitted.text)
