"""Gate and up of experts in one tensor: converted, fused, written apart, run, calibrated; always the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit.cli import main
from quantkit.errors import UnsupportedError
from quantkit.evaluate.imatrix.collect import Collector
from quantkit.formats import gguf
from quantkit.formats.safetensors import open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.export import export_gguf
from quantkit.pipelines.fuse_experts import plan_fuse, plan_separate
from tests.archs.checkpoints import tiny
from tests.runtime.conftest import rewrite

TOKENS = np.random.default_rng(3).integers(2, 300, 45)
# One architecture for each way of storing experts in a checkpoint: a matrix each, stacked, columns with biases.
ARCHS = ("qwen3moe", "qwen35moe", "gpt-oss")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """For each architecture a file with gate and up apart, and one that is converted with them fused."""
    made = {}
    for arch in ARCHS:
        folder = tmp_path_factory.mktemp(arch)
        tiny(folder / "hf", "float32", arch)
        convert_checkpoint(folder / "hf", folder / "apart.gguf", "f32")
        convert_checkpoint(folder / "hf", folder / "fused.gguf", "f32", fuse_gate_up=True)
        made[arch] = folder / "apart.gguf", folder / "fused.gguf"
    return made


def contents(path: Path) -> dict[str, Any]:
    return {name: (t.type.name, t.shape, t.stored.tobytes()) for name, t in gguf.open(path).tensors.items()}


@pytest.mark.parametrize("arch", ARCHS)
def test_files(files: dict[str, tuple[Path, Path]], arch: str, tmp_path: Path) -> None:
    apart, fused = files[arch]
    assert "blk.1.ffn_gate_up_exps.weight" in contents(fused)
    assert not any("ffn_gate_exps" in name or "ffn_up_exps" in name for name in contents(fused))
    plan_fuse(gguf.open(apart)).write(tmp_path / "fused.gguf")
    plan_separate(gguf.open(fused)).write(tmp_path / "apart.gguf")
    assert contents(tmp_path / "fused.gguf") == contents(fused)
    assert contents(tmp_path / "apart.gguf") == contents(apart)
    export_gguf(fused, tmp_path / "back")
    before, after = (open_checkpoint(p).tensors for p in (apart.parent / "hf", tmp_path / "back"))
    assert before.keys() == after.keys()
    assert sum(".experts." in name for name in before) > 3
    for name in before:  # others, such as qwen35moe's norms, may be rounded
        assert ".experts." not in name or before[name].raw().tobytes() == after[name].raw().tobytes()


@pytest.mark.parametrize(
    ("arch", "kind"), [*((arch, "f32") for arch in ARCHS), ("qwen3moe", "q8_0"), ("gpt-oss", "q4_0_r8")]
)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_logits(files: dict[str, tuple[Path, Path]], arch: str, kind: str, numerics: str, tmp_path: Path) -> None:
    apart = files[arch][0] if kind == "f32" else rewrite(files[arch][0], tmp_path / "apart.gguf", kind, bias="f32")
    plan_fuse(gguf.open(apart)).write(tmp_path / "fused.gguf")
    made = []
    for path in (apart, tmp_path / "fused.gguf"):
        model = quantkit.load(path, numerics=numerics)
        assert model.fallback_reason is None
        cache = model.new_cache(64)
        prompt = model.forward(TOKENS[:40], cache)
        made.append(np.concatenate([prompt, *(model.forward([int(t)], cache) for t in TOKENS[40:])]))
    np.testing.assert_array_equal(made[0], made[1])


@pytest.mark.parametrize("experts_by", ["number", "columns"])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_graph_split(files: dict[str, tuple[Path, Path]], arch: str, experts_by: str) -> None:
    found = [
        quantkit.load(path, devices="cpu:0,cpu:1", split_mode="graph", experts_by=experts_by).logits(TOKENS)
        for path in files[arch]
    ]
    np.testing.assert_array_equal(found[0], found[1])


def test_observed_once_under_the_name_in_the_file(files: dict[str, tuple[Path, Path]]) -> None:
    found = []
    for path in files["qwen3moe"]:
        model, collector = quantkit.load(path), Collector()
        model.observer = collector.observe
        model.logits(TOKENS)
        found.append(collector.result("text").entries)
    apart, fused = found
    name = "blk.0.ffn_gate_up_exps.weight"
    assert name in fused
    assert not any("ffn_up_exps" in n or "ffn_gate_exps" in n for n in fused)
    np.testing.assert_array_equal(fused[name].values, apart["blk.0.ffn_up_exps.weight"].values)
    np.testing.assert_array_equal(fused[name].counts, apart["blk.0.ffn_up_exps.weight"].counts)


@pytest.mark.parametrize("measured_on", [0, 1])
def test_quantized_with_importance_of_either_form(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, measured_on: int
) -> None:
    """Rows of one type are encoded alike in both forms, with an importance matrix that was measured on either."""
    (tmp_path / "text").write_text("".join(chr(97 + i * i % 26) for i in range(900)))
    matrix = str(tmp_path / "imatrix.gguf")
    assert (
        main(
            [
                "imatrix",
                "-m",
                str(files["qwen3moe"][measured_on]),
                "-f",
                str(tmp_path / "text"),
                "-o",
                matrix,
                "-c",
                "64",
            ]
        )
        == 0
    )
    for path, out in zip(files["qwen3moe"], ("apart", "fused")):
        rules = ["--custom-q", r"exps=q4_0,.*=q8_0"]
        assert main(["quantize", "--imatrix", matrix, *rules, str(path), str(tmp_path / f"{out}.gguf"), "Q8_0"]) == 0
    plan_fuse(gguf.open(tmp_path / "apart.gguf")).write(tmp_path / "again.gguf")
    assert contents(tmp_path / "again.gguf") == contents(tmp_path / "fused.gguf")
    plain = str(tmp_path / "plain.gguf")
    assert main(["quantize", *rules, str(files["qwen3moe"][1]), plain, "Q8_0"]) == 0
    name = "blk.0.ffn_gate_up_exps.weight"
    assert contents(Path(plain))[name] != contents(tmp_path / "fused.gguf")[name]


def test_command(files: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apart, fused = files["qwen3moe"]
    out = tmp_path / "out.gguf"
    assert main(["fuse-gate-up", str(apart), str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["made"] == [n for n in contents(fused) if "gate_up" in n]
    assert record["left_as_is"] == []
    assert main(["fuse-gate-up", "--undo", str(out), str(tmp_path / "back.gguf")]) == 0
    assert contents(tmp_path / "back.gguf") == contents(apart)
    capsys.readouterr()
    assert main(["fuse-gate-up", str(out), str(tmp_path / "x.gguf")]) == 1
    assert "no experts to fuse" in capsys.readouterr().err
    assert not (tmp_path / "x.gguf").exists()
    assert main(["convert", str(apart.parent / "hf"), str(out), "--fuse-gate-up", "--outtype", "f32"]) == 0
    assert contents(out) == contents(fused)


def test_types_that_differ_stay_apart(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    mixed = rewrite(files["qwen3moe"][0], tmp_path / "mixed.gguf", "f32", **{"blk.0.ffn_gate_exps.weight": "q8_0"})
    job = plan_fuse(gguf.open(mixed))
    assert job.notes == ["blk.0.ffn_gate_up_exps.weight: gate is q8_0, up is f32; a tensor has one type"]
    job.write(tmp_path / "fused.gguf")
    assert {"blk.0.ffn_up_exps.weight", "blk.1.ffn_gate_up_exps.weight"} <= contents(tmp_path / "fused.gguf").keys()
    np.testing.assert_array_equal(
        quantkit.load(tmp_path / "fused.gguf").logits(TOKENS), quantkit.load(mixed).logits(TOKENS)
    )


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    tiny(tmp_path / "hf", "float32", "llama")
    with pytest.raises(UnsupportedError, match="no experts whose gate and up"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "x.gguf", "f32", fuse_gate_up=True)
    convert_checkpoint(tmp_path / "hf", tmp_path / "x.gguf", "f32")
    with pytest.raises(UnsupportedError, match="nothing to separate"):
        plan_separate(gguf.open(tmp_path / "x.gguf"))
