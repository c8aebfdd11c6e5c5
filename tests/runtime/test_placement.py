from __future__ import annotations

import pytest

from quantkit.errors import DataError, UnsupportedError
from quantkit.runtime.placement import CPU, Device, Rule, parse_rules, place

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
    found = place(NAMES, rules, [CPU, GPU])
    assert [found[name] for name in NAMES] == [CPU, GPU, CPU, GPU, GPU]
    assert found.decided == (2, 1, 1)
    assert found.idle == []


def test_rules_that_decide_nothing_are_reported() -> None:
    found = place(NAMES, parse_rules("ffn=CPU,exps=CPU,[3-5]xyz=CPU"))
    assert [str(rule) for rule in found.idle] == ["exps=CPU", "[3-5]xyz=CPU"]


def test_a_comma_inside_a_regex_does_not_end_a_rule() -> None:
    assert parse_rules(r"blk\.\d{1,2}\.ffn=CPU,[a,b]=CPU") == [Rule(r"blk\.\d{1,2}\.ffn", "CPU"), Rule("[a,b]", "CPU")]


def test_the_last_equals_sign_separates() -> None:
    assert parse_rules("a=b=CPU") == [Rule("a=b", "CPU")]


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
