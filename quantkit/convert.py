"""A Hugging Face directory becomes a GGUF: tensors renamed, re-ordered, stored in one type, streamed in small pieces.

    convert("SmolLM2-135M", "smollm2-bf16.gguf", "bf16")
    plan = prepare("SmolLM2-135M", "auto")     what would be written, without writing

Order of the tensors: rope factors, embedding, the layers by number (within one: attention, then feed-forward), output
norm, output. Types: `outtype`, except that norms, biases and everything of one dimension are f32, and rows that do not
fit q8_0's blocks of 32 are f16. "auto" is the dtype of the first matrix in bf16 or f16, and f16 for a checkpoint that
is all float32.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import archs, types
from quantkit.archs import Arch, vocab
from quantkit.archs.tensors import Piece, ReadRows
from quantkit.errors import DataError, FormatError, UnknownNameError, UnsupportedError
from quantkit.files.gguf import Metadata, TensorSpec, Writer
from quantkit.files.mapping import release
from quantkit.files.pipeline import Job, pump, row_ranges
from quantkit.files.safetensors import Checkpoint, CheckpointTensor, open_checkpoint
from quantkit.types import QuantType, check_finite

OUTTYPES = ("auto", "bf16", "f16", "f32", "q8_0")
QUANTIZATION_VERSION = 2
_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True)
class Conversion:
    """What a conversion writes: `specs` in order, each made by the piece of the same name or taken from `generated`."""

    source: Path
    arch: Arch
    checkpoint: Checkpoint
    outtype: QuantType
    metadata: Metadata
    specs: list[TensorSpec]
    pieces: dict[str, Piece]
    generated: dict[str, np.ndarray]
    left_out: dict[str, list[str]] = field(default_factory=dict)  # tensors of the checkpoint, by what they are
    paths: list[Path] = field(default_factory=list)  # of the files written; empty before

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def fallbacks(self) -> list[str]:
        """Tensors whose rows do not fit the blocks of the outtype, and are f16 instead."""
        return [spec.name for spec in self.specs if spec.type.name == "f16" != self.outtype.name]

    @property
    def n_params(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs)

    def jobs(self) -> Iterator[Job]:
        """The output's bytes in order, in pieces of bounded size."""
        for spec in self.specs:
            if spec.name in self.generated:
                x = self.generated[spec.name].reshape(1, -1)
                yield spec.name, functools.partial(spec.type.quantize, x, threads=1)
                continue
            piece = self.pieces[spec.name]
            sources = [self.checkpoint.tensors[name] for name in piece.sources]
            for start, stop in _ranges(spec, piece):
                yield spec.name, functools.partial(_encode, spec, piece, sources, start, stop)


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    outtype: str = "auto",
    *,
    pre: str | None = None,
    split_max_bytes: int | None = None,
    dry_run: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> Conversion:
    """Write the checkpoint in directory `source` as the GGUF `out`, or as shards of at most `split_max_bytes`.

    `pre` names the tokenizer's way of cutting text where it is not recognised. The file appears when it is complete.
    With `dry_run` everything is checked and nothing written. QuantkitErrors name the file, the tensor or the setting
    that cannot be converted.
    """
    conversion = prepare(source, outtype, pre)
    if not dry_run:
        with Writer(out, conversion.metadata, conversion.specs, split_max_bytes) as writer:
            pump(conversion.jobs(), writer.write, conversion.nbytes, threads=threads, progress=progress)
            conversion.paths.extend(writer.paths)
    return conversion


def prepare(source: str | os.PathLike[str], outtype: str = "auto", pre: str | None = None) -> Conversion:
    """Read configuration, tokenizer and tensor names of a checkpoint and decide what its GGUF holds."""
    directory = Path(source)
    if outtype not in OUTTYPES:
        raise UnknownNameError("outtype", outtype, OUTTYPES)
    config = _read_config(directory)
    arch = archs.from_hf(config)
    checkpoint = open_checkpoint(directory)
    chosen = types.get(_automatic(checkpoint) if outtype == "auto" else outtype)
    with _naming(directory):
        pieces = arch.to_gguf(config, {name: tensor.shape for name, tensor in checkpoint.tensors.items()})
        generated = arch.generated(config)
        left_out = arch.left_out(config, [arch.canonical(name) for name in checkpoint.tensors])
        keys = arch.metadata(config)
        tokenizer = vocab.read(directory, config, pre)
    _check_tensors(checkpoint, pieces, config)
    specs = [TensorSpec(name, x.shape, types.get("f32")) for name, x in generated.items()]
    specs += [TensorSpec(piece.name, piece.shape, _type_of(piece, chosen)) for piece in pieces]
    of_name = {piece.name: piece for piece in pieces}
    made = Conversion(directory, arch, checkpoint, chosen, Metadata(), specs, of_name, generated, left_out)
    stated = {key: entry for key, entry in keys.items() if key.startswith("tokenizer.")}  # stronger than the files
    for key, (value, kind) in (_general(config, made) | keys | tokenizer | stated).items():
        made.metadata.set(key, value, kind)
    return made


# ------------------------------------------------------------------------------------------------------------ decisions


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise FormatError(f"{directory}: not a directory; `convert` wants a Hugging Face checkpoint directory")
    config = vocab.read_json(directory / "config.json")
    if not config:
        raise FormatError(
            f"{directory / 'config.json'} is missing; `convert` wants a Hugging Face checkpoint directory"
        )
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method:
        raise UnsupportedError(
            f"{directory}: the checkpoint is quantized already ({method}); convert one in bf16, f16 or f32"
        )
    return config


def _automatic(checkpoint: Checkpoint) -> str:
    """The name of the first 16-bit dtype that a matrix has; "f16" where all are float32."""
    matrices = [_DTYPES.get(tensor.dtype) for tensor in checkpoint.tensors.values() if len(tensor.shape) >= 2]
    return next((name for name in matrices if name in ("bf16", "f16")), None) or "f16"


def _type_of(piece: Piece, outtype: QuantType) -> QuantType:
    if piece.f32 or len(piece.shape) <= 1 or not piece.name.endswith(".weight"):
        return types.get("f32")
    return types.get("f16") if piece.shape[-1] % outtype.block_size else outtype


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Put the checkpoint's path before messages of rooms that do not know it."""
    try:
        yield
    except (FormatError, UnsupportedError, DataError) as error:
        raise error if str(directory) in str(error) else type(error)(f"{directory}: {error}") from None


def _check_tensors(checkpoint: Checkpoint, pieces: list[Piece], config: Mapping[str, Any]) -> None:
    """Dtypes that can be read, and an embedding of the configured size."""
    for piece in pieces:
        for name in piece.sources:
            tensor = checkpoint.tensors[name]
            if tensor.dtype not in _DTYPES:
                raise UnsupportedError(
                    f"{tensor.path}: tensor {name} is {tensor.dtype}; `convert` reads F32, F16 and BF16 weights"
                )
        if piece.name == "token_embd.weight" and piece.shape[0] != config["vocab_size"]:
            raise FormatError(
                f"{checkpoint.path}: {piece.sources[0]} has {piece.shape[0]} rows, config.json a vocab_size of "
                f"{config['vocab_size']}; they must agree"
            )


# ------------------------------------------------------------------------------------------------------------- the data


def _reader(tensor: CheckpointTensor, raw: bool) -> ReadRows:
    """Rows of a stored tensor: uint8 as they lie in the file, or float32. Those of a vector are its elements."""
    if len(tensor.shape) <= 1:
        count = math.prod(tensor.shape)
        whole = tensor.raw() if raw else tensor.rows(0, 1)
        return lambda start, stop: whole.reshape(count, -1)[start:stop]
    stored = tensor.raw().reshape(tensor.n_rows, -1)
    if raw:
        return lambda start, stop: stored[start:stop]

    def rows(start: int, stop: int) -> np.ndarray:
        x = tensor.rows(start, stop)
        if not np.may_share_memory(x, stored):  # float32 is a view; what is done with it comes later
            release(stored[start:stop])
        return x

    return rows


def _ranges(spec: TensorSpec, piece: Piece) -> Iterator[tuple[int, int]]:
    """Ranges of rows for a job each. Of stacked sources none reads two, so that an error names the right one."""
    each = piece.transform.each
    if each is None:
        yield from row_ranges(spec.shape, piece.transform.step)
        return
    for first in range(0, each * len(piece.sources), each):
        yield from ((first + start, first + stop) for start, stop in row_ranges((each, spec.shape[-1]), 1))


def _encode(spec: TensorSpec, piece: Piece, sources: list[CheckpointTensor], start: int, stop: int) -> np.ndarray:
    """Rows `start` to `stop` of an output tensor, as bytes. Bits that need no change are only looked at."""
    same = piece.transform.keeps_bits and all(_DTYPES[tensor.dtype] == spec.type.name for tensor in sources)
    data = piece.transform.rows([_reader(tensor, same) for tensor in sources], start, stop)
    n = spec.shape[-1]
    try:
        if not same:
            return spec.type.quantize(data.reshape(-1, n), threads=1)
        check_finite(spec.type.dequantize(data.reshape(-1, spec.type.row_bytes(n)), n, threads=1))
        return data
    except DataError as error:
        number, begin = divmod(start, piece.transform.each) if piece.transform.each else (0, start)
        source, first = sources[number], f" (rows are counted from {begin})" if begin else ""
        raise DataError(f"{source.path}: tensor {source.name}: {error}{first}") from None


# ------------------------------------------------------------------------------------------------------------- metadata


def _general(config: Mapping[str, Any], made: Conversion) -> dict[str, tuple[Any, str]]:
    """The general.* keys: what the directory says about the model, and how it is stored here."""
    directory = made.source
    name = os.path.basename(str(config.get("_name_or_path") or "").rstrip("/")) or directory.resolve().name
    entries: dict[str, tuple[Any, str]] = {
        "general.architecture": (made.arch.name, "str"),
        "general.type": ("model", "str"),
        "general.name": (name, "str"),
        "general.size_label": (size_label(made.n_params), "str"),
    }
    entries |= _model_card(directory / "README.md")
    for key, value in vocab.read_json(directory / vocab.METADATA_FILE).items():
        entries[key] = (value, "str" if isinstance(value, (str, list)) else "u32")
    entries |= vocab.sampling(directory)
    entries["general.file_type"] = (made.outtype.file_type, "u32")
    entries["general.quantization_version"] = (QUANTIZATION_VERSION, "u32")
    return entries


def _model_card(path: Path) -> dict[str, tuple[Any, str]]:
    """License, languages and tags of the front matter of a README.md: `key: value`, or lines `- value` below `key:`."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found: dict[str, list[str]] = {}
    key = ""
    for line in front[1].splitlines() if front else ():
        if match := re.match(r"(\w+):\s*(.*)", line):
            key, value = match[1], match[2].strip("'\" ")
            found[key] = [value] if value else []
        elif match := re.match(r"\s*-\s+(.+)", line):
            found.setdefault(key, []).append(match[1].strip("'\" "))
    entries: dict[str, tuple[Any, str]] = {}
    if found.get("license"):
        entries["general.license"] = (found["license"][0], "str")
    for key, target in (("tags", "general.tags"), ("language", "general.languages")):
        if found.get(key):
            entries[target] = (found[key], "str")
    return entries


def size_label(params: int) -> str:
    """Parameters as model names have them: 135M, 1.7B, 70B."""
    for unit, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if params >= unit:
            return f"{params / unit:.{1 if params < 10 * unit else 0}f}{suffix}"
    return f"{params / 1000:.0f}K"
