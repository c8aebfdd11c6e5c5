"""Quantizing to interleaved types in one pass: files like the reference's, and importance of zeros."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit import recipe, types
from quantkit.cli import main
from quantkit.formats import imatrix
from quantkit.pipelines.quantize import quantize_with_plan
from quantkit.pipelines.repack_file import plan_repack, plan_unpack, write_repacked
from tests.conformance.embedded import embed
from tests.repack.models import assert_same_tensors, importance, sliced

# The types of spec/repack.md 3.1 with a w-block: those whose reference guards against importance that vanishes.
GUARDED = {"q4_0_r8": 32, "q2_k_r4": 16, "q3_k_r4": 16, "q4_k_r4": 32, "q5_k_r4": 32, "q6_k_r4": 16, "iq2_xxs_r4": 32,
           "iq2_xs_r4": 16, "iq3_xxs_r4": 32, "iq4_nl_r4": 32, "iq3_s_r4": 16, "iq2_s_r4": 16, "iq4_xs_r8": 32,
           "q6_0_r4": 32}  # fmt: skip


@pytest.fixture(scope="module")
def wide(smollm2_q4_1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in 768 columns, f16."""
    folder = tmp_path_factory.mktemp("direct")
    embed(sliced(smollm2_q4_1, folder / "narrow.gguf", layers=2), folder / "wide.gguf")
    return folder / "wide.gguf"


@pytest.fixture(scope="module")
def narrow(smollm2_q4_1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in 576 columns, f16 but for what the wheel's model has as f32."""
    folder = tmp_path_factory.mktemp("direct")
    f = quantkit.open(sliced(smollm2_q4_1, folder / "q4_1.gguf", layers=2))
    options = recipe.Options(allow_requantize=True)
    quantize_with_plan(
        f, folder / "f16.gguf", recipe.plan(f.tensors.values(), "F16", metadata=f.metadata, options=options)
    )
    return folder / "f16.gguf"


def planned(source: Path, target: str, rules: str = "", matrix: imatrix.Imatrix | None = None, **options: object):
    f = quantkit.open(source)
    flags = recipe.Options(**options)  # type: ignore[arg-type]
    return f, recipe.plan(
        f.tensors.values(), target, recipe.parse(rules), metadata=f.metadata, imatrix=matrix, options=flags
    )


def made(source: Path, out: Path, target: str, rules: str = "", **options: object) -> Path:
    f, plan = planned(source, target, rules, importance(quantkit.open(source)), **options)
    return quantize_with_plan(f, out, plan, imatrix=importance(f), effort="fast").paths[0]


# ------------------------------------------------------------------------------------------------ degenerate importance


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("vanishing", ["weights", "values", "weights and values"])
def test_importance_or_weights_of_zero_in_a_sub_block(name: str, vanishing: str, rng: np.random.Generator) -> None:
    """Finite values of sane size, zeros as zeros, other sub-blocks as well encoded as without."""
    t, width, n = types.get(name), GUARDED[name], 512
    x = rng.standard_normal((2 * t.interleave, n)).astype(np.float32)
    weights = rng.chisquare(2, n).astype(np.float32) + np.float32(0.1)
    plain = t.dequantize(t.quantize(x, weights), n)
    inside = np.zeros(n, bool)
    inside[256 + width : 256 + 2 * width] = True
    if "weights" in vanishing:
        weights[inside] = 0
    if "values" in vanishing:
        x[:, inside] = 0
    y = t.dequantize(t.quantize(x, weights), n)
    assert np.isfinite(y).all()
    assert np.abs(y).max() <= 2 * np.abs(x).max()

    def error(values: np.ndarray, where: np.ndarray) -> float:
        return float((weights * (x - values) ** 2)[:, where].sum())

    assert error(y, ~inside) <= 1.05 * error(plain, ~inside)
    if vanishing == "values":  # some types have no zero; what they have is small
        assert np.abs(y[:, inside]).max() <= np.abs(x).max() / 4
    everywhere = t.dequantize(t.quantize(x, np.zeros(n, np.float32)), n)
    assert np.isfinite(everywhere).all()
    assert np.abs(everywhere).max() <= 2 * np.abs(x).max()
    assert not t.dequantize(t.quantize(np.zeros_like(x), weights), n).any()


# ------------------------------------------------------------------------------------------- files beside the reference


def references(source: Path, out: Path, *arguments: str) -> quantkit.formats.gguf.GGUF:
    """The file that llama-quantize writes of a file."""
    from tests.conformance.ggml import QUANTIZE_TOOL

    *flags, target = arguments
    done = subprocess.run([QUANTIZE_TOOL, *flags, source, out, target, "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    return quantkit.open(out)


@pytest.mark.parametrize("target", ["Q8_KV_R8", "Q8_K_R8"])
def test_bytes_of_types_that_round_to_the_nearest(target: str, wide: Path, tmp_path: Path) -> None:
    """Types that round to the nearest: the reference's bytes. (Not Q8_0: ours chooses the sign of its scales.)"""
    theirs = references(wide, tmp_path / "theirs.gguf", "--pure", target)
    f, plan = planned(wide, target, pure=True)
    quantize_with_plan(f, tmp_path / "ours.gguf", plan)
    ours = quantkit.open(tmp_path / "ours.gguf")
    compared = 0
    for name, tensor in ours.tensors.items():
        assert tensor.type.name == theirs.tensors[name].type.name
        if tensor.type.name != "q8_0":
            np.testing.assert_array_equal(tensor.data, theirs.tensors[name].data, err_msg=name)
            compared += tensor.type.interleave > 1
    assert compared == 15
    assert ours.metadata["general.file_type"] == theirs.metadata["general.file_type"]


def test_types_of_a_mix(narrow: Path, wide: Path, tmp_path: Path) -> None:
    """Where 256 columns fit and where they do not; what the plans of all mixes are is tests/recipe's."""
    for source in (narrow, wide):
        theirs = references(source, tmp_path / "theirs.gguf", "Q4_K_R4")
        f, plan = planned(source, "Q4_K_R4")
        quantize_with_plan(f, tmp_path / "ours.gguf", plan, effort="fast")
        ours = quantkit.open(tmp_path / "ours.gguf")
        assert [(t.name, t.type.name, t.nbytes) for t in ours.tensors.values()] == [
            (t.name, t.type.name, t.nbytes) for t in theirs.tensors.values()
        ]
        assert ours.metadata["general.file_type"] == theirs.metadata["general.file_type"]


# ---------------------------------------------------------------------------------------------------- quantize --repack


@pytest.mark.parametrize("target", ["Q4_K_M", "IQ4_NL", "Q8_0"])
def test_one_pass_is_two(target: str, wide: Path, tmp_path: Path) -> None:
    """quantize --repack gives what quantize and then repack give, file type included; unpack gives quantize's."""
    base = made(wide, tmp_path / "base.gguf", target)
    two = write_repacked(plan_repack(quantkit.open(base)), tmp_path / "two.gguf")[0]
    one = made(wide, tmp_path / "one.gguf", target, repack=True)
    assert assert_same_tensors(one, two) == 15
    a, b = quantkit.open(one).metadata, quantkit.open(two).metadata
    assert a.pop("quantkit.recipe") == f"# quantkit quantize {target} --repack\n"
    assert b.pop("quantkit.recipe") == f"# quantkit quantize {target}\n"
    a.pop("quantkit.tensors")  # of one pass the hashes of what it encoded
    assert b.pop("quantkit.tensors") == quantkit.open(base).metadata["quantkit.tensors"]
    assert dict(a) == dict(b)
    back = write_repacked(plan_unpack(quantkit.open(one)), tmp_path / "back.gguf")[0]
    assert assert_same_tensors(back, base) == 0
    there, back_there = (quantkit.open(path).metadata for path in (base, back))
    descriptive = ("quantkit.recipe", "quantkit.tensors")
    assert {k: v for k, v in back_there.items() if k not in descriptive} == {
        k: v for k, v in there.items() if k not in descriptive
    }


def test_patterns_and_the_plan(wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"
    args = ["quantize", str(wide), str(out), "Q4_K_S", "--repack-pattern", "ffn_up,attn_[qk]", "--effort", "fast"]
    assert main([*args, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "q4_k_r4  Q4_K_S; repacked" in text
    assert "Q4_K_S; not repacked: no --repack-pattern matches" in text
    assert "not repacked: embeddings are read row by row" in text
    assert main([*args, "--json"]) == 0
    written = quantkit.open(out)
    assert {t.name for t in written.tensors.values() if t.type.interleave > 1} == {
        f"blk.{i}.{part}.weight" for i in (0, 1) for part in ("ffn_up", "attn_q", "attn_k")
    }
    assert written.metadata["general.file_type"] == 14  # most of it is in rows
    assert main([*args[:4], "--repack", "--dry-run"]) == 0
    assert "Q4_K_S, written as Q4_K_R4: " in capsys.readouterr().out
    assert main([*args[:4], "--repack-pattern", "ffn_upp", "--dry-run"]) == 1
    assert "--repack-pattern 'ffn_upp' is found in none of 21 tensor names" in capsys.readouterr().err


def test_copies_are_repacked_and_unpacked_as_they_are(wide: Path, tmp_path: Path) -> None:
    """COPY --repack is repacking; a TYPE that the tensors have in another order moves their bits and no more."""
    base = made(wide, tmp_path / "base.gguf", "Q4_K_S", pure=True)
    repacked = write_repacked(plan_repack(quantkit.open(base)), tmp_path / "r4.gguf")[0]
    f, plan = planned(base, "COPY", repack=True)
    copied = quantize_with_plan(f, tmp_path / "copy.gguf", plan).paths[0]
    assert copied.read_bytes() == repacked.read_bytes()
    for source, target, expected in ((base, "Q4_K_R4", repacked), (repacked, "Q4_K_S", base)):
        f, plan = planned(source, target, pure=True)
        assert_same_tensors(quantize_with_plan(f, tmp_path / "o.gguf", plan).paths[0], expected)
    f, plan = planned(repacked, "Q4_K_S", pure=True, repack=True)
    assert all(t.copied for t in plan.tensors)


def test_repacking_does_not_allow_quantizing_again(wide: Path, tmp_path: Path) -> None:
    base = made(wide, tmp_path / "base.gguf", "Q4_0", pure=True)
    with pytest.raises(quantkit.errors.DataError, match="to repack the file as it is: quantkit repack IN OUT"):
        planned(base, "Q8_0", repack=True)


def test_interleaved_types_in_rules(wide: Path, narrow: Path, tmp_path: Path) -> None:
    """By rule like any type, with what does not fit falling back to rows."""
    rules = "ffn_down=iq5_k_r4,ffn=iq4_k_r4,attn_output=q8_0_r8,token_embd=q8_0_r8,.*=q6_0_r4"
    result = {t.name: t.type.name for t in quantkit.open(made(wide, tmp_path / "w", "Q8_0", rules)).tensors.values()}
    assert result["blk.0.ffn_down.weight"] == "iq5_k_r4"
    assert result["blk.1.ffn_gate.weight"] == "iq4_k_r4"
    assert result["blk.1.attn_output.weight"] == "q8_0_r8"
    assert result["blk.1.attn_k.weight"] == result["output.weight"] == "q6_0_r4"
    assert result["token_embd.weight"] == "q8_0"
    _, plan = planned(narrow, "Q8_0", rules)
    result = {t.name: t.type.name for t in plan.tensors}
    assert (result["blk.0.ffn_down.weight"], result["blk.1.ffn_gate.weight"]) == ("iq5_k_r4", "q5_0")
    assert plan["blk.1.ffn_gate.weight"].reason.endswith("576 columns are no multiple of iq4_k_r4's 256")


def test_shards_of_the_source_are_kept(wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    f, plan = planned(wide, "COPY")
    quantize_with_plan(f, tmp_path / "in.gguf", plan, split_max_tensors=9)
    source = tmp_path / "in-00001-of-00003.gguf"
    args = ["quantize", str(source), str(tmp_path / "out.gguf"), "Q8_0", "--repack", "--keep-split"]
    assert main(args) == 0
    assert "out-00003-of-00003.gguf" in capsys.readouterr().out
    assert quantkit.open(tmp_path / "out-00001-of-00003.gguf").shards == quantkit.open(source).shards
    assert main([*args, "--split-max-tensors", "2"]) == 2
