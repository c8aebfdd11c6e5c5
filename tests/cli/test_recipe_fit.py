"""`sensitivity` and `recipe fit` on a tiny model: from costs to a file of the predicted size, and its proof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from quantkit import cli
from quantkit.errors import DataError
from quantkit.evaluate import allocation_check
from quantkit.formats import gguf
from quantkit.placement.allocation import costs as costs_file
from tests.documentation import make_world

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.pipelines.allocate import RecipeFit
    from quantkit.pipelines.options import QuantizeOptions
    from quantkit.placement.allocation.costs import Costs

TYPES = "q4_0,q5_0,q6_0,q8_0,iq4_k"
SMALL = ["-c", "16", "--chunks", "4", "--rows", "32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the documentation, with an importance matrix and costs."""
    found = tmp_path_factory.mktemp("fit")
    make_world(found)
    model, text = str(found / "model-bf16.gguf"), str(found / "calibration.txt")
    imatrix = str(found / "imatrix.gguf")
    assert cli.main(["imatrix", model, "-f", text, "-o", imatrix, "-c", "16", "--second-moments", "full", "-q"]) == 0
    assert cli.main(["sensitivity", model, "-f", text, "-o", str(found / "costs.json"), "--imatrix", imatrix,
                     "--types", TYPES, *SMALL]) == 0  # fmt: skip
    return found


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert cli.main(list(map(str, words))) == 0
    return capsys.readouterr().out


def fit(folder: Path, *words: object) -> list[object]:
    return ["recipe", "fit", folder / "model-bf16.gguf", "--costs", folder / "costs.json", *words]


def test_costs_say_what_they_are_of(folder: Path) -> None:
    found = costs_file.read(folder / "costs.json")
    metrics = {name: t.metric for name, t in found.tensors.items()}
    assert metrics["token_embd.weight"] == "plain"  # which an importance matrix has no entry for
    assert metrics["blk.1.ffn_down.weight"] == "second moments"
    assert found.about["types"] == ["q4_0", "q5_0", "q6_0", "q8_0", "iq4_k"]
    assert len(found.about["model_hash"]) == len(found.about["text_hash"]) == 64
    for name, t in found.tensors.items():
        assert t.of("q8_0") < t.of("q5_0"), name  # type: ignore[operator]


def test_a_checkpoint_has_the_costs_of_its_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(capsys, "sensitivity", folder / "HF_DIR", "-f", folder / "calibration.txt", "-o", tmp_path / "c.json",
                  "--imatrix", folder / "imatrix.gguf", "--types", TYPES, *SMALL, "--json")  # fmt: skip
    assert costs_file.read(tmp_path / "c.json").tensors == costs_file.read(folder / "costs.json").tensors
    assert [point["type"] for point in json.loads(printed)["single_types"]][-1] == "q8_0"


def test_a_probe_may_need_importance(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedding, which has no entry in the matrix, is encoded with importance of 1."""
    costs = tmp_path / "costs.json"
    run(capsys, "sensitivity", folder / "model-bf16.gguf", "-f", folder / "calibration.txt", "-o", costs, "--imatrix",
        folder / "imatrix.gguf", "--no-second-moments", "--probe", "iq2_xxs", "--types", "q8_0", "-c", "16", "--chunks",
        "1", "--rows", "4")  # fmt: skip
    assert costs_file.read(costs).tensors["token_embd.weight"].kld > 0


@pytest.mark.parametrize("source", ["model-bf16.gguf", "HF_DIR"])
@pytest.mark.parametrize("imatrix", [True, False])
def test_the_file_has_the_predicted_size(
    folder: Path, tmp_path: Path, source: str, imatrix: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the printed recipe, and by the plan of --json."""
    given = ["--imatrix", folder / "imatrix.gguf"] if imatrix else []
    model, recipe, plan = folder / source, tmp_path / "fit.recipe", tmp_path / "plan.json"
    words = ["recipe", "fit", model, "--costs", folder / "costs.json", "--bpw", "5.5", *given]
    document = run(capsys, *words, "--json", "-o", recipe)
    plan.write_text(document, encoding="utf-8")
    found: dict[str, Any] = json.loads(document)
    assert found["bits_per_weight"] <= 5.5
    first, second = tmp_path / "recipe.gguf", tmp_path / "plan.gguf"
    run(capsys, "quantize", model, first, found["file_type"], "--recipe", recipe, *given)
    assert gguf.open(first).size == found["fit"]["size"]
    assert {t.name: t.type.name for t in gguf.open(first).tensors.values()} == {
        t["name"]: t["type"] for t in found["tensors"]
    }
    run(capsys, "quantize", model, second, "--plan", plan, *given)
    assert second.read_bytes() == first.read_bytes()


def test_limits_of_the_file_hold(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(run(capsys, *fit(folder, "--bpw", "9", "--json")))["fit"]["size"]
    size = whole * 3 // 4
    found = json.loads(run(capsys, *fit(folder, "--size", f"{size / 1e6:.6f}M", "--json")))
    assert 0.97 * size < found["fit"]["size"] <= size
    assert cli.main(list(map(str, fit(folder, "--size", "0.1M")))) == 1
    assert "the smallest file has" in capsys.readouterr().err


def test_inputs_are_not_replaced(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Costs take hours to measure."""
    before = (folder / "costs.json").read_bytes()
    verify = ["--verify", folder / "wiki.txt"]
    for words in (
        ["-o", folder / "costs.json"],
        ["-o", folder / "model-bf16.gguf"],
        ["-o", folder / "imatrix.gguf", "--imatrix", folder / "imatrix.gguf"],
        [*verify, "--refined-costs", folder / "costs.json"],
        [*verify, "-o", folder / "wiki.txt"],
    ):
        assert cli.main(list(map(str, fit(folder, "--bpw", "5", *words)))) == 1
        assert "this is the input; write to another name" in capsys.readouterr().err
    assert (folder / "costs.json").read_bytes() == before


def test_tables_and_plots(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curve.png"
    text = run(capsys, *fit(folder, "--ram", "1", "-c", "64", "--max-types", "2", "--curve", picture))
    assert picture.read_bytes()[1:4] == b"PNG"
    assert "blk.*.attn_output.weight" in text
    assert text.count("allocated ") > 8
    assert "fits" in text
    assert "predicted KLD" in text.splitlines()[-2]
    assert "; the best choice has at most 0.0" in text.splitlines()[-2]
    assert cli.main(list(map(str, fit(folder)))) == 2
    assert "needs a limit" in capsys.readouterr().err


def test_costs_of_zero_are_no_curve(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((folder / "costs.json").read_bytes())
    for entry in document["tensors"].values():
        entry["kld"] = 0
    (tmp_path / "costs.json").write_text(json.dumps(document), encoding="utf-8")
    words = fit(folder, "--bpw", "5", "--costs", tmp_path / "costs.json", "--curve", tmp_path / "curve.png")
    assert cli.main(list(map(str, words))) == 1
    assert "curve.png: all costs are 0" in capsys.readouterr().err


def test_two_pools_print_flags(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that `plan` places tensors by as it was counted."""
    costs = tmp_path / "moe.json"
    run(capsys, "sensitivity", folder / "moe-bf16.gguf", "-f", folder / "calibration.txt", "-o", costs, "--types",
        "q4_0,q8_0", *SMALL)  # fmt: skip
    words = ["recipe", "fit", folder / "moe-bf16.gguf", "--costs", costs, "-o", tmp_path / "r"]
    budgets = ["--vram", "0.01", "--ram", "0.01", "--fit-margin", "0"]
    found = json.loads(run(capsys, *words, *budgets, "--json"))
    loads = {load["device"]: load for load in found["fit"]["devices"]["devices"]}
    assert found["fit"]["devices"]["fits"]
    assert loads["CUDA0"]["tensors"]
    assert loads["CPU"]["tensors"]
    assert found["fit"]["flags"].startswith("-ngl 999")


def test_verify_measures_and_decides(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "fit.recipe"
    given = ["--verify", folder / "wiki.txt", "--verify-ctx", "16", "--imatrix", folder / "imatrix.gguf", "-o", recipe]
    words = fit(folder, "--bpw", "4.6", "--types", "q4_0", *given)  # IQ4_K has the same size and less divergence
    assert cli.main(list(map(str, words))) == 1
    printed = capsys.readouterr()
    assert "not less, with 95 % confidence, divergence than IQ4_K-pure: +0.0" in printed.out
    assert "so it is not written" in printed.err
    assert not recipe.exists()
    found = json.loads(run(capsys, *words, "--force", "--json"))
    assert recipe.exists()
    verify = found["fit"]["verify"]
    assert verify["holds"] is False
    assert [rival["better"] for rival in verify["rivals"]][-1] is False
    assert verify["rivals"][-1]["kld"] < verify["kld"]
    words = fit(folder, "--bpw", "6.6", *given)
    assert cli.main(list(map(str, words))) in (0, 1)
    assert f"predicted {0:.0f}" in capsys.readouterr().out


def test_verify_needs_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe", "fit", folder / "HF_DIR", "--costs", folder / "costs.json", "--bpw", "5", "--verify",
             folder / "wiki.txt"]  # fmt: skip
    assert cli.main(list(map(str, words))) == 1
    assert "quantkit convert makes one" in capsys.readouterr().err


def test_rivals_are_for_the_same_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that the program does not read is no rival."""

    def check(
        source: Path, found: RecipeFit, costs: Costs, text: Path, options: QuantizeOptions, *_: Any, **__: Any
    ) -> NoReturn:
        assert found.plan.dialect == options.dialect == "llama.cpp"
        rivals = allocation_check.rivals(source, found, costs, options)
        assert [rival.name for rival in rivals] == ["Q4_K_M", "Q4_0-pure"]  # IQ4_K costs less
        raise DataError("checked")

    monkeypatch.setattr(allocation_check, "check_allocation", check)
    words = fit(folder, "--bpw", "5", "--dialect", "llama.cpp", "--verify", folder / "wiki.txt")
    assert cli.main(list(map(str, words))) == 1
    assert "checked" in capsys.readouterr().err


def test_verify_refines_costs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refined costs agree better with the measured files, and serve the next fit."""
    refined = tmp_path / "refined.json"
    words = fit(folder, "--bpw", "6.6", "--verify", folder / "wiki.txt", "--verify-ctx", "16", "--imatrix",
                folder / "imatrix.gguf", "--refine", "2", "--refined-costs", refined, "--force")  # fmt: skip
    verify = json.loads(run(capsys, *words, "--json"))["fit"]["verify"]
    assert verify["kld"] == min(m["kld"] for m in verify["rounds"])
    factors = costs_file.read(refined).factors
    assert factors == verify["factors"]
    assert factors
    again = json.loads(run(capsys, *fit(folder, "--bpw", "6.6", "--json"), "--costs", refined))["fit"]["kld"]
    first = verify["rounds"][0]
    assert abs(again - first["kld"]) < abs(first["predicted"] - first["kld"])
    for flags in (["--refine", "1"], ["--cluster", "local:1"]):
        assert cli.main(list(map(str, fit(folder, "--bpw", "6.6", *flags)))) == 2
        assert "give it a text" in capsys.readouterr().err


def test_verify_runs_on_a_cluster(folder: Path, capsys: pytest.CaptureFixture[str], dask_client: Client) -> None:
    words = fit(folder, "--bpw", "6.6", "--verify", folder / "wiki.txt", "--verify-ctx", "16", "--imatrix",
                folder / "imatrix.gguf", "--refine", "0", "--force", "--json")  # fmt: skip
    here = json.loads(run(capsys, *words))["fit"]["verify"]
    assert cli.main(list(map(str, [*words, "--cluster", dask_client.scheduler.address]))) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["fit"]["verify"] == here
    assert f"cluster {dask_client.scheduler.address}: 2 worker(s)" in printed.err
