"""Every mistake that users are known to make is warned about, with what to write instead; what they publish is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quantkit import recipe
from quantkit.archs import language_model
from quantkit.formats.imatrix import Entry, Imatrix
from quantkit.placement.budget import budget
from quantkit.placement.rules import parse_flags
from quantkit.recipe import Options, Plan
from quantkit.recipe.models import from_config
from tests.recipe.configs import DEEPSEEK_V3, LLAMA_8B, QWEN3_30B, QWEN3_235B, QWEN35_27B

SMALL_DEEPSEEK = DEEPSEEK_V3 | {"num_hidden_layers": 12}
TINY_DEEPSEEK = DEEPSEEK_V3 | {"num_hidden_layers": 4, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}


def planned(config: dict[str, Any], rules: str, target: str = "Q8_0", imatrix: Imatrix | None = None) -> Plan:
    specs, metadata = from_config(language_model(config))
    options = Options(ignore_imatrix_rules=True)
    return recipe.plan(specs, target, recipe.parse(rules), metadata=metadata, imatrix=imatrix, options=options)


def warned(config: dict[str, Any], rules: str, target: str = "Q8_0", imatrix: Imatrix | None = None) -> str:
    """The one warning about a plan; the pattern that it proposes, if it does, is tried by `cured`."""
    found = planned(config, rules, target, imatrix).warnings
    assert len(found) == 1, found
    return found[0]


def cured(config: dict[str, Any], warning: str, kind: str = "q4_0") -> Plan:
    """The plan by the pattern that a warning tells to write: nothing is wrong with it any more."""
    better = warning.rsplit("write ", 1)[1].rstrip("?")
    made = planned(config, better if "=" in better else f"{better}={kind}")
    assert not made.warnings
    return made


def decided(made: Plan) -> set[str]:
    return {name for use in made.rules for name in use.decided}


def test_output_is_found_in_attn_output_too() -> None:
    said = warned(LLAMA_8B, r"output\.weight=q6_K")
    assert "matches blk.{0-31}.attn_output.weight as well as output.weight" in said
    assert decided(cured(LLAMA_8B, said)) == {"output.weight"}


def test_ssm_a_is_found_in_ssm_alpha_too() -> None:
    said = warned(QWEN35_27B, r"blk\.0\.ssm_a=q4_0")
    assert "matches blk.0.ssm_alpha.weight as well as blk.0.ssm_a" in said
    assert said.endswith(r"write blk\.0\.ssm_a$")


@pytest.mark.parametrize(
    "rules", [r"blk\.[0-10]\.ffn_down=q6_K", r"blk\.[3|12]\.ffn_down=q6_K", r"blk\.[10-15]\.ffn_down=q6_K"]
)
def test_numbers_in_a_character_class(rules: str) -> None:
    said = warned(LLAMA_8B, rules)
    assert "one character of a class" in said
    layers = {int(name.split(".")[1]) for name in decided(cured(LLAMA_8B, said))}
    assert layers in ({*range(11)}, {3, 12}, {*range(10, 16)})


def test_advice_about_classes_mends_all_of_them() -> None:
    said = warned(LLAMA_8B, r"blk\.([0-10]|[20-25])\.ffn_down=q6_K")
    assert "[0-10] and [20-25] are each one character of a class" in said
    layers = {int(name.split(".")[1]) for name in decided(cured(LLAMA_8B, said))}
    assert layers == {*range(11), *range(20, 26)}


def test_any_number_of_dots() -> None:
    said = warned(SMALL_DEEPSEEK, r"[3-5]\.*exps=q4_0")
    assert "matches none" in said
    assert len(decided(cured(SMALL_DEEPSEEK, said))) == 9


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (r"blk\..*\.attn_k.*", "blk.{0-47}.attn_k_norm.weight (f32, kept: one-dimensional)"),
        ("attn_q", "blk.{0-47}.attn_q_norm.weight (f32, kept: one-dimensional)"),
        (r"ffn_(gate|up)", "blk.{0-47}.ffn_gate_inp.weight (f32, kept: the router)"),
        (
            "ffn",
            "blk.{0-47}.ffn_norm.weight (f32, kept: one-dimensional); blk.{0-47}.ffn_gate_inp.weight (f32, kept: the",
        ),
        ("attn_norm", "matches only tensors that stay as they are: blk.{0-47}.attn_norm.weight"),
        ("ffn_gate_inp", "--ffn-gate-inp-type changes that"),
    ],
)
def test_norms_and_routers_that_stay_as_they_are_are_noted(pattern: str, kept: str) -> None:
    made = planned(QWEN3_30B, f"{pattern}=q4_0")
    assert made.warnings == ()
    made.require_clean()  # for --strict
    assert len(made.notes) == 1
    assert kept in made.notes[0]
    assert all(made[t].type.name == "f32" for t in (f"blk.0.{n}.weight" for n in ("attn_k_norm", "ffn_gate_inp")))


def test_a_dense_model_has_no_experts() -> None:
    said = warned(LLAMA_8B, "ffn_down_exps=q6_K")
    assert "this model is dense" in said
    assert len(decided(cured(LLAMA_8B, said))) == 32
    assert "are experts" in warned(QWEN3_30B, r"blk\.\d+\.ffn_(up|down)\.weight=q6_K")


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("q_proj=q8_0", "checkpoint's name"),
        (r"mlp\.down_proj=q8_0", "checkpoint's name"),
        ("blk.*.attn_Q=q8_0", "lower case"),
        (r"blk\.40\.attn_q\.weight=q8_0", "layers are 0 to 31"),
        ("blk.{30-40}.attn_q.weight=q6_K", "names layers 32-40; the model's are 0-31"),
        ("atn_output=q6_K", "did you mean attn_output"),
        ("blk.*_down=q6_K,blk.1.=q6_K", r"write blk\.1\."),
        ("blk.(1|2).=q6_K", r"6 more kinds, because . is any character; write blk\.(1|2)\."),
        (r"attn_v=q8_0,blk\.\d+\.attn_v\.weight=q6_K", "matches the same tensors as rule 1 'attn_v=q8_0'"),
    ],
)  # fmt: skip
def test_rules_that_do_nothing_or_too_much(rules: str, why: str) -> None:
    assert why in warned(LLAMA_8B, rules)


# ----------------------------------------------------------------------------------------------------- order of rules


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("ffn=q8_0,ffn_down=q6_K", "is shadowed by rule 1 'ffn=q8_0', which comes first; put it in front of rule 1"),
        (
            "ffn_down=q8_0,ffn_(down)=q6_K",
            "matches the same tensors as rule 1 'ffn_down=q8_0', which comes first; drop one",
        ),
        (
            r"blk\.[0-4]\.ffn=q8_0,blk\.[5-9]\.ffn=q4_0,blk\.[0-9]\.ffn_down=q6_K",
            "is shadowed by rule 1 'blk\\.[0-4]\\.ffn=q8_0' and rule 2 'blk\\.[5-9]\\.ffn=q4_0', which come first",
        ),
        (r"ffn_down=q8_0,blk\.1\.ffn_up=q4_0,blk\.1\.ffn_(down|up)=q6_K", "drop it, or narrow what comes first"),
    ],
)
def test_rules_that_come_too_late(rules: str, said: str) -> None:
    assert said in warned(LLAMA_8B, rules)


def test_rules_put_where_the_advice_says_are_not_warned_about() -> None:
    assert not planned(LLAMA_8B, "ffn_down=q6_K,ffn=q8_0").warnings
    assert not planned(LLAMA_8B, r"blk\.[0-9]\.ffn_down=q6_K,blk\.[0-4]\.ffn=q8_0,blk\.[5-9]\.ffn=q4_0").warnings


def test_rules_that_only_repeat_are_noted() -> None:
    for rules, said in (
        ("ffn=q8_0,ffn_down=q8_0", "rule 2 'ffn_down=q8_0' adds nothing to rule 1"),
        ("attn=q8_0,ffn=q4_0,token_embd=q8_0,^output=q8_0,.*=q6_K", "rule 5 '.*=q6_K' decides nothing"),
    ):
        made = planned(LLAMA_8B, rules)
        assert made.warnings == ()
        assert said in made.notes[-1]


TIED = LLAMA_8B | {"tie_word_embeddings": True}


def test_the_output_of_tied_models() -> None:
    """No advice makes it worse: a rule for output.weight finds only attn_output.weight, whatever comes first."""
    for rules in (r"output\.weight=q6_K", r"output\.weight=q6_K,attn_output=q4_0"):
        said = warned(TIED, rules, "Q4_0")
        assert r"rule 1 'output\.weight=q6_K' matches blk.{0-31}.attn_output.weight, and this model's output" in said
        assert decided(cured(TIED, said)) == {"token_embd.weight"}
    assert "does nothing: this model's output" in warned(TIED, r"attn_output=q4_0,output\.weight=q8_0", "Q4_0")
    assert "is its embedding, which becomes q4_0" in warned(TIED, r"token_embd=q4_0,^output\.weight=q6_K")
    assert not planned(TIED, r"token_embd=q8_0,^output\.weight=q6_K").warnings
    assert not planned(TIED, r"^(token_embd|output)\.weight=q8_0").warnings


def test_experts_that_an_earlier_rule_has_taken() -> None:
    rules = r"exps=iq2_k,blk\.(3|4)\.ffn_.*=q8_0"
    said = warned(SMALL_DEEPSEEK, rules)
    assert "gets no experts: rule 1 'exps=iq2_k' comes first and matches blk.{3-4}.ffn_down_exps.weight" in said
    assert "so only blk.{3-4}.ffn_down_shexp.weight" in said
    assert not planned(SMALL_DEEPSEEK, r"blk\.(3|4)\.ffn_.*=q8_0,exps=iq2_k").warnings


def test_a_loose_rule_that_changes_nothing_is_no_mistake() -> None:
    assert "as well as" in warned(LLAMA_8B, r"output\.weight=q8_0,attn=q6_K")
    assert not planned(LLAMA_8B, r"output\.weight=q8_0,attn=q8_0").warnings


def test_types_are_spelled_in_any_case() -> None:
    assert recipe.parse("a=q5_k,b=Q5_K,c=IQ4_k").one_line() == "a=q5_K,b=q5_K,c=iq4_k"


@pytest.mark.parametrize("kind", ["i8", "q8_K", "f64"])
def test_types_that_weights_are_not_encoded_to(kind: str) -> None:
    """They would be refused when the file is written."""
    said = warned(LLAMA_8B, rf"attn_q\.weight={kind},.*=q4_0")
    assert said.startswith(f"blk.{{0-31}}.attn_q.weight become {kind}, which quantkit does not encode weights to")


def test_rows_that_a_type_cannot_hold() -> None:
    said = warned(SMALL_DEEPSEEK, r"attn_k_b\.weight=iq4_k")
    assert "rows of 128 are no multiple of 256, so they become q5_0" in said
    assert {t.type.name for t in cured(SMALL_DEEPSEEK, said).tensors if "attn_k_b" in t.name} == {"q5_0"}


def test_rules_for_rows_name_all_tensors_and_no_others() -> None:
    """Two classes of tensors that fall back, in some layers only: the rules proposed are for just these."""
    odd = DEEPSEEK_V3 | {"num_hidden_layers": 12, "qk_nope_head_dim": 96, "kv_lora_rank": 480}
    said = warned(odd, r"blk\.[2-4]\.attn=iq4_k,.*=q8_0")
    for part in ("blk.{2-4}.attn_k_b.weight", "blk.{2-4}.attn_v_b.weight", "rows of 96 and 480 are no multiple of 256"):
        assert part in said
    made = planned(odd, said.rsplit("write ", 1)[1] + r",blk\.[2-4]\.attn=iq4_k,.*=q8_0")
    assert made.warnings == ()
    before = {t.name: t.type for t in planned(odd, r"blk\.[2-4]\.attn=iq4_k,.*=q8_0").tensors}
    assert {t.name: t.type for t in made.tensors} == before


def importance(config: dict[str, Any], tokens: int = 1000, without: str = "-") -> Imatrix:
    """What a measurement of a model gives: each expert saw `tokens`, but expert 1 of the first layer with some 5."""
    entries = {}
    specs, _ = from_config(language_model(config))
    for spec in specs:
        if spec.name.startswith("blk.") and len(spec.shape) > 1 and without not in spec.name:
            count = spec.shape[0] if len(spec.shape) == 3 else 1
            values = np.full((count, spec.shape[-1]), 0.5, np.float32)
            counts = np.full(count, tokens + 1)
            counts[:1] -= 1
            entries[spec.name] = Entry(values, counts, 8)
    return Imatrix(entries, 8, "text")


TINY_MOE = QWEN3_30B | {"num_hidden_layers": 2, "vocab_size": 512, "num_experts": 16}


def test_a_matrix_that_lacks_a_tensor() -> None:
    matrix = importance(TINY_DEEPSEEK, without="attn_k_b")
    said = warned(TINY_DEEPSEEK, "attn_k_b=q4_0", imatrix=matrix)
    assert "no entry for 4 tensor(s)" in said
    assert "-mla 1" in said
    assert not planned(TINY_DEEPSEEK, "attn_k_b=q4_0", imatrix=importance(TINY_DEEPSEEK)).warnings


def test_a_matrix_of_more_layers() -> None:
    """As of the model before `prune`, whose layers have new numbers. MTP layers may be left out: they are the last."""
    matrix = importance(TINY_DEEPSEEK | {"num_hidden_layers": 6})
    said = warned(TINY_DEEPSEEK, "ffn_up=q4_0", imatrix=matrix)
    assert "the importance matrix has entries for blk.5, the model has 4 layers" in said
    entry = next(iter(matrix.entries.values()))
    matrix.entries.update({f"blk.{layer}.nextn.eh_proj.weight": entry for layer in (4, 5)})
    assert not planned(TINY_DEEPSEEK, "ffn_up=q4_0", imatrix=matrix).warnings


def test_experts_that_saw_too_few_tokens() -> None:
    matrix = importance(TINY_MOE)
    assert not planned(TINY_MOE, "", "Q4_0", matrix).warnings
    matrix.entries["blk.0.ffn_up_exps.weight"].counts[3] = 5
    said = warned(TINY_MOE, "", "Q4_0", matrix)
    assert "blk.0.ffn_up_exps.weight has 1 of 16, as expert 3" in said


def test_experts_that_a_legacy_matrix_fills_in() -> None:
    matrix = importance(TINY_MOE)
    for entry in matrix.entries.values():
        entry.counts[:] = entry.calls  # all that a legacy file says
    assert not planned(TINY_MOE, "", "Q4_0", matrix).warnings
    matrix.entries["blk.1.ffn_down_exps.weight"].values[7] = 1
    assert "blk.1.ffn_down_exps.weight has 1 of 16, as expert 7" in warned(TINY_MOE, "", "Q4_0", matrix)


# ------------------------------------------------------------------------------------------------------------ placement


def placed(config: dict[str, Any], rules: str, flags: str) -> tuple[str, ...]:
    made = planned(config, rules)
    _, metadata = from_config(language_model(config))
    return budget({t.name: t for t in made.tensors}, metadata, parse_flags(flags)).warnings


def test_a_placement_rule_that_shadows_the_others() -> None:
    found = placed(SMALL_DEEPSEEK, "", r"-ngl 99 -ot exps=CPU -ot 'blk\.(3|4)\.ffn_.*_exps=CUDA0'")
    assert len(found) == 1
    assert "is shadowed by -ot exps=CPU, which comes first; put it in front of -ot exps=CPU" in found[0]
    assert not placed(SMALL_DEEPSEEK, "", r"-ngl 99 -ot 'blk\.(3|4)\.ffn_.*=CUDA0' -ot exps=CPU")


def test_placement_rules_whose_experts_are_taken() -> None:
    """What matters of blk.N.ffn_.* are the experts; that norms and routers are left does not save the rule."""
    for config in (SMALL_DEEPSEEK, QWEN3_30B):
        (said,) = placed(config, "", r"-ngl 99 -ot exps=CPU -ot 'blk\.(3|4)\.ffn_.*=CUDA0'")
        assert r"-ot blk\.(3|4)\.ffn_.*=CUDA0 gets no experts: -ot exps=CPU comes first" in said
        assert said.endswith("put it in front of -ot exps=CPU")
    (said,) = placed(SMALL_DEEPSEEK, "", "-ngl 99 -ot exps=CPU -ot _exps=CUDA0")
    assert "matches the same tensors as -ot exps=CPU, which comes first; drop one of the two" in said


@pytest.mark.parametrize(
    "flags",
    [
        r"-ot exps=CPU",
        r"-ot 'blk\.(3|4)\.ffn_.*=CUDA0' -ot exps=CPU",
        r"-ot 'blk\.([3-9]|10)\.ffn_.*=CUDA0' -ot exps=CPU",
        r"-ot exps=CPU -ot 'blk\.[0-5]\.=CUDA0' -ot 'blk\.([6-9]|1[01])\.=CUDA1'",
        r"-ot exps=CPU -ot ffn=CUDA0",
        r"-ot 'blk\.(3|4)\.ffn_(gate|up|down)_exps=CUDA0' -ot 'ffn_.*_exps=CPU' -ot attn=CUDA0",
    ],
)
def test_no_alarm_about_placement_as_people_write_it(flags: str) -> None:
    assert placed(SMALL_DEEPSEEK, "", f"-ngl 99 {flags}") == ()


def test_a_placement_rule_that_matches_nothing() -> None:
    assert "this model is dense" in placed(LLAMA_8B, "", "-ngl 99 -ot exps=CPU")[0]
    assert "one character of a class" in placed(LLAMA_8B, "", r"-ngl 99 -ot 'blk\.[0-10]\.ffn=CPU'")[0]


def test_a_repacked_type_where_a_gpu_would_get_it() -> None:
    rules = "ffn_down_exps=iq5_k_r4,ffn_(gate|up)_exps=q4_k_r4"
    found = placed(SMALL_DEEPSEEK, rules, "-ngl 99")
    assert len(found) == 1
    assert "18 row-interleaved tensors would go to a GPU" in found[0]  # iq5_k_r4 has a kernel there
    rule = found[0].rsplit("-ot '", 1)[1].rstrip("'")
    assert not placed(SMALL_DEEPSEEK, rules, f"-ngl 99 -ot '{rule}'")
    assert not placed(SMALL_DEEPSEEK, rules, "-ngl 99 -ot exps=CPU")


# ------------------------------------------------------------------------------------------------------ no false alarms

DEEPSEEK = r"""
blk\.\d+\.ffn_down_exps\.weight={0}
blk\.\d+\.ffn_(gate|up)_exps\.weight={1}
.*=q8_0
"""
PUBLISHED = [
    *((DEEPSEEK_V3, DEEPSEEK.format(*pair.split())) for pair in (
        "iq3_k_r4 iq2_k_r4", "iq5_k_r4 iq4_k_r4", "iq5_ks_r4 iq4_ks_r4", "q6_k_r4 q4_k_r4", "q3_k_r4 q2_k_r4")),
    (DEEPSEEK_V3, r"blk\.([3-9]|10)\.ffn_down_exps\.weight=iq4_k_r4"
                  r",blk\.([3-9]|10)\.ffn_(gate|up)_exps\.weight=iq3_k_r4" + DEEPSEEK.format("iq3_k_r4", "iq2_k_r4")),
    (QWEN3_235B, r"""
blk\.\d+\.attn_(q|k|v|output)\.weight=iq6_k
blk\.\d+\.ffn_down_exps\.weight=iq4_k
blk\.\d+\.ffn_(gate|up)_exps\.weight=iq3_k
(token_embd|output)\.weight=q8_0
"""),
    (QWEN3_235B, r"""
#!/usr/bin/env bash
custom="
# Attention
blk\..*\.attn_q.*=iq6_k
blk\..*\.attn_k.*=q8_0
blk\..*\.attn_v.*=q8_0
blk\..*\.attn_output.*=iq6_k

# Routed Experts
blk\..*\.ffn_down_exps\.weight=iq6_k
blk\..*\.ffn_(gate|up)_exps\.weight=iq5_k

# Non-Repeating Layers
token_embd\.weight=iq6_k
output\.weight=iq6_k
"
"""),
    (DEEPSEEK_V3, r"""
token_embd\.weight=q8_0
output\.weight=q8_0
output_norm\.weight=q8_0
blk\.[0-2]\..*=q8_0
blk\.[3-9]\.attn_.*=q8_0
blk\.[1-5][0-9]\.attn_.*=q8_0
blk\.60\.attn_.*=q8_0
blk\.[3-9]\.ffn_norm\.weight=q8_0
blk\.[1-5][0-9]\.ffn_norm\.weight=q8_0
blk\.60\.exp_probs_b\.bias=q8_0
blk\.[3-9]\.ffn_(gate|up)_shexp\.weight=q8_0
blk\.[1-5][0-9]\.ffn_down_shexp\.weight=q8_0
blk\.[3-9]\.ffn_down_exps\.weight=iq5_k_r4
blk\.[1][0-9]\.ffn_down_exps\.weight=iq5_k_r4
blk\.[2-5][0-9]\.ffn_down_exps\.weight=iq4_k_r4
blk\.60\.ffn_down_exps\.weight=iq4_k_r4
blk\.\d+\.ffn_(gate|up)_exps\.weight=iq3_k_r4
"""),
    (DEEPSEEK_V3, r"""
## Attention [0-60] (GPU)
# blk.*.attn_k_b.weight is not divisible by 256 so only supports iq4_nl or legacy qN_0
blk\..*\.attn_kv_b\.weight=q8_0
blk\..*\.attn_k_b\.weight=q8_0
blk\..*\.attn_v_b\.weight=q8_0
blk\..*\.attn_kv_a_mqa\.weight=q8_0
blk\..*\.attn_q_a\.weight=q8_0
blk\..*\.attn_q_b\.weight=q8_0
blk\..*\.attn_output\.weight=q8_0
## First Three Dense Layers [0-2] (GPU)
blk\..*\.ffn_down\.weight=q8_0
blk\..*\.ffn_(gate|up)\.weight=q8_0
## Shared Expert (1-60) (GPU)
blk\..*\.ffn_down_shexp\.weight=q8_0
blk\..*\.ffn_(gate|up)_shexp\.weight=q8_0
## Routed Experts (1-60) (CPU)
blk\..*\.ffn_down_exps\.weight=iq6_k
blk\..*\.ffn_(gate|up)_exps\.weight=iq5_k
## Token embedding and output tensors (GPU)
token_embd\.weight=iq6_k
output\.weight=iq6_k
"""),
    (QWEN3_30B, r"_exps=iq4_xs,attn_(q|k|v|output)\.weight=q5_K,^output\.weight=q6_K"),
    (QWEN35_27B, r"""
blk\.\d+\.(attn_norm|post_attention_norm|attn_[qk]_norm|ssm_(alpha|beta|conv1d|norm|out)|attn_[kv])\.weight=BF16
blk\.\d+\.ssm_(a|dt\.bias)$=BF16
blk\.\d+\.attn_(gate|q)\.weight=Q8_0
blk\.\d+\.attn_(qkv|output)\.weight=Q6_K
blk\.(51|59|6[0-3])\.ffn_(up|gate|down)\.weight=Q8_0
blk\.1[1-6]\.ffn_down\.weight=Q8_0
blk\.\d+\.ffn_(up|gate|down)\.weight=Q6_K
"""),
]  # fmt: skip


@pytest.mark.parametrize(("config", "rules"), PUBLISHED)
def test_no_alarm_about_what_is_published(config: dict[str, Any], rules: str) -> None:
    made = planned(config, rules)
    assert made.warnings == ()
    assert made.rules
    made.require_clean()  # so --strict can be used
