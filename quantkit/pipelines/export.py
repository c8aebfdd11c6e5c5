"""Export a GGUF to a Hugging Face directory: config.json, generation_config.json, tokenizer files, model.safetensors.

    export_gguf("smollm2-q4_1.gguf", "SmolLM2-135M")

Weights in f32, f16 and bf16 keep their dtype and their bits. Quantized weights are decoded exactly and stored as
`dtype`, by default F32, which holds every decoded value. `quantkit convert` restores the same tensors, and all keys
that a checkpoint can hold. The `general.*` keys are written to `gguf_metadata.json`, which `quantkit convert` reads.

`quantkit.export` (`api`) is the public function: it takes `ExportOptions` and calls `export_gguf`.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import types
from quantkit.archs.common import fused_experts, validate
from quantkit.archs.common.tensors import Piece, ReadRows
from quantkit.errors import DataError, FormatError, UnknownNameError, UnsupportedError
from quantkit.formats.atomic import writing
from quantkit.formats.gguf import GGUF, Tensor, scales
from quantkit.formats.gguf import open as open_gguf
from quantkit.formats.pipeline import Bar, Job, Progress, pump, row_ranges
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter
from quantkit.tokenizers import hf_tokenizer, vocab

DTYPES = ("auto", "bf16", "f16", "f32")
_TORCH = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_READ_TOO = ("chat_template.jinja", "chat_template.json", "special_tokens_map.json", "added_tokens.json",
             "tokenizer.model", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
             "pytorch_model.bin", "pytorch_model.bin.index.json")  # fmt: skip
"""Files that an export does not have, and that change what its own ones mean to `convert` and transformers."""
_REGENERATED = ("architecture", "type", "file_type", "quantization_version", "alignment")


@dataclass(frozen=True)
class Export:
    """A planned export, and its result once it is written.

    Fields:

        source     the opened GGUF file
        directory  the output directory
        files      contents of the text files, by name
        specs      name, shape and dtype of each output tensor, in order
        pieces     for each of the first `specs`: its source tensors and the transform that makes it from them
        scalars    values of the other ones, which are keys of the GGUF
        paths      the files; empty until they are written
    """

    source: GGUF
    directory: Path
    files: dict[str, str]
    specs: list[CheckpointSpec]
    pieces: list[Piece]
    scalars: dict[str, np.ndarray] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(spec.nbytes for spec in self.specs)

    def jobs(self) -> Iterator[Job]:
        """The checkpoint's bytes in order, in pieces of bounded size."""
        for spec, piece in zip(self.specs, self.pieces):
            sources = [self.source.tensors[name] for name in piece.sources]
            step = math.lcm(piece.transform.row_multiple, *(tensor.type.interleave for tensor in sources))
            for start, stop in row_ranges(spec.shape, step):
                yield spec.name, functools.partial(_decode, spec, piece, sources, start, stop)
        for name, value in self.scalars.items():
            yield name, functools.partial(_bytes_of, value)


def export_gguf(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    dtype: str = "auto",
    *,
    max_shard_bytes: int = 5 * 10**9,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | bool = False,
) -> Export:
    """Write the GGUF `source` as a Hugging Face checkpoint in `directory`, which is created if it does not exist.
    A directory with another checkpoint is refused; an earlier export is replaced.

    Quantized tensors are stored as `dtype`: "bf16", "f16" or "f32"; "auto" is "f32". The weights appear last, when they
    are complete. With `dry_run` everything is checked and nothing is written.
    """
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    plan = plan_export(open_gguf(source), directory, dtype)
    _require_own_directory(plan.directory)
    if dry_run:
        return plan
    plan.directory.mkdir(parents=True, exist_ok=True)
    with CheckpointWriter(plan.directory, plan.specs, {"format": "pt"}, max_shard_bytes) as writer:
        for name, text in plan.files.items():
            with writing(plan.directory / name) as stream:
                stream.write(text.encode())
            plan.paths.append(plan.directory / name)
        with Bar(plan.nbytes, progress) as bar:
            pump(plan.jobs(), writer.write, bar, threads=threads)
        plan.paths.extend(writer.paths)
    return plan


def _require_own_directory(directory: Path) -> None:
    """DataError for a directory with files of a checkpoint that is no earlier export: they would mix, or be lost."""
    others = [name for name in _READ_TOO if (directory / name).exists()]
    if not (directory / vocab.METADATA_FILE).exists():  # which every export has
        others += sorted(path.name for path in directory.glob("*.safetensors"))
    if others:
        raise DataError(
            f"{directory}: holds {others[0]}{f' and {len(others) - 1} more files' if others[1:] else ''} of another "
            "checkpoint, which an export would mix with its own or replace; choose an empty directory"
        )


def plan_export(source: GGUF, directory: str | os.PathLike[str], dtype: str = "auto") -> Export:
    """Plan the checkpoint of an open GGUF: configuration, tokenizer files, and where each tensor comes from.

    `dtype` is that of quantized tensors, as in `export_gguf`. Raises FormatError, DataError or UnsupportedError for
    a model or a tokenizer that cannot be exported.
    """
    described = validate.describe(source.metadata, source.tensors, source.path)
    arch, hparams = described.arch, described.hparams
    try:
        applied = scales.all_companions({name: tensor.type for name, tensor in source.tensors.items()})
        shapes = {name: tensor.shape for name, tensor in source.tensors.items() if name not in applied}
        pieces = arch.to_hf(hparams, fused_experts.separate_shapes(shapes))
        pieces = fused_experts.read_fused(pieces, shapes)
        config = arch.config(source.metadata, source.tensors)
        scalars = arch.scalar_tensors(hparams, source.metadata)
        tokenizer = hf_tokenizer.tokenizer_json(source.metadata)
    except (FormatError, DataError, UnsupportedError) as error:
        raise type(error)(f"{source.path}: {error}") from None
    target = "F32" if dtype == "auto" else dtype.upper()
    specs = [
        CheckpointSpec(
            piece.name, piece.shape, "I64" if piece.integers else _dtype(source.tensors[piece.sources[0]], target)
        )
        for piece in pieces
    ]
    specs += [CheckpointSpec(name, value.shape, "F32") for name, value in scalars.items()]
    main = next((spec.dtype for spec in specs if len(spec.shape) >= 2 and spec.dtype in _TORCH), target)
    ids = {f"{name}_token_id": hf_tokenizer.special_id(source.metadata, name) for name in ("bos", "eos", "pad")}
    rows = source.tensors["token_embd.weight"].shape[0]  # may be padded beyond the number of tokens
    config |= {key: number for key, number in ids.items() if number is not None}
    config |= {"vocab_size": rows, "dtype": _TORCH[main]}
    contents = {
        "config.json": config,
        "generation_config.json": hf_tokenizer.generation_config(source.metadata),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": hf_tokenizer.tokenizer_config(source.metadata, hparams.n_ctx_train),
        vocab.METADATA_FILE: _general_keys(source),
    }
    files = {name: json.dumps(content, ensure_ascii=False, indent=2) + "\n" for name, content in contents.items()}
    return Export(source, Path(directory), files, specs, pieces, scalars)


def _dtype(tensor: Tensor, quantized: str) -> str:
    """The dtype that holds a tensor: its own if it is a float type, else `quantized`."""
    own = tensor.type.name.upper()
    return own if own in _TORCH else quantized


def _general_keys(source: GGUF) -> dict[str, Any]:
    """The `general.*` keys that no other file of a checkpoint holds."""
    elsewhere = {f"general.{name}" for name in _REGENERATED} | {
        f"general.sampling.{name}" for name, _ in hf_tokenizer.SAMPLING.values()
    }
    return {key: value for key, value in source.metadata.items() if key.startswith("general.") and key not in elsewhere}


def _row_reader(tensor: Tensor, raw: bool) -> ReadRows:
    """A reader of a tensor's rows: the file's bytes as uint8 if `raw`, else float32.

    The rows of a vector are its elements. Interleaved rows are decoded in whole groups.
    """
    group = tensor.type.interleave

    def rows(start: int, stop: int) -> np.ndarray:
        if raw:
            return tensor.rows(start, stop)
        first = start // group * group
        data = tensor.rows(first, min(tensor.n_rows, -(-stop // group) * group))
        return scales.decode(tensor, data, first, threads=1)[start - first : stop - first]

    if len(tensor.shape) > 1:
        return rows
    return lambda start, stop: rows(0, 1).reshape(tensor.shape[0], -1)[start:stop]


def _bytes_of(value: np.ndarray) -> np.ndarray:
    """The bytes of a tensor of one element."""
    return value.reshape(1).view(np.uint8)


def _decode(spec: CheckpointSpec, piece: Piece, sources: list[Tensor], start: int, stop: int) -> np.ndarray:
    """Rows `start` to `stop` of a checkpoint tensor, as bytes. Rows that keep their dtype are not decoded."""
    if piece.integers:
        return np.ascontiguousarray(sources[0].rows(start, stop)).view("<i4").astype("<i8").view(np.uint8)
    keeps_dtype = piece.transform.copies_rows and all(tensor.type.name.upper() == spec.dtype for tensor in sources)
    data = piece.transform.rows([_row_reader(tensor, keeps_dtype) for tensor in sources], start, stop)
    if keeps_dtype:
        return data
    try:
        return types.get(spec.dtype).quantize(data.reshape(-1, spec.shape[-1]), threads=1)
    except DataError as error:
        raise DataError(f"{sources[0].path}: tensor {sources[0].name}, rows from {start}: {error}") from None
