"""Whole files beside the reference: the output of `llama-quantize --repack` for a model, tensor by tensor; unpacking.

Slices of SmolLM2 here; the whole model, and the one in 768 columns, with -m full.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import quantkit
from quantkit.pipelines.repack_file import plan_repack, plan_unpack, write_repacked
from tests.conformance.embedded import embed
from tests.repack.models import NARROW, WIDE, assert_same_tensors, quantized, reference_repack, sliced

# A type of every way of laying codes and scales out; the rest with -m full.
SAMPLE = ("Q4_0", "Q8_0", "IQ2_BN", "Q2_K", "Q4_K_M", "Q6_K", "IQ2_XXS", "IQ3_S", "IQ4_XS", "IQ4_K", "IQ4_KS", "IQ5_K")


@pytest.fixture(scope="module")
def slices(smollm2_q4_1: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One layer in 576 and in 768 columns."""
    folder = tmp_path_factory.mktemp("slices")
    narrow, wide = sliced(smollm2_q4_1, folder / "narrow.gguf", layers=1), folder / "wide.gguf"
    embed(narrow, wide)
    return narrow, wide


@pytest.fixture(scope="module")
def whole(smollm2_q4_1: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    wide = tmp_path_factory.mktemp("whole") / "wide.gguf"
    embed(smollm2_q4_1, wide)
    return smollm2_q4_1, wide


def check(source: Path, target: str, folder: Path, layers: int) -> None:
    """All matrices but the embedding are interleaved, as in the reference's file, and unpacking undoes it."""
    base = quantized(source, folder / "base.gguf", target)
    write_repacked(plan_repack(quantkit.open(base)), folder / "ours.gguf", threads=2)
    theirs = reference_repack(base, folder / "theirs.gguf")
    f = quantkit.open(base)
    untied = "output.weight" in f.tensors
    assert assert_same_tensors(folder / "ours.gguf", theirs) == 7 * layers + untied
    ours, reference = (quantkit.open(folder / name).metadata for name in ("ours.gguf", "theirs.gguf"))
    assert ours["general.file_type"] == reference["general.file_type"]
    write_repacked(plan_unpack(quantkit.open(folder / "ours.gguf")), folder / "back.gguf", threads=2)
    assert (folder / "back.gguf").read_bytes() == base.read_bytes()


@pytest.mark.parametrize(
    "target", [t if t in SAMPLE else pytest.param(t, marks=pytest.mark.full) for t in (*NARROW, *WIDE)]
)
def test_a_layer(target: str, slices: tuple[Path, Path], tmp_path: Path) -> None:
    check(slices[target in WIDE], target, tmp_path, layers=1)


@pytest.mark.full
@pytest.mark.parametrize("target", [*NARROW, *WIDE])
def test_a_model(target: str, whole: tuple[Path, Path], tmp_path: Path) -> None:
    check(whole[target in WIDE], target, tmp_path, layers=30)


def test_a_mix_with_patterns(slices: tuple[Path, Path], tmp_path: Path) -> None:
    """The mix of Q4_K_M in 576 columns, where most falls back, with the reference's own idea of patterns."""
    from quantkit import recipe
    from quantkit.pipelines.quantize import quantize_with_plan

    f = quantkit.open(slices[0])
    plan = recipe.plan(f.tensors.values(), "Q4_K_M", metadata=f.metadata, options=recipe.Options(allow_requantize=True))
    quantize_with_plan(f, tmp_path / "base.gguf", plan, effort="fast")
    base = quantkit.open(tmp_path / "base.gguf")
    write_repacked(plan_repack(base, ["ffn_(up|down)", "attn_v"]), tmp_path / "ours.gguf")
    theirs = reference_repack(base.path, tmp_path / "theirs.gguf", "--repack-pattern", "ffn_(up|down),attn_v")
    assert assert_same_tensors(tmp_path / "ours.gguf", theirs) == 3
