"""`fit_recipe`: limits are kept to the byte, the recipe gives what was counted, messages say what is missing."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from quantkit import types
from quantkit.archs import language_model
from quantkit.errors import DataError, FormatError, OptionError, QuantkitError, UnsupportedError
from quantkit.pipelines.allocate import FitOptions, RecipeFit, fit_recipe
from quantkit.pipelines.planning import PlanInput, complete_imatrix
from quantkit.placement.allocation import costs as costs_file
from quantkit.placement.allocation.costs import Costs, TensorCost
from quantkit.placement.budget import GIB
from quantkit.placement.speed import predict
from quantkit.recipe import Options, RecipeError, parse, plan
from quantkit.recipe.models import from_config
from quantkit.recipe.planning.replay import replay
from tests.allocation.made_up import SMALL, TYPES, costs_of
from tests.recipe import configs


@functools.cache
def model(name: str) -> PlanInput:
    specs, metadata = from_config(language_model(getattr(configs, name)))
    return PlanInput(specs, metadata, None)


@functools.cache
def costs(name: str) -> Costs:
    return costs_of(model(name).tensors)


def fitted(name: str, **options: Any) -> RecipeFit:
    given = FitOptions(types=options.pop("types", TYPES), **{"gap": 5e-4, "seconds": 30.0, **options})
    return fit_recipe(model(name), costs(name), given)


def again(name: str, found: RecipeFit) -> int:
    """Bytes of tensors in the plan of the printed recipe, as a user makes it."""
    about = model(name)
    options = Options(ignore_imatrix_rules=True)
    made = plan(about.tensors, found.file_type, parse(str(found.recipe)), metadata=about.metadata, options=options)
    assert not made.warnings
    return made.bytes_after


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LLAMA_8B", {"bpw": 4.5}),
        ("LLAMA_8B", {"size": 5 * GIB, "types": SMALL}),
        ("SMOLLM2", {"bpw": 5.5, "types": SMALL}),
        ("SMOLLM2", {"bpw": 6.0}),  # whose rows need fallbacks
        ("QWEN3_30B", {"vram": [12.0], "ram": 16.0, "ctx_size": 8192}),
        ("QWEN3_30B", {"vram": [8.0, 8.0], "ram": 8.0, "ctx_size": 4096, "cache_type_k": "q8_0"}),
        ("LLAMA_8B", {"ram": 5.0, "ctx_size": 4096}),
        ("QWEN3_30B", {"vram": [24.0], "ram": 64.0, "placement": "-ngl 99 -ot exps=CPU", "ctx_size": 4096}),
        ("QWEN3_30B", {"placement": "-ngl 99 -ot exps=CPU --devices cpu=14GiB,cuda:0=3GiB", "ctx_size": 1024}),
    ],
)
def test_limits_are_kept_and_the_recipe_gives_what_was_counted(name: str, options: dict[str, Any]) -> None:
    found = fitted(name, **options)
    assert again(name, found) == found.plan.bytes_after
    assert found.gap < 1e-3
    assert found.cost == pytest.approx(sum(t.cost for t in found.tensors))
    assert found.cost > found.error > 0
    if "bpw" in options:
        assert options["bpw"] - 0.05 < found.plan.bits_per_weight <= options["bpw"]
    if "size" in options:
        assert 0.99 * options["size"] < found.size <= options["size"]
    if found.budget is not None:
        assert found.budget.fits
        placed = {t.name: t.device for t in found.tensors}
        assert all(found.budget.placement[name].name == device for name, device in placed.items())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DEEPSEEK_V3", {"vram": [24.0], "ram": 256.0, "ctx_size": 32768, "cache_type_k": "q8_0"}),
        ("DEEPSEEK_V3", {"size": 250 * 10**9}),
        ("QWEN3_235B", {"vram": [24.0, 24.0], "ram": 96.0, "ctx_size": 32768}),
        ("QWEN3_235B", {"bpw": 3.5, "max_types": 4}),
    ],
)
def test_large_models_take_a_minute_at_most(name: str, options: dict[str, Any]) -> None:
    begin = time.process_time()  # of this process alone: other work on the machine does not count
    found = fitted(name, **options, seconds=600)
    assert time.process_time() - begin < 60
    assert found.gap < 1e-3
    assert again(name, found) == found.plan.bytes_after
    assert found.budget is None or found.budget.fits
    assert "max_types" not in options or len({t.type for t in found.tensors}) <= options["max_types"]


def test_a_better_recipe_than_one_type() -> None:
    found = fitted("LLAMA_8B", bpw=4.5)
    uniform = sum(costs("LLAMA_8B").tensors[t.name].of("iq4_k") or 0 for t in found.tensors)
    assert found.cost < 0.9 * uniform


def test_constraints() -> None:
    found = fitted("QWEN3_30B", bpw=4.0, min=["attn_v=q8_0", r"blk\.0\.=iq4_k"], max=["_exps=iq4_k"], same="experts",
                   layer_group=4)  # fmt: skip
    kinds = {t.name: t.type for t in found.tensors}
    bits = {name: kind.bits_per_weight() for name, kind in kinds.items()}
    assert all(bits[name] >= 8.5 for name in bits if "attn_v" in name)
    assert all(bits[name] >= 4.5 for name in bits if name.startswith("blk.0."))
    assert all(bits[name] <= 4.5 for name in bits if "_exps" in name)
    for layer in range(4, 8):
        for part in ("gate", "up", "down"):
            assert kinds[f"blk.{layer}.ffn_{part}_exps.weight"] is kinds["blk.4.ffn_gate_exps.weight"]
    free = fitted("QWEN3_30B", bpw=4.0, same="none")
    assert free.cost < found.cost


def test_types_of_one_program() -> None:
    """Also where rows need a fallback, as SmolLM2's of 576 columns do."""
    found = fitted("SMOLLM2", bpw=6.0, types=(), dialect="llama.cpp")
    assert all("llama.cpp" in t.type.readers for t in found.plan.tensors)
    assert found.plan.dialect == "llama.cpp"
    measured = costs_of(model("SMOLLM2").tensors, ("q5_k",))
    with pytest.raises(
        DataError, match=r"token_embd.weight: none of the types q5_K becomes one that --dialect llama.cpp"
    ):
        fit_recipe(model("SMOLLM2"), measured, FitOptions(bpw=6.0, types=("q5_K",), dialect="llama.cpp"))
    with pytest.raises(OptionError, match=r"--types iq4_k: --dialect llama.cpp does not read them"):
        fitted("SMOLLM2", bpw=6.0, types=("iq4_k", "q8_0"), dialect="llama.cpp")


def test_gate_and_up_have_one_type() -> None:
    kinds = {t.name: t.type for t in fitted("LLAMA_8B", bpw=4.0).tensors}
    assert all(kinds[f"blk.{i}.ffn_gate.weight"] is kinds[f"blk.{i}.ffn_up.weight"] for i in range(32))
    kinds = {t.name: t.type for t in fitted("LLAMA_8B", bpw=4.0, same="none").tensors}
    assert any(kinds[f"blk.{i}.ffn_gate.weight"] is not kinds[f"blk.{i}.ffn_up.weight"] for i in range(32))


def test_interleaved_types_stay_where_they_have_kernels() -> None:
    found = fitted("QWEN3_30B", types=["iq4_nl_r4", "iq4_k", "q8_0"], vram=[12.0], ram=8.0)
    assert {t.type.name for t in found.tensors if t.device == "CPU"} & {"iq4_nl_r4"}
    assert not {t.type.name for t in found.tensors if t.device != "CPU"} & {"iq4_nl_r4"}


@pytest.mark.parametrize("runtime", ["ik_llama.cpp", "quantkit"])
def test_a_tied_embedding_is_counted_where_it_is_read(runtime: str) -> None:
    """ik_llama.cpp loads it once more, to the GPU: the largest recipe that fits is as much smaller."""
    specs, metadata = from_config(configs.LLAMA_8B | {"tie_word_embeddings": True})
    options = FitOptions(types=TYPES, vram=[6.0], ram=8.0, ctx_size=4096, runtime=runtime, gap=5e-4, seconds=30.0)
    found = fit_recipe(PlanInput(specs, metadata, None), costs_of(specs), options)
    assert found.budget is not None
    assert found.budget.fits
    load = next(load for load in found.budget.loads if load.device == "CUDA0")
    own = sum(t.bytes_after for t in found.plan.tensors if found.budget.placement[t.name].name == "CUDA0")
    embedding = next(t for t in found.plan.tensors if t.name == "token_embd.weight")
    assert load.weights - own == (embedding.bytes_after if runtime == "ik_llama.cpp" else 0)
    assert 0 <= (load.left or 0) < 0.02 * 6 * GIB


@pytest.mark.parametrize("machine", [{"vram": [24.0], "placement": "-ngl 18"}, {"vram": [3.0, 3.0], "ram": 64.0}])
def test_layers_that_are_alike_may_be_on_several_devices(machine: dict[str, Any]) -> None:
    """Each counts where it is, and an interleaved type is for none of them if one is where it has no kernel."""
    found = fitted("LLAMA_8B", types=["iq4_nl_r4", "q4_0", "q8_0"], layer_group=5, ctx_size=1024, **machine)
    assert found.budget is not None
    assert found.budget.fits
    assert not found.budget.warnings
    assert {t.name: t.device for t in found.tensors} == {
        t.name: found.budget.placement[t.name].name for t in found.tensors
    }
    devices: dict[int, set[str]] = {}
    for t in found.tensors:
        if ".attn_" in t.name:
            devices.setdefault(int(t.name.split(".")[1]) // 5, set()).add(t.device)
    assert max(map(len, devices.values())) == 2


def test_a_speed_that_must_be_reached() -> None:
    machine: dict[str, Any] = {"vram": [12.0], "ram": 32.0, "bandwidth": "cpu=50,cuda:0=800", "seconds": 10.0}
    slow = fitted("QWEN3_30B", **machine)
    fast = fitted("QWEN3_30B", min_tg=55.0, **machine)
    assert fast.cost > slow.cost
    with pytest.raises(DataError, match="--min-tg asks for 5000"):
        fitted("QWEN3_30B", min_tg=5000.0, **machine)
    cached = fitted("QWEN3_30B", min_tg=20.0, ctx_size=32768, **machine | {"bandwidth": "cpu=50,cuda:0=100"})
    assert cached.budget is not None
    tensors = {t.name: t for t in cached.plan.tensors}
    caches = {load.device: load.cache for load in cached.budget.loads}
    rates = {"CPU": 50e9, "CUDA0": 100e9}
    assert predict(tensors, model("QWEN3_30B").metadata, cached.budget.placement, caches, rates, {}).tokens >= 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bpw": 1.5}, r"the smallest types need 2\.\d+ bits per weight, --bpw is 1.5"),
        ({"size": GIB}, r"the smallest file has [\d,]+ bytes \(\d\.\d+ GiB\), --size is 1,073,741,824 \(1.000 GiB\)"),
        ({"ram": 1.0}, r"CPU would need \d\.\d+ GiB with the smallest types, .* give --ram \d\.\d+ or more"),
        ({"vram": [2.0], "ram": 0.5, "ctx_size": 16384}, r"CUDA0 would need .* give --vram"),
        ({"vram": [0.5]}, r"CUDA0 would need .* and has 0.500 less a margin of 1.000: .* give --vram \d"),
        (
            {"placement": "-ngl 99 --devices cuda:0=1.5GiB"},
            r"and has 1.500 less .* give --devices CUDA0=\d[\d.]*GiB or",
        ),
        ({"bpw": 4.5, "min": ["nothing=q8_0"]}, "matches none of the"),
        ({"bpw": 4.5, "min": ["attn_v"]}, "is not REGEX=TYPE"),
        ({"bpw": 4.5, "min": ["attn_v=q8_0"], "max": ["attn_v=q4_K"]}, "none of the types .* is within --min attn_v"),
        ({"bpw": 4.5, "types": ["q5_K"]}, "costs: token_embd.weight has no error for q5_K.*sensitivity --types q5_K"),
        (
            {"bpw": 4.5, "types": ["q8_0", "q5_K"]},
            "no error for q5_K, nor has any other tensor.*or drop it from --types",
        ),
        ({"bpw": 4.5, "types": ["iq5_k", "iq4_xs_r8"]}, "sensitivity --types iq4_xs, or drop"),
        ({"bpw": 4.5, "types": ["q8_K"]}, "--types q8_K: quantkit cannot encode this type"),
        (
            {"bpw": 4.5, "min": ["ffn_up=q8_0"], "types": ["q4_0"]},
            r"blk.0.ffn_gate.weight, blk.0.ffn_up.weight that get one type .*: none of the types q4_0 is within",
        ),
        (
            {"bpw": 4.5, "min": [r"blk\.3\.attn_q=q8_0"], "types": ["q4_0"], "layer_group": 4},
            r"blk.{0-3}.attn_q.weight that get one type .* is within --min blk",
        ),
        ({}, "needs a limit"),
        ({"bpw": 4.5, "same": "all"}, "--same all: choose one of"),
        ({"bpw": 4.5, "layer_group": 0}, "--layer-group 0"),
        ({"bpw": 4.5, "max_types": 0}, "--max-types 0"),
        *(({"bpw": x}, f"--bpw {x:g}: a number above 0") for x in (0.0, -1.0, math.nan, math.inf)),
        *(({"ram": x}, f"--ram {x:g}: a number of GiB above 0") for x in (0.0, -1.0, math.nan, math.inf)),
        ({"vram": [1e308]}, "--vram 1e[+]308: a number of GiB"),
        ({"ram": 8.0, "fit_margin": math.inf}, "--fit-margin inf: a number of MiB from 0"),
        ({"bpw": 4.5, "min_tg": 0.0}, "--min-tg 0: a number above 0"),
        ({"bpw": 4.5, "seconds": math.nan}, "--seconds nan: a number above 0"),
        ({"bpw": 4.5, "bandwidth": "cpu=nan"}, "'cpu=nan': a rate must be a finite number above 0"),
        ({"bpw": 4.5, "placement": "-ts nan"}, "-ts .nan,.: shares must be from 0"),
        ({"vram": [8.0, 8.0], "placement": "-sm graph -ngl 99"}, "not -sm graph"),
        ({"vram": [8.0], "placement": "-ngl 99 --devices cuda:0=8GiB"}, "drop one of them"),
    ],
)
def test_what_cannot_be_is_said_with_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, OptionError, RecipeError, UnsupportedError), match=message):
        fitted("LLAMA_8B", **options)


def test_what_is_said_to_suffice_suffices() -> None:
    with pytest.raises(DataError) as error:
        fitted("LLAMA_8B", size=GIB)
    needed = int(str(error.value).split(" bytes")[0].rpartition(" ")[2].replace(",", ""))
    assert needed - 4096 < fitted("LLAMA_8B", size=needed).size <= needed
    with pytest.raises(DataError):
        fitted("LLAMA_8B", size=needed - 8192)


@pytest.mark.parametrize("limit", ["bpw", "min_tg"])
def test_figures_that_are_said_to_suffice_are_rounded_to_the_safe_side(limit: str) -> None:
    given: dict[str, Any] = {"bpw": 1.0} if limit == "bpw" else {"min_tg": 5000.0, "ram": 64.0}
    for kinds in (("iq2_ks",), ("iq3_k",), ("iq4_k",), ("q8_0",)):
        with pytest.raises(DataError) as error:
            fitted("LLAMA_8B", types=kinds, **given)
        needed = re.search(r"types need ([\d.]+) bits|types reach ([\d.]+) tok", str(error.value))
        assert needed
        fitted("LLAMA_8B", types=kinds, **given | {limit: float(needed[1] or needed[2])})


@pytest.mark.parametrize("kinds", [SMALL, TYPES])
def test_the_json_is_a_plan(kinds: tuple[str, ...]) -> None:
    """Of types that need an importance matrix, with one."""
    found = fitted("LLAMA_8B", bpw=5.0, types=kinds)
    document = {"schema": "quantkit.recipe-fit/1", **found.to_json()}
    tensors = model("LLAMA_8B").tensors
    needs = any(t.importance for t in found.plan.tensors)
    replayed = replay(document, tensors, complete_imatrix(tensors) if needs else None, where="fit")
    assert [t.type for t in replayed.tensors] == [t.type for t in found.plan.tensors]
    assert document["fit"]["kld"] == found.cost


def test_an_importance_matrix_that_will_be_needed_is_named() -> None:
    tensors = costs_of(model("LLAMA_8B").tensors, ("iq2_xxs", "q8_0"))
    found = fit_recipe(model("LLAMA_8B"), tensors, FitOptions(types=("iq2_xxs", "q8_0"), bpw=4.0))
    assert "needs an importance matrix" in found.notes[0]


def test_costs_files(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs("SMOLLM2").write(path)
    found = costs_file.read(path)
    assert found.tensors == costs("SMOLLM2").tensors
    assert found.types()[: len(TYPES)] == list(TYPES)
    t = next(t for t in model("SMOLLM2").tensors if t.name == "blk.3.attn_q.weight")
    assert found.cost(t.name, t.shape, types.get("iq4_nl_r4"), t.type) == found.tensors[t.name].of("iq4_nl")
    assert found.cost(t.name, t.shape, t.type, t.type) == 0
    with pytest.raises(DataError, match="has shape"):
        found.cost(t.name, (1, 2), types.get("q4_0"), t.type)
    with pytest.raises(DataError, match=r"has no costs of blk\.99"):
        found.cost("blk.99.attn_q.weight", t.shape, types.get("q4_0"), t.type)
    path.write_text('{"schema": "quantkit.costs/1", "tensors": {"a": {"shape": [1], "kld": -1}}}', encoding="utf-8")
    with pytest.raises(FormatError, match="a: not as quantkit sensitivity writes it"):
        costs_file.read(path)
    document = costs("SMOLLM2").to_json()
    entry = document["tensors"]["blk.3.attn_q.weight"]
    twice = {"errors": entry["errors"] | {"Q4_0": [1, 0]}}
    for wrong, message in (
        *(({"kld": value}, "kld is .*, not a number of at least 0") for value in (-1, math.nan, "1", True, 10**400)),
        ({"errors": {"q4_0": [1, math.inf]}}, "q4_0 is inf, not a number"),
        ({"errors": {"q4_0": [1]}}, "not as quantkit sensitivity writes it"),
        ({"errors": {"zz": [1, 0]}}, "unknown type 'zz'"),
        (twice, "a type is there twice: .*q4_0.*Q4_0"),
        *(({"shape": value}, "shape is .*, not a list of whole numbers") for value in ([math.inf], ["1"], [1.5], "ab")),
    ):
        path.write_text(json.dumps(document | {"tensors": {"blk.3.attn_q.weight": entry | wrong}}), encoding="utf-8")
        with pytest.raises(FormatError, match=rf"{re.escape(str(path))}: blk\.3\.attn_q\.weight: {message}"):
            costs_file.read(path)
    for key, value in (("kld", 1e308), ("probe_error", 5e-324), ("kld_error", 1e300)):
        huge = {"blk.3.attn_q.weight": entry | {key: value}}
        path.write_text(json.dumps(document | {"tensors": document["tensors"] | huge}), encoding="utf-8")
        with pytest.raises(FormatError, match=r"blk\.3\.attn_q\.weight: .* nats per token; at most 1e[+]12"):
            costs_file.read(path)
    exact = document["tensors"]["blk.3.attn_q.weight"] | {
        "probe_error": 0,
        "errors": {"q4_0": [0, 0], "q6_0": [0.5, 0]},
    }
    path.write_text(json.dumps(document | {"tensors": {"blk.3.attn_q.weight": exact}}), encoding="utf-8")
    with pytest.raises(FormatError, match=r"attn_q\.weight: the probe type has no error, q6_0 has 0\.5: .* --probe"):
        costs_file.read(path)
    exact["errors"] = {"q4_0": [0, 0], "q6_0": [0, 0]}  # of a matrix that is zero, say
    path.write_text(json.dumps(document | {"tensors": {"blk.3.attn_q.weight": exact}}), encoding="utf-8")
    assert costs_file.read(path).tensors["blk.3.attn_q.weight"].of("q6_0") == 0
    path.write_text(json.dumps(document | {"factors": {"q4_0": 1e300}}), encoding="utf-8")
    with pytest.raises(FormatError, match=r"factors: q4_0 has 1e[+]300; a factor is from"):
        costs_file.read(path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(FormatError, match="not a costs file"):
        costs_file.read(path)


def test_tensors_that_were_not_used_are_named() -> None:
    about = costs("LLAMA_8B")
    unused = {name: dataclasses.replace(t, kld=0.0, kld_error=0.0) for name, t in about.tensors.items() if
              name.startswith("blk.31.ffn")}  # fmt: skip
    given = FitOptions(types=TYPES, bpw=4.5)
    found = fit_recipe(model("LLAMA_8B"), dataclasses.replace(about, tensors={**about.tensors, **unused}), given)
    assert len(found.notes) == 1
    assert found.notes[0].startswith("3 tensors cost nothing")
    assert "blk.31.ffn_gate.weight" in found.notes[0]
    assert {t.type.name for t in found.tensors if t.name in unused} == {"iq2_ks"}
    assert fitted("LLAMA_8B", bpw=4.5).notes == ()


def test_costs_that_may_be_of_another_model_or_matrix_are_named() -> None:
    about = costs("LLAMA_8B")
    more = {f"blk.{i}.ffn_up.weight": about.tensors["blk.31.ffn_up.weight"] for i in (32, 33)}
    other = Costs({**about.tensors, **more}, {"imatrix": "i.gguf"}, "c.json")
    found = fit_recipe(model("LLAMA_8B"), other, FitOptions(types=SMALL, bpw=5.0))
    assert [note.partition(";")[0] for note in found.notes] == [
        "c.json has costs of 2 tensors that this model lacks, such as blk.{32-33}.ffn_up.weight",
        "c.json was measured with the importance matrix i.gguf, and none is given: without it the KL divergence is "
        "larger than predicted",
    ]
    given = complete_imatrix(model("LLAMA_8B").tensors)
    assert len(fit_recipe(model("LLAMA_8B"), other, FitOptions(types=SMALL, bpw=5.0), given).notes) == 1


def test_errors_of_costs_add_up() -> None:
    cost = TensorCost((1, 32), 0.01, 0.001, 2.0, {"q4_0": (2.0, 0.0), "q6_0": (1.0, 0.5)})
    assert cost.of("q6_0") == pytest.approx(0.005)
    assert cost.error_of("q4_0") == pytest.approx(0.001)
    assert cost.error_of("q6_0") == pytest.approx(((0.001 / 2) ** 2 + (0.01 * 0.5 / 2) ** 2) ** 0.5)


def test_the_size_counts_what_effort_adds_to_the_header() -> None:
    normal, fast = (fitted("LLAMA_8B", types=SMALL, bpw=5.0, effort=effort) for effort in ("normal", "fast"))
    assert [t.type for t in normal.tensors] == [t.type for t in fast.tensors]
    assert fast.size > normal.size
    with pytest.raises(QuantkitError, match="effort"):
        fitted("LLAMA_8B", types=SMALL, bpw=5.0, effort="quick")


def test_several_gpus_get_the_split_that_was_planned() -> None:
    """ik_llama.cpp divides layers by the memory that is free when it starts, if -ts does not say how."""
    found = fitted("QWEN3_30B", types=SMALL, vram=[12.0, 6.5], ram=16.0, ctx_size=4096)
    assert "-ts 12,6.5" in found.flags
    assert "-ts" not in fitted("QWEN3_30B", types=SMALL, vram=[12.0], ram=16.0, ctx_size=4096).flags
