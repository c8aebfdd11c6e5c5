"""Plans against the reference's own: its bundled llama-quantize in a dry run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit import recipe, types
from quantkit.errors import DataError
from quantkit.formats import imatrix
from quantkit.recipe.planning.presets import file_types
from tests.conformance.ggml import QUANTIZE_TOOL
from tests.recipe.synthetic import Shape

FLOATS = ("F32", "F16", "BF16")
# Newer than the wheel; of llama.cpp alone; not among the file types of its llama-quantize.
UNKNOWN_THERE = frozenset(("MXFP4_R8", "TQ1_0", "TQ2_0", "NVFP4", "Q1_0", "Q2_0", "Q1_0_G128"))
MIXED = [f.name for f in file_types() if f.default is not None and f.name not in UNKNOWN_THERE]
NEED_A_MATRIX = frozenset(("IQ1_S", "IQ2_XXS", "IQ2_XXS_R4", "IQ2_XS", "IQ2_XS_R4", "IQ2_S"))
_TENSOR = re.compile(r"\[ *\d+/ *\d+\] +(\S+) - \[[^\]]*\], type = +(\S+?),(?=\s)(.*?)size = ", re.DOTALL)


def reference_plan(model: Path, file_type: str, *flags: str) -> dict[str, str]:
    """Name -> type of every tensor as llama-quantize would write it."""
    command = [
        str(QUANTIZE_TOOL),
        "--allow-requantize",
        "--dry-run",
        *flags,
        str(model),
        str(model) + ".out",
        file_type,
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    found = {}
    for name, source, middle in _TENSOR.findall(done.stdout + done.stderr):
        became = re.findall(r"converting to (\S+)", middle)
        found[name] = became[-1] if became else source
    return found


def our_plan(
    model: Path, file_type: str, text: str = "", matrix: imatrix.Imatrix | None = None, **options: object
) -> dict:
    file = quantkit.open(model)
    made = recipe.plan(
        file.tensors.values(), file_type, recipe.parse(text), metadata=file.metadata, imatrix=matrix,
        options=recipe.Options(allow_requantize=True, **options),
    )  # fmt: skip
    return {t.name: t.type.name for t in made.tensors}


def differences(ours: dict[str, str], theirs: dict[str, str]) -> dict[str, tuple[str, str | None]]:
    return {name: (t, theirs.get(name)) for name, t in ours.items() if t != theirs.get(name)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Shape, Path]:
    folder = tmp_path_factory.mktemp("models")
    shapes = [
        Shape(keys=8),
        Shape(keys=4),
        Shape(keys=2, shuffled=True),
        Shape(keys=2, tied=True),
        Shape(keys=2, layers=80),
        Shape(keys=2, experts=8),
        Shape(keys=4, experts=3, shuffled=True),
    ]
    return {shape: shape.write(folder / f"{i}.gguf") for i, shape in enumerate(shapes)}


@pytest.mark.parametrize("file_type", MIXED)
def test_mix(file_type: str, models: dict[Shape, Path], tmp_path: Path) -> None:
    for shape, model in models.items():
        names = [spec.name for spec in shape.specs() if spec.name.startswith("blk.") and len(spec.shape) > 1]
        counts = {spec.name: spec.shape[0] if len(spec.shape) == 3 else 1 for spec in shape.specs()}
        ones = {n: imatrix.Entry(np.ones((counts[n], 256), np.float32), np.ones(counts[n], np.int64), 1) for n in names}
        matrix = imatrix.Imatrix(ones, 1, "ones")
        imatrix.write(tmp_path / "i.dat", matrix)
        if file_type not in NEED_A_MATRIX:
            plain = our_plan(model, file_type, ignore_imatrix_rules=True)
            assert not differences(plain, reference_plan(model, file_type, "--ignore-imatrix-rules")), shape
        with_matrix = reference_plan(model, file_type, "--imatrix", str(tmp_path / "i.dat"))
        assert not differences(our_plan(model, file_type, matrix=matrix), with_matrix), shape


@pytest.mark.parametrize("file_type", ["Q4_K_M", "IQ4_K_R4", "Q8_0_R8", "BF16"])
def test_pure(file_type: str, models: dict[Shape, Path]) -> None:
    for shape, model in models.items():
        assert not differences(our_plan(model, file_type, pure=True), reference_plan(model, file_type, "--pure")), shape


@pytest.mark.parametrize("file_type", sorted(NEED_A_MATRIX))
def test_a_plan_without_a_matrix_is_refused_where_a_type_needs_one(file_type: str, models: dict[Shape, Path]) -> None:
    """The reference's dry run does not; its run does, hours later."""
    with pytest.raises(DataError, match="needs an importance matrix"):
        our_plan(next(iter(models.values())), file_type, ignore_imatrix_rules=True)


@pytest.mark.parametrize("file_type", MIXED)
def test_mix_of_smollm2(file_type: str, smollm2_q4_1: Path, tmp_path: Path) -> None:
    """Tied, 576 columns, file order 0 1 10 11 …: fallbacks almost everywhere."""
    if file_type in ("IQ1_BN", "IQ2_BN", "IQ2_BN_R4"):
        pytest.skip("576 columns do fit blocks of 64, but the reference refuses files with other tensors of these")
    file = quantkit.open(smollm2_q4_1)
    matrices = [t for t in file.tensors.values() if t.name.startswith("blk.") and len(t.shape) == 2]
    ones = {t.name: imatrix.Entry(np.ones((1, t.shape[1]), np.float32), np.ones(1, np.int64), 1) for t in matrices}
    matrix = imatrix.Imatrix(ones, 1, "ones")
    imatrix.write(tmp_path / "i.dat", matrix)
    theirs = reference_plan(smollm2_q4_1, file_type, "--imatrix", str(tmp_path / "i.dat"))
    assert not differences(our_plan(smollm2_q4_1, file_type, matrix=matrix), theirs)


RULES = [
    r"blk\.\d+\.attn_[kv]\.weight=q8_0,ffn_down=q6_K,^output\.weight=q8_0",
    r"output\.weight=q5_0,.*=iq4_nl",
    r"blk\.(?:[0-9]|1[0-5])\.ffn_(?!down).*=q4_1,ffn_gate_inp=q4_0,attn_norm=q4_0",
    r"blk\.[0-10]\.=q6_0,\.1[[:digit:]]\.=q5_1",
    r"ffn.*?_exps=q8_0_r8,token_embd=q8_0_r8",
]


@pytest.mark.parametrize("text", RULES)
def test_rules(text: str, models: dict[Shape, Path]) -> None:
    for shape, model in models.items():
        theirs = reference_plan(model, "Q4_K_S", "--custom-q", text)
        assert not differences(our_plan(model, "Q4_K_S", text), theirs), shape


def test_flags(models: dict[Shape, Path]) -> None:
    q8, q5, q4_1 = types.get("q8_0"), types.get("q5_0"), types.get("q4_1")
    for shape, model in models.items():
        theirs = reference_plan(
            model, "Q4_0", "--output-tensor-type", "q5_0", "--attn-v-type", "q8_0", "--ffn-down-type", "q4_1"
        )
        ours = our_plan(model, "Q4_0", output_type=q5, class_types={"attn_v": q8, "ffn_down": q4_1})
        assert not differences(ours, theirs), shape
        theirs = reference_plan(model, "F16", "--token-embedding-type", "q8_0", "--output-tensor-type", "q5_0")
        assert not differences(our_plan(model, "F16", embedding_type=q8, output_type=q5), theirs), shape
        theirs = reference_plan(model, "Q8_0", "--leave-output-tensor", "--custom-q", "attn_v=q4_0")
        assert not differences(our_plan(model, "Q8_0", "attn_v=q4_0", leave_output=True), theirs), shape


def test_an_unknown_tensor_would_be_noticed(models: dict[Shape, Path]) -> None:
    """The comparison can fail: another file type gives differences."""
    model = next(iter(models.values()))
    assert differences(our_plan(model, "Q4_0"), reference_plan(model, "Q8_0"))
