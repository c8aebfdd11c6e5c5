"""The image encoder of a checkpoint as a GGUF file of its own, which llama.cpp calls mmproj.

    plan_mmproj("HF_DIR", "f16").write("mmproj.gguf")

`quantkit/vision` says which tensors and keys the file has. The image processor's mean and standard deviation are read
from preprocessor_config.json or processor_config.json, the number of the token [IMG_BREAK] from tokenizer.json. All
tensors of the encoder are used, or an error names those that are not known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit import types
from quantkit.archs.common import wrapper
from quantkit.archs.common.tensors import Piece, shape_of
from quantkit.errors import FormatError, UnknownNameError
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.formats.pipeline import Progress
from quantkit.formats.safetensors import Checkpoint, open_checkpoint
from quantkit.formats.safetensors.quantized import unscaled
from quantkit.formats.torch_bin import is_bin, open_bin
from quantkit.inputs.json_input import read_object
from quantkit.inputs.settings import mapping, sequence
from quantkit.pipelines.conversion.metadata import general_keys
from quantkit.pipelines.conversion.plan import errors_name, require_float
from quantkit.pipelines.conversion.tensor import ConvertedTensor
from quantkit.pipelines.output import WriteTask, filled_name, write_gguf
from quantkit.types import QuantType
from quantkit.vision import Tower, of_config
from quantkit.vision.tower import ARCHITECTURE, Part, check_shapes, require_names

OUTTYPES = ("auto", "bf16", "f16", "f32", "q8_0")
_BREAK = "[IMG_BREAK]"


@dataclass(frozen=True)
class Mmproj:
    """A planned file of an image encoder: its tower, tensors and metadata. `left_out` are tensors it does not need."""

    source: Path
    tower: Tower
    checkpoint: Checkpoint
    outtype: QuantType
    metadata: Metadata
    tensors: list[ConvertedTensor]
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def specs(self) -> list[TensorSpec]:
        """Name, shape and type of each tensor."""
        return [tensor.spec for tensor in self.tensors]

    def write(
        self, out: str | os.PathLike[str], *, threads: int | None = None, progress: Progress | bool = False
    ) -> list[Path]:
        """Write the file and return its path; `out` may be a template, as in `convert`."""
        return write_gguf(
            filled_name(out, self.source, self.outtype.name), self.metadata, self.specs, self._tasks,
            inputs=self.checkpoint.paths, threads=threads, progress=progress,
        )  # fmt: skip

    def _tasks(self, writer: Writer) -> Iterator[WriteTask]:
        for tensor in self.tensors:
            yield from tensor.tasks(writer)


def plan_mmproj(
    source: str | os.PathLike[str],
    outtype: str = "auto",
    metadata: str | os.PathLike[str] | None = None,
    model_name: str | None = None,
) -> Mmproj:
    """Plan the file of a checkpoint's image encoder. UnsupportedError for one that is not known, by name.

    `outtype` is the type of matrices, "auto" the checkpoint's 16-bit type; the rest as in `convert`.
    """
    directory = Path(source)
    if outtype not in OUTTYPES:
        raise UnknownNameError("outtype of --mmproj", outtype, OUTTYPES)
    config = read_object(directory / "config.json")
    if not config:
        raise FormatError(
            f"{directory / 'config.json'} is missing; `convert` needs a Hugging Face checkpoint directory"
        )
    with errors_name(directory):
        tower = of_config(config)
        own = tower.entries(config, _preprocessor(directory))
    opened = unscaled(open_bin(directory) if is_bin(directory) else open_checkpoint(directory), config)
    stored = {tower.canonical(name): name for name in opened.tensors}
    shapes = {name: tuple(opened.tensors[theirs].shape) for name, theirs in stored.items()}
    with errors_name(directory):
        parts = tower.parts(config, shapes, _break_token(directory))
    encoder = [tower.canonical(name) for name in wrapper.encoder_tensors(opened.tensors).get("image encoder", [])]
    with errors_name(directory):
        require_names(parts, encoder, tower)
    if absent := [part.source for part in parts if part.source not in stored]:
        raise FormatError(
            f"{directory}: the image encoder lacks {len(absent)} tensor(s): {', '.join(absent[:5])}; a shard is "
            "missing or config.json is wrong"
        )
    kind = types.get(_first_16_bit(opened, [stored[part.source] for part in parts]) if outtype == "auto" else outtype)
    tensors = [_tensor(part, opened, stored, kind) for part in parts]
    made = Mmproj(directory, tower, opened, kind, Metadata(), tensors)
    made.left_out.extend(name for name in encoder if name not in {part.source for part in parts})
    overrides = None if metadata is None else Path(metadata)
    keys = general_keys(directory, config, ARCHITECTURE, made.specs, kind, made.warnings, overrides, model_name)
    check_shapes(tower, own, {spec.name: spec.shape for spec in made.specs}, directory)
    keys |= {"general.type": ("mmproj", "str")} | own
    for key, (value, form) in keys.items():
        made.metadata.set(key, value, form)
    return made


def _tensor(part: Part, opened: Checkpoint, stored: Mapping[str, str], kind: QuantType) -> ConvertedTensor:
    source = opened.tensors[stored[part.source]]
    require_float(source)
    with errors_name(source.path):
        shape = shape_of(part.transform, part.name, tuple(source.shape))
    if part.kind:
        chosen = types.get(part.kind)
    elif len(shape) < 2:
        chosen = types.get("f32")
    else:
        chosen = types.get("f16") if shape[-1] % kind.block_size else kind
    spec = TensorSpec(part.name, shape, chosen)
    piece = Piece(part.name, shape, (source.name,), part.transform, chosen.name == "f32")
    return ConvertedTensor(spec, source.path, piece, [source])


def _first_16_bit(opened: Checkpoint, names: list[str]) -> str:
    kinds = {"BF16": "bf16", "F16": "f16"}
    found = (kinds.get(str(getattr(opened.tensors[name], "dtype", ""))) for name in names)
    return next((kind for kind in found if kind), "f16")


def _preprocessor(directory: Path) -> dict[str, Any]:
    """The image processor's settings, from either file that transformers writes."""
    found = read_object(directory / "preprocessor_config.json")
    found = found or dict(mapping(read_object(directory / "processor_config.json"), "image_processor"))
    if not found:
        raise FormatError(
            f"{directory}: no preprocessor_config.json, and no image_processor in processor_config.json; image_mean "
            "and image_std, by which images are normalised, are read from them: fetch it with the checkpoint"
        )
    return found


def _break_token(directory: Path) -> int | None:
    """The number of the token [IMG_BREAK] in tokenizer.json; None without one."""
    for token in sequence(read_object(directory / "tokenizer.json"), "added_tokens"):
        if isinstance(token, dict) and token.get("content") == _BREAK and type(token.get("id")) is int:
            return int(token["id"])
    return None
