"""Plans: precedence, fallbacks, importance, warnings, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from quantkit import recipe, types
from quantkit.errors import DataError, UnknownNameError, UnsupportedError
from quantkit.formats.imatrix import Entry, Imatrix
from quantkit.recipe import Options, RecipeError
from quantkit.types import QuantType
from tests.recipe.synthetic import Shape

Q8 = types.get("q8_0")


@dataclass
class Info:
    name: str
    shape: tuple[int, ...]
    type: QuantType


def tensors(*names: str, shape: tuple[int, ...] = (256, 256), source: str = "f16") -> list[Info]:
    return [Info(name, shape, types.get(source)) for name in names]


def chosen(listed: list[Info], target: str, rules: str = "", **options: object) -> list[str]:
    made = recipe.plan(listed, target, recipe.parse(rules), options=Options(**options))
    return [t.type.name for t in made.tensors]


def matrix_for(columns: int, **entries: int) -> Imatrix:
    """Entries by name, each of so many matrices."""
    made = {name: Entry(np.ones((1, n * columns), np.float32), np.ones(1, np.int64), 1) for name, n in entries.items()}
    return Imatrix(made, 1, "text")


def test_precedence() -> None:
    listed = tensors("token_embd.weight", "output.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight")
    q8, q5, q6 = (types.get(name) for name in ("q8_0", "q5_0", "q6_0"))
    flags = {"output_type": q8, "class_types": {"attn_q": q5, "attn_k": q6}}
    assert chosen(listed, "Q4_0", "attn_q=q4_1,output=q4_1", **flags) == ["q4_0", "q8_0", "q4_1", "q6_0"]
    tied = tensors("token_embd.weight")
    assert chosen(tied, "Q4_0", output_type=q8) == ["q8_0"]
    assert chosen(tied, "Q4_0", output_type=q8, embedding_type=q5) == ["q5_0"]


def test_rules_count_for_float_file_types() -> None:
    assert chosen(tensors("blk.0.ffn_up.weight", "blk.0.ffn_down.weight"), "BF16", "ffn_up=q4_0") == ["q4_0", "bf16"]


def test_a_fused_qkv_has_its_own_flag_and_obeys_the_one_of_q() -> None:
    q8, q5 = types.get("q8_0"), types.get("q5_0")
    listed = tensors("blk.0.attn_qkv.weight")
    assert chosen(listed, "Q4_0", class_types={"attn_q": q8}) == ["q8_0"]
    assert chosen(listed, "Q4_0", class_types={"attn_q": q8, "attn_qkv": q5}) == ["q5_0"]


@pytest.mark.parametrize(
    ("name", "shape", "source", "why"),
    [
        ("blk.0.attn_norm.weight", (256,), "f32", "one-dimensional"),
        ("blk.0.attn_q.bias", (256,), "f32", "not a weight"),
        ("blk.0.attn_q_norm.weight", (8, 256), "f32", "a norm"),
        ("blk.0.ssm_conv1d.weight", (8, 256), "f32", "a convolution"),
        ("blk.0.ffn_gate_inp.weight", (8, 256), "f32", "the router"),
        ("blk.0.one.weight", (1, 256), "f32", "one-dimensional"),
    ],
)
def test_what_is_never_quantized(name: str, shape: tuple[int, ...], source: str, why: str) -> None:
    made = recipe.plan([Info(name, shape, types.get(source))], "Q8_0", recipe.parse(".*=q4_0"))
    assert made.tensors[0].type is made.tensors[0].source
    assert why in made.tensors[0].reason
    assert made.warnings == ()
    assert "stay as they are" in made.notes[0]
    assert why in made.notes[0]


def test_the_router_is_quantized_when_asked_for_by_its_flag() -> None:
    listed = [Info("blk.0.ffn_gate_inp.weight", (8, 256), types.get("f32"))]
    assert chosen(listed, "Q4_0", router_type=types.get("q8_0")) == ["q8_0"]


@pytest.mark.parametrize(
    ("wanted", "shape", "becomes"),
    [
        ("iq4_k", (64, 320), "q5_0"),
        ("q6_K", (64, 320), "q8_0"),
        ("iq4_k_r4", (64, 320), "q5_0"),
        ("q4_0", (64, 72), "f16"),
        ("iq4_k", (64, 72), "f16"),
        ("q8_0_r8", (60, 256), "q8_0"),
        ("iq4_k_r4", (62, 256), "iq4_k"),
        ("q8_0_r8", (3, 60, 256), "q8_0"),
    ],
)
def test_shapes_have_the_last_word(wanted: str, shape: tuple[int, ...], becomes: str) -> None:
    listed = tensors("blk.0.ffn_up.weight", shape=shape)
    made = recipe.plan(listed, "Q8_0", recipe.parse(f"ffn_up={wanted}")).tensors[0]
    assert made.type.name == becomes
    assert made.wanted is types.get(wanted)
    assert "multiple" in made.reason
    made = recipe.plan(listed, "Q8_0", options=Options(pure=True))
    assert made.tensors[0].bytes_after == np.prod(shape[:-1]) * made.tensors[0].type.row_bytes(shape[-1])


def test_exact_flags_never_make_a_corrupt_tensor() -> None:
    listed = tensors("token_embd.weight", shape=(64, 320))
    assert chosen(listed, "Q8_0", embedding_type=types.get("q4_K")) == ["q5_0"]
    assert chosen(tensors("token_embd.weight"), "Q8_0", embedding_type=types.get("q8_0_r8")) == ["q8_0"]


def test_the_embedding_per_layer_has_a_flag_of_its_own() -> None:
    listed = tensors("token_embd.weight", "per_layer_token_embd.weight")
    q8_0, q5_0 = types.get("q8_0"), types.get("q5_0")
    assert chosen(listed, "Q4_0", layer_embedding_type=q8_0) == ["q6_K", "q8_0"]  # the first is the output too
    assert chosen(listed, "Q4_0", embedding_type=q5_0, layer_embedding_type=q8_0) == ["q5_0", "q8_0"]
    assert chosen(listed, "Q4_0", "per_layer=q6_0", layer_embedding_type=q8_0)[1] == "q8_0"


def test_a_float_source_keeps_its_own_float() -> None:
    listed = tensors("blk.0.ffn_up.weight", shape=(4, 72), source="bf16")
    made = recipe.plan(listed, "Q4_0").tensors[0]
    assert made.type.name == "bf16"
    assert made.copied


def test_copy_copies() -> None:
    made = recipe.plan(tensors("blk.0.ffn_up.weight", source="q4_0"), "copy")
    assert made.tensors[0].copied
    with pytest.raises(RecipeError, match="COPY"):
        recipe.plan(tensors("a.weight"), "COPY", recipe.parse("a=q8_0"))


def test_pure_refuses_rules_that_would_do_nothing() -> None:
    with pytest.raises(RecipeError, match=r"--pure .* 'ffn=q8_0'"):
        chosen(tensors("blk.0.ffn_up.weight"), "Q4_0", "ffn=q8_0", pure=True)


def test_types_without_codec_are_refused_by_name() -> None:
    made = recipe.plan(tensors("blk.0.ffn_up.weight"), "Q8_0", recipe.parse("ffn_up=i2_s"))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_up\.weight.*i2_s"):
        made.require_codecs()


@pytest.mark.parametrize("target", ["IQ1_KT", "IQ1_M", "IQ2_M"])
def test_very_low_bits_need_importance_but_for_embeddings(target: str) -> None:
    with pytest.raises(DataError, match=r"ffn_up\.weight: iq.* without importance.*--ignore-imatrix-rules"):
        chosen(tensors("blk.0.ffn_up.weight"), target, pure=True)
    wanted = recipe.file_type(target).default
    assert wanted is not None
    assert chosen(tensors("blk.0.ffn_up.weight"), target, pure=True, ignore_imatrix_rules=True) == [wanted.name]
    assert chosen(tensors("token_embd.weight"), target, pure=True) == [wanted.name]


def test_quantizing_again_needs_permission() -> None:
    listed = tensors("blk.0.ffn_up.weight", source="q4_1")
    with pytest.raises(DataError, match=r"blk\.0\.ffn_up\.weight \(q4_1 to q4_0\).*--allow-requantize"):
        chosen(listed, "Q4_0")
    assert chosen(listed, "Q4_0", allow_requantize=True) == ["q4_0"]
    assert chosen(listed, "Q4_1") == ["q4_1"]  # copied


def test_file_types_by_name_alias_and_number() -> None:
    assert recipe.file_type("q4_k").name == "Q4_K_M"
    assert recipe.file_type("15").name == "Q4_K_M"
    assert recipe.file_type(0).name == "F32"
    with pytest.raises(UnknownNameError, match="did you mean Q4_K_M"):
        recipe.file_type("Q4_KM")


# ------------------------------------------------------------------------------------------------- the warnings


def warned(rules: str, *names: str, **options: Any) -> list[str]:
    made = recipe.plan(tensors(*names), "Q4_0", recipe.parse(rules), options=Options(**options))
    return list(made.warnings)


def test_rules_that_match_nothing() -> None:
    assert (
        "rule 2 '_exps=q5_0' matches none of the 1 tensors" in warned("ffn=q8_0,_exps=q5_0", "blk.0.ffn_up.weight")[0]
    )


def test_rules_that_are_shadowed() -> None:
    found = warned(r"output\.weight=q8_0,attn_output=q5_0", "output.weight", "blk.0.attn_output.weight")
    assert len(found) == 1  # the second rule is well when the first is
    assert "matches blk.0.attn_output.weight as well as output.weight" in found[0]
    (found,) = warned(r"attn=q8_0,attn_output=q5_0", "blk.0.attn_q.weight", "blk.0.attn_output.weight")
    assert found == (
        "rule 2 'attn_output=q5_0' is shadowed by rule 1 'attn=q8_0', which comes first; put it in front of rule 1 "
        "'attn=q8_0'"
    )


def test_rules_that_a_flag_overrules() -> None:
    found = warned("^output=q8_0", "output.weight", output_type=types.get("q6_0"))
    assert "output.weight is decided by --output-tensor-type" in found[0]


@pytest.mark.parametrize(
    ("name", "rules", "options", "said"),
    [
        ("blk.0.attn_q.weight", "", {"class_types": {"attn_qkv": Q8}}, "--attn-qkv-type q8_0 is about none of the 1"),
        ("blk.0.attn_q.weight", "", {"router_type": Q8}, "--ffn-gate-inp-type q8_0 is about none of the 1"),
        ("blk.0.attn_q.weight", ".*=q5_0", {"class_types": {"attn_q": Q8}},
         "--attn-q-type q8_0 is overruled: blk.0.attn_q.weight is decided by rule 1: .*=q5_0"),
        ("output.weight", "", {"output_type": Q8, "leave_output": True},
         "--output-tensor-type q8_0 is overruled: output.weight is decided by --leave-output-tensor"),
        ("token_embd.weight", "", {"output_type": Q8, "embedding_type": types.get("q6_0")},
         "--output-tensor-type q8_0 is overruled: token_embd.weight is decided by --token-embedding-type"),
        ("token_embd.weight", "", {"leave_output": True}, "--leave-output-tensor has no effect"),
    ],
)  # fmt: skip
def test_flags_without_effect(name: str, rules: str, options: dict[str, Any], said: str) -> None:
    (found,) = warned(rules, name, **options)
    assert said in found


def test_flags_that_decide_a_tensor_are_not_warned_about() -> None:
    f32 = types.get("f32")
    made = warned("^blk.0.=q5_0", "blk.0.attn_q.weight", "blk.1.attn_q.weight", class_types={"attn_q": Q8})
    made += warned("", "token_embd.weight", output_type=Q8)  # of a tied model
    made += warned("attn_q=q8_0", "blk.0.attn_q.weight", class_types={"attn_q": Q8})  # it says the same
    listed = [Info("blk.0.ffn_gate_inp.weight", (8, 256), f32)]  # it keeps its type
    made += recipe.plan(listed, "Q4_0", options=Options(router_type=f32)).warnings
    assert not made


def test_a_rule_that_works_is_not_warned_about() -> None:
    made = recipe.plan(tensors("blk.0.ffn_up.weight", "blk.0.attn_q.weight"), "Q4_0", recipe.parse("ffn=q8_0,.*=q5_0"))
    assert made.warnings == ()
    made.require_clean()
    assert [(len(use.matched), len(use.decided)) for use in made.rules] == [(1, 1), (2, 1)]


def test_strict() -> None:
    made = recipe.plan(tensors("a.weight"), "Q4_0", recipe.parse("b=q8_0"))
    with pytest.raises(RecipeError, match="matches none"):
        made.require_clean()


# --------------------------------------------------------------------------------------------------- importance


def test_importance_is_found_by_name_or_stand_in() -> None:
    name = "blk.0.ffn_gate.weight"
    made = recipe.plan(tensors(name), "IQ4_NL", imatrix=matrix_for(256, **{"blk.0.ffn_up.weight": 1}))
    assert made[name].importance == "blk.0.ffn_up.weight"
    experts = Info("blk.0.ffn_up_exps.weight", (4, 32, 256), types.get("f16"))
    made = recipe.plan([experts], "IQ4_NL", imatrix=matrix_for(256, **{"blk.0.ffn_gate_up_exps.weight": 4}))
    assert made.tensors[0].importance == "blk.0.ffn_gate_up_exps.weight"


def test_experts_of_another_number_and_width_are_refused() -> None:
    """8 of 128 columns are as many values as 4 of 256."""
    tensor = Info("blk.0.ffn_up_exps.weight", (4, 32, 256), types.get("f16"))
    other = Imatrix({tensor.name: Entry(np.ones((8, 128), np.float32), np.ones(8, np.int64), 1)}, 1, "text")
    with pytest.raises(DataError, match=r"has 8 x 128 values for it, the tensor needs 4 x 256 = 1024; it was measured"):
        recipe.plan([tensor], "IQ4_NL", imatrix=other)


def test_missing_importance_is_warned_about_and_wrong_sizes_refused() -> None:
    listed = tensors("blk.0.ffn_up.weight", "token_embd.weight", "output.weight")
    made = recipe.plan(listed, "IQ4_NL", imatrix=matrix_for(256))
    assert ["1 tensor(s) that would use one: blk.0.ffn_up.weight" in text for text in made.warnings] == [True]
    with pytest.raises(DataError, match=r"has 1 x 512 values for it, the tensor needs 1 x 256"):
        recipe.plan(listed, "IQ4_NL", imatrix=matrix_for(256, **{"blk.0.ffn_up.weight": 2}))
    stand_in = recipe.plan(
        tensors("blk.0.ffn_gate.weight"), "IQ4_NL", imatrix=matrix_for(256, **{"blk.0.ffn_up.weight": 2})
    )
    assert stand_in.tensors[0].importance is None
    tolerated = recipe.plan(listed[1:2], "IQ4_NL", imatrix=matrix_for(256, **{"token_embd.weight": 2}))
    assert tolerated["token_embd.weight"].importance is None


# ---------------------------------------------------------------------------------------------- what it carries


def test_the_text_is_a_recipe_and_says_how_it_was_made() -> None:
    rules = recipe.parse("# my mix\nffn=q8_0")
    made = recipe.plan(tensors("blk.0.ffn_up.weight"), "Q4_0", rules, options=Options(embedding_type=types.get("q6_0")))
    again = recipe.parse(made.text())
    assert again.rules == rules.rules
    assert again.about == "quantkit quantize Q4_0 --token-embedding-type q6_0\nmy mix"


def test_a_recipe_taken_from_a_file_says_once_how_it_was_made() -> None:
    listed = tensors("blk.0.ffn_up.weight")
    text = "# my mix\n# quantkit quantize --recipe mine in.gguf out.gguf Q8_0\nffn=q8_0"
    for _ in range(3):
        made = recipe.plan(listed, "Q4_0", recipe.parse(text), options=Options(embedding_type=types.get("q6_0")))
        text = made.text()
    about = recipe.parse(text).about.split("\n")
    assert about == [
        "quantkit quantize Q4_0 --token-embedding-type q6_0",
        "my mix",
        "quantkit quantize --recipe mine in.gguf out.gguf Q8_0",
    ]
    other = recipe.plan(listed, "Q5_0", recipe.parse(text))
    assert recipe.parse(other.text()).about.startswith("quantkit quantize Q5_0\nmy mix\n")


def test_sizes() -> None:
    shape = Shape(keys=2, experts=8)
    specs = shape.specs()
    made = recipe.plan(specs, "Q4_K_M", metadata=shape.metadata())
    assert made.bytes_before == sum(spec.nbytes for spec in specs)
    assert made.bytes_after == sum(t.bytes_after for t in made.tensors) == made.to_json()["bytes_after"]
    assert made.bits_per_weight == pytest.approx(8 * made.bytes_after / sum(int(np.prod(s.shape)) for s in specs))


# ------------------------------------------------------------------------------------------------- repacking


def test_what_was_decided_is_interleaved() -> None:
    listed = tensors("token_embd.weight", "blk.0.ffn_up.weight", "blk.0.attn_q.weight", "blk.0.attn_norm.weight")
    listed += [Info("blk.0.attn_k.weight", (36, 256), types.get("f16")), Info("n", (256,), types.get("f32"))]
    rules = "attn_q=iq6_k,attn_k=q8_0"
    made = recipe.plan(listed, "Q4_0", recipe.parse(rules), options=Options(repack=True))
    assert {t.name: (t.type.name, t.reason) for t in made.tensors} == {
        "token_embd.weight": ("q6_K", "mix of Q4_0; not repacked: embeddings are read row by row"),
        "blk.0.ffn_up.weight": ("q4_0_r8", "Q4_0; repacked"),
        "blk.0.attn_q.weight": ("iq6_k", "rule 1: attn_q=iq6_k; not repacked: iq6_k has no interleaved form here"),
        "blk.0.attn_k.weight": ("q8_0", "rule 2: attn_k=q8_0; not repacked: 36 rows are not a multiple of 8"),
        "blk.0.attn_norm.weight": ("f16", "kept: a norm"),
        "n": ("f32", "kept: not a weight"),
    }
    assert made["blk.0.ffn_up.weight"].row_type is types.get("q4_0")
    assert made["blk.0.ffn_up.weight"].bytes_after == made["blk.0.ffn_up.weight"].elements * 18 // 32
    assert made.written_type.name == "Q4_0_R8"
    assert made.to_json()["written_as"] == "Q4_0_R8"
    assert str(Options(repack=True, pure=True)) == "--pure --repack"


def test_repacking_keeps_to_patterns() -> None:
    listed = tensors("blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "blk.0.attn_q.weight", source="bf16")
    halves = recipe.plan(listed[:1], "F16", options=Options(repack=True)).tensors[0]
    assert halves.reason.endswith("bf16_r16 would lose bits: if you want that, quantkit quantize IN OUT BF16_R16")
    options = {"repack_patterns": ("blk.0", "attn")}
    assert chosen(listed, "Q4_0", pure=True, **options) == ["q4_0_r8", "q4_0", "q4_0_r8"]
    assert chosen(listed, "BF16", repack=True) == ["bf16"] * 3  # bf16_r16 only where it is named
    assert chosen(listed, "BF16", **options) == ["bf16_r16", "bf16", "bf16_r16"]
    assert chosen(listed, "COPY", **options) == ["bf16_r16", "bf16", "bf16_r16"]
    assert str(Options(**options)) == "--repack-pattern blk.0,attn"
    with pytest.raises(RecipeError, match="--repack-pattern 'exps' is found in none of 3 tensor names"):
        chosen(listed, "Q4_0", repack_patterns=("attn", "exps"))


def test_another_order_of_the_same_bits_is_no_requantizing() -> None:
    """And asks for no importance."""
    listed = tensors("blk.0.ffn_up.weight", source="iq2_xxs")
    for target, becomes in (("IQ2_XXS", "iq2_xxs"), ("IQ2_XXS_R4", "iq2_xxs_r4")):
        assert chosen(listed, target, pure=True) == [becomes]
    assert chosen(tensors("blk.0.ffn_up.weight", source="iq2_xxs_r4"), "IQ2_XXS", pure=True) == ["iq2_xxs"]
    made = recipe.plan(listed, "IQ2_XXS_R4", options=Options(pure=True), imatrix=matrix_for(256))
    assert made.warnings == ()
    with pytest.raises(DataError, match="quantkit repack IN OUT"):
        chosen(listed, "Q4_0", repack=True)
