"""Reading and printing recipes; ECMAScript patterns."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit import types
from quantkit.errors import QuantkitError, UnknownNameError
from quantkit.formats.gguf import TensorSpec, Writer
from quantkit.recipe import Recipe, RecipeError, Rule, find, parse, plan, shipped
from quantkit.recipe.forms import format_recipe, rules_for_types, thireus
from quantkit.recipe.rules import layers
from quantkit.recipe.rules.ecmascript import compile_pattern

WRITTEN = r"""
# IQ2_K_R4 mix
# for one GPU

blk\.\d+\.ffn_down_exps\.weight=iq3_k_r4   # one step above
blk\.\d+\.ffn_(gate|up)_exps\.weight=IQ2_K_R4
# the rest
.*=q8_0
"""


def test_a_file_as_users_write_it() -> None:
    made = parse(WRITTEN)
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
        ("a{1,2}=q8_0", "cannot contain a comma"),
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
    ("text", "dropped"),
    [
        ("ffn_down=q6_K # a step above,ffn_up=q4_0,.*=q8_0", "'ffn_up=q4_0, .*=q8_0' drops 2 rule"),
        ("ffn_down=q6_K # a step above,ffn_up = iq4_KS,", "drops 1 rule"),
        ("ffn_down=q6_K # a step above ffn_up=q4_0", "drops 1 rule"),
        ("# mine,ffn_down=q6_K", "'ffn_down=q6_K' drops 1 rule"),
        ("down := q6_K # a step,ffn_down=${down}", "drops 1 rule"),
        ("a=q8_0,# the rest,b=q4_0", "'#' begins a comment between rules"),
        ("a=q8_0,#b=q4_0", "'#b=q4_0' begins a comment between rules"),
        (
            "a=q8_0\nffn_down=q6_K # a step above,ffn_up=q4_0\nb=q4_0",
            "line 2: a comment ends with its line, so the # in front of 'ffn_up=q4_0' drops",
        ),
    ],
)
def test_rules_behind_a_comment_of_joined_lines_are_not_dropped(text: str, dropped: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse(text, "--custom-q")
    assert dropped in str(error.value)


def test_rules_outside_the_quotes_of_a_script_are_not_dropped() -> None:
    script = 'type=Q8_0\ncustom="\nffn_down=q6_K\n"\nquantize --custom-q "$custom" in out $type\n'
    assert parse(script).one_line() == "ffn_down=q6_K"
    for text, line in (
        (f"{script}more='\nffn_(gate|up)=q4_0\n'\n", 7),
        (f"ffn_.*=q4_0\n{script}", 1),
        (f'{script}more="\nffn_up=q4_0\n"\n', 7),  # in quotes this is no assignment of the shell
        (f'{script}help="\na text\n"\nmore="\nffn_up=q4_0\n"\n', 10),
    ):
        with pytest.raises(RecipeError, match=rf"mine, line {line}: 'ffn_.*=q4_0' is outside the quotes"):
            parse(text, "mine")
    assert parse(f'{script}help="\na text\n"\nkind=Q4_0\n').one_line() == "ffn_down=q6_K"


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("ffn_down=q6_K # was iq4_k, now more", "ffn_down=q6_K"),
        ("# ffn_up=q4_0,ffn_gate=q4_0\nffn_down=q6_K", "ffn_down=q6_K"),
        ("a=q8_0\nffn_down=q6_K  # n=5, see the table", "a=q8_0,ffn_down=q6_K"),
    ],
)
def test_comments_that_only_speak_of_types_are_comments(text: str, rules: str) -> None:
    assert parse(text).one_line() == rules


def test_what_was_printed_is_read_back_whatever_its_comments_say() -> None:
    made = Recipe((Rule("a", types.get("q8_0"), note="was b=q4_0,c=q4_0"),))
    assert parse(str(made), printed=True) == made


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
    (tmp_path / "plan.json").write_text('{"schema": "quantkit.plan/1", "recipe": "a=q8_0"}', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"plan.json: a JSON document, no recipe; .* quantize --plan"):
        find(tmp_path / "plan.json")


# ------------------------------------------------------------------------------------------ layers, settings, forms


@given(st.sets(st.integers(0, 250), min_size=1, max_size=40))
def test_numbers_as_a_regex_match_exactly_those(numbers: set[int]) -> None:
    regex = compile_pattern(f"^(?:{layers.regex_of(numbers)})$")
    assert {n for n in range(300) if regex.search(str(n))} == numbers
    assert layers.numbers(layers.ranges(numbers)) == numbers


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("blk.{3-5,40}.ffn_down_exps.weight", {3, 4, 5, 40}),
        (r"blk\.{3-5,40}\.ffn_down_exps\.weight", {3, 4, 5, 40}),
        ("blk.{1}.*exps", {1}),
        ("^blk.{0-12}", {*range(13)}),
        ("blk.{7}.", {7}),
    ],
)
def test_layers_in_braces(pattern: str, hits: set[int]) -> None:
    rule = Rule(pattern, types.get("q8_0"))
    assert {n for n in range(130) if rule.matches(f"blk.{n}.ffn_down_exps.weight")} == hits
    assert "{" not in rule.expanded
    assert parse(f"{pattern}=q8_0,x=q4_0").rules[0] == rule
    assert not rule.matches("xblk.200.ffn_down_exps.weight")


@pytest.mark.parametrize("braces", ["3-", "5-3", "a", "", "3;5"])
def test_braces_that_name_no_layers(braces: str) -> None:
    with pytest.raises(RecipeError, match=r"behind blk\. is no list of layers"):
        parse(f"blk.{{{braces}}}.x=q8_0")


NAMED = """# A story
#   in two lines

down := iq4_k  # of ffn_down
# Which layers get more.
hot := 3-5,9
blk.{${hot}}.ffn_down=${down}  # the hot ones
## The rest

# and that is all
ffn_down=q4_0, .*=q8_0
# the end
"""


def test_settings_have_other_values() -> None:
    made = parse(NAMED, settings={"hot": "1,2"})
    assert [str(rule) for rule in made.rules] == ["blk.{1,2}.ffn_down=iq4_k", "ffn_down=q4_0", ".*=q8_0"]
    assert parse(NAMED).one_line() == r"blk\.(?:[3459])\.ffn_down=iq4_k,ffn_down=q4_0,.*=q8_0"
    assert str(made).startswith("# A story\n#   in two lines\ndown := iq4_k  # of ffn_down\n# Which layers get more.\n")
    assert "hot := 1,2\nblk.{${hot}}.ffn_down=${down}  # the hot ones\n## The rest\n# and that is all\n" in str(made)
    assert str(made).endswith("# the end\n")


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        (NAMED, {"hat": "1"}, "did you mean hot"),
        ("a=${x}", {}, "unknown setting 'x'"),
        ("x := 1\nx := 2", {}, "defined twice"),
        ("a=q8_0\nx := 1", {}, "settings come first"),
        ("x := \na=q8_0", {}, "not empty"),
        ("x := 1\na=q8_0", {"x": "a=b"}, "not empty and contains no blank"),
    ],
)
def test_what_is_wrong_with_settings_is_said(text: str, settings: dict[str, str], said: str) -> None:
    with pytest.raises(QuantkitError, match=said):
        parse(text, settings=settings)


def test_recipes_with_settings_add_up() -> None:
    one, other = parse("x := q8_0\na=${x}"), parse("x := q4_0\nb=${x}")
    assert (one + other).one_line() == "a=q8_0,b=q4_0"
    assert parse(str(one + other)) == one + other
    assert str(one + parse("y := q4_0\nb=${y}")) == "x := q8_0\ny := q4_0\na=${x}\nb=${y}\n"


THIREUS = r"""## Quant mix recipe created using a tool suite
# Model name: DeepSeek-R1-0528

## Model head & embeddings — qbits: 32 8
^output_norm\.weight$=f32
^token_embd\.weight$=q8_0

## CPU-loaded ffn_*_exps
^blk\.([3-9]|[1-5][0-9]|60)\.ffn_down_exps\.weight$=iq3_k

## Summary of tensor sizes per class
# GPU Total: 11.744 GiB (95.0%)
# - tensors.bf16.map SHA-256: 0123
## THE END!
"""


@pytest.mark.parametrize("text", [NAMED, WRITTEN, THIREUS, *(str(find(name)) for name in shipped())])
def test_every_form_is_read_back(text: str) -> None:
    made = parse(text)
    assert parse(str(made)) == made
    assert str(parse(str(made))) == str(made)
    for form in ("custom-q", "tensor-types"):
        plain = format_recipe(made, form)
        again = parse(plain)
        assert format_recipe(again, form) == plain
        assert [(rule.expanded, rule.type) for rule in again.rules] == [(r.expanded, r.type) for r in made.rules]


def test_comments_of_a_thireus_recipe_are_kept() -> None:
    assert str(parse(THIREUS)) == "".join(f"{line}\n" for line in THIREUS.splitlines() if line)


def test_a_tensor_type_file_is_parted_by_blanks() -> None:
    assert parse("attn_q=q8_0 ffn_down=Q5_K\n\tffn_up=q4_0").one_line() == "attn_q=q8_0,ffn_down=q5_K,ffn_up=q4_0"


def test_a_plan_as_a_thireus_recipe_makes_the_same_plan() -> None:
    tensors = [TensorSpec(f"blk.{i}.{name}.weight", (64, 256), types.get("f16")) for i in range(24)
               for name in ("attn_q", "ffn_down", "ffn_up")]  # fmt: skip
    made = plan(tensors, "Q4_K_M", parse("blk.{0-3,21}.ffn_up=q8_0"))
    again = plan(tensors, "Q8_0", parse(thireus(made, "tiny")))
    assert [t.type for t in again.tensors] == [t.type for t in made.tensors]
    assert again.warnings == ()
    assert parse(thireus(made)).rules == rules_for_types((t.name, t.type) for t in made.tensors).rules


def test_a_script_as_recipes_are_published_in() -> None:
    text = """#!/usr/bin/env bash
# For one GPU
custom="
# Attention
blk\\..*\\.attn_q\\.weight=iq6_k

# Experts
exps=iq4_k
"
custom=$(
  echo "$custom" | grep -v '^#' | \\
  sed -Ez 's:\\n+:,:g;s:,$::;s:^,::'
)
./llama-quantize --custom-q "$custom" in.gguf out.gguf Q8_0 24
"""
    made = parse(text)
    assert made.one_line() == r"blk\..*\.attn_q\.weight=iq6_k,exps=iq4_k"
    assert str(made) == "# For one GPU\n# Attention\n" + "blk\\..*\\.attn_q\\.weight=iq6_k\n# Experts\nexps=iq4_k\n"
    with pytest.raises(RecipeError, match="line 8"):
        parse(text.replace("iq4_k", "iq9_k"), "x")


@pytest.mark.parametrize(
    "text",
    [
        "ffn=q8_0" + " " * 200_000 + "x",
        "ffn" + " " * 200_000 + "x=q8_0",
        "ffn=q8_0 # " + "a" * 200_000,
        "ffn=q8_0 # " + "a " * 100_000,
    ],
)
def test_long_runs_take_linear_time(text: str) -> None:
    """A quadratic search of these takes minutes."""
    begin = time.process_time()
    with contextlib.suppress(RecipeError):
        parse(text)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    ("line", "pattern", "note"),
    [("a=q8_0 # n", "a", "n"), ("a  =\tq8_0  #n", "a", "n"), ("a=q8_0", "a", ""), ("a#b=q8_0", "a#b", "")],
)
def test_blanks_and_notes(line: str, pattern: str, note: str) -> None:
    (rule,) = parse(line).rules
    assert (rule.pattern, rule.note) == (pattern, note)


@given(st.sets(st.integers(0, 1299), min_size=1, max_size=80))
def test_a_regex_of_layers_matches_these_layers_only(chosen: set[int]) -> None:
    pattern = re.compile(rf"^blk\.({layers.regex_of(chosen)})\.ffn$")
    assert {n for n in range(1300) if pattern.search(f"blk.{n}.ffn")} == chosen


def test_the_recipe_of_a_file(tmp_path: Path) -> None:
    specs = [TensorSpec(f"blk.{i}.ffn_up.weight", (4, 32), types.get("q8_0" if i else "q4_0")) for i in range(12)]
    for metadata, line in (({}, r"^blk\.(0)\.ffn_up\.weight$=q4_0,^blk\.([1-9]|1[01])\.ffn_up\.weight$=q8_0"),
                           ({"quantkit.recipe": "x := q8_0\n.*=${x}\n"}, ".*=q8_0")):  # fmt: skip
        with Writer(tmp_path / "a.gguf", metadata, specs) as writer:
            for spec in specs:
                writer.write(spec.name, np.zeros(spec.nbytes, np.uint8))
        assert find(tmp_path / "a.gguf").one_line() == line
    assert find(tmp_path / "a.gguf", {"x": "q4_0"}).one_line() == ".*=q4_0"
