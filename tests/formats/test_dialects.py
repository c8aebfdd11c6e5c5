"""Files for llama.cpp and for ik_llama.cpp: a reader of the other kind refuses them or reads them right."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import gguf as library
import numpy as np
import pytest

from quantkit import types
from quantkit.cli import main
from quantkit.errors import FormatError, UnknownNameError
from quantkit.formats import gguf
from quantkit.formats.gguf import TensorSpec, Writer, dialects

# That the gguf package knows, by the ids; its Q2_0 is newer.
KNOWN = {kind.value: kind for kind in library.GGMLQuantizationType}
NAMES = ["tq1_0", "tq2_0", "nvfp4", "q2_0", "q1_0_g128", "mxfp4", "iq4_k", "iq2_bn", "iq4_ks_r4"]


def written(path: Path, name: str, rows: int = 4, n: int = 512, **metadata: str) -> tuple[Path, np.ndarray]:
    """A file of two tensors of a type, and the bytes of each."""
    t = types.get(name)
    data = t.quantize(np.random.default_rng(1).standard_normal((rows, n)).astype(np.float32))
    names = ("blk.0.attn_q.weight", "blk.0.attn_k.weight")
    keys = {"general.architecture": "llama"} | metadata
    with Writer(path, keys, [TensorSpec(name, (rows, n), t) for name in names]) as writer:
        for name in names:
            writer.write(name, data)
    return path, data


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_s_reader(name: str, tmp_path: Path) -> None:
    """The gguf package reads its own types right and refuses the others."""
    path, data = written(tmp_path / "a.gguf", name)
    t = types.get(name)
    if t.ggml_type not in KNOWN:
        with pytest.raises(ValueError, match=f"{t.ggml_type}.* is not a valid GGMLQuantizationType"):
            library.GGUFReader(path)
        return
    assert "llama.cpp" in t.readers
    for tensor in library.GGUFReader(path).tensors:
        assert tensor.tensor_type == KNOWN[t.ggml_type]
        assert np.array_equal(np.asarray(tensor.data).reshape(data.shape), data)


_READ = """
import ctypes, sys
class Parameters(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]
lib = ctypes.CDLL(sys.argv[1])
lib.gguf_init_from_file.restype = ctypes.c_void_p
lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, Parameters]
lib.gguf_get_tensor_type.argtypes = [ctypes.c_void_p, ctypes.c_int]
lib.gguf_get_tensor_offset.restype = ctypes.c_size_t
lib.gguf_get_tensor_offset.argtypes = [ctypes.c_void_p, ctypes.c_int]
file = lib.gguf_init_from_file(sys.argv[2].encode(), Parameters(True, None))
if not file:
    sys.exit("refused")
print(lib.gguf_get_tensor_type(file, 0), lib.gguf_get_tensor_offset(file, 1))
"""


@pytest.mark.parametrize("name", NAMES)
def test_ik_llama_cpp_s_reader(name: str, tmp_path: Path) -> None:
    """Its library reads ids and sizes as we do; at ids that it does not know the process ends."""
    from tests.conformance import ggml

    path, data = written(tmp_path / "a.gguf", name)
    command = [sys.executable, "-c", _READ, str(ggml.ROOT / "lib" / "libggml.so"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    t = types.get(name)
    if "ik" in t.readers:
        assert done.returncode == 0, done.stderr
        assert [int(word) for word in done.stdout.split()] == [t.ggml_type, -(-data.nbytes // 32) * 32]
    else:
        assert done.returncode != 0
        assert not done.stdout
    assert ctypes.sizeof(ctypes.c_size_t) == 8


def test_readers_are_those_of_the_gguf_package() -> None:
    """Of the formats that files hold; id 42 is newer than the package."""
    of_llama_cpp = {t.ggml_type for t in map(types.layout, types.names()) if "llama.cpp" in t.readers}
    activations = {library.GGMLQuantizationType.Q8_1, library.GGMLQuantizationType.Q8_K}
    assert of_llama_cpp == set(KNOWN) - {kind.value for kind in activations} | {42}


# ------------------------------------------------------------------------------------------------- forks of llama.cpp


def prism(path: Path, ours: Path, rows: int, n: int) -> Path:
    """The file with tensors of blocks of 128 in 34 bytes under id 42, as PrismML's fork wrote them."""
    size = -(-rows * n // 128 * 34 // 32) * 32
    whole = ours.read_bytes()
    shard = gguf.reader.Shard(ours)
    first, second = shard.tensors.values()
    head = bytearray(whole[: shard.data_start])
    offset = (second.offset - shard.data_start).to_bytes(8, "little")
    at = head.rindex(offset)
    head[at : at + 8] = size.to_bytes(8, "little")
    path.write_bytes(bytes(head) + bytes(2 * size))
    assert first.offset == shard.data_start
    return path


def test_blocks_of_128_under_id_42_are_refused(tmp_path: Path) -> None:
    ours, _ = written(tmp_path / "a.gguf", "q2_0", 8, 512)
    assert [t.type.name for t in gguf.open(ours).tensors.values()] == ["q2_0", "q2_0"]
    theirs = prism(tmp_path / "b.gguf", ours, 8, 512)
    with pytest.raises(FormatError, match=r"attn_q.weight of id 42 has room for 1088 bytes.* not for the 1152 of"):
        gguf.open(theirs)


def test_tensors_too_small_to_tell_need_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding hides the difference: 288 bytes of llama.cpp's, 272 of PrismML's."""
    path, data = written(tmp_path / "a.gguf", "q2_0", 4, 256)
    with pytest.raises(FormatError, match=r"may be 288 bytes of llama.cpp's q2_0 or 272 .*set QUANTKIT_DIALECT"):
        gguf.open(path)
    stated, _ = written(tmp_path / "b.gguf", "q2_0", 4, 256, **{dialects.KEY: "llama.cpp"})
    assert np.array_equal(gguf.open(stated).tensors["blk.0.attn_q.weight"].data, data)
    monkeypatch.setenv("QUANTKIT_DIALECT", "llama.cpp")
    assert np.array_equal(gguf.open(path).tensors["blk.0.attn_q.weight"].data, data)
    monkeypatch.setenv("QUANTKIT_DIALECT", "llama")
    with pytest.raises(UnknownNameError, match=r"did you mean llama.cpp"):
        gguf.open(path)
    monkeypatch.delenv("QUANTKIT_DIALECT")
    odd, _ = written(tmp_path / "c.gguf", "q2_0", 4, 192)  # no multiple of 128
    gguf.open(odd)


@pytest.mark.parametrize(("number", "names"), [(142, "PQ2_0.*IQ2_TN"), (143, "PTQ1_0.*IQ1_TN"), (37, "not known$")])
def test_ids_of_forks_are_named(number: int, names: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path / "a.gguf", "q8_0")
    data = path.read_bytes()
    name = b"blk.0.attn_k.weight"
    at = data.index(name) + len(name) + 4 + 16
    path.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(FormatError, match=f"attn_k.weight' has type id {number}, which is not known.*{names}|{names}"):
        gguf.open(path)


# ------------------------------------------------------------------------------------------------- --dialect of readers


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "{}"], ["verify", "{}"], ["metadata", "{}"], ["metadata", "set", "{}", "a.b=i32:1"],
        ["diff", "{}", "{}"], ["repack", "{}", "{}.out"], ["unpack", "{}", "{}.out"], ["export", "{}", "{}.hf"],
        ["prune", "{}", "{}.out", "--prune-layers", "0"], ["split", "{}", "{}.s"], ["merge", "{}", "{}.out"],
        ["perplexity", "{}", "-f", "{}"], ["generate", "{}", "-p", "a"], ["imatrix", "{}", "-f", "{}", "-o", "{}.i"],
        ["compare", "{}", "{}", "-f", "{}"], ["bench", "{}"], ["saliency", "-m", "{}", "-f", "{}"],
        ["sensitivity", "{}", "-f", "{}"], ["upload", "{}", "hf://a/b", "--card", "--dry-run"],
    ],
    ids=lambda words: " ".join(word for word in words[:2] if "{" not in word),
)  # fmt: skip
def test_commands_that_read_can_be_told(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They refuse a file that may be of two programs, and say how to go on; the option answers the question."""
    path, _ = written(tmp_path / "a.gguf", "q2_0", 4, 256)
    words = [word.format(path) for word in words]
    question = "padding hides which; if the file is llama.cpp's, pass --dialect llama.cpp"
    assert main(words) == 1
    assert question in capsys.readouterr().err
    main([*words, "--dialect", "llama.cpp"])
    assert question not in capsys.readouterr().err
    monkeypatch.setenv("QUANTKIT_DIALECT", "ik")  # says that it is not llama.cpp's; an option counts more
    assert main([*words, "--dialect", "llama.cpp"]) in (0, 1)
    assert question not in capsys.readouterr().err


def test_copies_state_the_dialect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then the question is answered for all readers."""
    path, data = written(tmp_path / "a.gguf", "q2_0", 4, 256)
    assert main(["split", str(path), str(tmp_path / "s"), "--dialect", "llama.cpp"]) == 0
    shard = next(tmp_path.glob("s-*.gguf"))
    assert gguf.open(shard).metadata[dialects.KEY] == "llama.cpp"
    assert main(["merge", str(shard), str(tmp_path / "m.gguf")]) == 0
    assert np.array_equal(gguf.open(tmp_path / "m.gguf").tensors["blk.0.attn_k.weight"].data, data)
    assert main(["merge", str(shard), str(tmp_path / "n.gguf"), "--dialect", "ik"]) == 1
    assert "blk.0.attn_q.weight and 1 more are q2_0, which --dialect ik does not read" in capsys.readouterr().err
    assert not (tmp_path / "n.gguf").exists()


# --------------------------------------------------------------------------------- whole files, and the other's reader


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a few matrices and a norm; rows of `ffn_up` fit no block of 256."""
    path = tmp_path_factory.mktemp("floats") / "f32.gguf"
    shapes = {"token_embd.weight": (64, 256), "blk.0.attn_norm.weight": (256,), "blk.0.attn_v.weight": (64, 256),
              "blk.0.ffn_down.weight": (64, 512), "blk.0.ffn_up.weight": (64, 384),
              "output.weight": (64, 256)}  # fmt: skip
    rng = np.random.default_rng(4)
    specs = [TensorSpec(name, shape, types.get("f32")) for name, shape in shapes.items()]
    with Writer(path, {"general.architecture": "llama"}, specs) as writer:
        for spec in specs:
            writer.write(spec.name, rng.standard_normal(spec.shape).astype("<f4").reshape(-1).view(np.uint8))
    return path


_READ_ALL = _READ.replace(
    "print(lib.gguf_get_tensor_type(file, 0), lib.gguf_get_tensor_offset(file, 1))",
    """
lib.gguf_get_tensor_name.restype = ctypes.c_char_p
lib.gguf_get_tensor_name.argtypes = [ctypes.c_void_p, ctypes.c_int]
lib.gguf_get_n_tensors.argtypes = lib.gguf_get_data_offset.argtypes = [ctypes.c_void_p]
lib.gguf_get_data_offset.restype = ctypes.c_size_t
start = lib.gguf_get_data_offset(file)
for i in range(lib.gguf_get_n_tensors(file)):
    print(lib.gguf_get_tensor_name(file, i).decode(), lib.gguf_get_tensor_type(file, i),
          start + lib.gguf_get_tensor_offset(file, i))
""",
)
_OF_EACH = [(dialect, target) for dialect in types.DIALECTS
            for target in ("Q4_K_M", "IQ4_NL", "Q1_0")]  # fmt: skip
_OF_LLAMA_CPP = [("llama.cpp", target) for target in ("NVFP4", "TQ1_0", "TQ2_0", "Q2_0")]
_OF_IK = [("ik", target) for target in ("IQ4_K", "IQ2_BN", "Q4_K_R4")]


@pytest.mark.parametrize(("dialect", "target"), [*_OF_EACH, *_OF_LLAMA_CPP, *_OF_IK])
def test_files_of_each_dialect_and_both_readers(dialect: str, target: str, floats: Path, tmp_path: Path) -> None:
    """Each reader finds every tensor with its type, place, bytes and values, or refuses the file: the other's may."""
    from tests.conformance import ggml

    out = tmp_path / "m.gguf"
    flags = ["--dialect", dialect, "--ignore-imatrix-rules"]
    assert main(["quantize", str(floats), str(out), target, *flags]) == 0
    written = gguf.open(out).tensors
    command = [sys.executable, "-c", _READ_ALL, str(ggml.ROOT / "lib" / "libggml.so"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for program, known in (
        ("llama.cpp", all(t.type.ggml_type in KNOWN for t in written.values())),
        ("ik", all("ik" in t.type.readers for t in written.values())),
    ):
        assert known or program != dialect or target == "Q2_0"  # which is newer than the package
        if program == "ik":
            lines = [f"{t.name} {t.type.ggml_type} {t.offset}" for t in written.values()]
            assert done.stdout.split("\n")[:-1] == (lines if known else [])
            assert known == (done.returncode == 0)
        elif not known:
            with pytest.raises(ValueError, match="is not a valid GGMLQuantizationType"):
                library.GGUFReader(out)
        else:
            for theirs in library.GGUFReader(out).tensors:
                ours = written[theirs.name]
                assert (theirs.tensor_type, theirs.data_offset) == (ours.type.ggml_type, ours.offset)
                try:
                    values = library.quants.dequantize(theirs.data, theirs.tensor_type)
                except NotImplementedError:  # of ids that the package knows without a codec
                    assert np.array_equal(np.asarray(theirs.data).reshape(-1).view(np.uint8), ours.stored)
                else:
                    assert np.array_equal(values.reshape(ours.shape), ours.dequantize())
