"""Convert a Hugging Face directory to a GGUF: rename and reorder tensors, store them in one type, stream small pieces.

    convert("SmolLM2-135M", "smollm2-bf16.gguf", "bf16")
    plan = prepare("SmolLM2-135M", "auto")     plans the output without writing it

Order of the tensors: RoPE factors, embedding, the layers by number (within a layer: attention, then feed-forward),
output norm, output.

Types: `outtype`, except that norms, biases and all tensors of one dimension are f32, and matrices whose rows do not
fit q8_0's blocks of 32 are f16. "auto" is the dtype of the first matrix in bf16 or f16, and f16 for a checkpoint that
is all float32. "stored" is the same, but f32 for an all-float32 checkpoint. Matrices stored as codes and scales (FP8,
MXFP4) count as bf16: their float32 products are rounded to nearest, ties to even.

`quantize` also accepts a `Conversion` in place of an open GGUF: its tensors return, a range of rows at a time, the
bytes that the converted file would hold.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import archs, types
from quantkit.archs import Arch
from quantkit.archs.common.mtp import POLICIES
from quantkit.archs.common.tensors import Piece, ReadRows
from quantkit.errors import DataError, FormatError, UnknownNameError, UnsupportedError
from quantkit.formats import front_matter
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.formats.mapping import is_mapped, release
from quantkit.formats.pipeline import Progress, row_ranges, spread
from quantkit.formats.safetensors import Checkpoint, CheckpointTensor, open_checkpoint
from quantkit.formats.safetensors.quantized_checkpoint import FP8, INTEGERS, unscaled
from quantkit.formats.safetensors.quantized_matrix import FP8Tensor, MXFP4Tensor, ScaledTensor
from quantkit.formats.torch_bin import is_bin, open_bin
from quantkit.inputs.json_input import read_object
from quantkit.tokenizers import vocab
from quantkit.types import QuantType, check_finite
from quantkit.types.floats import FLOATS, is_finite

OUTTYPES = ("auto", "bf16", "f16", "f32", "q8_0")
STORED = "stored"  # the lossless outtype
QUANTIZATION_VERSION = 2
_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"} | dict.fromkeys((*FP8, "MXFP4", "TERNARY", *INTEGERS), "bf16")

PieceSource = CheckpointTensor | ScaledTensor


@dataclass(frozen=True)
class Converted:
    """A tensor of the converted file, computed from the checkpoint on demand.

    Its attributes match those of `formats.gguf.Tensor`; `path` is the checkpoint's file. A tensor that is computed from
    `config.json` has `piece` None and its values in `x`.
    """

    spec: TensorSpec
    path: Path
    piece: Piece | None
    sources: Sequence[PieceSource]
    x: np.ndarray | None = None

    @property
    def name(self) -> str:
        """Name in the GGUF file."""
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with rows first."""
        return self.spec.shape

    @property
    def type(self) -> QuantType:
        """Type in the GGUF file."""
        return self.spec.type

    @property
    def nbytes(self) -> int:
        """Bytes in the GGUF file."""
        return self.spec.nbytes

    @property
    def n_rows(self) -> int:
        """Rows of all its matrices."""
        return self.spec.n_rows

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows as uint8[stop - start, row_bytes].

        Raises DataError that names the checkpoint's tensor if the type cannot hold a value.
        """
        if self.piece is None:
            assert self.x is not None
            return self.type.quantize(self.x.reshape(-1, self.shape[-1])[start:stop], threads=1)
        if len(self.shape) == 1:  # transforms treat each element of a vector as a row
            start, stop = 0, self.shape[0]
        return _encode(self.spec, self.piece, self.sources, self._as_bytes, start, stop).reshape(
            -1, self.spec.row_bytes
        )

    @functools.cached_property
    def _as_bytes(self) -> bool:
        """Whether the sources already give rows of the type, so that the transform only moves bytes."""
        moves = self.piece is not None and self.piece.transform.copies_rows
        return moves and all(_gives_rows_of(tensor, self.type.name) for tensor in self.sources)

    @functools.cached_property
    def sends(self) -> bool:
        """Whether the sources can write the rows directly: floats, unchanged or converted to another float type."""
        if self.piece is None or self.type.name not in FLOATS or len(self.shape) < 2 or not self._as_bytes:
            return False
        return self.piece.transform.locate(0, 1) is not None


@dataclass(frozen=True)
class Conversion:
    """A planned conversion: `specs` in order, each made by the piece of the same name or taken from `generated`.

    `paths` and `tensors` match those of an open GGUF: the input files, and the tensors by name.
    """

    source: Path
    arch: Arch
    checkpoint: Checkpoint
    outtype: QuantType
    metadata: Metadata
    specs: list[TensorSpec]
    pieces: dict[str, Piece]
    generated: dict[str, np.ndarray]
    left_out: dict[str, list[str]] = field(default_factory=dict)  # tensors that are not converted, by kind
    warnings: list[str] = field(default_factory=list)  # parts of the checkpoint that were skipped as unreadable
    written: list[Path] = field(default_factory=list)  # the output files; empty until they are written

    @property
    def paths(self) -> list[Path]:
        return self.checkpoint.paths

    @functools.cached_property
    def tensors(self) -> dict[str, Converted]:
        return {spec.name: self._converted(spec) for spec in self.specs}

    def _converted(self, spec: TensorSpec) -> Converted:
        if spec.name in self.generated:
            return Converted(spec, self.source / "config.json", None, (), self.generated[spec.name])
        piece = self.pieces[spec.name]
        sources = [self.checkpoint.tensors[name] for name in piece.sources]
        return Converted(spec, sources[0].path, piece, sources)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def fallbacks(self) -> list[str]:
        """Tensors stored in f16 because their rows do not fit the blocks of the outtype."""
        return [spec.name for spec in self.specs if spec.type.name == "f16" != self.outtype.name]

    @property
    def n_mtp_layers(self) -> int:
        """Number of MTP (multi-token prediction) layers."""
        return int(self.metadata.get(f"{self.arch.name}.nextn_predict_layers", 0))

    @property
    def n_params(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs)

    def tasks(self, writer: Writer) -> Iterator[Callable[[], int]]:
        """Tasks that compute the output in pieces of bounded size and write them at their offsets."""
        for tensor in self.tensors.values():
            ranges = [(0, tensor.n_rows)] if tensor.piece is None else _ranges(tensor.spec, tensor.piece, tensor.sends)
            yield from (functools.partial(_put, tensor, start, stop, writer) for start, stop in ranges)


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    outtype: str = "auto",
    *,
    pre: str | None = None,
    mtp: str = "auto",
    split_max_bytes: int | None = None,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | bool = False,
) -> Conversion:
    """Write the checkpoint in directory `source` as the GGUF `out`, or as shards of at most `split_max_bytes`.

    `pre` names the pre-tokenizer if it is not recognised. `mtp` says whether MTP (multi-token prediction) layers are
    kept: "keep", "drop", or "auto" for the architecture's default. Image and audio encoders are skipped. The file
    appears under its name when it is complete. With `dry_run` everything is checked and nothing is written. A
    QuantkitError names the file, the tensor or the setting that cannot be converted.
    """
    conversion = prepare(source, outtype, pre, mtp)
    if not dry_run:
        with Writer(out, conversion.metadata, conversion.specs, split_max_bytes, durable=False) as writer:
            spread(conversion.tasks(writer), conversion.nbytes, threads=threads, progress=progress)
            conversion.written.extend(writer.paths)
    return conversion


def prepare(
    source: str | os.PathLike[str], outtype: str = "auto", pre: str | None = None, mtp: str = "auto"
) -> Conversion:
    """Read configuration, tokenizer and tensor names of a checkpoint and plan its GGUF.

    `outtype` is one of OUTTYPES, or STORED for the checkpoint's own. `mtp` is passed to `Arch.with_mtp`.
    """
    directory = Path(source)
    if outtype not in (*OUTTYPES, STORED):
        raise UnknownNameError("outtype", outtype, OUTTYPES)
    if mtp not in POLICIES:
        raise UnknownNameError("policy of --mtp", mtp, POLICIES)
    with _naming(directory):
        config: Mapping[str, Any] = archs.language_model(_read_config(directory))
        arch = archs.from_hf(config)
    opened = open_bin(directory) if is_bin(directory) else open_checkpoint(directory)
    checkpoint = unscaled(opened, config)
    automatic = {"auto": "f16", STORED: "f32"}  # for a checkpoint that is all float32
    chosen = types.get(_automatic(checkpoint, automatic[outtype]) if outtype in automatic else outtype)
    names = [arch.canonical(name) for name in checkpoint.tensors]
    with _naming(directory):
        config = arch.with_mtp(config, mtp, names)
        pieces = arch.to_gguf(config, {name: tensor.shape for name, tensor in checkpoint.tensors.items()})
        generated = arch.generated(config)
        left_out = arch.dropped_tensors(config, names)
        keys = arch.metadata(config)
        tokenizer = vocab.read(directory, config, pre)
        wanted = arch.shapes(config, [piece.name for piece in pieces])
    _check_tensors(checkpoint, pieces, wanted)
    specs = [TensorSpec(name, x.shape, types.get("f32")) for name, x in generated.items()]
    specs += [TensorSpec(piece.name, piece.shape, _type_of(piece, checkpoint, chosen)) for piece in pieces]
    of_name = {piece.name: piece for piece in pieces}
    made = Conversion(directory, arch, checkpoint, chosen, Metadata(), specs, of_name, generated, left_out)
    # Tokenizer keys that the architecture sets override those read from the tokenizer files.
    stated = {key: entry for key, entry in keys.items() if key.startswith("tokenizer.")}
    for key, (value, kind) in (_general(config, made) | keys | tokenizer | stated).items():
        made.metadata.set(key, value, kind)
    return made


# ------------------------------------------------------------------------------------------------------------ decisions


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise FormatError(f"{directory}: not a directory; `convert` needs a Hugging Face checkpoint directory")
    config = read_object(directory / "config.json")
    if not config:
        raise FormatError(
            f"{directory / 'config.json'} is missing; `convert` needs a Hugging Face checkpoint directory"
        )
    return config


def _automatic(checkpoint: Checkpoint, otherwise: str) -> str:
    """The first 16-bit dtype among the matrices, as stored or as read; `otherwise` if there is none."""
    matrices = [_DTYPES.get(tensor.dtype) for tensor in checkpoint.tensors.values() if len(tensor.shape) >= 2]
    return next((name for name in matrices if name in ("bf16", "f16")), None) or otherwise


def _type_of(piece: Piece, checkpoint: Checkpoint, outtype: QuantType) -> QuantType:
    """The output type of a piece. MXFP4 stays MXFP4: another type would be larger or less accurate."""
    if piece.transform.copies_rows and all(checkpoint.tensors[name].dtype == "MXFP4" for name in piece.sources):
        return types.get("mxfp4")
    if piece.f32 or len(piece.shape) <= 1 or not piece.name.endswith(".weight"):
        return types.get("f32")
    return types.get("f16") if piece.shape[-1] % outtype.block_size else outtype


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Prefix the checkpoint's path to errors from modules that do not know it."""
    try:
        yield
    except (FormatError, UnsupportedError, DataError) as error:
        raise error if str(directory) in str(error) else type(error)(f"{directory}: {error}") from None


def _check_tensors(checkpoint: Checkpoint, pieces: list[Piece], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every dtype can be read and that every shape agrees with `config.json`."""
    for piece in pieces:
        for name in piece.sources:
            tensor = checkpoint.tensors[name]
            if tensor.dtype not in _DTYPES:
                raise UnsupportedError(
                    f"{tensor.path}: tensor {name} is {tensor.dtype}; `convert` reads F32, F16 and BF16 weights, and "
                    "FP8 where config.json has a quantization_config"
                )
        if piece.shape != wanted.get(piece.name, piece.shape):
            tensor = checkpoint.tensors[piece.sources[0]]
            raise FormatError(
                f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}, which makes {piece.name} "
                f"{piece.shape}; config.json requires {wanted[piece.name]}: one of the two files belongs to another "
                "model"
            )


# ------------------------------------------------------------------------------------------------------------- the data


def _put(tensor: Converted, start: int, stop: int, writer: Writer) -> int:
    """Write a piece: natively where the source supports it and all values are finite, else through numpy."""
    if tensor.sends and (nbytes := _send(tensor, start, stop, writer)):
        return nbytes
    data = tensor.rows(start, stop)
    writer.put(tensor.name, start * tensor.spec.row_bytes if len(tensor.shape) > 1 else 0, data)
    release(data)  # a copied tensor is a view of the mapped input
    return data.nbytes


def _send(tensor: Converted, start: int, stop: int, writer: Writer) -> int:
    """Let the source write rows natively, without Python between its slices; the byte count, 0 if it did not."""
    assert tensor.piece is not None
    if (place := tensor.piece.transform.locate(start, stop)) is None:
        return 0
    (number, first), width = place, tensor.spec.row_bytes
    source, last = tensor.sources[number], first + stop - start
    assert isinstance(source, (CheckpointTensor, FP8Tensor))

    def send(descriptor: int, offset: int) -> bool:
        return source.send(tensor.type.name, first, last, descriptor, offset)

    nbytes = (stop - start) * width
    if not writer.put_direct(tensor.name, start * width, nbytes, send):
        return 0
    source.forget(first, last)
    return nbytes


@dataclass
class _Read:
    """What was read for a piece.

    parts   (tensor, start, stop) of each range of rows
    copied  some rows are the unchanged bytes of the file
    fits    all converted values are finite in the output type
    """

    parts: list[tuple[PieceSource, int, int]] = field(default_factory=list)
    copied: bool = False
    fits: bool = True

    def finite(self, kind: QuantType, data: np.ndarray) -> bool:
        """Whether all values of the output (f32, f16 or bf16) are finite."""
        return self.fits and (not self.copied or is_finite(kind, data))


def _reader(tensor: PieceSource, kind: str | None, read: _Read) -> ReadRows:
    """A reader of a tensor's rows: uint8 rows of the GGUF type `kind` (see `_stored_rows`), or float32 for None.

    The rows of a vector are its elements.
    """

    def rows(start: int, stop: int) -> np.ndarray:
        read.parts.append((tensor, start, stop))
        return tensor.rows(start, stop) if kind is None else _stored_rows(tensor, kind, start, stop, read)

    if len(tensor.shape) > 1:
        return rows
    count = math.prod(tensor.shape)
    whole = rows(0, 1)
    return lambda start, stop: whole.reshape(count, -1)[start:stop]


def _gives_rows_of(tensor: PieceSource, kind: str) -> bool:
    """Whether `_stored_rows` can give rows of a type.

    A vector is never converted that way: it is small, and loading compiled code would take longer.
    """
    if tensor.dtype.lower() == kind:
        return True
    if kind not in FLOATS or len(tensor.shape) < 2:
        return False
    if isinstance(tensor, FP8Tensor):
        return tensor.encodes(kind)
    from quantkit.types.native import recode

    return tensor.dtype.lower() in FLOATS and tensor.shape[-1] % recode.LANES == 0


def _stored_rows(tensor: PieceSource, kind: str, start: int, stop: int, read: _Read) -> np.ndarray:
    """Rows as uint8[stop - start, bytes]: a view of the mapped file if it stores that type, else converted."""
    if isinstance(tensor, MXFP4Tensor):
        return tensor.packed(start, stop)
    if isinstance(tensor, FP8Tensor):
        made, fits = tensor.encoded(kind, start, stop)
    else:
        assert isinstance(tensor, CheckpointTensor)
        data = tensor.raw().reshape(tensor.n_rows, -1)[start:stop]
        if tensor.dtype.lower() == kind:
            read.copied = True
            return data
        from quantkit.types.native.recode import recode

        made, fits = recode(tensor.dtype.lower(), kind, data)
    read.fits &= fits
    return made


_SENT = 1 << 23  # elements of a piece that a source writes natively


def _ranges(spec: TensorSpec, piece: Piece, sends: bool) -> Iterator[tuple[int, int]]:
    """Ranges of rows, one per task. No range spans two stacked sources, so that an error names the right one."""
    each, elements = piece.transform.source_rows, _SENT if sends else 0
    if each is None:
        yield from row_ranges(spec.shape, piece.transform.row_multiple, elements)
        return
    for first in range(0, each * len(piece.sources), each):
        yield from ((first + start, first + stop) for start, stop in row_ranges((each, spec.shape[-1]), 1, elements))


class _Readers(Sequence[ReadRows]):
    """The `_reader` of each source, made on access: a piece reads one of hundreds of experts."""

    def __init__(self, sources: Sequence[PieceSource], kind: str | None, read: _Read):
        self.sources, self.kind, self.read = sources, kind, read

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, number: Any) -> Any:
        return _reader(self.sources[number], self.kind, self.read)


def _encode(
    spec: TensorSpec, piece: Piece, sources: Sequence[PieceSource], as_bytes: bool, start: int, stop: int
) -> np.ndarray:
    """Rows `start` to `stop` of an output tensor, as bytes. Bytes that need no conversion are only checked.

    `as_bytes`: all sources give rows of the type (`_gives_rows_of`) and the transform moves whole rows.
    """
    read = _Read()

    def rows(kind: str | None) -> np.ndarray:
        return piece.transform.rows(_Readers(sources, kind, read), start, stop)

    kind, n = spec.type, spec.shape[-1]
    try:
        if as_bytes:
            data = rows(kind.name)
            if kind.name not in FLOATS:
                check_finite(kind.dequantize(data.reshape(-1, kind.row_bytes(n)), n, threads=1))
            elif not read.finite(kind, data):
                data = kind.quantize(rows(None).reshape(-1, n), threads=1)  # its error names the row and column
        else:
            data = kind.quantize(rows(None).reshape(-1, n), threads=1)
    except DataError as error:
        number, begin = divmod(start, piece.transform.source_rows) if piece.transform.source_rows else (0, start)
        source, first = sources[number], f" (rows counted from row {begin})" if begin else ""
        raise DataError(f"{source.path}: tensor {source.name}: {error}{first}") from None
    if not is_mapped(data):
        for tensor, first_row, last_row in read.parts:
            tensor.forget(first_row, last_row)
    return data


# ------------------------------------------------------------------------------------------------------------- metadata


def _general(config: Mapping[str, Any], made: Conversion) -> dict[str, tuple[Any, str]]:
    """The `general.*` keys: the directory's description of the model, and the file type of this output."""
    directory = made.source
    name = os.path.basename(str(config.get("_name_or_path") or "").rstrip("/")) or directory.resolve().name
    entries: dict[str, tuple[Any, str]] = {
        "general.architecture": (made.arch.name, "str"),
        "general.type": ("model", "str"),
        "general.name": (name, "str"),
        "general.size_label": (size_label(made.n_params), "str"),
    }
    entries |= _model_card(directory / "README.md", made.warnings)
    for key, value in read_object(directory / vocab.METADATA_FILE).items():
        entries[key] = (value, "str" if isinstance(value, (str, list)) else "u32")
    entries |= vocab.sampling(directory)
    entries["general.file_type"] = (made.outtype.file_type, "u32")
    entries["general.quantization_version"] = (QUANTIZATION_VERSION, "u32")
    return entries


def _model_card(path: Path, warnings: list[str]) -> dict[str, tuple[Any, str]]:
    """License, languages and tags from the front matter of `README.md`. A value that cannot be read is a warning."""
    try:
        front = front_matter.read(path) if path.is_file() else {}
    except FormatError as error:
        warnings.append(f"{error}; its license, languages and tags are skipped")
        return {}
    entries: dict[str, tuple[Any, str]] = {}
    for key, target in (("license", "general.license"), ("tags", "general.tags"), ("language", "general.languages")):
        value = front.get(key)
        listed = [part for part in (value if isinstance(value, list) else [value]) if part not in (None, "")]
        if not all(isinstance(part, str) for part in listed) or (key == "license" and len(listed) > 1):
            warnings.append(f"{path}: front matter key {key} is {value!r:.60}, which {target} cannot hold; skipped")
        elif listed:
            entries[target] = (listed[0] if key == "license" else listed, "str")
    return entries


def size_label(params: int) -> str:
    """A parameter count in the form used in model names: 135M, 1.7B, 70B."""
    for unit, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if params >= unit:
            return f"{params / unit:.{1 if params < 10 * unit else 0}f}{suffix}"
    return f"{params / 1000:.0f}K"
