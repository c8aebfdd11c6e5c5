"""The gguf package of llama.cpp as oracle: it reads what we write, we read what it writes, its numbers are ours.

Decoding is compared with `gguf.quants` in tests/types/test_decode.py, general.* keys in tests/test_general_keys.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest

from quantkit import archs, types
from quantkit.archs.common import experts
from quantkit.formats import gguf
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.formats.gguf.metadata import DTYPES, IDS, KINDS
from quantkit.recipe.planning.presets import file_types
from quantkit.tokenizers import hf_tokenizer

KNOWN = {t.value: t.name for t in library.GGMLQuantizationType}
SHARED = [t for t in types.all() if t.ggml_type in KNOWN]
LIMITS = {kind: np.iinfo(dtype) for kind, dtype in DTYPES.items() if kind not in ("f32", "f64", "bool")}
VALUES: dict[str, list[Any]] = {
    **{kind: [int(limits.min), 1, int(limits.max)] for kind, limits in LIMITS.items()},
    "f32": [-1.5, 0.0, float(np.finfo(np.float32).max)],
    "f64": [0.1, -1e300],
    "bool": [True, False],
    "str": ["", "a b", "日本 \n\u2581", "x" * 70_000],
}  # empty arrays have no kind in gguf, which leaves them out


# ---------------------------------------------------------------------------------------------- what we write, it reads


def test_it_knows_many_of_our_types() -> None:
    assert len(SHARED) == len({t.ggml_type for t in SHARED}) >= 24


@pytest.mark.parametrize("t", SHARED, ids=lambda t: t.name)
def test_it_reads_tensors_of_every_type_that_it_knows(tmp_path: Path, rng: np.random.Generator, t: Any) -> None:
    """Vectors, matrices and stacks of matrices; ids, shapes, sizes and the bytes themselves."""
    n = 3 * t.block_size
    specs = [TensorSpec("vector", (n,), t), TensorSpec("matrix", (5, n), t), TensorSpec("stack", (2, 3, n), t)]
    data = {spec.name: rng.integers(0, 256, spec.nbytes, np.uint8) for spec in specs}
    with Writer(tmp_path / "a.gguf", {"general.architecture": "llama"}, specs) as writer:
        for name, values in data.items():
            writer.write(name, values)
    found = library.GGUFReader(tmp_path / "a.gguf").tensors
    assert [tensor.name for tensor in found] == [spec.name for spec in specs]
    for spec, tensor in zip(specs, found):
        assert tensor.tensor_type == t.ggml_type
        assert tuple(tensor.shape) == spec.shape[::-1]
        assert (tensor.n_bytes, tensor.n_elements) == (spec.nbytes, np.prod(spec.shape))
        assert np.array_equal(tensor.data.view(np.uint8).reshape(-1), data[spec.name])


def test_it_reads_metadata_of_every_kind(tmp_path: Path) -> None:
    metadata = Metadata({"general.architecture": "llama"})
    for kind, values in VALUES.items():
        for i, value in enumerate(values):
            metadata.set(f"test.{kind}.{i}", value, kind)
        metadata.set(f"test.{kind}.list", values, kind)
    with Writer(tmp_path / "a.gguf", metadata, [TensorSpec("a", (1,), types.get("f32"))]) as writer:
        writer.write("a", bytes(4))
    fields = library.GGUFReader(tmp_path / "a.gguf").fields
    for key, value in metadata.items():
        kind, array = IDS[metadata.kind(key)], [library.GGUFValueType.ARRAY] if isinstance(value, list) else []
        assert fields[key].types == [*array, kind], key
        assert fields[key].contents() == value, key


# ---------------------------------------------------------------------------------------------- what it writes, we read


def written(path: Path, writer: library.GGUFWriter) -> gguf.GGUF:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.open(path)


def test_we_read_metadata_of_every_kind(tmp_path: Path) -> None:
    writer = library.GGUFWriter(tmp_path / "a.gguf", "llama")
    kinds = {kind: library.GGUFValueType(number) for kind, number in IDS.items()}
    for kind, values in VALUES.items():
        for i, value in enumerate(values):
            writer.add_key_value(f"test.{kind}.{i}", value, kinds[kind])
        writer.add_key_value(f"test.{kind}.list", values, kinds["array"], kinds[kind])
    writer.add_tensor("a", np.zeros(3, np.float32))
    metadata = written(tmp_path / "a.gguf", writer).metadata
    assert metadata["general.architecture"] == "llama"
    for kind, values in VALUES.items():
        for i, value in enumerate(values):
            assert (metadata[f"test.{kind}.{i}"], metadata.kind(f"test.{kind}.{i}")) == (value, kind)
        assert (metadata[f"test.{kind}.list"], metadata.kind(f"test.{kind}.list")) == (values, kind)


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_we_read_tensors_at_any_alignment(tmp_path: Path, rng: np.random.Generator, alignment: int) -> None:
    writer = library.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(alignment)
    data = {t.name: rng.integers(0, 256, (5, t.row_bytes(2 * t.block_size)), np.uint8) for t in SHARED}
    for t in SHARED:
        kind = library.GGMLQuantizationType(t.ggml_type)
        floats = {"f32": np.float32, "f16": np.float16}.get(t.name)
        writer.add_tensor(t.name, data[t.name].view(floats) if floats else data[t.name], raw_dtype=kind)
    file = written(tmp_path / "a.gguf", writer)
    assert list(file.tensors) == list(data)
    for t in SHARED:
        tensor = file.tensors[t.name]
        assert (tensor.type, tensor.shape) == (t, (5, 2 * t.block_size))
        assert np.array_equal(tensor.data.reshape(-1), data[t.name].reshape(-1))


def test_we_read_its_shards(tmp_path: Path, rng: np.random.Generator) -> None:
    writer = library.GGUFWriter(tmp_path / "a.gguf", "llama", split_max_tensors=2)
    data = {f"t{i}": rng.standard_normal((i + 1, 32), np.float32) for i in range(5)}
    for name, values in data.items():
        writer.add_tensor(name, values)
    file = written(tmp_path / "a-00001-of-00003.gguf", writer)
    assert len(file.paths) == 3
    assert {name: tensor.dequantize().tolist() for name, tensor in file.tensors.items()} == {
        name: values.tolist() for name, values in data.items()
    }


# -------------------------------------------------------------------------------------------------------------- numbers


def test_ids_and_sizes_of_types() -> None:
    renamed = {"q1_0_g128": "Q1_0"}
    for t in SHARED:
        assert renamed.get(t.name, t.name).upper() == KNOWN[t.ggml_type]
        assert library.GGML_QUANT_SIZES[library.GGMLQuantizationType(t.ggml_type)] == (t.block_size, t.block_bytes)


def test_numbers_of_file_types() -> None:
    """The ones that both have: ik_llama.cpp's begin at 135, and 33 to 35 are gone from llama.cpp."""
    theirs = {t.value: t.name.split("_", 1)[1] for t in library.LlamaFileType if t is not library.LlamaFileType.GUESSED}
    ours = {t.number: t.name for t in file_types() if t.number is not None and t.number < 135 and t.name != "Q1_0_G128"}
    both = ours.keys() & theirs.keys()
    assert ours.keys() - both == {33, 34, 35, 41}  # 41: its Q2_0 is newer than the package
    assert {n: ours[n] for n in both} == {n: theirs[n] for n in both} | {38: "MXFP4"}


def test_numbers_of_metadata() -> None:
    names = {"UINT": "u", "INT": "i", "FLOAT": "f", "STRING": "str"}
    for kind in library.GGUFValueType:
        letters = kind.name.rstrip("0123456789")
        assert KINDS[kind] == names.get(letters, letters.lower()) + kind.name[len(letters) :]
    assert (gguf.writer.VERSION, gguf.writer.ALIGNMENT) == (library.GGUF_VERSION, library.GGUF_DEFAULT_ALIGNMENT)
    assert {t.name.lower(): t.value for t in library.ExpertGatingFuncType} == experts.GATING_NUMBERS
    assert {"none", "linear", "yarn"} <= {t.value for t in library.RopeScalingType}


def keys_of(group: type) -> set[str]:
    """All keys in a class of constants and in the classes in it."""
    found: set[str] = set()
    for value in vars(group).values():
        found |= keys_of(value) if isinstance(value, type) else {value} if isinstance(value, str) else set()
    return found


LATER_OF = {  # keys of architectures that this gguf does not know
    "deepseek4": {
        "attention.compress_ratios", "attention.compress_rope_freq_base", "attention.output_group_count",
        "attention.output_lora_rank", "hash_layer_count", "hyper_connection.count", "hyper_connection.epsilon",
        "hyper_connection.sinkhorn_iterations",
    },
    "longcat-flash": {"expert_zero_count"},
    "qwen4exp": {
        "attention.compress_ratios", "hyper_connection.count", "hyper_connection.low_rank",
        *(f"ple.{key}" for key in ("layers", "ngram_size", "heads_per_ngram", "conv_kernel", "eos_token_id",
                                   "layer_multipliers", "head_offsets", "head_vocab_sizes")),
    },
    "mistral-large4": {"rope.dimension_count_per_layer"},
}  # fmt: skip


def test_names_of_keys() -> None:
    """Keys that every architecture and the tokenizers write are spelled as there."""
    later = {"value_scale", *(f"indexer.{name}" for name in ("types", "block_size", "local_blocks"))}  # than this gguf
    known = keys_of(library.Keys) | {f"{{arch}}.attention.{name}" for name in later}
    for arch in archs.all():
        keys = arch.metadata(arch.EXAMPLE)
        assert keys
        unknown = {
            key.removeprefix(f"{arch.name}.") for key in keys if key.replace(arch.name, "{arch}", 1) not in known
        }
        assert unknown == LATER_OF.get(arch.name, set()), arch.name
    own = {*hf_tokenizer.SPECIAL.values(), *hf_tokenizer.END_TOKENS.values()}
    assert own - known == {"tokenizer.ggml.cls_token_id"}  # gguf has no name for it; llama.cpp reads it
    assert {f"general.sampling.{name}" for name, _ in hf_tokenizer.SAMPLING.values()} <= known
