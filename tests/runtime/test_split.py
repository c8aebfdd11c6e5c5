"""Models over several devices compute what they compute on one: layer split, graph split, tensors elsewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs, types
from quantkit.errors import DataError, QuantkitError, UnknownNameError, UnsupportedError
from quantkit.formats import gguf
from quantkit.placement import rules as placement
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs import checkpoints
from tests.runtime.conftest import rewrite

TOKENS = np.random.default_rng(2).integers(0, 320, 40)
FOUR = "cpu:0,cpu:1,cpu:2,cpu:3"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each architecture, with four layers, converted to GGUF in float32."""
    from quantkit.pipelines.conversion.convert import convert_checkpoint

    result = {}
    for arch, changes in {
        "llama": {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
        "qwen3moe": {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
        "deepseek2": {"num_hidden_layers": 4},
        "qwen35moe": {"num_hidden_layers": 4},
    }.items():
        directory = tmp_path_factory.mktemp(arch)
        checkpoints.tiny(directory / "hf", "float32", arch, **changes)
        convert_checkpoint(directory / "hf", directory / "model.gguf", "f32")
        result[arch] = directory / "model.gguf"
    return result


def difference(path: Path, numbers: np.ndarray, **how: Any) -> float:
    one = load(path, **{key: how[key] for key in ("mla", "cache_type", "flash_attention") if key in how})
    return float(np.abs(numbers - one.logits(TOKENS)).max())


def check(path: Path, tolerance: float = 1e-4, **how: Any) -> Model:
    """A model run so gives the logits of one device: prompts at once, then token by token."""
    model = load(path, **how)
    assert difference(path, model.logits(TOKENS), **how) < tolerance
    cache = model.new_cache(len(TOKENS))
    parts = [model.forward(TOKENS[:30], cache), *(model.forward([token], cache) for token in TOKENS[30:34])]
    assert difference(path, np.concatenate([*parts, model.forward(TOKENS[34:], cache)]), **how) < tolerance
    return model


CASES = [("llama", {}), ("qwen3moe", {}), ("qwen35moe", {}), *(("deepseek2", {"mla": mla}) for mla in range(4))]
by_model = pytest.mark.parametrize(
    ("arch", "how"),
    [
        pytest.param(arch, how, id=f"{arch}{how.get('mla', '')}", marks=[pytest.mark.full] * (how.get("mla") in (1, 2)))
        for arch, how in CASES
    ],
)


@by_model
@pytest.mark.parametrize("count", [2, 3])
def test_layers_over_devices(arch: str, how: dict[str, Any], count: int, models: dict[str, Path]) -> None:
    model = check(models[arch], devices=",".join(FOUR.split(",")[:count]), **how)
    assert model.split is not None
    assert {device.name for device in model.placement.of_layer.values()} == {f"cpu:{i}" for i in range(count)}
    assert model.split.ledger.bytes["cpu:0", "cpu:1"] == 2 * len(TOKENS) * 4 * model.hparams.n_embd


@by_model
@pytest.mark.parametrize("count", [2, 4])
def test_layers_shared_by_devices(arch: str, how: dict[str, Any], count: int, models: dict[str, Path]) -> None:
    check(models[arch], devices=",".join(FOUR.split(",")[:count]), split_mode="graph", **how)


@by_model
def test_experts_on_another_device(arch: str, how: dict[str, Any], models: dict[str, Path]) -> None:
    for mode in ("layer", "graph"):
        rules = "exps=cpu:1" if arch != "llama" else "ffn=cpu:1" if mode == "layer" else ""
        check(models[arch], devices=FOUR, split_mode=mode, override_tensor=rules, **how)


MAPS = [pytest.param(i, marks=[] if i < 3 else pytest.mark.full) for i in range(50)]


@pytest.mark.parametrize("seed", MAPS)
def test_random_maps_of_tensors(seed: int, models: dict[str, Path]) -> None:
    """Every tensor on a random device, keys and values with their layer or on the CPU."""
    rng = np.random.default_rng(seed)
    for arch, how in CASES if seed else CASES[:3]:
        names = gguf.open(models[arch]).tensors
        devices = ("CPU", "cpu:0", "cpu:1", "cpu:2")
        rules = [f"^{re.escape(name)}$={devices[rng.integers(4)]}" for name in names]
        model = check(
            models[arch], devices="cpu:0,cpu:1,cpu:2", override_tensor=rules, kv_on_cpu=bool(rng.integers(2)),
            gpu_layers=int(rng.integers(6)), **how,
        )  # fmt: skip
        assert [f"^{re.escape(name)}$={device.name}" for name, device in model.placement.devices.items()] == rules
        assert model.split is not None
        assert model.split.ledger.moved_bytes > 0


def test_latents_expanded_for_long_prompts_on_several_devices(models: dict[str, Path]) -> None:
    tokens = np.random.default_rng(3).integers(0, 320, 150)
    rules = [r"attn_k_b=cpu:1", r"attn_v_b=CPU"]
    for mla in (2, 3):
        expected = load(models["deepseek2"], mla=mla).logits(tokens)
        for how in ({"split_mode": "graph"}, {"override_tensor": rules}, {"kv_on_cpu": True}):
            result = load(models["deepseek2"], mla=mla, devices="cpu:0,cpu:1", **how).logits(tokens)
            assert np.abs(result - expected).max() < 1e-4


@pytest.mark.parametrize(
    "how",
    [
        {"split_mode": "graph", "tensor_split": (3, 1)},
        {"split_mode": "graph", "gpu_layers": 2},
        {"split_mode": "graph", "max_gpus": 2, "devices": FOUR},
        {"split_mode": "graph", "experts_by": "columns"},
        {"split_mode": "graph", "n_cpu_moe": 2},
        {"split_mode": "none", "main_gpu": 1},
        {"kv_on_cpu": True, "cache_type": "q8_0"},
        {"split_mode": "graph", "cache_type": "f16", "flash_attention": False},
        {"n_cpu_moe": 1, "tensor_split": (1, 3)},
    ],
    ids=str,
)  # fmt: skip
def test_ways_to_share(how: dict[str, Any], models: dict[str, Path]) -> None:
    tolerance = 0.01 if "cache_type" in how else 1e-4  # a key near a tie of two codes may round apart
    check(models["qwen3moe"], tolerance, **{"devices": "cpu:0,cpu:1", **how})


@pytest.mark.parametrize("how", [{}, {"split_mode": "graph"}], ids=str)
def test_caches_of_split_models_forget_and_go_on(how: dict[str, Any], models: dict[str, Path]) -> None:
    path = models["llama"]
    model, expected = load(path, devices="cpu:0,cpu:1", **how), load(path).logits(TOKENS)
    cache = model.new_cache(64)
    assert cache.nbytes == load(path).new_cache(64).nbytes
    assert {name for name, part in cache.parts.items() if part.nbytes} == {"cpu:0", "cpu:1"}  # type: ignore[attr-defined]
    model.forward(TOKENS, cache)
    cache.truncate(10)
    assert np.abs(model.forward(TOKENS[10:20], cache) - expected[10:20]).max() < 1e-4
    cache.clear()
    assert np.abs(model.forward(TOKENS[:20], cache) - expected[:20]).max() < 1e-4
    together = model.forward_sequences(TOKENS.reshape(4, 10), slice(None))
    alone = np.stack([load(path).logits(chunk) for chunk in TOKENS.reshape(4, 10)])
    assert np.abs(together - alone).max() < 1e-4
    other = model.new_cache(64)
    ends = model.forward_batch([(TOKENS[:7], other), (TOKENS[20:25], cache)])
    assert np.abs(ends[0] - expected[6]).max() < 1e-4


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3moe"])
@pytest.mark.parametrize("how", [{}, {"split_mode": "graph"}], ids=str)
def test_states_are_saved_and_restored_when_sliced(arch: str, how: dict[str, Any], models: dict[str, Path]) -> None:
    path = models[arch]
    model, expected = load(path, devices="cpu:0,cpu:1", **how), load(path).logits(TOKENS)
    cache, other = model.new_cache(64), model.new_cache(48)
    assert cache.state_bytes == load(path).new_cache(64).state_bytes
    model.forward(TOKENS[:25], cache)
    saved = cache.save()
    assert (saved.length, sum(part.nbytes > 0 for part in saved.parts.values())) == (25, 2)  # type: ignore[attr-defined]
    cache.mark()
    model.forward(TOKENS[:5], cache)
    cache.truncate(25)
    assert np.abs(model.forward(TOKENS[25:30], cache) - expected[25:30]).max() < 1e-4
    other.restore(saved)
    assert np.abs(model.forward(TOKENS[25:], other) - expected[25:]).max() < 1e-4
    if arch == "qwen35moe":
        with pytest.raises(DataError, match="recurrent layers have no state of each length"):
            other.truncate(7)
    with pytest.raises(DataError, match="saved from devices CPU alone"):
        cache.restore(load(path).new_cache(8).save())
    with pytest.raises(DataError, match="under one placement"):
        load(path, devices="cpu:0").new_cache(64).restore(saved)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sums_travel_in_fewer_bits_when_asked(kind: str, models: dict[str, Path]) -> None:
    model = load(models["llama"], devices="cpu:0,cpu:1", split_mode="graph", reduce_type=kind)
    expected = load(models["llama"]).logits(TOKENS)
    error = np.abs(model.logits(TOKENS) - expected).max() / np.std(expected)
    assert 1e-5 < error < (0.02 if kind == "f16" else 0.1)
    assert model.split is not None
    assert model.split.describe() == {
        "split_mode": "graph", "devices": {"CPU": 1, "cpu:0": 38, "cpu:1": 38}, "reduce": kind, "shares": [0.5, 0.5]
    }  # fmt: skip
    with pytest.raises(UnknownNameError, match="f8"):
        load(models["llama"], devices="cpu:0,cpu:1", split_mode="graph", reduce_type="f8")


QUANTIZED = ["q4_K", "q4_k_r4", "iq4_ks", "iq2_kt", "iq1_s_r4", "q8_0"]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if i < 2 else pytest.mark.full) for i, k in enumerate(QUANTIZED)]
)
def test_quantized_rows_are_cut_at_blocks(kind: str, tiny: Path, tmp_path: Path) -> None:
    """Two heads of 128 columns are one block of 256, so out cannot be cut; feed-forwards of 512 can."""
    path = rewrite(tiny, tmp_path / "model.gguf", kind, attn_output="q8_0")
    assert types.get(kind).block_size in (32, 256)
    check(path, devices="cpu:0,cpu:1", split_mode="graph")
    whole = rewrite(tiny, tmp_path / "whole.gguf", "q4_K")
    with pytest.raises(
        UnsupportedError, match=r"blk.0.attn_output.weight: q4_K can be split at multiples of 256 columns"
    ):
        load(whole, devices="cpu:0,cpu:1", split_mode="graph")


def test_fast_numerics_run_layer_by_layer_and_say_so(models: dict[str, Path], tiny: Path) -> None:
    model = load(tiny, numerics="fast", devices="cpu:0,cpu:1")
    assert "layer by layer" in (model.fallback_reason or "")
    one = load(tiny, numerics="fast").logits(TOKENS)
    assert np.abs(model.logits(TOKENS) - one).max() < 0.05 * np.std(one)


def test_what_enters_matrices_is_seen_wherever_they_are(models: dict[str, Path]) -> None:
    def seen(**how: Any) -> dict[Any, np.ndarray]:
        model, result = load(models["qwen3moe"], **how), {}
        model.observer = lambda name, x, *which: result.setdefault((name, *which), np.array(x))
        model.logits(TOKENS)
        return result

    expected = seen()
    result = seen(devices="cpu:0,cpu:1", override_tensor=["down_exps=CPU", "attn_v=cpu:1"])
    assert result.keys() == expected.keys()
    assert all(np.abs(result[key] - expected[key]).max() < 1e-4 for key in expected)
    with pytest.raises(UnsupportedError, match="-sm graph cuts them"):
        seen(devices="cpu:0,cpu:1", split_mode="graph")


def test_project_uses_the_observer_that_is_set_now(models: dict[str, Path]) -> None:
    model = load(models["llama"], devices="cpu:0=1GiB,cpu:1=1GiB")
    seen: list[str] = []
    model.observer = lambda name, x, *which: seen.append(name)
    hidden = model.hidden_sequences(np.array([TOKENS]), slice(None))[0]
    seen.clear()
    model.observer = None
    model.project(hidden)
    assert not seen
    model.observer = lambda name, x, *which: seen.append(name)
    model.project(hidden)
    assert seen == ["output.weight"]


@pytest.mark.parametrize("how", [{}, {"split_mode": "graph"}], ids=str)
def test_a_bad_tensor_is_named_and_nobody_waits(how: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    from tests.runtime.test_model import edited, put

    path = edited(tiny, tmp_path / "bad.gguf", "blk.1.ffn_up.weight", put(3, 5, np.nan))
    for tripwire in ("layer", "full"):
        with pytest.raises(DataError, match=r"blk.1.ffn_up.weight made nan.*not finite in 1 row\(s\), first 3"):
            load(path, devices="cpu:0,cpu:1", tripwire=tripwire, **how).logits(TOKENS)


@pytest.mark.parametrize(
    ("how", "message"),
    [({"devices": "cpu:0", "split_mode": "graph"}, "at least 2 GPUs, there are 1"),
     ({"devices": "cpu:0,cpu:1", "split_mode": "graph", "kv_on_cpu": True}, "-nkvo"),
     ({"devices": "cpu:0,cpu:1", "split_mode": "graph", "override_tensor": "attn_q=CPU"},
      r"-ot attn_q=CPU: blk.0.attn_q.weight would go to CPU"),
     ({"devices": "cpu:0", "override_tensor": "attn_q=cpu:1"}, "device 'cpu:1' is not available"),
     ({"override_tensor": "attn_q=CUDA0"}, "valid devices: CPU")],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_is_read(how: dict[str, Any], message: str, tiny: Path) -> None:
    with pytest.raises(QuantkitError, match=message):
        load(tiny, **how)


def test_without_torch_graph_split_says_what_is_missing(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"torch is not there.*pip install 'quantkit\[torch\]'"):
        load(models["llama"], devices="cpu:0,cpu:1", split_mode="graph")
    assert load(models["llama"], devices="cpu:0,cpu:1").logits(TOKENS[:3]).shape == (3, 320)


def test_parts_of_a_model_with_other_tensors(models: dict[str, Path], tmp_path: Path) -> None:
    """What `compare_layers` does: a block with tensors of another file, on devices."""
    from quantkit.evaluate.layers.parts import parts

    other = gguf.open(rewrite(models["llama"], tmp_path / "q.gguf", "f16")).tensors
    for how in ({}, {"split_mode": "graph"}):
        pairs = zip(parts(load(models["llama"]), TOKENS.reshape(2, 20)),
                    parts(load(models["llama"], devices="cpu:0,cpu:1", **how), TOKENS.reshape(2, 20)))  # fmt: skip
        for one, several in pairs:
            assert np.abs(one.run({}) - several.run({})).max() < 1e-4
            others = {name: other[name] for name in one.weights if "ffn_down" in name}
            assert np.abs(one.run(others) - several.run(others)).max() < 1e-4


def test_a_profile_says_where_time_goes(models: dict[str, Path]) -> None:
    model = load(models["qwen3moe"], devices="cpu:0,cpu:1", override_tensor="exps=CPU", profile=True)
    model.logits(TOKENS)
    assert model.split is not None
    ledger = model.split.ledger
    assert ledger.seconds["CPU"]["experts"] > 0
    assert {"products", "attention", "norms", "transfer"} <= ledger.seconds["cpu:0"].keys()
    assert re.search(r"spends \d+% of its time on \w+: the run is bound by", ledger.bound())
    assert ledger.to_json()["tokens"] == len(TOKENS)
    recurrent = load(models["qwen35moe"], devices="cpu:0,cpu:1", split_mode="graph", profile=True)
    recurrent.logits(TOKENS)
    assert recurrent.split is not None
    assert {"recurrent", "waiting", "other"} <= recurrent.split.ledger.seconds["cpu:1"].keys()
    one = load(models["llama"], profile=True)
    one.logits(TOKENS)
    assert one.split is not None
    assert set(one.split.ledger.seconds) == {"CPU"}
    assert one.split.ledger.moved_bytes == 0
    ledger.clear()
    assert ledger.bound() == ""


@pytest.mark.full
@pytest.mark.parametrize("arch", [arch.name for arch in archs.all()])
def test_every_architecture_on_devices(arch: str, tmp_path: Path) -> None:
    from quantkit.pipelines.conversion.convert import convert_checkpoint

    checkpoints.tiny(tmp_path / "hf", "float32", arch)
    path = tmp_path / "model.gguf"
    convert_checkpoint(tmp_path / "hf", path, "f32")
    for how in ({}, {"split_mode": "graph"}, {"override_tensor": r"(attn_out|down|gate_inp)=cpu:1"}):
        try:
            # scores of gemma4 are not scaled, so differences of rounding grow
            check(path, 1e-3 if arch == "gemma4" else 1e-4, devices="cpu:0,cpu:1", **how)
        except UnsupportedError as error:  # the ways that are refused
            if arch in ("deepseek4", "gemma3n"):
                assert re.search("cannot shard CompressedAttention|with -sm graph only the three", str(error))  # noqa: PT017
                assert how == {"split_mode": "graph"}
                continue
            if arch == "mistral-large4":
                assert "scales queries by position and head" in str(error)  # noqa: PT017
                assert how == {"split_mode": "graph"}
                continue
            if arch == "longcat-flash":
                assert "experts without matrices" in str(error)  # noqa: PT017
                assert how == {"split_mode": "graph"}
                continue
            reasons = (
                "normalized together|computed in parallel|several matrices|experts that devices share|"
                "(KimiDelta|Mamba2|NGrams|ShortConv) layers"
            )
            assert re.search(reasons, str(error))  # noqa: PT017
            assert how == {"split_mode": "graph"}


def test_plain_placements_are_run_as_ever(tiny: Path) -> None:
    assert load(tiny, override_tensor="ffn=CPU").split is None
    assert placement.place(["a"]).is_cpu_only
