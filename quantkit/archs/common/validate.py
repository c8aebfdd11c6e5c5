"""Check that a GGUF is consistent: hyperparameters with each other, with the tensors and with the tokenizer.

    found = validate.describe(file.metadata, file.tensors, file.path)    found.hparams, found.blocks, found.head
    validate.problems(file.metadata, file.tensors)                       the contradictions, one sentence each
    validate.check_planned(metadata, tensors, path)                      of a file that a config.json becomes

Kernels take sizes from hyperparameters and addresses from tensors, so nothing runs and nothing is allocated before
`describe` has returned. The values of tensors are not read. A plausible but wrong number, such as the RoPE base of
another model, is not found.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantkit import archs
from quantkit.archs.common import blocks, checked
from quantkit.archs.common.base import Arch
from quantkit.archs.common.blocks import Block, Head, HParams
from quantkit.archs.common.required_tensors import Shaped, required, required_of_mtp
from quantkit.archs.common.tensors import split_name
from quantkit.errors import FormatError, QuantkitError, UnknownNameError, UnsupportedError
from quantkit.formats.gguf.reader import PART
from quantkit.formats.gguf.scales import SCALED, all_companions, scale_name
from quantkit.types import QuantType

REMEDY = "correct a wrong key with `quantkit metadata set FILE KEY=TYPE:VALUE`; if the file is damaged, get it again"
_OPTIONAL = ("bias", "scale")
_IGNORED_TENSORS = re.compile(
    r"blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight"
)  # in old files; the runtime computes these values
_MTP_MARK = "nextn.eh_proj"


@dataclass(frozen=True)
class Description:
    """The description of a model whose hyperparameters and tensors agree."""

    arch: Arch
    hparams: HParams
    blocks: list[Block]
    head: Head


def describe(
    metadata: Mapping[str, object], tensors: Mapping[str, Shaped], path: str | os.PathLike[str] = "the model"
) -> Description:
    """The description of a model. FormatError or UnsupportedError if its metadata and tensors contradict each other."""
    try:
        found = _read(metadata, tensors)
        wrong = list(_contradictions(found, metadata, tensors))
    except FormatError as error:
        raise FormatError(f"{path}: {error}; {REMEDY}") from None
    except (UnsupportedError, UnknownNameError) as error:
        raise UnsupportedError(f"{path}: {error}") from None
    if wrong:
        more = f" (and {len(wrong) - 1} more: `quantkit inspect` lists them)" if len(wrong) > 1 else ""
        raise FormatError(f"{path}: {wrong[0]}{more}; {REMEDY}")
    return found


def problems(metadata: Mapping[str, object], tensors: Mapping[str, Shaped]) -> list[str]:
    """All contradictions that `describe` would refuse; [] for a file that is not a model of a known architecture."""
    name = metadata.get("general.architecture")
    if not is_model(metadata) or name not in _names() or PART in metadata or is_mtp_only(metadata, tensors):
        return []
    try:
        return list(_contradictions(_read(metadata, tensors), metadata, tensors))
    except QuantkitError as error:
        return [str(error)]


def unknown_architecture(metadata: Mapping[str, object]) -> str:
    """The name of a model's architecture that quantkit does not know, so that `problems` checks nothing; "" else."""
    name = str(metadata.get("general.architecture"))
    return name if is_model(metadata) and name not in _names() else ""


def check_planned(metadata: Mapping[str, object], tensors: Mapping[str, Shaped], path: str | os.PathLike[str]) -> None:
    """FormatError if the GGUF that the config.json at `path` becomes would contradict itself, so that nothing loads it.

    What quantkit converts for other programs but does not run itself is no contradiction.
    """
    try:
        wrong = next(_contradictions(_read(metadata, tensors), metadata, tensors), None)
    except UnsupportedError:
        return
    except FormatError as error:
        wrong = str(error)
    if wrong:
        raise FormatError(f"{path}: the GGUF would contradict itself: {wrong}; correct the settings of config.json")


def check_mtp(
    arch: Arch,
    hparams: HParams,
    tensors: Mapping[str, Shaped],
    path: str | os.PathLike[str],
    layers: Sequence[blocks.MtpLayer] | None = None,
) -> None:
    """FormatError for a tensor of the MTP layers that is missing or of another shape than the metadata make it.

    `layers` are `arch.mtp_heads(hparams)`. What quantkit copies but does not run is not checked.
    """
    try:
        wanted = list(required_of_mtp(hparams, arch.mtp_heads(hparams) if layers is None else layers, tensors))
    except UnsupportedError:
        return
    for name, shape in wanted:
        if name not in tensors:
            raise FormatError(f"{path}: tensor {name} is missing; the metadata make it {shape}; {REMEDY}")
        if tuple(tensors[name].shape) != tuple(shape):
            raise FormatError(
                f"{path}: tensor {name} has shape {tensors[name].shape}, the metadata say {shape}; {REMEDY}"
            )


def check_sizes(metadata: Mapping[str, object], path: str | os.PathLike[str] | None = None) -> None:
    """FormatError if a hyperparameter is impossible. Planning needs this check, and no more.

    Architectures that quantkit does not know are planned too. Their keys may be 0, as some have no heads.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        return
    try:
        checked.check_keys(name, metadata, zeros=name not in _names())
    except FormatError as error:
        raise FormatError(f"{path}: {error}; {REMEDY}" if path else str(error)) from None


def _names() -> set[str]:
    return {arch.name for arch in archs.all()}


def is_model(metadata: Mapping[str, object]) -> bool:
    """Whether a file claims to be a model: it has a block_count and is not an adapter."""
    name = metadata.get("general.architecture")
    return f"{name}.block_count" in metadata and metadata.get("general.type", "model") == "model"


def is_mtp_only(metadata: Mapping[str, object], tensors: Mapping[str, Shaped]) -> bool:
    """Whether a file has MTP layers and no block of their trunk."""
    layers = {layer for stem, layer, _ in map(split_name, tensors) if layer is not None and stem.startswith("blk.")}
    arch = metadata.get("general.architecture")
    count, further = (metadata.get(f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
    return isinstance(count, int) and isinstance(further, int) and min(layers, default=0) >= max(1, count - further)


# --------------------------------------------------------------------------------------------------------------- checks


def _read(metadata: Mapping[str, object], tensors: Mapping[str, Shaped]) -> Description:
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FormatError("metadata has no general.architecture; the file is not a model")
    arch = archs.get(name)
    if PART in metadata:
        raise UnsupportedError(
            f"the file is a part of a model, {len(tensors)} of {metadata[PART]} tensors (`quantize --only`); join the "
            "parts with `quantkit merge`"
        )
    checked.check_keys(name, metadata)
    checked.check_tokenizer(metadata)
    _check_layers(name, metadata, tensors)
    hp = arch.hparams(metadata, tensors.keys())
    return Description(arch, hp, arch.blocks(hp), arch.head(hp))


def _check_layers(name: str, metadata: Mapping[str, object], tensors: Mapping[str, Shaped]) -> None:
    """FormatError if a layer that the metadata count has no tensors, or a tensor belongs to a layer beyond them.

    UnsupportedError for a file of MTP layers alone.
    """
    key, value = f"{name}.block_count", metadata.get(f"{name}.block_count")
    if not isinstance(value, int):
        raise FormatError(f"metadata key {key} is missing; the file is not a complete {name} model")
    n_mtp_layers = metadata.get(f"{name}.nextn_predict_layers") or 0
    if not isinstance(n_mtp_layers, int) or n_mtp_layers >= value:
        raise FormatError(
            f"metadata key {name}.nextn_predict_layers = {n_mtp_layers}, {key} = {value}: no layer would run"
        )
    if is_mtp_only(metadata, tensors):
        raise UnsupportedError(
            "the file has MTP layers alone, without the blocks of a model; draft with them by `quantkit mtp MODEL "
            "--head FILE`, or put them into a model's file by `quantkit mtp join`"
        )
    there = {layer for stem, layer, _ in map(split_name, tensors) if layer is not None and stem.startswith("blk.")}
    if there and max(there) >= value:
        raise FormatError(f"metadata key {key} = {value}, but there are tensors of blk.{max(there)}")
    main = value - n_mtp_layers
    absent = next((i for i in range(main) if i not in there), None)
    if absent is not None:
        raise FormatError(f"metadata key {key} = {value}, but there are no tensors of blk.{absent}")
    marked = {split_name(tensor)[1] for tensor in tensors if f".{_MTP_MARK}." in tensor}
    if there and max(there) >= main and main not in marked:
        raise FormatError(
            f"metadata key {name}.nextn_predict_layers = {n_mtp_layers} makes blk.{main} an MTP layer, "
            f"but there is no tensor blk.{main}.{_MTP_MARK}.weight"
        )


def _contradictions(found: Description, metadata: Mapping[str, object], tensors: Mapping[str, Shaped]) -> Iterator[str]:
    for block in found.blocks:
        for part in block.parts:
            yield from (f"blk.{block.layer}: {sentence}" for sentence in _part_problems(found, part))
    wanted = dict(required(found.hparams, found.blocks, found.head, tensors))
    for name, shape in wanted.items():
        if name not in tensors:
            yield f"tensor {name} is missing; the metadata make it {shape}"
        elif tensors[name].shape != shape:
            yield f"tensor {name} has shape {tensors[name].shape}, the metadata say {shape}"
    yield from _unused_tensors(found, wanted, tensors)
    yield from _incomplete_sets(found, tensors)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > found.hparams.n_vocab:
        yield (
            f"metadata key tokenizer.ggml.tokens has {len(tokens)} tokens, the model's vocabulary has "
            f"{found.hparams.n_vocab} (rows of token_embd.weight)"
        )


def _part_problems(found: Description, part: blocks.Part) -> Iterator[str]:
    """What cannot be computed in a part, whatever its tensors."""
    if isinstance(part, blocks.Attention):
        if part.heads % part.kv_heads:
            yield (
                f"attention.head_count = {part.heads} is not a multiple of attention.head_count_kv = {part.kv_heads}; "
                "each KV head serves the same number of query heads"
            )
        if part.window is not None and part.window < 1:
            yield f"attention.sliding_window = {part.window}; a token attends to itself, so it has to be 1 or more"
        yield from _rope_problems(part.rope, part.head_dim_k, found.arch.rotary_fraction is None)
    elif isinstance(part, blocks.LatentAttention):
        if part.kv_lora < 1:
            yield f"attention.kv_lora_rank = {part.kv_lora}; it has to be 1 or more"
        if part.nope < 1:
            yield (
                f"attention.key_length = {part.head_dim_k} leaves no elements without rope beside "
                f"rope.dimension_count = {part.rope.dim}"
            )
        yield from _rope_problems(part.rope, part.head_dim_k, False)
    elif isinstance(part, blocks.CompressedAttention):
        yield from _compressed_problems(part)
    if (
        isinstance(part, (blocks.Attention, blocks.LatentAttention, blocks.CompressedAttention))
        and not 0 < part.scale < math.inf
    ):
        yield f"scores are multiplied by {part.scale}; the scale or the head length in the metadata is wrong"


def _compressed_problems(part: blocks.CompressedAttention) -> Iterator[str]:
    yield from _rope_problems(part.rope, part.dim, False)
    if part.heads % part.groups:
        yield f"attention.head_count = {part.heads} is not a multiple of output_group_count = {part.groups}"
    if part.indexer is not None and part.rope.dim > part.indexer.dim:
        yield f"rope.dimension_count = {part.rope.dim}, but an indexer's key has {part.indexer.dim} elements"


def _rope_problems(rope: blocks.Rope, head_dim: int, rotates_all: bool) -> Iterator[str]:
    if rope.dim % 2:
        yield f"rope.dimension_count = {rope.dim}; RoPE rotates pairs, so it has to be even"
    if rope.dim > head_dim:
        yield f"rope.dimension_count = {rope.dim}, but a head's key has {head_dim} elements (attention.key_length)"
    elif rotates_all and 0 < rope.dim < head_dim:
        yield f"rope.dimension_count = {rope.dim}, but this architecture rotates all {head_dim} elements of a head"
    if rope.yarn is not None and rope.yarn.beta_fast < rope.yarn.beta_slow:
        yield (
            f"rope.scaling.yarn_beta_fast = {rope.yarn.beta_fast:g} is below "
            f"rope.scaling.yarn_beta_slow = {rope.yarn.beta_slow:g}"
        )


def _unused_tensors(found: Description, wanted: Mapping[str, object], tensors: Mapping[str, Shaped]) -> Iterator[str]:
    """Tensors that the computation would not use, so that the model would not be the one in the file."""
    hp = found.hparams
    unneeded = {name for name in all_companions(_nvfp4(tensors)) if name.endswith(".input_scale")}
    for name in tensors:
        _, layer, _ = split_name(name)
        of_mtp = layer is not None and hp.n_main <= layer < hp.n_layer
        if (
            name not in wanted
            and name not in unneeded | hp.unread
            and not of_mtp
            and not _IGNORED_TENSORS.fullmatch(name)
        ):
            yield f"tensor {name} is not used by {hp.arch} as quantkit computes it; the model is a variant of it"


def _nvfp4(tensors: Mapping[str, Shaped]) -> dict[str, QuantType]:
    """The NVFP4 tensors and their type; of tensors without types, none."""
    kinds = {name: getattr(tensor, "type", None) for name, tensor in tensors.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, QuantType) and kind.name == SCALED}


def _incomplete_sets(found: Description, tensors: Mapping[str, Shaped]) -> Iterator[str]:
    """Biases and scales that some layers have and others lack although they have the matrix."""
    layers: dict[tuple[str, str], set[int]] = {}
    optional = {scale_name(name) for name in _nvfp4(tensors)}
    for name in tensors:
        stem, layer, suffix = split_name(name)
        if name in optional:  # llama.cpp leaves out a scale of 1, and layers may have other types
            continue
        if layer is not None and layer < found.hparams.n_main:
            layers.setdefault((stem, suffix), set()).add(layer)
    for (stem, suffix), those in layers.items():
        if suffix in _OPTIONAL:
            for layer in sorted(layers.get((stem, "weight"), set()) - those):
                yield (
                    f"tensor {stem.replace('N', str(layer), 1)}.{suffix} is missing; {len(those)} other layer(s) "
                    f"have it, blk.{min(those)} among them"
                )
