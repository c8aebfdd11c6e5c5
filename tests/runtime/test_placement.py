"""The device of each tensor, and which tensors are repacked: figures of shared/field-notes.md 4."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantkit import types
from quantkit.errors import DataError, UnknownNameError, UnsupportedError
from quantkit.formats.gguf import TensorSpec
from quantkit.placement.devices import CPU, Device, parse_devices
from quantkit.placement.rules import (
    ALL_LAYERS,
    Flags,
    Placement,
    PlacementRule,
    gpu_kernels,
    parse_flags,
    parse_rules,
    place,
    plan,
)
from quantkit.repack.eligible import interleaved
from quantkit.runtime.kernels.cuda.dispatch import product

NAMES = [
    "token_embd.weight",
    "blk.0.attn_output.weight",
    "blk.0.ffn_down_exps.weight",
    "blk.1.ffn_down.weight",
    "output.weight",
]
GPU = Device("CUDA0")


def test_without_rules_every_tensor_is_on_the_default_device() -> None:
    assert place(NAMES).devices == dict.fromkeys(NAMES, CPU)


def test_the_first_rule_that_matches_decides_wherever_it_matches() -> None:
    rules = parse_rules(r"output\.weight=CUDA0,exps=CPU,ffn=CUDA0")
    result = place(NAMES, rules, [CPU, GPU])
    assert [result[name] for name in NAMES] == [CPU, GPU, CPU, GPU, GPU]
    assert result.decided == (2, 1, 1)
    assert result.idle == []


def test_rules_that_decide_nothing_are_reported() -> None:
    result = place(NAMES, parse_rules("ffn=CPU,exps=CPU,[3-5]xyz=CPU"))
    assert [str(rule) for rule in result.idle] == ["exps=CPU", "[3-5]xyz=CPU"]


def test_a_comma_inside_a_regex_does_not_end_a_rule() -> None:
    assert parse_rules(r"blk\.\d{1,2}\.ffn=CPU,[a,b]=CPU") == [
        PlacementRule(r"blk\.\d{1,2}\.ffn", "CPU"),
        PlacementRule("[a,b]", "CPU"),
    ]


def test_the_last_equals_sign_separates() -> None:
    assert parse_rules("a=b=CPU") == [PlacementRule("a=b", "CPU")]


@pytest.mark.parametrize("text", ["ffn", "=CPU", "ffn=", "a=CPU,b"])
def test_a_rule_without_both_sides_is_an_error(text: str) -> None:
    with pytest.raises(DataError, match="REGEX=DEVICE"):
        parse_rules(text)


def test_a_broken_regex_is_an_error() -> None:
    with pytest.raises(DataError, match="not a regular expression"):
        parse_rules("blk[=CPU")


def test_a_device_that_is_not_there_is_an_error_with_the_valid_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"ffn=CUDA0.*valid devices: CPU"):
        place(NAMES, parse_rules("ffn=CUDA0"))
    with pytest.raises(UnsupportedError, match=r"-ngl 5.*valid devices: CPU"):
        place(NAMES, gpu_layers=5)


def test_devices_are_found_in_any_case() -> None:
    assert place(["a"], parse_rules("a=cpu"))["a"] == CPU


# ------------------------------------------------------------------------------------------- layers and experts on GPUs


def layer_names(layers: int, dense: int = 0) -> list[str]:
    """A model's names: attention and, after `dense` plain layers, experts."""
    names = ["token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"]
    for i in range(layers):
        names.append(f"blk.{i}.attn_q.weight")
        names += [f"blk.{i}.ffn_{part}{'_exps' if i >= dense else ''}.weight" for part in ("up", "down", "gate")]
    return names


def on_gpu(placement: Placement) -> set[str]:
    return {name for name in placement.devices if not placement.on_cpu(name)}


def test_layers_go_to_the_gpu_from_the_last_one_down() -> None:
    names = layer_names(4)
    assert on_gpu(place(names, (), [CPU, GPU], 0)) == set()
    assert on_gpu(place(names, (), [CPU, GPU], 2)) == {name for name in names if name[:6] in ("blk.2.", "blk.3.")}
    assert on_gpu(place(names, (), [CPU, GPU], 4)) == {name for name in names if name.startswith("blk.")}
    everything = {name for name in names if name not in ("token_embd.weight", "rope_freqs.weight")}
    for gpu_layers in (5, 99, None):
        assert on_gpu(place(names, (), [CPU, GPU], gpu_layers)) == everything
    # The metadata know better than the names of a part of a model.
    assert on_gpu(place(names, (), [CPU, GPU], 4, n_layers=6)) == {n for n in names if n[:6] in ("blk.2.", "blk.3.")}


def test_several_gpus_share_the_layers() -> None:
    result = place(layer_names(7), (), [CPU, GPU, Device("CUDA1")], 99)
    assert [result[f"blk.{i}.attn_q.weight"].name[-1] for i in range(7)] == list("0000111")
    assert result["output.weight"].name == "CUDA1"


def layers_on_cpu(placement: Placement, layers: int) -> list[int]:
    return [i for i in range(layers) if placement.on_cpu(f"blk.{i}.ffn_up_exps.weight")]


def test_experts_stay_from_the_last_layer_down() -> None:
    def experts(names: list[str], count: int, **more: int) -> Placement:
        return place(names, parse_rules(r"blk\.9\.ffn=CUDA0"), [CPU, GPU], 99, n_cpu_moe=count, **more)

    names = layer_names(10)
    assert layers_on_cpu(experts(names, 3), 10) == [7, 8]  # -ot comes first
    assert layers_on_cpu(experts(names, ALL_LAYERS), 10) == list(range(9))
    assert layers_on_cpu(experts(names, 3, mtp_layers=1), 10) == [6, 7, 8]
    assert not experts(names, 3).on_cpu("blk.8.attn_q.weight")
    (rule,) = place(layer_names(3, dense=3), (), [CPU, GPU], n_cpu_moe=ALL_LAYERS).idle
    assert rule.text == "--cpu-moe"
    assert place([], n_cpu_moe=2).idle[0].text == "--n-cpu-moe 2"


def test_experts_stay_in_proportion_where_gpus_share_the_layers() -> None:
    result = place(layer_names(9), (), [CPU, GPU, Device("CUDA1")], 99, n_cpu_moe=4)
    assert [result[f"blk.{i}.attn_q.weight"].name[-1] for i in range(9)] == list("000001111")
    assert layers_on_cpu(result, 9) == [3, 4, 7, 8]


def test_flags_as_they_are_typed() -> None:
    result = parse_flags("-ngl 99 -ot 'blk\\.(3|4)\\.ffn_.*=CUDA0' --override-tensor exps=CPU --n-cpu-moe 7")
    assert result == Flags(99, (r"blk\.(3|4)\.ffn_.*=CUDA0", "exps=CPU"), 7)
    assert result.rules == [PlacementRule(r"blk\.(3|4)\.ffn_.*", "CUDA0"), PlacementRule("exps", "CPU")]
    assert parse_flags("--cpu-moe") == Flags(None, (), ALL_LAYERS)
    assert parse_flags("") == Flags()


@pytest.mark.parametrize(
    ("text", "message"),
    [("-fa -ngl 99", "-fa.*supported: -ngl N"), ("-ngl x", "invalid int value"), ("-ot 'a", "No closing quotation"),
     ("-ngl -1", "-ngl -1: the number of layers must be 0 or more"), ("--n-cpu-moe -2", "--n-cpu-moe -2")],
)  # fmt: skip
def test_flags_that_are_none(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_flags(text)


# ------------------------------------------------------------------------------------------------------ whole models


def deepseek(down: str, gate: str) -> dict[str, TensorSpec]:
    """DeepSeek-R1 with all three sets of attention tensors: 1147, of which 361 are float32."""
    names: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((129280, 7168), "q8_0"), "output.weight": ((129280, 7168), "q8_0"),
        "output_norm.weight": ((7168,), "f32"),
    }  # fmt: skip
    for i in range(61):
        at = f"blk.{i}."
        for norm, n in (("attn_norm", 7168), ("attn_q_a_norm", 1536), ("attn_kv_a_norm", 512), ("ffn_norm", 7168)):
            names[f"{at}{norm}.weight"] = (n,), "f32"
        for name, shape in {
            "attn_q_a": (1536, 7168), "attn_q_b": (24576, 1536), "attn_kv_a_mqa": (576, 7168),
            "attn_kv_b": (32768, 512), "attn_k_b": (65536, 128), "attn_v_b": (16384, 512), "attn_output": (7168, 16384),
        }.items():  # fmt: skip
            names[f"{at}{name}.weight"] = shape, "q8_0"
        n_ff, end = (18432, "") if i < 3 else (2048, "_shexp")
        names[f"{at}ffn_down{end}.weight"] = (7168, n_ff), "q8_0"
        names |= {f"{at}ffn_{part}{end}.weight": ((n_ff, 7168), "q8_0") for part in ("gate", "up")}
        if i >= 3:
            names[f"{at}ffn_gate_inp.weight"] = (256, 7168), "f32"
            names[f"{at}exp_probs_b.bias"] = (256,), "f32"
            names[f"{at}ffn_down_exps.weight"] = (256, 7168, 2048), down
            names |= {f"{at}ffn_{part}_exps.weight": ((256, 2048, 7168), gate) for part in ("gate", "up")}
    return {name: TensorSpec(name, shape, types.get(kind)) for name, (shape, kind) in names.items()}


def qwen3_235b(attention: str, down: str, gate: str) -> dict[str, TensorSpec]:
    names: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((151936, 4096), "q8_0"), "output.weight": ((151936, 4096), "q8_0"),
        "output_norm.weight": ((4096,), "f32"),
    }  # fmt: skip
    for i in range(94):
        at = f"blk.{i}."
        for norm, n in (("attn_norm", 4096), ("ffn_norm", 4096), ("attn_q_norm", 128), ("attn_k_norm", 128)):
            names[f"{at}{norm}.weight"] = (n,), "f32"
        names[f"{at}ffn_gate_inp.weight"] = (128, 4096), "f32"
        for name, shape in {"q": (8192, 4096), "k": (512, 4096), "v": (512, 4096), "output": (4096, 8192)}.items():
            names[f"{at}attn_{name}.weight"] = shape, attention
        names[f"{at}ffn_down_exps.weight"] = (128, 4096, 1536), down
        names |= {f"{at}ffn_{part}_exps.weight": ((128, 1536, 4096), gate) for part in ("gate", "up")}
    return {name: TensorSpec(name, shape, types.get(kind)) for name, (shape, kind) in names.items()}


def repacked(tensors: dict[str, TensorSpec], flags: str) -> int:
    """How many tensors -rtr repacks."""
    placement = plan(tensors, parse_flags(flags), {}, "model.gguf")
    on_cpu = [t for name, t in tensors.items() if placement.on_cpu(name)]
    return sum(interleaved(t.name, t.shape, t.type)[0] is not None for t in on_cpu)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("-ngl 99 -ot exps=CPU", 174),
        ("-ngl 99 --cpu-moe", 174),
        (r"-ngl 99 -ot 'blk\.3\.ffn_.*=CUDA0' -ot exps=CPU", 171),
        (r"-ngl 99 -ot 'blk\.(3|4)\.ffn_.*=CUDA0,exps=CPU'", 168),
        ("-ngl 99 --n-cpu-moe 56", 168),
    ],
)
def test_counts_of_deepseek(flags: str, count: int) -> None:
    tensors = deepseek("iq3_k", "iq2_k")
    assert len(tensors) == 1147
    assert sum(t.type.name == "f32" for t in tensors.values()) == 361
    assert repacked(tensors, flags) == count


def test_counts_of_qwen3() -> None:
    tensors = qwen3_235b("iq6_k", "iq4_k", "iq3_k")
    assert len(tensors) == 1131
    assert sum(t.type.name == "f32" for t in tensors.values()) == 471
    assert repacked(tensors, "-ngl 99 --n-cpu-moe 82") == 246
    layers = "|".join(map(str, range(12)))
    assert repacked(tensors, rf"-ngl 99 -ot 'blk\.({layers})\.ffn_.*=CUDA0,exps=CPU'") == 246
    assert repacked(qwen3_235b("iq6_k", "q8_0", "iq6_k"), "-ngl 0") == 95


# ---------------------------------------------------------------------------------------------- interleaved on a GPU


def test_ik_llama_has_cuda_kernels_for_eight_interleaved_types_and_quantkit_for_all() -> None:
    assert all(product(t) for t in types.all() if t.interleave > 1)
    result = {t.name for t in types.all() if t.interleave > 1 and gpu_kernels(t)}
    assert result == {"iq1_s_r4", "iq1_m_r4", "iq2_k_r4", "iq3_k_r4", "iq4_k_r4", "iq5_k_r4", "iq4_ks_r4", "iq5_ks_r4"}
    assert gpu_kernels(types.get("q4_K"))
    assert not gpu_kernels(types.get("iq1_s_r4"), 384)


def test_interleaved_tensors_are_refused_on_a_gpu_without_a_kernel() -> None:
    tensors = deepseek("q3_k_r4", "iq2_k_r4")
    with pytest.raises(UnsupportedError) as refused:
        plan(tensors, parse_flags(r"-ngl 99 -ot 'blk\.(5|6|9)\.ffn=CPU'"), {}, "model.gguf")
    message = str(refused.value)
    assert "model.gguf: 55 row-interleaved tensors would go to a GPU, and ik_llama.cpp has no CUDA kernel" in message
    assert "blk.(3-4,7-8,10-60).ffn_down_exps.weight  q3_k_r4  CUDA0" in message
    assert "iq2_k_r4" not in message
    assert "quantkit unpack model.gguf OUT" in message
    with pytest.raises(UnsupportedError) as refused:
        plan(tensors, parse_flags("-ngl 99"), {}, "model.gguf")
    rule = str(refused.value).split("-ot '")[1].split("'")[0]
    assert rule == r"^(blk\.\d+\.ffn_down_exps\.weight)$=CPU"
    assert not plan(tensors, parse_flags(f"-ngl 99 -ot '{rule}'"), {}, "model.gguf").on_cpu("blk.3.ffn_up_exps.weight")


def test_a_plan_for_quantkit_uses_quantkits_kernels() -> None:
    tensors = deepseek("q3_k_r4", "iq2_k_r4")
    result = plan(tensors, replace(parse_flags("-ngl 99"), runtime="quantkit"), {}, "model.gguf")
    assert not result.on_cpu("blk.3.ffn_down_exps.weight")
    with pytest.raises(UnknownNameError, match="llama"):
        replace(parse_flags("-ngl 99"), runtime="llama")


def test_plans_know_the_model_from_its_metadata_and_devices_from_the_rules() -> None:
    tensors = {name: TensorSpec(name, (256, 256), types.get("q8_0")) for name in layer_names(4)}
    metadata = {"general.architecture": "glm4moe", "glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    result = plan(tensors, parse_flags("-ngl 99 --n-cpu-moe 1"), metadata, "model.gguf")
    assert layers_on_cpu(result, 4) == [2]
    result = plan(tensors, parse_flags("-ot 'blk.0=CUDA2,blk.1=cpu'"), metadata, "model.gguf")
    assert result["blk.0.attn_q.weight"] == Device("CUDA2")
    assert result["blk.1.attn_q.weight"] == CPU
    assert result["blk.2.attn_q.weight"] == Device("CUDA1")
    with pytest.raises(UnsupportedError, match="'CDUA0' is not a device; valid devices: CPU, CUDA0"):
        plan(tensors, parse_flags("-ot exps=CDUA0"), metadata, "model.gguf")


def test_shares_of_gpus() -> None:
    names = [f"blk.{i}.attn_q.weight" for i in range(7)] + ["output.weight"]
    gpus = [Device("CUDA0"), Device("CUDA1"), Device("CUDA2")]

    def counts(split: tuple[float, ...], layers: int = 99) -> list[int]:
        result = place(names, (), [CPU, *gpus], layers, tensor_split=split)
        return [sum(result[name] == device for name in names) for device in gpus]

    assert counts((2, 1, 1)) == [4, 2, 2]
    assert counts((3, 1)) == [6, 2, 0]
    assert counts((0, 1, 1)) == [0, 4, 4]
    assert counts((1, 0, 0), 3) == [3, 0, 0]
    assert counts(()) == counts((5, 5, 5)) == [3, 3, 2]
    assert parse_flags("-ngl 9 -ts 3,1").tensor_split == parse_flags("-ngl 9 -ts 3/1").tensor_split == (3, 1)
    for wrong, message in (("a,b", "shares must be numbers"), ("0,0", "not all 0"), ("1,-1", "shares must be from 0")):
        with pytest.raises(DataError, match=message):
            parse_flags(f"-ts={wrong}")
    tensors = {name: TensorSpec(name, (8, 32), types.get("q8_0")) for name in names}
    result = plan(tensors, parse_flags("-ngl 99 -ts 1,1"), {"general.architecture": "llama"}, "m.gguf")
    assert [result[name].name for name in names] == ["CUDA0"] * 4 + ["CUDA1"] * 4


# ---------------------------------------------------------------------------------------------- modes and their devices


VIRTUAL = parse_devices("cpu=64GiB,cpu:0=2GiB,cpu:1=6GiB")


def test_devices_as_they_are_typed() -> None:
    result = parse_devices("cuda:1=24GiB,cpu:0=512MiB,CUDA0,cpu=1.5")
    assert [(d.name, d.memory) for d in result] == [
        ("CPU", 3 << 29), ("CUDA1", 24 << 30), ("cpu:0", 512 << 20), ("CUDA0", None)
    ]  # fmt: skip
    assert [d.runs_here for d in result] == [True, False, True, False]
    assert parse_devices("")[0] == CPU
    for wrong, message in (("gpu0", "is not a device"), ("cuda", "is not a device"), ("cpu:0=2TB", "not a memory size"),
                        ("cpu:0,CPU:0", "twice")):  # fmt: skip
        with pytest.raises((DataError, UnsupportedError), match=message):
            parse_devices(wrong)


def test_layers_are_shared_by_memory_where_it_is_known() -> None:
    result = place(layer_names(7), parse_rules("down_exps=CPU"), VIRTUAL)
    assert [result[f"blk.{i}.attn_q.weight"].name for i in range(7)] == ["cpu:0"] * 2 + ["cpu:1"] * 5
    assert result["output.weight"].name == "cpu:1"
    assert result.reasons["blk.0.ffn_down_exps.weight"] == "-ot down_exps=CPU"
    assert result.reasons["blk.0.attn_q.weight"] == "layer 0, all layers, is on cpu:0 (-sm layer)"
    assert result.reasons["token_embd.weight"] == "not in a layer: embeddings stay on the CPU"


def test_one_gpu_of_several() -> None:
    result = place(layer_names(3), (), VIRTUAL, 2, split_mode="none", main_gpu=1)
    assert {device.name for device in result.devices.values()} == {"CPU", "cpu:1"}
    assert result.reasons["blk.0.attn_q.weight"] == "layer 0 is not included in -ngl 2"
    with pytest.raises(UnsupportedError, match="-mg 2: there are 2 GPUs"):
        place(layer_names(3), (), VIRTUAL, split_mode="none", main_gpu=2)


def test_layers_that_are_shared() -> None:
    result = place(layer_names(3), parse_rules("exps=CPU"), VIRTUAL, split_mode="graph")
    assert result.sharded == {f"blk.{i}.attn_q.weight" for i in range(3)} | {"output_norm.weight", "output.weight"}
    assert result.shares == dict.fromkeys(range(4), (0.25, 0.75))
    assert "is shared by cpu:0, cpu:1 (-sm graph)" in result.reasons["blk.1.attn_q.weight"]
    assert place(layer_names(3), (), VIRTUAL, 2, split_mode="graph", tensor_split=(1, 1)).shares == {
        1: (0.5, 0.5), 2: (0.5, 0.5)
    }  # fmt: skip
    some = place(layer_names(4), (), [CPU, *(Device(f"CUDA{i}") for i in range(3))], split_mode="graph", max_gpus=2)
    assert [[share > 0 for share in some.shares[i]] for i in range(3)] == [
        [True, True, False], [True, False, True], [False, True, True]
    ]  # fmt: skip
    with pytest.raises(UnsupportedError, match="at least 2 GPUs, there are 1"):
        place(layer_names(3), (), [CPU, GPU], split_mode="graph")


def test_caches_follow_their_layer_or_stay() -> None:
    assert place(layer_names(2), (), [CPU, GPU], 1).of_cache(1) == GPU
    assert place(layer_names(2), (), [CPU, GPU], 1).of_cache(0) == CPU
    assert place(layer_names(2), (), [CPU, GPU], 2, kv_on_cpu=True).of_cache(1) == CPU


@pytest.mark.parametrize(
    ("text", "message"),
    [("-sm row", "split mode"), ("-sm none -ts 1,1", "-ts shares"), ("-mg 1", "-mg 1 needs -sm none"),
     ("--max-gpu 2", "--max-gpu 2 needs -sm graph"), ("-sm graph --max-gpu 0", "1 or more")],
)  # fmt: skip
def test_modes_that_do_not_go_together(text: str, message: str) -> None:
    with pytest.raises((DataError, UnknownNameError), match=message):
        parse_flags(text)


def test_all_flags_of_modes() -> None:
    result = parse_flags("-sm graph --max-gpu 2 -nkvo -ts 1,1 --devices cpu:0=1GiB,cpu:1")
    assert (result.split_mode, result.max_gpus, result.kv_on_cpu, len(result.devices)) == ("graph", 2, True, 3)
    assert parse_flags("-sm none -mg 1").main_gpu == 1
