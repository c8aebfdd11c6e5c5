"""Plans for one program: types that it does not read are refused by name, or replaced by the nearest, not larger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import recipe, types
from quantkit.cli import main
from quantkit.errors import UnknownNameError
from quantkit.formats import gguf
from quantkit.formats.gguf import TensorSpec, Writer
from quantkit.recipe import Options, RecipeError
from quantkit.recipe.planning import dialects
from quantkit.recipe.planning.presets import file_type, file_types, in_dialect
from tests.recipe.test_plan import chosen, matrix_for, tensors

UP, DOWN = "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"


def test_types_of_the_other_program_are_refused_by_name() -> None:
    listed = tensors(UP, DOWN, shape=(256, 1024))
    with pytest.raises(RecipeError, match=r"llama.cpp does not read iq4_k of blk.* and 1 more \(nearest: q4_K"):
        chosen(listed, "IQ4_K", dialect="llama.cpp")
    with pytest.raises(RecipeError, match=r"ik_llama.cpp does not read tq2_0 of blk.* \(nearest: iq2_bn"):
        chosen(listed, "Q8_0", "ffn_down=tq2_0", dialect="ik")
    assert chosen(listed, "IQ4_K", dialect="ik") == ["iq4_k", "iq4_k"]
    assert chosen(listed, "NVFP4", dialect="llama.cpp") == ["nvfp4", "nvfp4"]
    with pytest.raises(RecipeError, match=r"iq4_k of blk.0.ffn_up.weight"):  # what is only copied, too
        chosen(tensors(UP, source="iq4_k"), "COPY", dialect="llama.cpp")
    with pytest.raises(UnknownNameError, match=r"did you mean llama.cpp"):
        chosen(listed, "Q8_0", dialect="llama")


def test_replacing() -> None:
    options = {"dialect": "llama.cpp", "replace_types": True}
    assert chosen(tensors(UP, DOWN), "IQ4_K", "ffn_down=iq5_k_r4", **options) == ["q4_K", "q5_K"]
    assert chosen(tensors(UP, shape=(256, 288)), "Q6_0", **options) == ["q5_1"]
    assert chosen(tensors(UP), "Q4_K_R4", **options) == ["q4_K"]  # the rows of the interleaved type
    with pytest.raises(RecipeError, match=r"iq1_bn of blk.0.ffn_up.weight \(nearest: none\)"):
        chosen(tensors(UP), "IQ1_BN", **options)
    with pytest.raises(RecipeError, match=r"--replace-types is about the program"):
        chosen(tensors(UP), "Q8_0", replace_types=True)
    with pytest.raises(RecipeError, match=r"llama.cpp reads no interleaved types"):
        chosen(tensors(UP), "Q4_0", dialect="llama.cpp", repack=True)


@pytest.mark.parametrize("dialect", types.DIALECTS)
def test_what_takes_a_type_s_place_is_read_fits_and_is_not_larger(dialect: str) -> None:
    for t in types.all():
        for columns in (288, 4096):
            found = dialects.nearest(t, dialect, columns)
            if dialect in t.readers:
                assert found is t
            elif found is not None:
                assert dialect in found.readers, t.name
                assert columns % found.block_size == 0, t.name
                assert found.bits_per_weight(columns) <= t.bits_per_weight(columns - columns % t.block_size or 256)


@pytest.mark.parametrize("name", [t.name for t in file_types() if t.default and "llama.cpp" in t.default.readers])
def test_every_mix_of_llama_cpp_s_file_types_can_be_had_for_it(name: str) -> None:
    """What the mix, or a row that does not fit, gives instead of the type of the file is replaced without asking."""
    names = ("token_embd.weight", "output.weight", "blk.0.attn_v.weight", "blk.0.attn_output.weight", DOWN)
    for columns in (256, 288) if file_type(name).default.block_size == 256 else (256,):
        listed = tensors(*names, shape=(256, columns))
        matrix = matrix_for(columns, **dict.fromkeys(names, 1))
        made = recipe.plan(listed, name, imatrix=matrix, options=Options(dialect="llama.cpp"))
        assert all("llama.cpp" in t.type.readers for t in made.tensors)


def test_a_file_that_neither_reads_is_a_warning() -> None:
    made = recipe.plan(tensors(UP, DOWN), "IQ4_K", recipe.parse("ffn_down=nvfp4"))
    assert "no program but quantkit" in made.warnings[-1]
    assert not recipe.plan(tensors(UP), "IQ4_K").warnings


def test_flags_of_a_plan_are_read_back() -> None:
    options = Options(dialect="llama.cpp", replace_types=True)
    assert Options.parse(str(options)) == options
    document = recipe.plan(tensors(UP), "Q8_0", options=Options(dialect="llama.cpp")).to_json()
    assert recipe.replay(document, tensors(UP)).dialect == "llama.cpp"
    document = recipe.plan(tensors(UP), "IQ4_K").to_json()
    with pytest.raises(RecipeError, match=r"iq4_k"):
        recipe.replay(document, tensors(UP), dialect="llama.cpp")


def test_numbers_that_mean_two_file_types() -> None:
    assert [file_type(name).number for name in ("Q1_0", "Q2_0", "Q1_0_G128")] == [40, 41, 41]
    assert file_type("Q1_0").default is types.get("q1_0") is types.get("q1_0_g128")
    assert in_dialect(file_type("Q1_0"), "ik").number == 41
    assert in_dialect(file_type("Q1_0_G128"), "llama.cpp").number == 40
    assert in_dialect(file_type("Q2_0"), "ik") is file_type("Q2_0")
    with pytest.raises(UnknownNameError, match="give the name"):
        file_type(41)


def test_the_file_says_for_which_program_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.gguf"
    x = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    with Writer(source, {"general.architecture": "llama"}, [TensorSpec(UP, x.shape, "f32")]) as writer:
        writer.write(UP, x.view(np.uint8))

    def keys(target: str, *flags: str) -> tuple[object, object]:
        out = tmp_path / "out.gguf"
        assert main(["quantize", str(source), str(out), target, *flags]) == 0
        metadata = gguf.open(out).metadata
        return metadata["general.file_type"], metadata.get("quantkit.dialect")

    assert keys("Q8_0") == (7, None)
    assert keys("Q2_0") == (41, "llama.cpp")
    assert keys("Q1_0") == (40, None)
    assert keys("Q1_0", "--dialect", "ik") == (41, "ik")
    assert keys("Q1_0_G128", "--for", "llama.cpp") == (40, "llama.cpp")
    assert keys("IQ4_K", "--for", "llama.cpp", "--replace-types") == (140, "llama.cpp")
    capsys.readouterr()
    assert main(["quantize", str(source), str(tmp_path / "no.gguf"), "IQ4_K", "--for", "llama.cpp"]) == 1
    assert "llama.cpp does not read iq4_k" in capsys.readouterr().err
    assert not (tmp_path / "no.gguf").exists()
