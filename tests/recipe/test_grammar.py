"""Reading and printing recipes; ECMAScript patterns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit import types
from quantkit.errors import QuantkitError, UnknownNameError
from quantkit.recipe import Recipe, RecipeError, Rule, find, parse, shipped
from quantkit.recipe.ecmascript import compile_pattern

COOKS = r"""
# IQ2_K_R4 mix
# for one GPU

blk\.\d+\.ffn_down_exps\.weight=iq3_k_r4   # one step above
blk\.\d+\.ffn_(gate|up)_exps\.weight=IQ2_K_R4
# the rest
.*=q8_0
"""


def test_a_file_as_cooks_write_it() -> None:
    made = parse(COOKS)
    assert [str(rule) for rule in made.rules] == [
        r"blk\.\d+\.ffn_down_exps\.weight=iq3_k_r4",
        r"blk\.\d+\.ffn_(gate|up)_exps\.weight=iq2_k_r4",
        ".*=q8_0",
    ]
    assert made.about == "IQ2_K_R4 mix\nfor one GPU"
    assert made.rules == parse(made.one_line()).rules
    assert parse(str(made)) == made


@given(
    st.lists(
        st.tuples(st.sampled_from([r"blk\.\d+", "ffn_(up|gate)", "[a-z]+?_v", "^x$", "a{2}", "#"]),
                  st.sampled_from([t.name for t in types.all()])), max_size=6),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=30),
)  # fmt: skip
def test_printed_and_parsed_is_the_same(pairs: list[tuple[str, str]], about: str) -> None:
    rules = tuple(Rule(pattern if pattern != "#" else "[#]", types.get(name)) for pattern, name in pairs)
    made = Recipe(rules, " ".join(about.split()).lstrip("# "))
    assert parse(str(made)) == made


def test_the_first_equals_sign_splits_and_types_are_spelled_in_any_case() -> None:
    assert parse("a=Q4_K,b = iq4_K ,").one_line() == "a=q4_K,b=iq4_k"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ffn_up", "not REGEX=TYPE"),
        ("=q8_0", "not REGEX=TYPE"),
        ("a{1,2}=q8_0", "cannot hold one"),
        ("ffn=q9_0", "did you mean"),
        ("(ffn=q8_0", "pattern '(ffn'"),
        ("[ffn=q8_0", "never closed"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=r"my\.recipe, line 2: ") as error:
        parse(f"a=q8_0\n{text}\n", "my.recipe")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "hits", "misses"),
    [
        (r"blk\.1\.", "blk.1.x", "blk.11.x"),
        ("blk.1.", "blk.11.x", "blk.2.x"),
        ("[0-10]", "x1", "x2"),
        ("a(?=b)", "ab", "ac"),
        ("a(?!b)", "ac", "ab"),
        ("(?:up|down)", "ffn_up", "gate"),
        (r"(a)\1", "aa", "ab"),
        ("[[:digit:]]+$", "x12", "12x"),
        ("[^[:alpha:].]", "a1", "a.b"),
        ("[[]", "[", "x"),
        ("a+?b", "aab", "b"),
        ("x{2,}", "xx", "x"),
        (r"\x2e", "a.b", "ab"),
        (r"\d", "7", "\u0667"),
        (r"[\]]", "]", "x"),
    ],
)
def test_patterns_mean_what_they_mean_in_ecmascript(pattern: str, hits: str, misses: str) -> None:
    regex = compile_pattern(pattern)
    assert regex.search(hits)
    assert not regex.search(misses)


@pytest.mark.parametrize(
    "pattern",
    [r"(?<=a)b", r"(?<!a)b", "(?P<n>a)", "(?<n>a)", "(?i)a", "(?i:a)", "(?#a)", "(?>a)", "a++", "a*+", r"\Aa", r"a\Z",
     "[]a]", "[^]", "{3-18}", "a{x}", "a**", "a)", "*a", "a\\", r"\Q", "[[:foo:]]", "[z-a]"],
)  # fmt: skip
def test_what_ecmascript_does_not_have_is_refused(pattern: str) -> None:
    with pytest.raises(RecipeError, match="pattern '"):
        compile_pattern(pattern)


def test_every_shipped_recipe_reads_and_has_a_story() -> None:
    assert shipped()
    for name in shipped():
        made = find(name)
        assert made.rules
        assert len(made.about) > 100
        assert all(rule.type.has_codec for rule in made.rules)


def test_find_takes_a_file_and_names_the_near_ones(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a=q8_0\n")
    assert find(tmp_path / "mine").one_line() == "a=q8_0"
    with pytest.raises(UnknownNameError, match="small-dense"):
        find("smal-dense")
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    with pytest.raises(QuantkitError, match="not UTF-8"):
        find(tmp_path / "bad")
