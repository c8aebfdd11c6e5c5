"""Take the MTP (multi-token prediction) layers of a file apart from its trunk, and join both again, bytes as they are.

    plan_trunk(open("model.gguf"))                          the file without MTP layers
    plan_head(open("model.gguf"))                           the layers alone, with embedding, last norm and output
    plan_join(open("trunk.gguf"), open("head.gguf"))       the layers after the blocks of the trunk

The head's file has the metadata of the whole and no blk.0, as llama.cpp's converter writes it with --mtp and as its
loader takes it as a draft model. So the two files may be quantized apart, each by its own recipe. Joining takes the
MTP layers of the second file, which may be a whole model, and everything else of the first one; the numbers of layers
follow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from quantkit import archs
from quantkit.archs.common import validate
from quantkit.archs.common.mtp import in_head_file
from quantkit.archs.common.required_tensors import Shaped
from quantkit.archs.common.tensors import split_name
from quantkit.errors import DataError, FormatError, UnknownNameError, UnsupportedError
from quantkit.formats import provenance
from quantkit.formats.gguf import GGUF, Metadata
from quantkit.pipelines.rewrite import Rewrite, RewrittenTensor, by_shard, copied, is_of_layers


def plan_trunk(source: GGUF) -> Rewrite:
    """Plan the file without its MTP layers. UnsupportedError if it has none."""
    arch, main, further = _layers(source)
    metadata = _counted(source.metadata, arch, main + further, main, 0)
    made = [copied(tensor, shard) for shard, tensor in by_shard(source) if _layer(tensor.name, -1) < main]
    _keep_records(metadata, made)
    validate.describe(metadata, {tensor.spec.name: tensor.spec for tensor in made}, source.path)
    return Rewrite([source], made, metadata)


def plan_head(source: GGUF) -> Rewrite:
    """Plan the file of the MTP layers alone. UnsupportedError if there are none."""
    _, main, _ = _layers(source)
    _check_layers(source.metadata, source.tensors, source.path)
    made = [copied(tensor, shard) for shard, tensor in by_shard(source) if in_head_file(tensor.name, main)]
    metadata = source.metadata.copy()
    _keep_records(metadata, made)
    return Rewrite([source], made, metadata)


def plan_join(trunk: GGUF, head: GGUF) -> Rewrite:
    """Plan the file of a trunk and of the MTP layers of another file.

    DataError if they are not of one model, or if the trunk has MTP layers already.
    """
    arch, main, further = _layers(head)
    there = trunk.metadata.get(f"{arch}.nextn_predict_layers") or 0
    if there:
        raise DataError(
            f"{trunk.path}: it has {there} MTP layer(s) already; leave them out with `quantkit mtp split --trunk`"
        )
    validate.describe(trunk.metadata, trunk.tensors, trunk.path)
    _require_same(trunk, head, arch, main)
    metadata = _counted(trunk.metadata, arch, main, main + further, further, head.metadata)
    made = [copied(tensor, shard) for shard, tensor in by_shard(trunk)]
    layers = [tensor for tensor in head.tensors.values() if _layer(tensor.name, -1) >= main]
    last = max(i for i, tensor in enumerate(made) if tensor.spec.name.startswith("blk."))
    made[last + 1 : last + 1] = [copied(tensor, made[last].shard) for tensor in layers]
    _keep_records(metadata, made, head.metadata)
    specs = {tensor.spec.name: tensor.spec for tensor in made}
    validate.describe(metadata, specs, trunk.path)
    _check_layers(metadata, specs, head.path)
    return Rewrite([trunk, head], made, metadata)


def _check_layers(metadata: Metadata, tensors: Mapping[str, Shaped], path: str | os.PathLike[str]) -> None:
    """FormatError, UnsupportedError for MTP layers that are incomplete or contradict the metadata."""
    try:
        arch = archs.get(str(metadata["general.architecture"]))
        hparams = arch.hparams(metadata, tensors.keys())
    except FormatError as error:
        raise FormatError(f"{path}: {error}; {validate.REMEDY}") from None
    except (UnsupportedError, UnknownNameError) as error:
        raise UnsupportedError(f"{path}: {error}") from None
    validate.check_mtp(arch, hparams, tensors, path)


def _layers(source: GGUF) -> tuple[str, int, int]:
    """(architecture, blocks of the trunk, MTP layers) of a file that has MTP layers."""
    arch = source.metadata.get("general.architecture")
    count, further = (source.metadata.get(f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
    if not isinstance(arch, str) or not isinstance(count, int) or type(further) is not int or not further:
        raise UnsupportedError(
            f"{source.path}: the file has no MTP layers ({arch}.nextn_predict_layers is {further!r})"
        )
    main = count - further
    if further < 0 or main < 1:
        raise FormatError(
            f"{source.path}: metadata key {arch}.nextn_predict_layers = {further}, {arch}.block_count = {count}; "
            f"{validate.REMEDY}"
        )
    there = {_layer(name, -1) for name in source.tensors}
    if absent := next((i for i in range(main, count) if i not in there), 0):
        raise UnsupportedError(
            f"{source.path}: {arch}.nextn_predict_layers = {further}, but there are no tensors of blk.{absent}: they "
            "were left out; take the file that has them"
        )
    return arch, main, further


def _layer(name: str, without: int) -> int:
    number = split_name(name)[1] if name.startswith("blk.") else None
    return without if number is None else number


def _counted(
    source: Metadata, arch: str, before: int, layers: int, further: int, longer: Metadata | None = None
) -> Metadata:
    """The metadata of so many layers, of which `further` are MTP layers. `longer` has the values per layer beyond."""
    metadata = source.copy()
    metadata.set(f"{arch}.block_count", layers, "u32")
    if further or f"{arch}.nextn_predict_layers" in metadata:
        metadata.set(f"{arch}.nextn_predict_layers", further, "u32")
    for key, value in source.items():
        if is_of_layers(key, value, arch, before):
            rest = longer.get(key) if longer is not None else None
            more = rest[before:] if isinstance(rest, list) else []
            metadata.set(key, [*value[:layers], *more], source.kind(key))
    return metadata


def _require_same(trunk: GGUF, head: GGUF, arch: str, main: int) -> None:
    other = trunk.metadata.get("general.architecture")
    if other != arch:
        raise DataError(f"{head.path}: MTP layers of {arch}, {trunk.path} is {other}")
    if (count := trunk.metadata.get(f"{arch}.block_count")) != main:
        raise DataError(f"{head.path}: MTP layers of a model with {main} blocks, {trunk.path} has {count}")
    counts = (f"{arch}.block_count", f"{arch}.nextn_predict_layers")
    for key, mine in trunk.metadata.items():
        if not key.startswith(f"{arch}.") or key in counts:
            continue
        theirs = head.metadata.get(key, mine)
        if isinstance(mine, list) and isinstance(theirs, list):
            theirs = theirs[: len(mine)]  # of values per layer the head has more
        if mine != theirs:
            raise DataError(f"{head.path}: {key} is {theirs}, in {trunk.path} it is {mine}: not one model")
    tokens = [file.metadata.get("tokenizer.ggml.tokens") for file in (trunk, head)]
    if tokens[0] != tokens[1]:
        raise DataError(f"{head.path}: other tokens than {trunk.path}: not one model")


def _keep_records(metadata: Metadata, made: list[RewrittenTensor], *others: Metadata) -> None:
    """Keep the provenance records of the tensors that are there, if there are any."""
    known = provenance.records(metadata)
    if not known:
        return
    for other in others:
        known |= provenance.records(other)
    records = [known[tensor.spec.name] for tensor in made if tensor.spec.name in known]
    metadata.set(provenance.SOURCE, provenance.of_sources(records), "str")
    metadata.set(provenance.TENSORS, [str(record) for record in records], "str")
