"""LoRA adapters of PEFT: merged into a checkpoint that is converted, or converted to an adapter in GGUF.

    adapter GGUF   keys general.type "adapter", adapter.type "lora", adapter.lora.alpha; of each matrix
                   NAME.weight.lora_a [r, n] and NAME.weight.lora_b [rows, r], as llama.cpp's convert_lora_to_gguf.py
                   writes them. llama.cpp adds alpha / r b a; where PEFT's scale is another one, b has the difference.

Rows of b are reordered as the rows of the matrix are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import types
from quantkit.archs import Arch
from quantkit.archs.common import wrapper
from quantkit.archs.common.tensors import Piece
from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.formats.pipeline import Progress
from quantkit.formats.safetensors import Checkpoint
from quantkit.formats.safetensors.peft_adapter import (
    Adapter,
    LowRank,
    MergedTensor,
    check_fits,
    files_of,
    open_adapter,
)
from quantkit.pipelines.output import WriteTask, write_gguf
from quantkit.types import QuantType


def merged(checkpoint: Checkpoint, adapter: Adapter, arch: Arch) -> Checkpoint:
    """The checkpoint with the adapter's products added. FormatError for a product whose matrix it does not have."""
    names = _names_of(checkpoint, adapter, arch)
    tensors: dict[str, Any] = dict(checkpoint.tensors)
    for theirs, product in adapter.products.items():
        tensors[names[theirs]] = MergedTensor(tensors[names[theirs]], product)
    return replace(checkpoint, tensors=tensors, paths=[*checkpoint.paths, *files_of(adapter.path)])


def unused(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> list[str]:
    """The names of the merged matrices of a checkpoint that none of the pieces is made from."""
    used = {source for piece in pieces for source in piece.sources}
    changed = [name for name, tensor in checkpoint.tensors.items() if isinstance(tensor, MergedTensor)]
    return [name for name in changed if name not in used]


def _names_of(checkpoint: Checkpoint, adapter: Adapter, arch: Arch) -> dict[str, str]:
    """The checkpoint's names of the matrices of an adapter."""
    stored = {arch.canonical(name): name for name in checkpoint.tensors}
    found = {name: stored.get(arch.canonical(name), "") for name in adapter.products}
    if absent := [name for name, ours in found.items() if not ours]:
        if [arch.canonical(name) for name in absent] == ["lm_head.weight"]:
            raise UnsupportedError(
                f"{adapter.path}: the adapter changes {absent[0]}, which {checkpoint.path} does not have: its output "
                "is the embedding, which stays; save the model with tie_word_embeddings=False and its own lm_head, or "
                "merge the adapter in PEFT and convert the result"
            )
        if sum(map(len, wrapper.encoder_tensors(map(arch.canonical, absent)).values())) == len(absent):
            raise UnsupportedError(
                f"{adapter.path}: {len(absent)} of {len(found)} matrices are of an image or audio encoder, and "
                f"{checkpoint.path} does not have them under these names: {absent[0]}; train an adapter of the "
                "language model alone, or merge the adapter in PEFT and convert the result"
            )
        raise FormatError(
            f"{adapter.path}: {len(absent)} of {len(found)} matrices are not in {checkpoint.path}: {absent[0]}; the "
            "adapter is of another model"
        )
    of_ours: dict[str, str] = {}
    for theirs, ours in found.items():
        if (other := of_ours.setdefault(ours, theirs)) != theirs:
            raise FormatError(f"{adapter.path}: {other} and {theirs} are both of {ours}; leave out one of them")
    return found


@dataclass(frozen=True)
class AdapterFile:
    """A planned adapter in GGUF: PEFT's directory; its tensors, of float type, with the values of each; metadata."""

    path: Path
    specs: list[TensorSpec]
    values: dict[str, np.ndarray]
    metadata: Metadata
    inputs: list[Path]

    def write(self, out: str | os.PathLike[str], progress: Progress | bool = False) -> list[Path]:
        """Write the file and return its path. It appears when it is complete."""
        return write_gguf(out, self.metadata, self.specs, self._tasks, inputs=self.inputs, progress=progress)

    def _tasks(self, writer: Writer) -> Iterator[WriteTask]:
        for spec in self.specs:
            yield functools.partial(self._write, writer, spec)

    def _write(self, writer: Writer, spec: TensorSpec) -> int:
        try:
            data = spec.type.quantize(self.values[spec.name], threads=1)
        except DataError as error:
            raise DataError(f"{self.path}: tensor {spec.name}: {error}") from None
        writer.put(spec.name, 0, data)
        return data.nbytes


def plan_adapter(
    directory: str | os.PathLike[str], checkpoint: Checkpoint, pieces: Sequence[Piece], arch: Arch, kind: QuantType
) -> AdapterFile:
    """Plan the GGUF of an adapter for a checkpoint, whose conversion has `pieces`; `kind` is a float type.

    UnsupportedError for a matrix that GGUF stores otherwise than row by row, such as one of several stacked experts.
    """
    adapter = open_adapter(directory)
    names = _names_of(checkpoint, adapter, arch)
    products = {names[theirs]: product for theirs, product in adapter.products.items()}
    for name, product in products.items():
        check_fits(checkpoint.tensors[name], product)
    made: dict[str, np.ndarray] = {}
    for piece in pieces:
        if not products.keys().isdisjoint(piece.sources):
            made |= _of_piece(adapter, piece, products)
    used = {source for piece in pieces for source in piece.sources}
    if left := [name for name in products if name not in used]:
        raise UnsupportedError(
            f"{adapter.path}: {len(left)} of its {len(products)} matrices are of tensors that the GGUF leaves out: "
            f"{left[0]}; train an adapter without them, or merge it: convert --merge-lora"
        )
    metadata = Metadata()
    metadata.set("general.architecture", arch.name, "str")
    metadata.set("general.type", "adapter", "str")
    metadata.set("general.name", adapter.path.resolve().name, "str")
    metadata.set("adapter.type", "lora", "str")
    metadata.set("adapter.lora.alpha", adapter.alpha, "f32")
    specs = [TensorSpec(name, x.shape, kind) for name, x in made.items()]
    return AdapterFile(adapter.path, specs, made, metadata, [*checkpoint.paths, *files_of(adapter.path)])


def _of_piece(adapter: Adapter, piece: Piece, products: dict[str, LowRank]) -> dict[str, np.ndarray]:
    """lora_a and lora_b of a tensor of the GGUF, float32."""
    product = products[piece.sources[0]] if len(piece.sources) == 1 else None
    if product is None or not piece.transform.copies_rows or len(piece.shape) != 2:
        changed = next(name for name in piece.sources if name in products)
        how = f"{len(piece.sources)} tensors" if len(piece.sources) > 1 else "it, but not by copying rows"
        raise UnsupportedError(
            f"{adapter.path}: the adapter of {changed} cannot be written: {piece.name} is made of {how}; merge it: "
            "convert --merge-lora"
        )
    rows = piece.shape[0]
    b = product.b.dequantize()
    b = np.ascontiguousarray(piece.transform.rows([lambda start, stop: b[start:stop]], 0, rows))
    factor = product.scale / (adapter.alpha / product.rank)
    if abs(factor - 1) > 1e-6:
        b *= np.float32(factor)
    return {f"{piece.name}.lora_a": product.a.dequantize(), f"{piece.name}.lora_b": b}


def adapter_type(outtype: str) -> QuantType:
    """The type of an adapter's matrices; f32 for "auto". UnsupportedError for a quantized one."""
    if outtype in ("q8_0", "stored"):
        raise UnsupportedError(f"--lora with --outtype {outtype}: an adapter is f32, f16 or bf16")
    return types.get("f32" if outtype == "auto" else outtype)
