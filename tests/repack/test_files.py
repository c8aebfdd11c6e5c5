"""Repacking files: what changes, what stays and why, the way back, and the reference's own repacking."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit import types
from quantkit.cli import main
from quantkit.errors import QuantkitError
from quantkit.files.gguf import GGUF, TensorSpec, Writer
from quantkit.repack_file import plan_repack, plan_unpack, write
from tests.recipe.synthetic import Shape

BIG = "blk.0.ffn_down_exps.weight"


def content(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    """Any bytes, but finite scales: the reference refuses files that hold others. Ones in F32."""
    if spec.type.name == "f32":
        return np.ones(spec.shape, "<f4").view(np.uint8)
    blocks = rng.integers(0, 256, (spec.nbytes // spec.type.block_bytes, spec.type.block_bytes), dtype=np.uint8)
    blocks[:, 1] &= 0xBF  # the upper byte of d
    return blocks


def model(path: Path, rng: np.random.Generator, file_type: int | None = 140) -> Path:
    """A small mixture of experts in IQ4_K with Q8_0 attention."""
    shape = Shape(layers=2, experts=3)
    specs = []
    for spec in shape.specs():
        kind = "f32" if len(spec.shape) == 1 else "q8_0" if "attn" in spec.name or "inp" in spec.name else "iq4_k"
        specs.append(TensorSpec(spec.name, spec.shape, types.get(kind)))
    metadata = shape.metadata()
    metadata.set("general.quantization_version", 2, "u32")
    if file_type is not None:
        metadata.set("general.file_type", file_type, "u32")
    with Writer(path, metadata, specs) as writer:
        for spec in specs:
            writer.write(spec.name, content(spec, rng))
    return path


@pytest.fixture
def source(tmp_path: Path, rng: np.random.Generator) -> GGUF:
    return quantkit.open(model(tmp_path / "model.gguf", rng))


def test_round_trip_is_the_file_there_was(source: GGUF, tmp_path: Path) -> None:
    there, back = tmp_path / "r4.gguf", tmp_path / "back.gguf"
    write(plan_repack(source), there, threads=2)
    repacked = quantkit.open(there)
    assert repacked.metadata["general.file_type"] == 340
    assert repacked.tensors[BIG].type.name == "iq4_k_r4"
    assert repacked.tensors["blk.1.attn_q.weight"].type.name == "q8_0_r8"
    assert list(repacked.tensors) == list(source.tensors)
    for name in (BIG, "blk.1.attn_q.weight"):
        ours, theirs = repacked.tensors[name].dequantize(), source.tensors[name].dequantize()
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    write(plan_unpack(repacked), back, threads=1)
    assert back.read_bytes() == source.path.read_bytes()


def test_what_stays_says_why(source: GGUF) -> None:
    reasons = {change.tensor.name: change.reason for change in plan_repack(source).changes}
    assert reasons["token_embd.weight"] == "embeddings are read row by row"
    assert reasons["output_norm.weight"] == "f32 has no interleaved form here"
    assert reasons["blk.0.ffn_gate_inp.weight"] == "3 rows are not a multiple of 8"
    assert reasons[BIG] == ""
    for change in plan_repack(source).changes:
        assert change.changed is (change.reason == "")


def test_patterns(source: GGUF) -> None:
    job = plan_repack(source, ["ffn_(up|down)_exps", r"^blk\.1\.attn_q"])
    assert {change.tensor.name for change in job.changed} == {
        "blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight", "blk.1.ffn_up_exps.weight",
        "blk.1.ffn_down_exps.weight", "blk.1.attn_q.weight",
    }  # fmt: skip
    with pytest.raises(QuantkitError, match="--repack-pattern 'ffn_dwon' is found in none of"):
        plan_repack(source, ["attn", "ffn_dwon"])


def test_the_file_type_says_what_most_of_the_main_type_is(
    source: GGUF, tmp_path: Path, rng: np.random.Generator
) -> None:
    assert plan_repack(source, ["attn"]).metadata["general.file_type"] == 140  # the IQ4_K part is as it was
    assert plan_repack(source, ["exps"]).metadata["general.file_type"] == 340
    for number, expected in ((None, None), (15, 15), (7, 207), (4711, 4711)):
        job = plan_repack(quantkit.open(model(tmp_path / f"{number}.gguf", rng, number)))
        assert job.metadata.get("general.file_type") == expected


def test_unpacking_a_file_quantized_straight(tmp_path: Path, rng: np.random.Generator) -> None:
    t = types.get("q8_0_r8")
    x = rng.standard_normal((16, 64)).astype(np.float32)
    with Writer(tmp_path / "a.gguf", {"general.file_type": 207}, [TensorSpec("a.weight", x.shape, t)]) as writer:
        writer.write("a.weight", t.quantize(x))
    write(plan_unpack(quantkit.open(tmp_path / "a.gguf")), tmp_path / "b.gguf")
    unpacked = quantkit.open(tmp_path / "b.gguf")
    assert unpacked.metadata["general.file_type"] == 7
    np.testing.assert_array_equal(unpacked.tensors["a.weight"].data, types.get("q8_0").quantize(x))


def test_commands(source: GGUF, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back, no = (str(tmp_path / name) for name in ("r4.gguf", "back.gguf", "no.gguf"))
    assert main(["repack", str(source.path), there, "--repack-pattern", "ffn_up,ffn_down", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["changed"] == 4
    assert record["paths"] == [there]
    assert {"name": BIG, "from": "iq4_k", "to": "iq4_k_r4", "reason": None} in record["tensors"]
    assert main(["unpack", there, back]) == 0
    assert "iq4_k_r4  iq4_k" in capsys.readouterr().out
    assert Path(back).read_bytes() == source.path.read_bytes()
    assert main(["repack", str(source.path), no, "--dry-run"]) == 0
    assert "general.file_type 140 -> 340" in capsys.readouterr().out
    assert main(["unpack", back, no]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not Path(no).exists()
    assert main(["repack", str(source.path), str(source.path)]) == 1
    assert "this is the input" in capsys.readouterr().err


def test_against_the_references_repacking(source: GGUF, tmp_path: Path) -> None:
    """llama-quantize --repack of the same file: types, bytes and file type."""
    from tests.conformance.ggml import QUANTIZE_TOOL

    theirs = tmp_path / "theirs.gguf"
    command = [str(QUANTIZE_TOOL), "--repack", str(source.path), str(theirs), "IQ4_K", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    ours = tmp_path / "ours.gguf"
    write(plan_repack(source), ours)
    a, b = quantkit.open(ours), quantkit.open(theirs)
    assert list(a.tensors) == list(b.tensors)
    for name, tensor in a.tensors.items():
        assert tensor.type.name == b.tensors[name].type.name, name
        np.testing.assert_array_equal(tensor.data, b.tensors[name].data, err_msg=name)
    assert a.metadata["general.file_type"] == b.metadata["general.file_type"]


def test_nothing_to_do_as_in_the_reference(
    smollm2_q4_1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.conformance.ggml import QUANTIZE_TOOL

    command = [str(QUANTIZE_TOOL), "--repack", str(smollm2_q4_1), str(tmp_path / "theirs.gguf"), "Q4_1", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert re.search("nothing to do", done.stdout + done.stderr)
    assert main(["repack", str(smollm2_q4_1), str(tmp_path / "ours.gguf")]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())
