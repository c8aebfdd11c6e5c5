"""Options of `bench` that take lists."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from quantkit.cli.bench import launch_record, varying_columns
from quantkit.cli.common.bench_lists import OPTIONS, combinations, integers


def given(**options: Any) -> dict[str, Any]:
    return {name: default for name, (_, default) in OPTIONS.items()} | {"other": 7} | options


def test_without_lists_there_is_one_combination_of_the_defaults() -> None:
    (only,) = combinations(given())
    assert only["other"] == 7
    assert launch_record(only) == {
        "n_gpu_layers": None, "flash_attn": True, "type_k": None, "type_v": None, "mla_attn": 3, "attn_max_batch": 256,
        "fused_moe": True, "repack": False, "use_mmap": True, "use_thp": False,
    }  # fmt: skip


def test_all_combinations_in_llama_benchs_order() -> None:
    found = list(combinations(given(flash_attn="0,1", cache_type_k="f16,Q8_0", mla="1,3")))
    assert [(v["flash_attn"], v["cache_type_k"], v["mla"]) for v in found] == [
        (fa, k, mla) for fa in ("off", "on") for k in ("f16", "q8_0") for mla in (1, 3)
    ]
    assert varying_columns([launch_record(values) for values in found]) == ["flash_attn", "type_k", "mla_attn"]


def test_a_value_counts_once_and_switches_have_several_names() -> None:
    found = list(combinations(given(flash_attn="on,1,auto", run_time_repack="0,on", cache_type_v="Q8_kv")))
    assert [(v["flash_attn"], v["run_time_repack"], v["cache_type_v"]) for v in found] == [
        ("on", False, "q8_KV"), ("on", True, "q8_KV")
    ]  # fmt: skip


def test_switches_of_the_other_commands_still_count() -> None:
    (values,) = combinations(given(no_mmap=True, no_fused_moe=True, fused_moe="0,1"))
    assert (values["mmap"], values["fused_moe"]) == (False, False)


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("flash_attn", "0,2", "-fa 0,2: '2' is not valid; write on|off,…"),
        ("mla", "3,4", "-mla 3,4: '4'"),
        ("attention_max_batch", "-1", "-amb -1: '-1'"),
        ("cache_type_v", "q9", "-ctv q9: 'q9'"),
        ("huge_pages", "1,", "-thp 1,: ''"),
    ],
)
def test_what_is_not_valid_is_named(option: str, text: str, said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said.replace("|", r"\|")):
        list(combinations(given(**{option: text})))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("512", [512]),
        ("16, 64", [16, 64]),
        ("3-5", [3, 4, 5]),
        ("16-64+16", [16, 32, 48, 64]),
        ("16-63+16", [16, 32, 48]),
        ("16-64*2,7", [16, 32, 64, 7]),
        ("0-2", [0, 1, 2]),
    ],
)
def test_ranges_of_llama_bench(text: str, numbers: list[int]) -> None:
    assert integers("-p", text, 0) == numbers


@pytest.mark.parametrize("text", ["", "a", "-1", "4-", "4-8*1", "0-8*2", "4-8+0", "8-4", "1-2-3", "0-999999999", "0"])
def test_a_range_that_has_no_numbers_or_no_end_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="or a range: 16-64"):
        integers("-p", text, 1)


def test_numbers_of_options_may_be_ranges() -> None:
    found = list(combinations(given(attention_max_batch="128-512*2", gpu_layers="0,all,3-4")))
    assert [v["attention_max_batch"] for v in found[:3]] == [128, 256, 512]
    assert list(dict.fromkeys(launch_record(v)["n_gpu_layers"] for v in found)) == [0, "all", 3, 4]


def test_a_list_of_layers_is_timed_once_without_a_gpu() -> None:
    from quantkit.cli.common.launch import _launches
    from quantkit.cli.common.run_options import RUN_OPTIONS

    options = {name: default for name, (_, default) in (RUN_OPTIONS | OPTIONS).items()} | {"gpu_layers": "0,1"}
    assert [launch.given["gpu_layers"] for launch in _launches(options)] == [None]
    found = _launches(options | {"devices": "cpu:0"})
    assert [launch.given["gpu_layers"] for launch in found] == ["0", "1"]
