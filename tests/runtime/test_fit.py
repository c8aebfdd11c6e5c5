"""--fit: every device within its limit, filled, and the flags that are printed give the same placement."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit import archs, recipe
from quantkit.errors import DataError
from quantkit.formats.gguf import TensorSpec
from quantkit.placement import fit as fitting
from quantkit.placement.budget import GIB, Budget, CacheSettings, budget
from quantkit.placement.devices import CPU, Device
from quantkit.placement.fit import Fitted, fit
from quantkit.placement.rules import Flags, parse_flags, parse_rules, place_model
from quantkit.placement.speed import ASSUMED, parse_rates, predict
from quantkit.recipe.models import from_config
from tests.recipe.configs import DEEPSEEK_V3, LLAMA_8B, QWEN3_30B, QWEN3_235B, QWEN35_27B

MODELS = {"deepseek": (DEEPSEEK_V3, "iq4_k"), "qwen3": (QWEN3_235B, "iq4_k"), "llama": (LLAMA_8B, "q8_0"),
          "qwen3-30b": (QWEN3_30B, "q8_0"), "qwen35": (QWEN35_27B, "q8_0")}  # fmt: skip


def planned(which: str, experts: str = "") -> tuple[dict[str, Any], Any]:
    config, kind = MODELS[which]
    specs, metadata = from_config(archs.language_model(config))
    rules = recipe.parse(f"exps={experts or kind},.*=q8_0")
    return {t.name: t for t in recipe.plan(specs, "Q8_0", rules, metadata=metadata).tensors}, metadata


def devices(vram: list[float], ram: float | None = None) -> tuple[Device, ...]:
    gpus = (Device(f"CUDA{i}", int(size * GIB)) for i, size in enumerate(vram))
    return Device(CPU.name, int(ram * GIB) if ram else None), *gpus


def fitted(which: str, machine: tuple[Device, ...], cache: CacheSettings | None, **more: Any) -> tuple[Fitted, Budget]:
    """The fit; its flags, printed and read again, give its placement, and the budget says that all fits."""
    experts = more.pop("experts", "")
    tensors, metadata = planned(which, experts)
    result = fit(tensors, metadata, machine, cache.of_layers(metadata) if cache else (), **more)
    again = place_model(tensors, parse_flags(result.text), metadata, machine)
    assert again.devices == result.placement.devices
    assert again.of_layer == result.placement.of_layer
    assert again.sharded == result.placement.sharded
    assert again.shares == result.placement.shares
    assert not again.idle
    margin = more.get("margin", GIB)
    from dataclasses import replace

    ram = machine[0].memory
    report = budget(
        tensors, metadata, replace(parse_flags(result.text), devices=machine), cache, ram=ram, margin=margin
    )
    assert report.placement.devices == result.placement.devices
    assert all(load.left is None or load.left >= 0 for load in report.loads), report.loads
    return result, report


def test_interleaved_tensors_go_where_the_runtime_has_kernels() -> None:
    tensors, metadata = planned("qwen3", "q4_k_r4")
    machine = devices([24], 256)
    for_ik_llama = fit(tensors, metadata, machine)
    for_quantkit = fit(tensors, metadata, machine, flags=Flags(runtime="quantkit"))
    experts = [name for name in tensors if "_exps." in name]
    assert all(for_ik_llama.placement.on_cpu(name) for name in experts)
    assert not all(for_quantkit.placement.on_cpu(name) for name in experts)


VRAM = [[24], [24, 24], [96], [24] * 8]


@pytest.mark.parametrize("ram", [256, 512])
@pytest.mark.parametrize("vram", VRAM, ids=str)
@pytest.mark.parametrize("which", ["deepseek", "qwen3"])
def test_machines_that_people_have(which: str, vram: list[float], ram: float) -> None:
    kinds = {"deepseek": "iq2_k" if ram == 256 else "iq4_k", "qwen3": "iq4_k" if ram == 256 else "q8_0"}
    begin = time.process_time()
    result, report = fitted(which, devices(vram, ram), CacheSettings(32768, "q8_0", "q8_0"), experts=kinds[which])
    assert time.process_time() - begin < 20
    gpus = [load for load in report.loads if load.device != "CPU"]
    assert len(gpus) == len(vram)
    largest = max(
        t.type.tensor_bytes(t.shape) for name, t in planned(which, kinds[which])[0].items() if "_exps." in name
    )
    on_cpu = [name for name in result.placement.devices if result.placement.on_cpu(name)]
    if any("_exps." in name for name in on_cpu):  # then no GPU has room for one more, work being estimated from above
        for load in gpus:
            assert load.left is not None
            assert load.left < largest + (900 << 20), load
    assert all("_exps." in name for name in on_cpu if name.startswith("blk."))  # attention and the like are on GPUs
    assert {load.device for load in report.loads if load.cache} == {load.device for load in gpus if load.tensors}


@pytest.mark.parametrize("which", ["deepseek", "qwen3"])
@pytest.mark.parametrize("vram", [[24, 24], [24] * 8], ids=str)
def test_layers_that_are_shared(which: str, vram: list[float]) -> None:
    if which == "qwen3" and len(vram) == 8:
        vram = vram[:4]  # as many as there are groups of heads
    result, report = fitted(
        which, devices(vram, 512), CacheSettings(8192, "q8_0", "q8_0"), flags=Flags(split_mode="graph")
    )
    assert result.flags.split_mode == "graph"
    assert "-sm graph" in result.text
    gpus = [load for load in report.loads if load.device != "CPU"]
    sizes = [load.weights for load in gpus]
    assert max(sizes) - min(sizes) < 0.1 * max(sizes)


def test_recurrent_layers_that_are_shared() -> None:
    result, report = fitted("qwen35", devices([24, 24]), CacheSettings(8192), flags=Flags(split_mode="graph"))
    assert result.text == "-ngl 65 -sm graph -ts 1,1"
    states, rows = 48 * 817152 * 4, 16 * 8192 * 4 * 2 * 256 * 2  # of field-notes.md 4; keys and values of 16 layers
    assert [load.cache for load in report.loads if load.device != "CPU"] == [(states + rows) // 2] * 2
    weights = [load.weights for load in report.loads if load.device != "CPU"]
    assert weights[0] == weights[1]


def test_what_fits_whole_is_shared_evenly() -> None:
    result, report = fitted("llama", devices([24, 24]), CacheSettings(8192))
    on_cpu = {name for name in result.placement.devices if result.placement.on_cpu(name)}
    assert on_cpu == {"token_embd.weight", "rope_freqs.weight"}
    sizes = [load.total for load in report.loads if load.device != "CPU"]
    assert max(sizes) < 1.25 * min(sizes)
    result, _ = fitted("llama", devices([10]), CacheSettings(2048))
    assert result.text == "-ngl 33"


def test_dense_models_leave_feed_forwards_then_layers() -> None:
    result, _ = fitted("llama", devices([6]), CacheSettings(8192))
    on_cpu = [name for name in result.placement.devices if result.placement.on_cpu(name) and name.startswith("blk.")]
    assert on_cpu
    assert all("ffn_" in name for name in on_cpu)
    result, _ = fitted("llama", devices([2.2]), CacheSettings(8192), margin=1 << 28)
    assert 0 < (result.flags.gpu_layers or 0) < 33
    assert result.placement.on_cpu("output.weight")


def test_uneven_gpus_take_what_they_can() -> None:
    result, report = fitted("qwen3-30b", devices([6, 24], 64), CacheSettings(4096))
    loads = {load.device: load for load in report.loads}
    assert loads["CUDA0"].total < 5.1 * GIB
    assert loads["CUDA1"].total > 20 * GIB
    assert result.flags.tensor_split


def test_types_without_a_kernel_on_gpus_stay() -> None:
    result, _ = fitted("qwen3-30b", devices([24]), CacheSettings(4096), experts="q8_0_r8")
    assert {
        name for name in result.placement.devices if "_exps." in name and not result.placement.on_cpu(name)
    } == set()
    assert len(result.flags.override_tensor) == 1
    virtual = (CPU, Device("cpu:0", 24 * GIB))  # which computes with any type
    result, _ = fitted("qwen3-30b", virtual, CacheSettings(4096), experts="q8_0_r8")
    assert any("_exps." in name and not result.placement.on_cpu(name) for name in result.placement.devices)


def test_what_cannot_fit_is_said_with_numbers() -> None:
    tensors, metadata = planned("deepseek")
    cache = CacheSettings(32768).of_layers(metadata)
    with pytest.raises(
        DataError, match=r"the CPU would hold [\d.]+ GiB of weights.*and has 128.000: [\d.]+ GiB too much"
    ):
        fit(tensors, metadata, devices([24], 128), cache)
    with pytest.raises(DataError, match=r"not even the smallest layer.*CUDA0 1.000 GiB.*GiB are missing"):
        fit(tensors, metadata, devices([1], 512), cache)
    with pytest.raises(DataError, match="pass --vram"):
        fit(tensors, metadata, (CPU, Device("CUDA0")), cache)
    with pytest.raises(DataError, match="or omit --fit"):
        fit(tensors, metadata, devices([24], 512), cache, flags=parse_flags("-ot exps=CPU"))


def test_ranges_are_the_best_there_are() -> None:
    """Against trying all of them."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        base, bulk = rng.integers(1, 9, 6).tolist(), rng.integers(0, 30, 6).tolist()
        room = rng.integers(5, 60, 3).tolist()
        first, counts = fitting._partition(base, bulk, room)

        def held(start: int, counts: list[int], base: list[int] = base, bulk: list[int] = bulk, room: list[int] = room):
            total = 0
            for count, free in zip(counts, room):
                need = sum(base[start : start + count])
                if need > free:
                    return -1
                total += min(sum(bulk[start : start + count]), free - need) if count else 0
                start += count
            return total

        def all_of(n: int) -> list[list[int]]:
            return [[a, b, n - a - b] for a in range(n + 1) for b in range(n + 1 - a)]

        for start in range(7):
            most = max(held(start, counts) for counts in all_of(6 - start)) if start < 6 else 0
            if most >= 0:
                break
        assert first == start
        assert sum(counts) == 6 - start
        assert held(start, counts) == most


# --------------------------------------------------------------------------------------------------------------- speed


def test_speeds_follow_from_bytes() -> None:
    from quantkit import types

    q8 = types.get("q8_0")
    shapes = {"attn_q": (1024, 1024), "ffn_up_exps": (8, 1024, 1024)}
    names = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    tensors = {name: TensorSpec(name, shape, q8) for name, shape in names.items()}
    metadata = {"general.architecture": "m", "m.expert_count": 8, "m.expert_used_count": 2, "m.block_count": 2}
    there = devices([1], 1)
    size = q8.tensor_bytes((1024, 1024))
    result = place_model(tensors, parse_flags("-ngl 99 -ot exps=CPU"), metadata, there)
    rates = parse_rates("cpu=10,cuda:0=100", "--bandwidth", 1e9)
    speed = predict(tensors, metadata, result, {"CUDA0": 1000}, rates, {})
    assert speed.tokens == pytest.approx(1 / ((2 * size + 1000) / 100e9 + 4 * size / 10e9))
    assert speed.bound.startswith("CPU")
    assert any("arithmetic" in text for text in speed.assumptions)
    every = 1 - 0.75**512
    assert speed.prompt == pytest.approx(512 / (2 * size / 100e9 + 16 * every * size / 10e9))
    slow = predict(tensors, metadata, result, {}, rates, {"CPU": 1e9, "CUDA0": 1e15})
    assert slow.prompt == pytest.approx(512 / (2 * size / 100e9 + 2 * 512 * 4 * 2**20 / 1e9), rel=1e-3)
    assumed = predict(tensors, metadata, result, {}, {}, {})
    assert assumed.tokens == pytest.approx(1 / (2 * size / ASSUMED["cuda"] + 4 * size / ASSUMED["cpu"]))
    assert any("assumed; --bandwidth CPU=" in text for text in assumed.assumptions)
    for wrong in ("cpu", "cpu=x", "cpu=0"):
        with pytest.raises(DataError, match="--bandwidth"):
            parse_rates(wrong, "--bandwidth", 1e9)


@given(st.sets(st.tuples(st.integers(0, 93), st.sampled_from(["ffn_up_exps.weight", "ffn_down_exps.weight"]))))
def test_rules_match_exactly_the_tensors_that_stay(chosen: set[tuple[int, str]]) -> None:
    """Ranges of layers instead of lists: the same tensors, and each rule is short where layers follow each other."""
    every = [f"blk.{i}.{kind}" for i in range(94) for kind in ("ffn_up_exps.weight", "ffn_down_exps.weight")]
    names = [f"blk.{i}.{kind}" for i, kind in sorted(chosen)]
    texts = fitting.cpu_rules([*names, "output.weight"])
    rules = [rule for text in texts for rule in parse_rules(text)]
    assert all(rule.device == CPU.name for rule in rules)
    assert [name for name in [*every, "output.weight"] if any(rule.matches(name) for rule in rules)] == [
        name for name in [*every, "output.weight"] if name in {*names, "output.weight"}
    ]


def test_a_range_of_layers_is_a_short_rule() -> None:
    (text,) = fitting.cpu_rules([f"blk.{i}.ffn_up_exps.weight" for i in range(20, 36)])
    assert text == r"^blk\.(2[0-9]|3[0-5])\.(ffn_up_exps\.weight)$=CPU"
