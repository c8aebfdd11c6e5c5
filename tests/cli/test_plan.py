"""plan, recipe, quantize --plan and --dry-run, on configs and on small files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs, types
from quantkit.formats import imatrix
from quantkit.formats.gguf import TensorSpec, Writer
from tests.cli.running import printed, refused
from tests.recipe.configs import LLAMA_8B, QWEN3_30B

RULES = "ffn_(gate|up)=iq4_nl,ffn_down=q5_0"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A bare config.json of a small llama."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip
    (tmp_path / "small").mkdir()
    path = tmp_path / "small" / "config.json"
    path.write_text(json.dumps(LLAMA_8B | small))
    return path


@pytest.fixture
def model(config: Path, rng: np.random.Generator) -> Path:
    """A GGUF of that model."""
    from quantkit.recipe import from_config, read_config

    specs, metadata = from_config(read_config(config))
    specs = [TensorSpec(s.name, s.shape, types.get("f16") if s.type.name == "bf16" else s.type) for s in specs]
    with Writer(config.parent / "small.gguf", metadata, specs) as writer:
        for spec in specs:
            x = rng.standard_normal((spec.n_rows, spec.shape[-1])).astype(np.float32)
            writer.write(spec.name, spec.type.quantize(x))
    return config.parent / "small.gguf"


def test_a_plan_of_a_config_is_that_of_its_directory_and_of_a_dry_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("Q4_0", "--custom-q", RULES, "--json", "-c", "128", "-ngl", "2", "-ot", "ffn_down=CPU")
    one = json.loads(printed(capsys, "plan", config, *flags))
    assert one == json.loads(printed(capsys, "plan", config.parent, *flags))
    assert one["schema"] == "quantkit.plan/1"
    dry = json.loads(printed(capsys, "quantize", config, tmp_path / "no.gguf", *flags, "--dry-run"))
    assert dry == one
    assert not (tmp_path / "no.gguf").exists()
    devices = {load["device"]: load for load in one["budget"]["devices"]}
    assert devices["CPU"]["weights"] + devices["CUDA0"]["weights"] == one["bytes_after"]
    assert (devices["CPU"]["cache"], devices["CUDA0"]["cache"]) == (128 * 2 * 32 * 2, 2 * 128 * 2 * 32 * 2)
    assert one["budget"]["placement"]["blk.2.ffn_down.weight"] == "CPU"
    assert one["budget"]["placement"]["blk.2.ffn_up.weight"] == "CUDA0"
    assert sum(use["tensors"] for use in one["types"]) == len(one["tensors"])


def test_tables(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "plan", config, "Q4_0", "--custom-q", "blk.{0-1}.ffn_down=q8_0,nothing=q4_0")
    for part in ("blk.{0-1}.ffn_down.weight", "blk.{2}.ffn_down.weight", "blk.*.attn_q.weight", "rule 1: blk.{0-1}",
                 "warning: rule 2 'nothing=q4_0' matches none of the", "bits per weight"):  # fmt: skip
        assert part in said
    assert "device" not in said
    said = printed(capsys, "plan", config, "Q4_0", "-c", "1000", "--ram", "1", "--vram", "2,2", "-ts", "3,1")
    assert "fits, with 1024.00 MiB of each GPU reserved" in said
    assert "CUDA1" in said


def test_a_plan_is_executed(model: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = printed(capsys, "plan", config, "Q4_0", "--custom-q", RULES, "--json")
    path = tmp_path / "plan.json"
    path.write_text(made)
    printed(capsys, "quantize", model, tmp_path / "by-plan.gguf", "--plan", path)
    printed(capsys, "quantize", model, tmp_path / "by-rules.gguf", "Q4_0", "--custom-q", RULES)
    assert (tmp_path / "by-plan.gguf").read_bytes() == (tmp_path / "by-rules.gguf").read_bytes()
    types_of = {t["name"]: t["type"] for t in json.loads(made)["tensors"]}
    assert {t.name: t.type.name for t in quantkit.open(tmp_path / "by-plan.gguf").tensors.values()} == types_of


def test_a_plan_changed_by_hand_is_executed_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = json.loads(printed(capsys, "plan", model, "Q4_0", "--custom-q", RULES, "--json"))
    path, out = tmp_path / "plan.json", tmp_path / "out.gguf"
    path.write_text(json.dumps(edited(made, "blk.1.ffn_up.weight", type="Q8_0")))
    written = json.loads(printed(capsys, "quantize", model, out, "--plan", path, "--json"))
    found = {t.name: t.type.name for t in quantkit.open(out).tensors.values()}
    assert found["blk.1.ffn_up.weight"] == "q8_0"
    assert not written["fallbacks"]
    assert [rule["decided"] for rule in written["rules"]] == [1, 5, 3]
    again = json.loads(printed(capsys, "plan", model, "Q4_0", "--recipe", out, "--json"))
    assert {t["name"]: t["type"] for t in again["tensors"]} == found  # by the recipe in the file


def edited(made: dict[str, Any], of: str = "blk.0.ffn_up.weight", **changes: Any) -> dict[str, Any]:
    tensors = [t | changes if t["name"] == of else t for t in made["tensors"]]
    return made | {"tensors": tensors}


def test_plans_that_do_not_fit_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(printed(capsys, "plan", model, "Q4_0", "--json"))
    path, out = tmp_path / "plan.json", tmp_path / "out.gguf"
    for document, said in (
        (edited(made, shape=[1, 64]), "blk.0.ffn_up.weight: the plan is for a shape"),
        (edited(made, name="x.weight"), "planned for another model"),
        (edited(made, type="q4_K"), "cannot be q4_K"),
        (edited(made, type="q4_k_m"), "unknown type"),
        (edited(made, importance="blk.0.ffn_up.weight"), "none is given; pass --imatrix"),
        (made | {"schema": "quantkit.plan/2"}, "a plan's is quantkit.plan/1"),
        ({"tensors": [{}]}, "not a plan as"),
        ([made], "plan.json: a list where `quantkit plan --json` writes an object"),
        (made | {"tensors": [*made["tensors"], made["tensors"][0]]}, "a tensor is there twice"),
        (made | {"flags": "--nope"}, "plan.json: '--nope' is not a flag"),
        (
            edited(made, "blk.0.attn_norm.weight", type="q4_0"),
            "cannot be q4_0, because it is one-dimensional; write f32",
        ),
        (
            edited(made, "token_embd.weight", type="q4_0_r8"),
            "rows of an embedding are looked up one by one; write q4_0",
        ),
    ):
        path.write_text(json.dumps(document))
        assert said in refused(capsys, "quantize", model, out, "--plan", path)
    path.write_text("{")
    assert "not JSON" in refused(capsys, "quantize", model, out, "--plan", path)
    path.write_text(json.dumps(made))
    assert "drop one" in refused(capsys, "quantize", model, out, "Q4_0", "--plan", path, status=2)
    assert "drop one" in refused(capsys, "quantize", model, out, "--plan", path, "--pure", status=2)
    assert "TYPE is missing" in refused(capsys, "quantize", model, out, status=2)
    assert not out.exists()


def test_a_plan_remembers_its_importance(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in quantkit.open(model).tensors if name.startswith("blk.") and "norm" not in name]
    columns = {name: quantkit.open(model).tensors[name].shape[-1] for name in names}
    ones = {n: imatrix.Entry(np.full((1, columns[n]), 2, np.float32), np.ones(1, np.int64), 1) for n in names}
    imatrix.write(tmp_path / "i.dat", imatrix.Imatrix(ones, 1, "ones"))
    (tmp_path / "plan.json").write_text(
        printed(capsys, "plan", model, "Q4_0", "--imatrix", tmp_path / "i.dat", "--json")
    )
    with_matrix = ("--imatrix", tmp_path / "i.dat")
    printed(capsys, "quantize", model, tmp_path / "a.gguf", "--plan", tmp_path / "plan.json", *with_matrix)
    printed(capsys, "quantize", model, tmp_path / "b.gguf", "Q4_0", *with_matrix)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    zeros = {n: imatrix.Entry(np.zeros((1, columns[n]), np.float32), np.ones(1, np.int64), 1) for n in names}
    imatrix.write(tmp_path / "i.dat", imatrix.Imatrix(zeros, 1, "another matrix than the plan's"))
    words = ("quantize", model, tmp_path / "c.gguf", "--plan", tmp_path / "plan.json", *with_matrix)
    assert "holds only zeros under" in refused(capsys, *words)


def test_a_plan_without_importance_is_not_executed_with_a_matrix(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tensors would be encoded without, in a file that names the matrix."""
    columns = quantkit.open(model).tensors["blk.0.ffn_down.weight"].shape[-1]
    entry = imatrix.Entry(np.full((1, columns), 2, np.float32), np.ones(1, np.int64), 1)
    imatrix.write(tmp_path / "i.dat", imatrix.Imatrix({"blk.0.ffn_down.weight": entry}, 1, "ones"))
    (tmp_path / "plan.json").write_text(printed(capsys, "plan", model, "Q4_0", "--json"))
    words = ("quantize", model, tmp_path / "a.gguf", "--plan", tmp_path / "plan.json", "--imatrix", tmp_path / "i.dat")
    error = refused(capsys, *words)
    assert "plan.json: blk.0.ffn_down.weight is planned without importance" in error
    assert 'write "importance": "blk.0.ffn_down.weight"' in error
    printed(capsys, *words, "--exclude-weights", "ffn_down")


def test_a_type_that_needs_importance_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    made = json.loads(printed(capsys, "plan", config, "Q4_K", "--json"))
    for kind in ("iq2_xxs", "iq1_s"):
        (tmp_path / "plan.json").write_text(json.dumps(edited(made, type=kind)))
        words = ("quantize", config, "a.gguf", "--plan", tmp_path / "plan.json", "--dry-run")
        assert f"without importance, which {kind} needs" in refused(capsys, *words)


def test_tensor_types_and_settings(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "types").write_text("ffn_up=q5_1 ffn_down=q8_0\n")
    (tmp_path / "mine").write_text("which := 0-1\nblk.{${which}}.attn_q\\.=q5_0\n")
    rules = ("--tensor-type", "ffn_up=q6_0", "--tensor-type-file", tmp_path / "types", "--recipe", tmp_path / "mine")
    made = json.loads(printed(capsys, "plan", config, "Q4_0", *rules, "--set", "which=2", "--json"))
    found = {t["name"]: t["type"] for t in made["tensors"]}
    assert [found[f"blk.2.{name}.weight"] for name in ("ffn_up", "ffn_down", "attn_q")] == ["q6_0", "q8_0", "q5_0"]
    assert found["blk.0.attn_q.weight"] == "q4_0"
    assert "did you mean which" in refused(capsys, "plan", config, "Q4_0", *rules, "--set", "whch=2")
    assert "pass --recipe" in refused(capsys, "plan", config, "Q4_0", "--set", "which=2", status=2)


def test_strict(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "matches none" in refused(capsys, "plan", config, "Q4_0", "--custom-q", "nothing=q4_0", "--strict")
    said = refused(capsys, "plan", config, "Q4_0", "-ngl", "99", "-ot", "nothing=CPU", "--strict")
    assert "-ot nothing=CPU matches none" in said
    assert "GiB too much" in refused(capsys, "plan", config, "Q4_0", "--ram", "0.00001", "--strict")


@pytest.mark.parametrize(
    ("flags", "said", "status"),
    [
        (("-c", "128", "-ctk", "q8_KV", "-ot", "x=GPU"), "is not a device", 1),
        (("-ts", "a,b"), "shares must be numbers", 2),
        (("-sm", "none", "-ts", "1"), "omit one of them", 2),
        (("-mg", "0", "-sm", "layer"), "omit -mg", 2),
        (("--vram", "-1"), "write the GiB of each GPU", 2),
        (("--tensor-type", "ffn_up"), "not REGEX=TYPE", 1),
    ],
)
def test_what_is_wrong_is_said(
    config: Path, flags: tuple[str, ...], said: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "plan", config, "Q4_0", *flags, status=status)


def test_an_unknown_choice_is_bad_usage(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'q9_0' is not one of 'f32'" in refused(capsys, "plan", config, "Q4_0", "-ctk", "q9_0", status=2)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "not JSON"), ("[]", "a list where"), ("{}", "no 'architectures'"),
     ('{"architectures": ["FooForCausalLM"]}', "FooForCausalLM is not an architecture quantkit converts"),
     ('{"architectures": ["LlamaForCausalLM"]}', "config.json has no '")],
)  # fmt: skip
def test_configs_that_tell_nothing(tmp_path: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(content)
    assert said in refused(capsys, "plan", tmp_path, "Q4_0")
    (tmp_path / "empty").mkdir()
    assert "is missing" in refused(capsys, "plan", tmp_path / "empty", "Q4_0")


def test_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(printed(capsys, "recipe", "--json"))["recipes"]
    assert {"deepseek-iq2_k", "dense-iq4_k"} <= {made["name"] for made in listed}
    assert "qwen3moe-iq3_k" in printed(capsys, "recipe")
    line = printed(capsys, "recipe", "show", "deepseek-iq2_k", "--set", "down=iq4_k", "--as", "custom-q")
    assert line == r"blk\.\d+\.ffn_down_exps\.weight=iq4_k,blk\.\d+\.ffn_(gate|up)_exps\.weight=iq2_k,.*=q8_0" + "\n"
    assert printed(capsys, "recipe", "show", "a=q8_0,b=q4_0", "--as", "tensor-types") == "a=q8_0\nb=q4_0\n"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_30B | {"num_hidden_layers": 2}))
    pinned = printed(capsys, "recipe", "show", "qwen3moe-iq4_xs", "--as", "thireus", "--model", path)
    assert "^blk\\.([01])\\.ffn_down_exps\\.weight$=iq4_xs\n" in pinned
    assert printed(capsys, "recipe", "lint", "qwen3moe-iq4_xs", path) == ""
    assert "warning: rule 1" in printed(capsys, "recipe", "lint", "blk.7.=q8_0", path)
    assert "matches none" in refused(capsys, "recipe", "lint", "x9=q8_0", path, "--strict")
    needing = printed(capsys, "recipe", "lint", "ffn_up=iq2_xxs", path)
    assert (
        "2 tensors, for example blk.0.ffn_up_exps.weight, become iq2_xxs, which needs an importance matrix" in needing
    )
    counts = np.full(128, 500)
    counts[[3, 77]] = 4
    ones = imatrix.Entry(np.ones((128, 2048), np.float32), counts, 9)
    imatrix.write(tmp_path / "i.gguf", imatrix.Imatrix({"blk.0.ffn_up_exps.weight": ones}, 9, "t", 512))
    seen = printed(capsys, "recipe", "lint", "blk.0.ffn_up=iq2_xxs", path, "--imatrix", tmp_path / "i.gguf")
    assert "saw fewer than 32 tokens of some experts of 2 tensor(s): blk.0.ffn_" in seen  # up, for gate as well
    assert "has 2 of 128, as expert 3" in seen
    lacking = ("recipe", "lint", "blk.1.ffn_up=iq2_xxs", path, "--imatrix", tmp_path / "i.gguf")
    assert "blk.1.ffn_up_exps.weight" in refused(capsys, *lacking)
    assert "'custom-q'" in refused(capsys, "recipe", "show", "dense-iq4_k", "--as", "custm-q", status=2)


# ------------------------------------------------------------------------------------------------ what is asked for


def test_rules_longer_than_a_file_name_are_rules(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = ",".join(rf"blk\.{i}\.ffn_(gate|up)\.weight=q4_0" for i in range(200))
    assert len(rules) > 4096
    assert printed(capsys, "recipe", "show", rules, "--as", "custom-q") == f"{rules}\n"
    assert "matches none" in printed(capsys, "recipe", "lint", rules, config)
    for option in ("--recipe", "--custom-q"):
        made = json.loads(printed(capsys, "plan", config, "Q8_0", option, rules, "--json"))
        assert sum(t["type"] == "q4_0" for t in made["tensors"]) == 6


def test_a_file_of_rules_is_a_file_for_every_option(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config.parent / "down=mine.recipe"  # has an = as rules do
    path.write_text("ffn_down=q4_1\n")
    for option in ("--recipe", "--custom-q"):
        made = json.loads(printed(capsys, "plan", config, "Q8_0", option, path, "--json"))
        assert sum(t["type"] == "q4_1" for t in made["tensors"]) == 3
    assert "neither a file nor a shipped one" in refused(capsys, "plan", config, "Q8_0", "--custom-q", "qwen3mo")


def test_a_plan_of_types_that_need_importance(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 256, "intermediate_size": 512}))
    for name, kind in (("IQ2_XXS", "iq2_xxs"), ("IQ1_M", "iq1_m"), ("Q2_K_S", "q2_K"), ("IQ1_KT", "iq1_kt")):
        said = printed(capsys, "plan", config, name)
        assert "which needs an importance matrix; pass --imatrix FILE" in said, name
        assert f"{name}: " in said
        made = json.loads(printed(capsys, "plan", config, name, "--json"))
        assert kind in {t["type"] for t in made["tensors"]}
        assert any(warning.count("needs an importance matrix") for warning in made["warnings"])
        assert "--imatrix FILE" in refused(capsys, "quantize", config, tmp_path / "no.gguf", name, "--dry-run")
        assert "needs an importance matrix" in refused(capsys, "plan", config, name, "--strict")
    assert "importance" not in printed(capsys, "plan", config, "IQ4_XS")
    assert "importance" not in printed(capsys, "plan", config, "Q2_K_S", "--ignore-imatrix-rules")


def test_a_plan_of_rules_without_a_type_asks_for_the_type(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rules in (("--recipe", "dense-iq4_k"), ("--custom-q", RULES), ("--attn-q-type", "q8_0"), ("--pure",)):
        said = " ".join(refused(capsys, "plan", config, *rules, status=2).replace("│", " ").split())
        assert f"TYPE is missing: the type of tensors that {rules[0]} does not decide" in said
        assert "COPY" not in said
    assert "COPY: " in printed(capsys, "plan", config)
    assert "COPY changes no tensor" in refused(capsys, "plan", config, "COPY", "--custom-q", RULES)


def test_a_warning_of_several_lines_is_printed_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    lines = printed(capsys, "plan", path, "Q4_K_R4", "-ngl", "99").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("warning: "))
    assert "ik_llama.cpp has no CUDA kernel for their types (quantkit has one" in lines[first]
    assert lines[first + 1].startswith("  blk.")
    assert "q4_k_r4  CUDA0" in lines[first + 1]
    assert any(line.startswith("  For ik_llama.cpp, keep them on the CPU") for line in lines[first:])
    assert not any("\\n" in line for line in lines)
    said = printed(capsys, "plan", path, "Q4_K_R4", "-ngl", "99", "--runtime", "quantkit")
    assert "no CUDA kernel" not in said
    about = ("plan", path, "Q4_K_R4", "-ngl", "99", "--runtime", "llama.cpp")
    assert "--runtime" in refused(capsys, *about, status=2)


def test_a_cluster_is_predicted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "plan", model, "Q4_0", "--cluster", "4 x 2, 0.5, 1", "--json"))
    plan, cluster = found, found["cluster"]
    assert cluster["reading"] == pytest.approx(plan["bytes_before"] / 1e9)  # the storage is slower than four links
    assert cluster["network"] == pytest.approx(plan["bytes_after"] / 0.5e9)
    weights = {kind["type"]: kind["elements"] for kind in plan["types"]}
    speeds = cluster["weights_per_second"]
    assert cluster["encoding"] == pytest.approx(sum(n / speeds[kind] for kind, n in weights.items()) / 8)
    assert cluster["seconds"] == max(cluster[name] for name in ("encoding", "reading", "network", "scheduler"))
    assert cluster["tasks"] >= len(plan["tensors"])
    assert cluster["scheduler"] == pytest.approx(cluster["tasks"] * 0.007)
    text = printed(capsys, "plan", model, "Q4_0", "--cluster", "4 x 2, 0.5")
    assert f"{cluster['binds']} binds" in text
    assert f"{cluster['tasks']} tasks" in text
    assert "WORKERS x CORES" in refused(capsys, "plan", model, "Q4_0", "--cluster", "4, 2", status=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--ram", "0"], "--ram 0: a number of GiB above 0"), (["--ram", "nan"], "--ram nan"),
     (["--fit-margin", "inf"], "--fit-margin inf: a number of MiB"), (["-ts", "nan,1"], "shares must be from 0"),
     (["-c", "99999999999"], "-c 99999999999: a context has at most 2147483648 tokens"),
     (["--bandwidth", "cpu=inf"], "'cpu=inf': a rate must be a finite number above 0")],
)  # fmt: skip
def test_sizes_that_cannot_be(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "config.json").write_text(json.dumps(archs.get("llama").EXAMPLE))
    assert message in " ".join(refused(capsys, "plan", path, "Q4_0", *words, status=2).split())
