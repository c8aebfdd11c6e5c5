"""Placement on the command line: --fit, --devices, -sm and their kin, in plans and in runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli import main
from tests.cli.running import printed, refused
from tests.recipe.configs import QWEN3_30B
from tests.runtime.conftest import tiny  # noqa: F401  # a fixture


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3") / "config.json"
    path.write_text(json.dumps(QWEN3_30B))
    return path


def planned(capsys: pytest.CaptureFixture[str], config: Path, *flags: object) -> dict[str, Any]:
    return json.loads(printed(capsys, "plan", config, "Q4_0", "-c", 4096, "--json", *flags))["budget"]


@pytest.mark.parametrize("mode", ["layer", "graph"])
def test_what_fit_prints_gives_its_placement(mode: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--vram", "6,6", "--ram", "64")
    found = planned(capsys, config, "--fit", "-sm", mode, *limits)
    said = next(note for note in found["notes"] if note.startswith("--fit")).partition("equivalent to ")[2]
    again = planned(capsys, config, *shlex.split(said), *limits)
    for key in ("placement", "split", "devices"):
        assert again[key] == found[key]
    assert found["fits"]
    assert {load["device"] for load in found["devices"]} == {"CPU", "CUDA0", "CUDA1"}
    assert all(load["buffers"] > 0 for load in found["devices"])
    assert found["speed"]["tg"] > 0
    assert found["reasons"]["blk.5.attn_q.weight"].startswith("layer 5, -ngl 49")


def test_a_plan_explains_itself(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--fit", "--devices", "cpu:0=4GiB,cpu=64GiB", "--bandwidth", "cpu=80,cpu:0=40", "--compute", "cpu=1")
    said = printed(capsys, "plan", config, "Q4_0", "-c", 4096, "--explain", *flags)
    for part in ("--fit for ik_llama.cpp: equivalent to -ngl 49 -ot", "cpu:0: attention", "experts",
                 "predicted: at most", "-sm layer",
                 "arithmetic on cpu:0 is not counted (--compute cpu:0=…)", "a full cache; every token reads",
                 "fewer than 512 tokens run the CPU's experts on the CPU"):  # fmt: skip
        assert part in said
    assert "assumed" not in said
    vram = ("-c", 64, "--vram", "24", "-ot", "exps=CPU")
    assert "fewer than 1024 tokens" in printed(capsys, "plan", config, "Q4_0", *vram, "--offload-threshold", 64)
    assert "are never offloaded (-op)" in printed(capsys, "plan", config, "Q4_0", *vram, "-op", "MUL_MAT_ID,0")


def test_what_does_not_go_together_is_said(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = ("plan", config, "Q4_0")
    assert "GiB too much" in refused(capsys, *about, "--fit", "--vram", "6", "--ram", "4")
    assert "omit them" in refused(capsys, *about, "--fit", "--vram", "6", "-ot", "exps=CPU", status=2)
    assert "pass --vram" in refused(capsys, *about, "--fit", status=2)
    assert "drop one" in refused(capsys, *about, "--vram", "6", "--devices", "cuda:0", status=2)
    assert "--split-mode" in refused(capsys, *about, "--vram", "6,6", "-sm", "row", status=2)
    assert "a rate must be a finite number above 0" in refused(capsys, *about, "--bandwidth", "cpu=-1", status=2)
    assert "-op" in refused(capsys, *about, "--vram", "6", "-op", "x,0")


def test_benches_run_on_devices_and_say_so(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    about = ("bench", tiny, "-p", 4, "-n", 2, "-r", 1, "--numerics", "exact")
    assert main([str(a) for a in (*about, "--devices", "cpu:0,cpu:1", "-sm", "graph", "--profile")]) == 0
    out, err = capsys.readouterr()
    assert "reduce f32" in out + err
    assert "split_mode graph" in out + err
    assert "cpu:1 spends" in err or "cpu:0 spends" in err or "CPU spends" in err
    assert "transfers" in err
    assert main([str(a) for a in (*about, "--devices", "cpu:0=40MiB", "--fit", "--fit-margin", 1)]) == 0
    assert "--fit: equivalent to -ngl 3" in capsys.readouterr().err
    for flags, said, status in (
        (("--devices", "cpu:0=1MiB"), r"cpu:0 holds", 1),
        (("--devices", "cpu:0,cpu:0"), "is listed twice", 2),
        (("-sm", "graph"), "at least 2 GPUs", 1),
    ):
        assert said in refused(capsys, *about, *flags, status=status)


@pytest.mark.parametrize("command", ["generate", "perplexity", "imatrix", "bench", "sweep-bench", "compare"])
def test_a_gpu_without_a_driver(
    command: str,
    tiny: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from quantkit.errors import UnsupportedError
    from quantkit.runtime.cuda import gpu_worker
    from quantkit.runtime.kernels.cuda import driver

    def missing() -> None:
        raise UnsupportedError(f"no CUDA GPU: the NVIDIA driver is not installed; {driver.REMEDY}")

    monkeypatch.setattr(driver, "library", missing)
    gpu_worker.gpu.cache_clear()
    text = tmp_path / "text"
    text.write_text("once upon a time " * 200)
    others = {"generate": ["-p", "a"], "imatrix": ["-f", text, "-o", tmp_path / "out"], "perplexity": ["-f", text],
              "compare": [tiny, "-f", text]}.get(command, [])  # fmt: skip
    said = refused(capsys, command, tiny, *others, "--devices", "cuda:0")
    assert said.startswith("error: no CUDA GPU: ")
    assert said.count("\n") == 1
    assert "did you mean MUL_MAT, MUL_MAT_ID?" in refused(capsys, command, tiny, *others, "-op", "MULMAT,0")
