"""Repacking files: what changes, what stays and why, unpacking, and comparison with the reference."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit import cli, types
from quantkit.cli import main
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import GGUF, Metadata, TensorSpec, Writer
from quantkit.pipelines.repack_file import plan_repack, plan_unpack, write_repacked
from quantkit.recipe import file_types
from quantkit.repack import interleaved_form
from tests.recipe.synthetic import Shape

BIG = "blk.0.ffn_down_exps.weight"


def content(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    """Random bytes with finite scales, as the reference refuses others; ones for F32."""
    if spec.type.name == "f32":
        return np.ones(spec.shape, "<f4").view(np.uint8)
    blocks = rng.integers(0, 256, (spec.nbytes // spec.type.block_bytes, spec.type.block_bytes), dtype=np.uint8)
    blocks[:, 1] &= 0xBF  # the upper byte of d
    return blocks


def model(path: Path, rng: np.random.Generator, file_type: int | None = 140, shards: int = 0) -> Path:
    """A small mixture of experts in IQ4_K with Q8_0 attention; with `shards`, in so many files: the last of them."""
    shape = Shape(layers=2, experts=3)
    specs = []
    for spec in shape.specs():
        kind = "f32" if len(spec.shape) == 1 else "q8_0" if "attn" in spec.name or "inp" in spec.name else "iq4_k"
        specs.append(TensorSpec(spec.name, spec.shape, types.get(kind)))
    metadata = shape.metadata()
    metadata.set("general.quantization_version", 2, "u32")
    if file_type is not None:
        metadata.set("general.file_type", file_type, "u32")
    counts = None if not shards else [len(specs) - 2 * (shards - 1), *[2] * (shards - 1)]
    with Writer(path, metadata, specs, shards=counts) as writer:
        for spec in specs:
            writer.write(spec.name, content(spec, rng))
    return writer.paths[-1]


def one_tensor(path: Path, kind: str, shape: tuple[int, ...], data: np.ndarray, **keys: int) -> GGUF:
    metadata = Metadata({"general.architecture": "llama"})
    for key, value in keys.items():
        metadata.set(f"general.{key}", value, "u32")
    spec = TensorSpec("blk.0.ffn_up.weight", shape, types.layout(kind))
    with Writer(path, metadata, [spec]) as writer:
        writer.write(spec.name, data)
    return quantkit.open(path)


@pytest.fixture
def source(tmp_path: Path, rng: np.random.Generator) -> GGUF:
    return quantkit.open(model(tmp_path / "model.gguf", rng))


def test_unpacking_gives_the_original_file(source: GGUF, tmp_path: Path) -> None:
    there, back = tmp_path / "r4.gguf", tmp_path / "back.gguf"
    write_repacked(plan_repack(source), there, threads=2)
    repacked = quantkit.open(there)
    assert repacked.metadata["general.file_type"] == 340
    assert repacked.tensors[BIG].type.name == "iq4_k_r4"
    assert repacked.tensors["blk.1.attn_q.weight"].type.name == "q8_0_r8"
    assert list(repacked.tensors) == list(source.tensors)
    for name in (BIG, "blk.1.attn_q.weight"):
        ours, theirs = repacked.tensors[name].dequantize(), source.tensors[name].dequantize()
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    write_repacked(plan_unpack(repacked), back, threads=1)
    assert back.read_bytes() == source.path.read_bytes()


def test_tensors_that_are_not_repacked_have_a_reason(source: GGUF) -> None:
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


def test_the_file_type_is_that_of_most_tensors_of_the_main_type(
    source: GGUF, tmp_path: Path, rng: np.random.Generator
) -> None:
    assert plan_repack(source, ["attn"]).metadata["general.file_type"] == 140  # the IQ4_K part is as it was
    assert plan_repack(source, ["exps"]).metadata["general.file_type"] == 340
    for number, expected in ((None, None), (15, 15), (7, 207), (4711, 4711)):
        job = plan_repack(quantkit.open(model(tmp_path / f"{number}.gguf", rng, number)))
        assert job.metadata.get("general.file_type") == expected


@pytest.mark.parametrize(
    ("number", "back"), [(214, 14), (210, 21), (229, 29), (399, 7), (223, 23), (33, 2), (398, 149)]
)
def test_the_file_type_after_quantizing_to_interleaved_types(tmp_path: Path, number: int, back: int) -> None:
    """Of a file quantized straight to interleaved types: that of the mix in rows."""
    kind = next(t.default for t in file_types() if t.number == number)
    assert kind is not None
    data = np.zeros((16, kind.row_bytes(256)), np.uint8)
    assert plan_unpack(one_tensor(tmp_path / "a", kind.name, (16, 256), data, file_type=number)).metadata == {
        "general.architecture": "llama", "general.file_type": back,
    }  # fmt: skip


def test_unpacking_a_file_quantized_straight(tmp_path: Path, rng: np.random.Generator) -> None:
    t = types.get("q8_0_r8")
    x = rng.standard_normal((16, 64)).astype(np.float32)
    with Writer(tmp_path / "a.gguf", {"general.file_type": 207}, [TensorSpec("a.weight", x.shape, t)]) as writer:
        writer.write("a.weight", t.quantize(x))
    write_repacked(plan_unpack(quantkit.open(tmp_path / "a.gguf")), tmp_path / "b.gguf")
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


# -------------------------------------------------------------------------------------------------------------- shards


def split_keys(path: Path) -> dict[str, tuple[int, str]]:
    """Of one shard: key -> value and kind."""
    from quantkit.formats.gguf import Shard

    metadata = Shard(path).metadata
    return {key: (metadata[key], metadata.kind(key)) for key in metadata if key.startswith("split.")}


def test_shards_in_and_out(tmp_path: Path, rng: np.random.Generator) -> None:
    """Any member opens the set; the shards are kept, remade or merged, and unpacking gives the original files."""
    last = model(tmp_path / "in.gguf", rng, shards=3)
    source = quantkit.open(last)
    assert [path.name for path in source.paths] == [f"in-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    kept = write_repacked(plan_repack(source), tmp_path / "kept.gguf", keep_split=True)
    repacked = quantkit.open(kept[1])
    assert repacked.shards == source.shards == [len(source.tensors) - 4, 2, 2]
    total = len(source.tensors)
    for number, path in enumerate(kept):
        assert split_keys(path) == {
            "split.no": (number, "u16"), "split.count": (3, "u16"), "split.tensors.count": (total, "i32"),
        }  # fmt: skip
    back = write_repacked(plan_unpack(repacked), tmp_path / "back.gguf", keep_split=True)
    for there, here in zip(source.paths, back):
        assert here.read_bytes() == there.read_bytes()

    fewer = write_repacked(plan_repack(source), tmp_path / "fewer.gguf", split_max_tensors=total // 2 + 1)
    limited = write_repacked(
        plan_unpack(quantkit.open(fewer[0])), tmp_path / "limited.gguf", split_max_bytes=source.size // 4
    )
    one = write_repacked(plan_repack(quantkit.open(limited[-1])), tmp_path / "one.gguf")
    assert (len(fewer), len(limited) > 3, len(one)) == (2, True, 1)
    assert split_keys(one[0]) == {}
    for name, tensor in quantkit.open(one[0]).tensors.items():
        for paths in (kept, fewer):
            np.testing.assert_array_equal(quantkit.open(paths[0]).tensors[name].data, tensor.data)


def test_one_file_has_one_shard_to_keep(source: GGUF, tmp_path: Path) -> None:
    assert write_repacked(plan_repack(source), tmp_path / "a.gguf", keep_split=True) == [tmp_path / "a.gguf"]


def test_splitting_on_the_command_line(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    last, out, back = model(tmp_path / "in.gguf", rng, shards=2), tmp_path / "out.gguf", tmp_path / "back.gguf"
    assert main(["repack", str(last), str(out), "--keep-split", "--json"]) == 0
    paths = json.loads(capsys.readouterr().out)["paths"]
    assert len(paths) == 2
    assert main(["unpack", paths[0], str(back), "--split-max-size", "100K", "--json"]) == 0
    sizes = [Path(path).stat().st_size for path in json.loads(capsys.readouterr().out)["paths"]]
    assert len(sizes) > 2
    assert main(["unpack", paths[1], str(back), "--split-max-tensors", "1000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["paths"] == [str(back)]
    for flag in (("--split-max-size", "1G"), ("--split-max-tensors", "3")):
        assert main(["repack", str(last), str(out), "--keep-split", *flag]) == 2


def test_shards_beside_the_reference(tmp_path: Path, rng: np.random.Generator) -> None:
    """Its --repack --keep-split of our shards; and it joins what we split."""
    from tests.conformance.ggml import QUANTIZE_TOOL
    from tests.repack.models import assert_same_tensors, reference_repack

    model(tmp_path / "in.gguf", rng, shards=3)
    first = tmp_path / "in-00001-of-00003.gguf"
    ours = write_repacked(plan_repack(quantkit.open(first)), tmp_path / "ours.gguf", keep_split=True)
    command = [str(QUANTIZE_TOOL), "--repack", "--keep-split", str(first), str(tmp_path / "theirs.gguf"), "Q8_0", "1"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    for number, path in enumerate(ours, 1):
        theirs = tmp_path / f"theirs-0000{number}-of-00003.gguf"
        assert split_keys(theirs) == split_keys(path)
    assert_same_tensors(ours[0], tmp_path / "theirs-00001-of-00003.gguf")
    back = write_repacked(plan_unpack(quantkit.open(ours[0])), tmp_path / "back.gguf", split_max_tensors=7)
    assert_same_tensors(reference_repack(back[0], tmp_path / "joined.gguf"), ours[0])


# -------------------------------------------------------------------------------------------------- what is special


def test_q8_kv_has_the_stride_that_readers_expect(tmp_path: Path, rng: np.random.Generator) -> None:
    """4 + n a row, as the reference quantizes; what it repacks has gaps (spec/repack.md 11.1)."""
    from tests.conformance import ggml

    n, x = 256, rng.standard_normal((24, 256)).astype(np.float32)
    data = types.get("q8_KV").quantize(x)
    f = one_tensor(tmp_path / "kv.gguf", "q8_KV", x.shape, data, file_type=149)
    write_repacked(plan_repack(f), tmp_path / "r8.gguf")
    repacked = quantkit.open(tmp_path / "r8.gguf")
    tensor = repacked.tensors["blk.0.ffn_up.weight"]
    assert (tensor.type.name, tensor.nbytes) == ("q8_KV_r8", 24 * (4 + n))
    assert repacked.metadata["general.file_type"] == 398
    np.testing.assert_array_equal(tensor.data, ggml.quantize("q8_KV_r8", x))
    write_repacked(plan_unpack(repacked), tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == f.path.read_bytes()


def test_floats(tmp_path: Path, rng: np.random.Generator) -> None:
    """F16 stays, as it would lose bits, but can be quantized to an interleaved type; BF16 is repacked where named."""
    x = rng.standard_normal((32, 64)).astype(np.float32)
    half = one_tensor(tmp_path / "f16.gguf", "f16", x.shape, types.get("f16").quantize(x), file_type=1)
    (change,) = plan_repack(half, ["ffn"]).changes
    assert not change.changed
    assert "quantkit quantize IN OUT BF16_R16" in change.reason
    assert main(["quantize", str(half.path), str(tmp_path / "r16.gguf"), "BF16_R16"]) == 0
    made = quantkit.open(tmp_path / "r16.gguf")
    assert made.metadata["general.file_type"] == 232
    rounded = types.get("bf16").quantize(half.tensors["blk.0.ffn_up.weight"].dequantize())
    np.testing.assert_array_equal(
        made.tensors["blk.0.ffn_up.weight"].data, quantkit.repack.repack(rounded, "bf16", 64)[0]
    )

    brain = one_tensor(tmp_path / "bf16.gguf", "bf16", x.shape, types.get("bf16").quantize(x), file_type=32)
    (change,) = plan_repack(brain).changes
    assert not change.changed
    assert "name it by --repack-pattern" in change.reason
    job = plan_repack(brain, ["ffn"])
    assert (job.changed[0].type.name, job.metadata["general.file_type"]) == ("bf16_r16", 232)
    odd = one_tensor(tmp_path / "odd.gguf", "bf16", (32, 3), np.zeros((32, 6), np.uint8))
    assert "cannot be interleaved by pairs of columns" in plan_repack(odd, ["ffn"]).changes[0].reason


def test_tensors_that_are_not_multiplied_are_not_repacked(tmp_path: Path) -> None:
    t = types.get("q8_0")
    names = ("position_embd.weight", "token_embd.weight", "blk.0.ssm_conv1d.weight", "blk.0.attn_rel_b.weight")
    specs = [TensorSpec(name, (16, 32), t) for name in names]
    with Writer(tmp_path / "a.gguf", {}, specs) as writer:
        for spec in specs:
            writer.write(spec.name, np.zeros(spec.nbytes, np.uint8))
    assert not plan_repack(quantkit.open(tmp_path / "a.gguf")).changed


def test_encodings_of_their_own_are_unpacked_where_that_is_exact(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    """IQ1_S_R4 always, IQ1_M_R4 by its multipliers, neither where the columns do not fit; the rest says why."""
    kinds = {"a": ("iq1_s_r4", 256), "b": ("iq1_m_r4", 256), "c": ("iq1_m_r4", 256), "d": ("iq1_s_r4", 288)}
    specs = [TensorSpec(f"{name}.weight", (2, 64, n), types.get(kind)) for name, (kind, n) in kinds.items()]
    metadata = Metadata({"general.architecture": "llama"})
    metadata.set("general.file_type", 224, "u32")
    with Writer(tmp_path / "in.gguf", metadata, specs) as writer:
        for spec in specs:
            data = rng.integers(0, 256, (spec.n_rows, spec.row_bytes), dtype=np.uint8)
            groups = data.reshape(32, -1)
            groups[:, 1:8:2] &= 0x3F  # finite scales
            if spec.name in ("b.weight", "c.weight"):
                groups[:, 8:].reshape(32, -1, 28)[:, :, 24:] |= 0x11
            if spec.name == "c.weight":
                groups[20, 8 + 28 * 3 + 24 + 2] ^= 0x11  # row 82: an even multiplier in columns 96 to 127
            writer.write(spec.name, data)
    source, out = quantkit.open(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    assert main(["unpack", str(source.path), str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    result = {t["name"][0]: (t["to"], t["reason"]) for t in record["tensors"]}
    assert result == {
        "a": ("iq1_s", None), "b": ("iq1_m", None),
        "c": ("iq1_m_r4", "iq1_m cannot hold the multipliers of row 82, columns 0 to 255"),
        "d": ("iq1_s_r4", "288 columns are not a multiple of iq1_s's 256"),
    }  # fmt: skip
    back = quantkit.open(out)
    for name, tensor in source.tensors.items():
        ours, theirs = back.tensors[name].dequantize(), tensor.dequantize()
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    assert back.metadata["general.file_type"] == 224  # as much of it is left as became IQ1_S
    assert record["bytes"] == sum(t.nbytes for t in back.tensors.values())


# ------------------------------------------------------------------------------------------------- accidents, memory


def big(path: Path, mebibytes: int, kind: str = "q4_K") -> Path:
    """`mib` MiB of zeros of a type, in tensors of 10 MiB or a smaller one."""
    t, each = types.get(kind), min(mebibytes, 10)
    rows = (each << 20) // t.row_bytes(1024) // 16 * 16
    specs = [TensorSpec(f"blk.{i}.ffn_up.weight", (rows, 1024), t) for i in range(mebibytes // each)]
    with Writer(path, {"general.architecture": "llama"}, specs) as writer:
        for spec in specs:
            writer.write(spec.name, np.zeros(spec.nbytes, np.uint8))
    return path


def joined(path: Path, *sources: Path) -> Path:
    """The tensors of all in one file, named by their number."""
    tensors = [tensor for source in sources for tensor in quantkit.open(source).tensors.values()]
    specs = [TensorSpec(f"blk.{i}.ffn_up.weight", t.shape, t.type) for i, t in enumerate(tensors)]
    with Writer(path, {"general.architecture": "llama"}, specs) as writer:
        for spec, tensor in zip(specs, tensors):
            writer.write(spec.name, tensor.data)
    return path


@pytest.mark.parametrize("command", ["repack", "unpack"])
def test_killed_in_the_middle_it_leaves_nothing(tmp_path: Path, command: str) -> None:
    """SIGKILL while the partial file is written, early and late; a rerun succeeds and removes it."""
    source, out = big(tmp_path / "in.gguf", 150), tmp_path / "out.gguf"
    if command == "unpack":
        write_repacked(plan_repack(quantkit.open(source)), tmp_path / "r4.gguf")
        source = (tmp_path / "r4.gguf").replace(tmp_path / "in.gguf")
    arguments = [sys.executable, "-m", "quantkit", command, str(source), str(out), "--threads", "1"]
    subprocess.run(arguments, check=True, capture_output=True)  # compiles what the killed ones must not wait for
    whole = out.read_bytes()
    out.unlink()
    killed = 0
    for delay in (0.0, 0.01, 0.02, 0.04, 0.1):
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(tmp_path.glob("*.partial-*")):
            time.sleep(0.002)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            killed += 1
            assert not out.exists() or out.read_bytes() == whole  # killed after the rename
        out.unlink(missing_ok=True)
    assert killed >= 2
    subprocess.run(arguments, check=True, capture_output=True)
    assert out.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gguf", "out.gguf"]


@pytest.mark.parametrize(("command", "kind"), [("repack", "q4_K"), ("unpack", "iq2_xxs_r4"), ("repack", "f16")])
def test_memory_does_not_grow_with_the_file(command: str, kind: str, tmp_path: Path) -> None:
    """The peak of the whole process, pages of the mapped input included, is that of a small file."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc with the peak memory of a process here")
    peaks = []
    program = (
        "import sys; from quantkit.cli import main; assert main(sys.argv[1:]) == 0; "
        "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )  # not ru_maxrss, which begins with that of the process before exec
    for mebibytes in (1, 1, 400):
        source = big(tmp_path / "in.gguf", mebibytes, kind)
        if kind == "f16":  # is copied, beside what is not
            big(tmp_path / "q8_0.gguf", 1, "q8_0")
            source = joined(tmp_path / "both.gguf", source, tmp_path / "q8_0.gguf")
        arguments = [sys.executable, "-c", program, command, str(source), str(tmp_path / "out.gguf"), "--threads", "2"]
        done = subprocess.run(arguments, check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout.split()[-2]) / 1024)
    assert peaks[2] < peaks[1] + 100
    assert peaks[2] < 400


# --------------------------------------------------------------------------------------------------- the reference


# Of these file types the reference keeps the number although all is repacked, and its build does not know MXFP4_R8.
KEPT = {"Q2_K_S": 210, "IQ2_S": 220, "IQ3_XS": 226, "IQ3_M": 226, "IQ3_KL": 339, "MXFP4": 351}


def test_file_types_beside_the_reference(tmp_path: Path) -> None:
    """Every file type with tensors that can be repacked: if all are, the name is the reference's or a closer one."""
    from tests.repack.models import reference_repack

    metadata = Shape(layers=1).metadata()
    names = set()
    for file_type in file_types():
        if file_type.default is None or file_type.default.interleave > 1 or file_type.is_float:
            continue
        if interleaved_form(file_type.default) is None:
            continue
        spec = TensorSpec("blk.0.ffn_up.weight", (64, 256), file_type.default)
        metadata.set("general.file_type", file_type.number, "u32")
        with Writer(tmp_path / "in.gguf", metadata, [spec]) as writer:
            writer.write(spec.name, np.zeros(spec.nbytes, np.uint8))
        ours = plan_repack(quantkit.open(tmp_path / "in.gguf")).metadata["general.file_type"]
        names.add(file_type.name)
        if file_type.name in KEPT:
            assert ours == KEPT[file_type.name]
        else:
            theirs = reference_repack(tmp_path / "in.gguf", tmp_path / "theirs.gguf")
            assert ours == quantkit.open(theirs).metadata["general.file_type"], file_type.name
    assert len(names) > 30
    assert set(KEPT) <= names


def test_against_the_references_repacking(source: GGUF, tmp_path: Path) -> None:
    """llama-quantize --repack of the same file: types, bytes and file type."""
    from tests.conformance.ggml import QUANTIZE_TOOL

    theirs = tmp_path / "theirs.gguf"
    command = [str(QUANTIZE_TOOL), "--repack", str(source.path), str(theirs), "IQ4_K", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    ours = tmp_path / "ours.gguf"
    write_repacked(plan_repack(source), ours)
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


# ------------------------------------------------------------------------------------------------------ for a placement


def run_for(source: GGUF, out: Path, placement: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main(["repack", str(source.path), str(out), "--for", placement])
    message = capsys.readouterr()
    return status, message.out + message.err


def test_only_what_stays_on_the_cpu_is_repacked(
    source: GGUF, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    status, message = run_for(source, out, "-ngl 99 --n-cpu-moe 1 -ot attn_q=CPU", capsys)
    assert status == 0
    assert "on CUDA0 in this placement" in message
    kinds = {name: t.type for name, t in quantkit.open(out).tensors.items()}
    interleaved = {name for name, kind in kinds.items() if kind.interleave > 1}
    experts = {f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    first = {name.replace("blk.1.", "blk.0.") for name in experts}
    assert {"blk.0.attn_q.weight", "blk.1.attn_q.weight"} < interleaved
    assert len(interleaved - {"blk.0.attn_q.weight", "blk.1.attn_q.weight"}) == 3
    assert interleaved & experts == experts or interleaved & first == first


def test_a_rule_that_places_nothing_is_warned_about(
    source: GGUF, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, message = run_for(source, tmp_path / "out.gguf", "-ot nothing=CPU -ngl 0", capsys)
    assert status == 0
    assert "warning: -ot nothing=CPU decides no tensor" in message


def test_a_repacked_type_on_a_gpu_without_a_kernel_is_refused(
    source: GGUF, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_repacked(plan_repack(source, ["attn_q"]), tmp_path / "some.gguf")
    some = quantkit.open(tmp_path / "some.gguf")
    status, message = run_for(some, tmp_path / "out.gguf", "-ngl 99", capsys)
    assert status == 1
    assert "attn_q.weight" in message
    assert "=CPU" in message
    assert "quantkit unpack" in message
    assert not (tmp_path / "out.gguf").exists()
    own = ["repack", str(some.path), str(tmp_path / "own.gguf"), "--for", "-ngl 99 -ot attn_k=CPU"]
    assert cli.main([*own, "--runtime", "quantkit"]) == 0
    assert quantkit.open(tmp_path / "own.gguf").tensors["blk.0.attn_k.weight"].type.interleave > 1


@pytest.mark.parametrize("flags", ["--no-such-flag", "-ngl many", "-ot broken", "-ot 'x=CPU"])
def test_flags_that_do_not_exist(flags: str, source: GGUF, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = run_for(source, tmp_path / "out.gguf", flags, capsys)
    assert status == 2
    assert not (tmp_path / "out.gguf").exists()
