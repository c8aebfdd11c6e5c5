"""Patterns of users and files: the same matches as re's, in bounded time, for hostile ones too."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from quantkit import recipe
from quantkit.errors import DataError, QuantkitError
from quantkit.formats.safetensors.quantized.compressed_tensors import _matches
from quantkit.inputs import safe_regex
from quantkit.inputs.safe_regex import compile
from quantkit.placement.rules import PlacementRule
from quantkit.recipe import registry
from quantkit.recipe.planning.interleaving import Selection
from quantkit.recipe.rules.ecmascript import compile_pattern

NAMES = [
    f"blk.{layer}.{part}.weight"
    for layer in (0, 3, 10, 47, 60)
    for part in ("attn_q", "attn_output", "ffn_down", "ffn_gate_exps", "ffn_up_shexp", "ffn_gate_inp", "attn_norm")
] + ["token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight", "a" * 64, "", "x" * 300, "é.b"]

# What takes re or regex for ever, in searching or in compiling.
ENDLESS = [
    "([a-z_.0-9]*)*!", "(x+x+)+y", "(a|a)*b", "(a|ab|b)*c", r"(\w|_)+!", "((a*)*)*((a*)*)*b", "(|a)+b", "(?:a?)*b",
    "a?" * 60 + "a" * 60, "(a|a)" * 40 + "b", "(.|a)" * 40 + "b", ".*" * 30 + "x",
    "(?:.*a){20}b", r"^(\d+|\w+)*$", "(?:(?:a|b|ab)+x?)+!", "(a+)+?b", "(a+)*", "((a)|(a))+b",
]  # fmt: skip
TEXTS = ["a" * 60, "x" * 60, "blk.0.attn_output_of_something_long.weight", "ab" * 30, "1" * 60, "a" * 5000]


@pytest.mark.parametrize("pattern", ENDLESS)
def test_hostile_patterns_end(pattern: str) -> None:
    started = time.process_time()
    found = compile(pattern, "--custom-q")
    for text in TEXTS:
        found.search(text)
        found.match(text)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("pattern", ["(a+)+b(?=c)", r"([a-z]+)+\1!", "(?!x)([a-z_.0-9]*)*!", "(?x)(a*) *b", "(?:a?)*+b",
                                     "(a{1000}){1000}(a*)*", "((a{1,1000}){1,1000}){1,1000}b", "(a{0,40}){40}b",
                                     "(?<=x)" + "(a|a)" * 40 + "b"])  # fmt: skip
def test_what_cannot_be_bounded_is_refused(pattern: str) -> None:
    """With lookaheads or back references there is no linear search."""
    with pytest.raises(QuantkitError, match=r"--custom-q: pattern .* could take forever on 'aaaaaaa.*, of 60 char"):
        compile(pattern, "--custom-q").search("a" * 60)


@pytest.mark.parametrize("pattern", ["(", "a**", "[", "a{99999999999999999999}", "(" * 3000 + "a" + ")" * 3000, "\\",
                                     "a" * 40000, ")", "(?P<x>a)(?P<x>b)", "(?", "a|*"])  # fmt: skip
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(DataError, match=r"^here: pattern '.*' (is not a regular expression|has 40000 characters)"):
        compile(pattern, "here")


@pytest.mark.parametrize("pattern", [
    r"blk\.(?:[3-9]|1[0-8]|40)\.ffn_(up|gate)_exps.*",
    "^output\\.weight", "ffn_down", r"attn_.*\.weight$", "(?=.*attn)blk",
    r"blk\..*\.ffn_(gate|up)_shexp", "[^.]*_exps", r"\bffn", "a{3,60}$", "(?:ab?)*",
    "(a|b)*?x", "(blk|ffn)+?", "x{300}",
    "(?:.+a){2}", r"(\w+)\.\1", "[]a]", "(?!blk)", ".", "", "é", r"\.(?:0|1|2|10)\.", r".*\d.*_.*e.*", "(?i:BLK)",
])  # fmt: skip
def test_matches_are_those_of_re(pattern: str) -> None:
    """With the engine that the bound chooses, and with the linear one where it can."""
    expected = re.compile(pattern, re.ASCII)
    found, linear = compile(pattern), safe_regex.Pattern(pattern, "", True, DataError, "")
    linear._longest = -1
    for name in NAMES:
        for method in ("search", "match"):
            wanted = getattr(expected, method)(name)
            for each in (found, linear):
                try:
                    got = getattr(each, method)(name)
                except DataError:
                    assert each is linear or len(name) > 60
                    continue
                assert (got and (got.span(), got[0])) == (wanted and (wanted.span(), wanted[0])), (name, method)


def test_ordinary_patterns_stay_with_re() -> None:
    """All of the shipped recipes, and what is common in published ones."""
    common = [r"blk\..*\.attn_k.*", r".*\.ffn_(gate|up)_exps\.weight.*", r"blk\.(0|1|2|3|4|5|10|11|60)\.ffn_.*exps.*",
              r"blk\.([0-9]|1[0-9]|2[0-9])\.ffn_down_exps\.weight",
              r"\.(1[2-9]|[2-5]\d)\.ffn_.*_shexp\.weight$"]  # fmt: skip
    shipped = [rule.expanded for name in registry.shipped() for rule in registry.find(name).rules]
    assert len(shipped) > 20
    for pattern in common + shipped:
        assert compile(pattern)._longest >= 63, pattern


def test_escapes_of_the_linear_engine() -> None:
    pattern = compile(r"(\u0062*)*[\x61]\.\\u\Z")
    assert pattern._longest == -1
    assert pattern.search(r"bba.\u")
    assert not pattern.search(r"bba.u")


def test_re2_is_imported_only_where_it_is_needed() -> None:
    source = Path(safe_regex.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^import re2|^from re2", source, re.M)


HOSTILE, BOUND = "([a-z_.0-9]*)*!", "([a-z_.0-9]*)*(?!.)!"  # one for the linear engine, one that it cannot express
NAME = "blk.0.attn_output_of_something.weight"
ENTRANCES = {
    "--custom-q": lambda pattern: recipe.parse(f"{pattern}=q8_0").rules[0].matches(NAME),
    "--repack-pattern": lambda pattern: Selection([pattern, "blk"], [NAME, "!"]),
    "-ot": lambda pattern: PlacementRule(pattern, "CPU").matches(NAME),
    "targets of config.json": lambda pattern: _matches(f"re:{pattern}", NAME),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_every_entrance(entrance: str) -> None:
    """What took years now ends, or says what it is about."""
    ENTRANCES[entrance](HOSTILE)
    with pytest.raises(QuantkitError, match=f"could take forever on '{re.escape(NAME)}'"):
        ENTRANCES[entrance](BOUND)


def test_a_target_that_is_no_text() -> None:
    with pytest.raises(QuantkitError, match="targets: 5; a target is"):
        _matches(5, "model.layers.0")  # type: ignore[arg-type]


def test_long_patterns_are_refused_before_they_are_translated() -> None:
    with pytest.raises(QuantkitError, match="has 10000000 characters"):
        compile_pattern("a" * 10**7)


def test_the_message_has_the_pattern_as_it_was_written() -> None:
    with pytest.raises(QuantkitError, match=re.escape("pattern '([[:alpha:]]+)+(?=!)' could take forever")):
        compile_pattern("([[:alpha:]]+)+(?=!)").search("a" * 40)
