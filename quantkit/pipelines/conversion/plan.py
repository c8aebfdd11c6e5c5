"""Plan a conversion: which output tensor comes from which tensors of the checkpoint, and of which type it is.

    conversion = plan_conversion("SmolLM2-135M", "auto")     reads config, tokenizer and headers; no weights

Order of the tensors: RoPE factors, embedding, the layers by number (within a layer: attention, then feed-forward),
output norm, output.

Types: `outtype`, except that norms, biases and all tensors of one dimension are f32, and matrices whose rows do not
fit q8_0's blocks of 32 are f16. "auto" is the dtype of the first matrix in bf16 or f16, and f16 for a checkpoint that
is all float32. Matrices stored as codes and scales (FP8, NVFP4, GPTQ) count as the 16-bit type of their format: their
float32 products are rounded to nearest, ties to even. MXFP4 stays MXFP4. "values", which `quantize` reads, is "auto",
but f32 for an all-float32 checkpoint, and each quantized matrix has the type of its own format. "stored" is that, but
NVFP4 stays NVFP4, with a tensor NAME.scale beside it; a matrix of it that GGUF's type cannot say becomes bf16, with a
warning.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import archs, types
from quantkit.archs import Arch
from quantkit.archs.common import fused_experts, validate
from quantkit.archs.common.base import is_tied
from quantkit.archs.common.mtp import POLICIES, in_head_file
from quantkit.archs.common.tensors import Piece
from quantkit.errors import DataError, FormatError, UnknownNameError, UnsupportedError
from quantkit.formats.gguf import Metadata, TensorSpec, Writer, scales
from quantkit.formats.safetensors import Checkpoint, open_checkpoint
from quantkit.formats.safetensors.peft_adapter import open_adapter
from quantkit.formats.safetensors.quantized import ScaledTensor, unscaled
from quantkit.formats.safetensors.quantized.gptq import GPTQTensor
from quantkit.formats.safetensors.quantized.nvfp4 import NVFP4Tensor
from quantkit.formats.torch_bin import is_bin, open_bin
from quantkit.inputs.json_input import read_object
from quantkit.inputs.settings import integer
from quantkit.pipelines.arrivals import Arrivals
from quantkit.pipelines.conversion.lora import merged, unused
from quantkit.pipelines.conversion.metadata import general_keys
from quantkit.pipelines.conversion.tensor import (
    INTEGERS,
    ConvertedTensor,
    GeneratedTensor,
    IntegerTensor,
    OutputTensor,
    ScaleTensor,
    SourceTensor,
    why_not_packed,
)
from quantkit.pipelines.output import WriteTask
from quantkit.tokenizers import vocab
from quantkit.types import QuantType

OUTTYPES = ("auto", "bf16", "f16", "f32", "q8_0")
STORED = "stored"  # the lossless outtype
VALUES = "values"  # what is quantized: as STORED, but values of NVFP4 are bf16, as its own programs compute them
_COMPARED = 1 << 22  # values that are compared at a time
_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True)
class Conversion:
    """A planned conversion, and its result once it is written.

    Fields:

        source      the checkpoint's directory
        arch        the architecture
        checkpoint  the opened input
        outtype     type of the matrices
        metadata    keys of the GGUF file
        specs       name, shape and type of each output tensor, in order
        pieces      by name of the output tensor: its source tensors and the transform that makes it from them
        generated   by name: the values of tensors that are computed from `config.json`
        left_out    names of tensors that are not converted, by kind
        warnings    parts of the checkpoint that were skipped as unreadable
        paths       the files; empty until they are written
        arrivals    brings the tensors of a checkpoint on the Hub; None: all of them are on the disk
        workers     what each worker of a cluster did, by address, once it is written
        reopen      arguments of `plan_conversion` that give the same tensors in another process
    """

    source: Path
    arch: Arch
    checkpoint: Checkpoint
    outtype: QuantType
    metadata: Metadata
    specs: list[TensorSpec]
    pieces: dict[str, Piece]
    generated: dict[str, np.ndarray]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    arrivals: Arrivals | None = None
    reopen: tuple[Any, ...] = ()
    workers: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def tensors(self) -> dict[str, OutputTensor]:
        """The output tensors by name. Their rows are computed on demand."""
        return {spec.name: self._tensor(spec) for spec in self.specs}

    def _tensor(self, spec: TensorSpec) -> OutputTensor:
        if spec.name in self.generated:
            return GeneratedTensor(spec, self.source / "config.json", self.generated[spec.name])
        if weight := self._scaled.get(spec.name):
            converted = self._tensor(weight)
            assert isinstance(converted, ConvertedTensor)
            return ScaleTensor(spec, converted.path, converted)
        piece = self.pieces[spec.name]
        sources = [self.checkpoint.tensors[name] for name in piece.sources]
        if piece.integers:
            return IntegerTensor(spec, sources[0].path, sources[0])
        return ConvertedTensor(spec, sources[0].path, piece, sources)

    @functools.cached_property
    def _scaled(self) -> dict[str, TensorSpec]:
        """The weights of NVFP4 codes by the names of the tensors of their scales."""
        return {scales.scale_name(spec.name): spec for spec in self.specs if spec.type.name == scales.SCALED}

    @property
    def as_gguf(self) -> CheckpointView:
        """The checkpoint as an input of `quantize` and `verify`."""
        return CheckpointView(
            self.checkpoint.paths,
            self.metadata,
            self.tensors,
            self.left_out,
            self.warnings,
            self.arrivals,
            self.reopen,
        )

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
        """Number of values in all tensors."""
        return sum(math.prod(spec.shape) for spec in self.specs)

    def tasks(self, writer: Writer) -> Iterator[WriteTask]:
        """Tasks that compute the output in pieces of bounded size and write them at their offsets."""
        for tensor in self.tensors.values():
            yield from tensor.tasks(writer)


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint seen as the GGUF file that it converts to: `quantize` and `verify` read it like an open GGUF.

    `paths` are the checkpoint's files. Rows of the tensors are the bytes of the converted file, computed on demand.
    `reopen` is as in `Conversion`.
    """

    paths: list[Path]
    metadata: Metadata
    tensors: Mapping[str, OutputTensor]
    left_out: Mapping[str, list[str]]
    warnings: list[str]
    arrivals: Arrivals | None = None
    reopen: tuple[Any, ...] = ()


def plan_conversion(
    source: str | os.PathLike[str],
    outtype: str = "auto",
    pre: str | None = None,
    mtp: str = "auto",
    metadata: str | os.PathLike[str] | None = None,
    model_name: str | None = None,
    opened: Checkpoint | None = None,
    arrivals: Arrivals | None = None,
    fuse_gate_up: bool = False,
    merge_lora: str | os.PathLike[str] | None = None,
) -> Conversion:
    """Read configuration, tokenizer and tensor names of a checkpoint and plan its GGUF.

    `outtype` is one of OUTTYPES, or STORED or VALUES for the checkpoint's own. `mtp` is passed to `Arch.with_mtp`.
    `metadata` (a JSON file) and `model_name` override what the checkpoint states about the model (`metadata.py`).
    `opened` are its tensors, if they are not in `source`; `arrivals` then brings their bytes. With `fuse_gate_up`, gate
    and up of experts are one tensor (`archs/common/fused_experts.py`); UnsupportedError for a model without experts.
    `merge_lora` is the directory of a PEFT adapter that is added to the weights.
    """
    directory = Path(source)
    if outtype not in (*OUTTYPES, STORED, VALUES):
        raise UnknownNameError("outtype", outtype, OUTTYPES)
    if mtp not in POLICIES:
        raise UnknownNameError("policy of --mtp", mtp, POLICIES)
    with errors_name(directory):
        stated = _read_config(directory)
        config: Mapping[str, Any] = archs.language_model(stated)
        arch = archs.from_hf(config)
    opened = opened or (open_bin(directory) if is_bin(directory) else open_checkpoint(directory))
    checkpoint = unscaled(opened, config)
    automatic = {"auto": "f16", STORED: "f32", VALUES: "f32"}  # for a checkpoint that is all float32
    chosen = types.get(_first_16_bit(checkpoint) or automatic[outtype] if outtype in automatic else outtype)
    adapter = None if merge_lora is None else open_adapter(merge_lora)
    names = _canonical_names(arch, checkpoint)
    warnings: list[str] = []
    with errors_name(directory):
        config = arch.with_mtp(config, mtp, names)
        checkpoint = _without_added_biases(checkpoint, arch, config)
        checkpoint = checkpoint if adapter is None else merged(checkpoint, adapter, arch)
        config = _as_tied(config, arch, checkpoint, arrivals is None, warnings)
        pieces = arch.to_gguf(config, {name: tensor.shape for name, tensor in checkpoint.tensors.items()})
        generated = arch.generated(config)
        left_out = arch.dropped_tensors(config, names)
        keys = arch.metadata(config) | arch.scalar_keys(config, checkpoint.tensors)
        tokenizer = vocab.read(directory, config, pre)
        if mtp == "only":
            pieces = [piece for piece in pieces if in_head_file(piece.name, integer(config, "num_hidden_layers"))]
        if fuse_gate_up:
            pieces = _fused(pieces, arch.name)
        if left := unused(checkpoint, pieces):
            warnings.append(
                f"{len(left)} matrices of the adapter are of tensors that are left out, so they change nothing: "
                f"{', '.join(left[:3])}{', …' if left[3:] else ''}"
            )
        expected = arch.shapes(config, [piece.name for piece in pieces])
    _check_tensors(checkpoint, pieces, expected)
    packed = _packed(pieces, checkpoint, warnings) if outtype == STORED else set()
    specs = [TensorSpec(name, x.shape, types.get("f32")) for name, x in generated.items()]
    for piece in pieces:
        if piece.name not in packed:
            specs.append(TensorSpec(piece.name, piece.shape, _type_of(piece, checkpoint, chosen, outtype)))
            continue
        specs.append(TensorSpec(piece.name, piece.shape, types.get(scales.SCALED)))
        specs.append(TensorSpec(scales.scale_name(piece.name), (scales.matrices(piece.shape),), types.get("f32")))
    by_name = {piece.name: piece for piece in pieces}
    reopen = (os.path.abspath(directory), outtype, pre, mtp, None, None, None, None, fuse_gate_up)  # of the tensors
    conversion = Conversion(
        directory, arch, checkpoint, chosen, Metadata(), specs, by_name, generated, left_out, warnings, [], arrivals,
        reopen,
    )  # fmt: skip
    overrides_file = None if metadata is None else Path(metadata)
    main = types.get(scales.SCALED) if packed else chosen
    general = general_keys(directory, stated, arch.name, specs, main, conversion.warnings, overrides_file, model_name)
    # Tokenizer keys that the architecture sets override those read from the tokenizer files.
    overrides = {key: entry for key, entry in keys.items() if key.startswith("tokenizer.")}
    for key, (value, kind) in (general | keys | tokenizer | overrides).items():
        conversion.metadata.set(key, value, kind)
    validate.check_planned(conversion.metadata, {spec.name: spec for spec in specs}, directory)
    return conversion


def _canonical_names(arch: Arch, checkpoint: Checkpoint) -> list[str]:
    """The names of the tensors as the rules spell them. FormatError for one name in two spellings."""
    found: dict[str, str] = {}
    for name, tensor in checkpoint.tensors.items():
        if (other := found.setdefault(arch.canonical(name), name)) != name:
            raise FormatError(
                f"{tensor.path}: tensor {name} is another spelling of {other}, which is in "
                f"{checkpoint.tensors[other].path}; the directory holds two checkpoints, or one that was saved twice: "
                "remove one of them"
            )
    return list(found)


def _without_added_biases(checkpoint: Checkpoint, arch: Arch, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint without biases of zeros that the model has not: AutoGPTQ gives one to every layer."""
    tensors = checkpoint.tensors
    biases = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if name.endswith(".bias") and isinstance(tensors.get(f"{name.removesuffix('bias')}weight"), GPTQTensor)
    }
    if not biases:
        return checkpoint
    added = {name for name in biases.keys() - arch.expected(config, biases) if not tensors[name].dequantize().any()}
    return replace(checkpoint, tensors={name: tensor for name, tensor in tensors.items() if name not in added})


def _as_tied(
    config: Mapping[str, Any], arch: Arch, checkpoint: Checkpoint, is_here: bool, warnings: list[str]
) -> Mapping[str, Any]:
    """The config with tie_word_embeddings as the checkpoint has it: an lm_head that differs from the embedding counts.

    transformers 5 decides so, too. Weights on the Hub are not compared.
    """
    by_name = {arch.canonical(name): tensor for name, tensor in checkpoint.tensors.items()}
    head, embedding = (by_name.get(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    if head is None or embedding is None or not is_tied(config, arch.ties_by_default):
        return config
    if not is_here:
        warnings.append(
            f"{head.name} is left out: config.json ties it to the embedding. Whether their values are the same is not "
            "checked for a checkpoint on the Hub"
        )
        return config
    if _are_equal(head, embedding):
        return config
    warnings.append(
        f"{head.name} differs from the embedding, so it is the output matrix, although config.json says "
        "tie_word_embeddings: true"
    )
    return dict(config) | {"tie_word_embeddings": False}


def _are_equal(a: SourceTensor, b: SourceTensor) -> bool:
    if a.shape != b.shape:
        return False
    rows = max(1, _COMPARED // max(1, math.prod(a.shape[1:])))
    for start in range(0, a.n_rows, rows):
        stop = min(start + rows, a.n_rows)
        if not np.array_equal(a.rows(start, stop), b.rows(start, stop), equal_nan=True):
            return False
        a.forget(start, stop)
        b.forget(start, stop)
    return True


def _fused(pieces: list[Piece], arch: str) -> list[Piece]:
    fused = fused_experts.fuse_pieces(pieces)
    if not any(fused_experts.separate_names(piece.name) for piece in fused):
        raise UnsupportedError(f"--fuse-gate-up: this {arch} model has no experts whose gate and up could be fused")
    return fused


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise FormatError(f"{directory}: not a directory; `convert` needs a Hugging Face checkpoint directory")
    config = read_object(directory / "config.json")
    if not config:
        raise FormatError(
            f"{directory / 'config.json'} is missing; `convert` needs a Hugging Face checkpoint directory"
        )
    return config


def _first_16_bit(checkpoint: Checkpoint) -> str | None:
    """The first 16-bit dtype among the matrices, as stored or as read; None if there is none."""
    matrices = [_float_type(tensor) for tensor in checkpoint.tensors.values() if len(tensor.shape) >= 2]
    return next((name for name in matrices if name in ("bf16", "f16")), None)


def _float_type(tensor: SourceTensor) -> str | None:
    """The float type that holds a tensor's values, for codes and scales as far as their own programs do."""
    return tensor.float_type if isinstance(tensor, ScaledTensor) else _DTYPES.get(tensor.dtype)


def _packed(pieces: list[Piece], checkpoint: Checkpoint, warnings: list[str]) -> set[str]:
    """The tensors that keep the codes of NVFP4; a line in `warnings` says which matrices do not, and why."""
    found, others = set[str](), dict[str, list[str]]()
    for piece in pieces:
        sources = [checkpoint.tensors[name] for name in piece.sources]
        if not all(isinstance(tensor, NVFP4Tensor) for tensor in sources):
            continue
        reason = why_not_packed(piece, sources)
        if reason or piece.f32 or not piece.name.endswith(".weight"):
            others.setdefault(reason or "it is no weight", []).append(piece.name)
        else:
            found.add(piece.name)
    for reason, names in others.items():
        more = f" and {len(names) - 1} more" if names[1:] else ""
        warnings.append(f"{names[0]}{more}: not kept as nvfp4: {reason}")
    return found


def _type_of(piece: Piece, checkpoint: Checkpoint, outtype: QuantType, name: str) -> QuantType:
    """The output type of a piece. MXFP4 stays MXFP4: another type would be larger or less accurate."""
    if piece.transform.copies_rows and all(checkpoint.tensors[name].dtype == "MXFP4" for name in piece.sources):
        return types.get("mxfp4")
    if piece.integers:
        return types.layout("i32")
    if piece.f32 or len(piece.shape) <= 1 or not piece.name.endswith(".weight"):
        return types.get("f32")
    sources: list[SourceTensor] = [checkpoint.tensors[name] for name in piece.sources]
    kinds = {_float_type(tensor) for tensor in sources}
    if name in (STORED, VALUES) and all(isinstance(t, ScaledTensor) for t in sources) and "f32" not in kinds:
        return types.get("f16" if kinds == {"f16"} else "bf16")
    return types.get("f16") if piece.shape[-1] % outtype.block_size else outtype


@contextmanager
def errors_name(directory: Path) -> Iterator[None]:
    """Prefix a path, such as the checkpoint's, to errors from modules that do not know it."""
    try:
        yield
    except (FormatError, UnsupportedError, DataError) as error:
        raise error if str(directory) in str(error) else type(error)(f"{directory}: {error}") from None


def require_float(tensor: SourceTensor) -> None:
    """UnsupportedError for a tensor that is not read as float32 values."""
    if _float_type(tensor) is None:
        raise UnsupportedError(
            f"{tensor.path}: tensor {tensor.name} is {tensor.dtype}; `convert` reads F32, F16 and BF16 weights, and "
            "codes with scales where config.json has a quantization_config"
        )


def _check_tensors(checkpoint: Checkpoint, pieces: list[Piece], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every dtype can be read and that every shape agrees with `config.json`."""
    for piece in pieces:
        for name in piece.sources:
            tensor = checkpoint.tensors[name]
            if piece.integers and tensor.dtype not in INTEGERS:
                raise UnsupportedError(
                    f"{tensor.path}: tensor {name} is {tensor.dtype}; whole numbers are {' or '.join(INTEGERS)}"
                )
            if not piece.integers:
                require_float(tensor)
        if piece.shape != expected.get(piece.name, piece.shape):
            tensor = checkpoint.tensors[piece.sources[0]]
            raise FormatError(
                f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}, which makes {piece.name} "
                f"{piece.shape}; config.json requires {expected[piece.name]}: one of the two files belongs to another "
                "model"
            )
    _require_whole(checkpoint, pieces)


def _require_whole(checkpoint: Checkpoint, pieces: list[Piece]) -> None:
    """FormatError for a tensor of which the GGUF would take a part only, such as a stack of too many experts.

    Shapes of the GGUF's tensors come from config.json where a transform cuts a tensor, so they do not show it.
    """
    taken = Counter[str]()  # elements of each tensor, where a piece takes equally much of what its sources have
    for piece in pieces:
        sizes = [math.prod(checkpoint.tensors[name].shape) for name in piece.sources]
        for name, size in zip(piece.sources, sizes):
            taken[name] += -(-math.prod(piece.shape) * size // max(1, sum(sizes)))
    for name, count in taken.items():
        tensor = checkpoint.tensors[name]
        if count < math.prod(tensor.shape):
            made = ", ".join(f"{piece.name} {piece.shape}" for piece in pieces if name in piece.sources)
            raise FormatError(
                f"{tensor.path}: tensor {name} has shape {tensor.shape}, {math.prod(tensor.shape)} values; config.json "
                f"makes {made} of it, {count} values: one of the two files belongs to another model"
            )
