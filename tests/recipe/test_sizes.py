"""Figures that people published about models of hundreds of gigabytes, to the last digit, from a config.json alone.

From field-notes.md 3 and 4: sizes, tensor counts, bytes by device, caches, numbers of repacked tensors.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quantkit import archs, recipe, types
from quantkit.archs import language_model
from quantkit.archs.deepseek2 import in_layout
from quantkit.cli import main
from quantkit.placement.budget import CacheSettings, budget
from quantkit.placement.rules import parse_flags
from quantkit.recipe import Options, Plan, find, shipped
from quantkit.recipe.models import from_config
from tests.recipe import configs
from tests.recipe.configs import DEEPSEEK_V3, QWEN35_27B

MIB = 1 << 20


@cache
def described(name: str) -> Any:
    return from_config(language_model(getattr(configs, name)))


@cache
def planned(name: str, rules: str, target: str = "Q8_0", repack: bool = False) -> Plan:
    specs, metadata = described(name)
    options = Options(ignore_imatrix_rules=True, repack=repack)
    return recipe.plan(specs, target, recipe.parse(rules), metadata=metadata, options=options)


def loads(name: str, rules: str, flags: str, target: str = "Q8_0") -> dict[str, float]:
    """MiB of weights by device."""
    made = planned(name, rules, target)
    found = budget({t.name: t for t in made.tensors}, described(name)[1], parse_flags(flags))
    return {load.device: load.weights / MIB for load in found.loads}


def cached(name: str, n_ctx: int, kind: str, values: str = "f16", mla: int = 3) -> str:
    """MiB of a cache, as it is printed."""
    sizes = CacheSettings(n_ctx, kind, values, mla).of_layers(described(name)[1])
    return f"{sum(sizes) / MIB:.2f}"


DEEPSEEK = r"blk\.\d+\.ffn_down_exps\.weight={},blk\.\d+\.ffn_(gate|up)_exps\.weight={},.*=q8_0"
ATTENTION = r"attn_(q|k|v|output)\.weight"


@pytest.mark.parametrize(
    ("down", "rest", "gib", "bpw"),
    [
        ("iq3_k_r4", "iq2_k_r4", "226.003", "2.889"),
        ("iq5_k_r4", "iq4_k_r4", "386.183", "4.936"),
        ("iq5_ks_r4", "iq4_ks_r4", "367.774", "4.701"),
        ("q6_k_r4", "q4_k_r4", "413.144", "5.281"),
        ("q3_k_r4", "q2_k_r4", "238.690", None),
    ],
)
def test_deepseek(down: str, rest: str, gib: str, bpw: str | None) -> None:
    made = planned("DEEPSEEK_V3", DEEPSEEK.format(down, rest))
    assert f"{made.bytes_after / 2**30:.3f}" == gib
    assert bpw is None or f"{made.bits_per_weight:.3f}" == bpw
    assert made.types() == {"q8_0": 612, "f32": 361, rest: 116, down: 58}


def test_more_bits_for_the_first_layers_of_deepseek() -> None:
    base = DEEPSEEK.format("iq3_k_r4", "iq2_k_r4")
    first = "blk.{3-10}.ffn_down_exps=iq4_k_r4,blk.{3-10}.ffn_(gate|up)_exps=iq3_k_r4,"
    more = planned("DEEPSEEK_V3", first + base).bytes_after - planned("DEEPSEEK_V3", base).bytes_after
    assert f"{more / 2**30:.2f}" == "11.16"


@pytest.mark.parametrize(
    ("rules", "gib", "bpw"),
    [
        (
            f"{ATTENTION}=iq6_k,ffn_down_exps=iq4_k,ffn_(gate|up)_exps=iq3_k,^(token_embd|output)=q8_0",
            "106.830",
            "3.903",
        ),
        (".*=q8_0", "232.769", None),
        ("ffn_down_exps=q8_0,^(token_embd|output)=q8_0,.*=iq6_k", "198.259", None),
    ],
)
def test_qwen3_235b(rules: str, gib: str, bpw: str | None) -> None:
    made = planned("QWEN3_235B", rules)
    assert f"{made.bytes_after / 2**30:.3f}" == gib
    assert bpw is None or f"{made.bits_per_weight:.3f}" == bpw
    assert len(made.tensors) == 1131
    assert made.types()["f32"] == 471


def test_qwen3_30b() -> None:
    made = planned("QWEN3_30B", f"_exps=iq4_xs,{ATTENTION}=q5_K,^output=q6_K", "IQ4_XS")
    assert f"{made.bytes_after / 2**30:.1f}" == "15.4"


def test_layouts_of_deepseek() -> None:
    every = archs.from_hf(DEEPSEEK_V3).tensors(DEEPSEEK_V3)
    counted = {
        layout: (len(found), f"{sum(math.prod(t.shape) for t in found) / 1e9:.3f}")
        for layout in ("all", "joint", "split")
        if (found := in_layout(every, layout))
    }
    assert counted == {"all": (1147, "672.050"), "joint": (1025, "671.026"), "split": (1086, "671.026")}


def test_what_a_measurement_of_deepseek_has_entries_for() -> None:
    joint = in_layout(archs.from_hf(DEEPSEEK_V3).tensors(DEEPSEEK_V3), "joint")
    assert len([t for t in joint if t.name.startswith("blk.") and len(t.shape) > 1]) == 720


@pytest.mark.parametrize(
    ("down", "rest", "kept_layers", "mib"),
    [
        ("iq3_k", "iq2_k", 58, "212744.00"),
        ("iq5_k", "iq4_k", 58, "376768.00"),
        ("iq5_k", "iq4_k", 57, "370272.00"),
        ("iq5_ks", "iq4_ks", 58, "357918.00"),
        ("iq5_ks", "iq4_ks", 57, "351747.00"),
        ("q3_k_r4", "q2_k_r4", 58, "225736.00"),
    ],
)
def test_experts_of_deepseek_on_the_cpu(down: str, rest: str, kept_layers: int, mib: str) -> None:
    on_gpu = r" -ot 'blk\.3\.ffn_.*_exps=CUDA0'" if kept_layers == 57 else ""
    found = loads("DEEPSEEK_V3", DEEPSEEK.format(down, rest), f"-ngl 99{on_gpu} -ot exps=CPU")
    embedding = types.get("q8_0").tensor_bytes((129280, 7168)) / MIB
    assert f"{embedding:.2f}" == "938.98"
    assert f"{found['CPU'] - embedding:.2f}" == mib
    if kept_layers == 58:
        assert f"{found['CUDA0']:.2f}" == "17743.99"


def test_parts_of_deepseek() -> None:
    made = planned("DEEPSEEK_V3", "token_embd=q4_K,.*=q8_0")
    assert f"{made['token_embd.weight'].bytes_after / MIB:.2f}" == "497.11"
    kv_b = sum(t.bytes_after for t in made.tensors if "attn_kv_b" in t.name)
    assert f"{kv_b / MIB:.1f}" == "1037.0"
    f32 = [t.name for t in made.tensors if t.type.name == "f32"]
    assert len(f32) == 361
    assert sum("norm" in name for name in f32) == 61 * 4 + 1


@pytest.mark.parametrize(
    ("n_ctx", "kind", "mib"),
    [(32768, "f16", "2196.00"), (32768, "q8_0", "1166.62"), (65536, "q8_0", "2333.25"), (131072, "q8_0", "4666.50"),
     (2048, "q8_0", "72.91")],
)  # fmt: skip
def test_latent_cache_of_deepseek(n_ctx: int, kind: str, mib: str) -> None:
    assert cached("DEEPSEEK_V3", n_ctx, kind) == mib


def test_full_cache_of_deepseek() -> None:
    assert cached("DEEPSEEK_V3", 2048, "f16", mla=0) == f"{61 * 2048 * 128 * (192 + 128) * 2 / MIB:.2f}"


@pytest.mark.parametrize(("kind", "mib"), [("f16", "6016.00"), ("q8_0", "3196.00")])
def test_cache_of_qwen3_235b(kind: str, mib: str) -> None:
    assert cached("QWEN3_235B", 32768, kind, kind) == mib


def test_qwen35_27b() -> None:
    specs, metadata = described("QWEN35_27B")
    assert len(specs) == 851
    assert f"{sum(math.prod(s.shape) for s in specs) / 1e9:.3f}" == "26.896"
    shapes = {s.name: s.shape for s in specs}
    assert shapes["blk.3.attn_q.weight"] == (12288, 5120)
    assert shapes["blk.0.attn_qkv.weight"] == (10240, 5120)
    assert shapes["blk.0.attn_gate.weight"] == (6144, 5120)
    assert shapes["blk.0.ssm_alpha.weight"] == shapes["blk.0.ssm_beta.weight"] == (48, 5120)
    assert shapes["blk.0.ssm_conv1d.weight"] == (10240, 4)
    assert shapes["blk.0.ssm_out.weight"] == (5120, 6144)
    assert metadata["qwen35.rope.dimension_sections"] == [11, 11, 10, 0]
    assert metadata["qwen35.rope.dimension_count"] == 64
    sizes = CacheSettings(4096).of_layers(metadata)
    assert sizes[0] == 4 * 817152
    assert sizes[3] == 4096 * 2 * 4 * 256 * 2


def test_recurrent_state_of_qwen35_122b() -> None:
    larger = language_model(QWEN35_27B) | {"linear_num_value_heads": 64}
    assert CacheSettings(1).of_layers(from_config(larger)[1])[0] == 4 * 1085440


@pytest.mark.parametrize(
    ("name", "rules", "flags", "count"),
    [
        ("DEEPSEEK_V3", DEEPSEEK.format("iq3_k", "iq2_k"), "-ngl 99 -ot exps=CPU", 174),
        ("DEEPSEEK_V3", DEEPSEEK.format("iq3_k", "iq2_k"), r"-ngl 99 -ot blk\\.3\\.=CUDA0 -ot exps=CPU", 171),
        ("DEEPSEEK_V3", DEEPSEEK.format("iq3_k", "iq2_k"), r"-ngl 99 -ot blk\\.[34]\\.=CUDA0 -ot exps=CPU", 168),
        ("QWEN3_235B", "ffn_down_exps=iq4_k,ffn_(gate|up)_exps=iq3_k,.*=iq6_k", "-ngl 99 -ncmoe 82", 246),
        ("QWEN3_235B", "ffn_down_exps=q8_0,^(token_embd|output)=q8_0,.*=iq6_k", "-ngl 0", 95),
    ],
)
def test_how_many_tensors_are_repacked_at_load(name: str, rules: str, flags: str, count: int) -> None:
    repacked = planned(name, rules, repack=True)
    plain = {t.name: t for t in planned(name, rules).tensors}
    places = budget(plain, described(name)[1], parse_flags(flags)).placement
    assert sum(t.repacked and places.on_cpu(t.name) for t in repacked.tensors) == count


# ------------------------------------------------------------------------------------------------------ shipped recipes

_SIZE = re.compile(r"^Size: (\S+), (\S+)(?: with (.*))?: ([\d.]+) GiB, ([\d.]+) bits a weight$", re.MULTILINE)
_MODELS = {
    "DeepSeek-V3": "DEEPSEEK_V3", "Qwen3-235B-A22B": "QWEN3_235B", "Qwen3-30B-A3B": "QWEN3_30B",
    "Qwen3.5-27B": "QWEN35_27B", "Llama-3.1-8B": "LLAMA_8B", "SmolLM2-135M": "SMOLLM2",
}  # fmt: skip


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_are_as_large_as_they_say_and_without_fault(name: str) -> None:
    said = _SIZE.findall(find(name).about)
    assert said, f"{name} tells no size"
    for model, target, settings, gib, bpw in said:
        specs, metadata = described(_MODELS[model])
        options = Options(ignore_imatrix_rules=True)
        made = find(name, dict(pair.split("=") for pair in settings.split()))
        made = recipe.plan(specs, target, made, metadata=metadata, options=options)
        assert (f"{made.bytes_after / 2**30:.3f}", f"{made.bits_per_weight:.3f}") == (gib, bpw)
        assert made.warnings == ()


_FITS = re.compile(r"^Fits: (\S+), (\S+): (.*)$", re.MULTILINE)
_MEMORY = re.compile(r"(\d+) GB\b")


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_fit_where_they_say(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags of each claim are those of a plan that fits; every memory that the story names is claimed."""
    about, claimed = find(name).about, set[str]()
    for model, target, flags in _FITS.findall(about):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(getattr(configs, _MODELS[model])))
        words = ["plan", str(path), target, "--recipe", name, *shlex.split(flags), "--ignore-imatrix-rules", "--json"]
        assert main(words) == 0
        found = json.loads(capsys.readouterr().out)["budget"]
        assert found["fits"], (flags, found["warnings"])
        assert found["warnings"] == []
        claimed |= set(re.findall(r"--(?:vram|ram) (\d+)", flags))
    assert claimed, f"{name} does not say where it fits"
    assert set(_MEMORY.findall(about)) <= claimed


def test_classes_of_models_have_a_recipe() -> None:
    models = {model for name in shipped() for model, *_ in _SIZE.findall(find(name).about)}
    assert models == set(_MODELS)


# --------------------------------------------------------------------------------------------------------- the command


def test_a_plan_of_a_bare_config_takes_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    started = time.process_time()
    rules = DEEPSEEK.format("iq3_k_r4", "iq2_k_r4")
    places = ["-ngl", "99", "-ot", "exps=CPU", "-c", "32768", "-ctk", "q8_0", "--vram", "24", "--ram", "256"]
    assert main(["plan", str(path), "Q8_0", "--custom-q", rules, *places]) == 0
    assert time.process_time() - started < 2
    said = capsys.readouterr().out
    for figure in ("226.003 GiB", "2.889 bits per weight", "17743.99 MiB", "1166.62 MiB", "213682.98 MiB"):
        assert figure in said
    assert "fits" in said
    assert "warning" not in said


def test_of_other_architectures_too() -> None:
    glm = {
        "architectures": ["Glm4MoeForCausalLM"], "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "attention_bias": True, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    specs, metadata = from_config(glm)
    assert f"{sum(math.prod(s.shape) for s in specs if not s.name.startswith('blk.46.')) / 1e9:.1f}" == "106.9"
    assert metadata["glm4moe.block_count"] == 47
    moe = language_model(QWEN35_27B) | {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "num_hidden_layers": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    names = {s.name for s in from_config(moe)[0]}
    assert {"blk.0.ffn_gate_inp_shexp.weight", "blk.3.attn_k.weight", "blk.2.ssm_out.weight"} <= names
