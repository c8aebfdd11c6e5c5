"""Leave experts or layers out of a file: what stays is copied bit for bit, in any type.

    job = plan_prune(open("model.gguf"), {3: [0, 2, 5], …}, drop_layers=[7])

Of each layer with experts the same number stays, in their order: of the stacked matrices, their scales, the router's
rows, its bias and the choice bias. `expert_count` follows. Layers that stay are numbered anew; `block_count`,
`leading_dense_block_count`, `nextn_predict_layers` and values per layer follow. A file whose remaining layers would
compute otherwise, because their number decides about windows or recurrence, is refused.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from quantkit import archs
from quantkit.archs.common import blocks, validate
from quantkit.archs.common.tensors import split_name
from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.formats.gguf import GGUF, Metadata, Tensor
from quantkit.pipelines.conversion.metadata import size_label
from quantkit.pipelines.rewrite import Rewrite, RewrittenTensor, by_shard, copied, is_of_layers, selected

SALIENCY = "quantkit.saliency/1"  # schema of the files of `quantkit saliency`
_SIZE = "general.size_label"
_NGRAMS = "ple.layers"  # the key that lists layers with n-grams
_OF_EXPERTS = re.compile(
    r"blk\.\d+\.(ffn_\w+_exps\.(weight|bias|scale|input_scale)|(ffn_gate_inp|exp_probs_b)\.(weight|bias))"
)  # gemma4's ffn_gate_inp.scale is a norm of the router's input


def most_salient(saliency: Mapping[int, Sequence[float]], keep: int, groups: int = 1) -> dict[int, list[int]]:
    """The `keep` experts of highest saliency of each layer, in their order; equally many of each group.

    Equal saliencies prefer the lower number. DataError if `keep` is impossible.
    """
    found = {}
    for layer, scores in saliency.items():
        if not 1 <= keep <= len(scores):
            raise DataError(f"--prune-experts {keep}: layer {layer} has {len(scores)} experts")
        if keep % groups:
            raise DataError(f"--prune-experts {keep}: the experts are in {groups} groups; keep a multiple of {groups}")
        each = len(scores) // groups
        chosen: list[int] = []
        for first in range(0, len(scores), each):
            order = np.argsort(-np.asarray(scores[first : first + each]), kind="stable")
            chosen += [first + int(i) for i in order[: keep // groups]]
        found[layer] = sorted(chosen)
    return found


def plan_prune(
    source: GGUF, keep_experts: Mapping[int, Sequence[int]] | None = None, drop_layers: Collection[int] = ()
) -> Rewrite:
    """Plan a file without some experts and layers.

    keep_experts   by layer, the experts that stay; None: all. It has to name every layer with experts that stays
    drop_layers    the layers that are left out

    DataError or UnsupportedError for what the file does not have, or what would not run as before.
    """
    described = validate.describe(source.metadata, source.tensors, source.path)
    hp = described.hparams
    if any(layer < hp.n_layer and layer != block.layer for block in described.blocks for layer in block.layers):
        raise UnsupportedError(
            f"{source.path}: a layer of {hp.arch} is two blocks, whose experts are in the first one; prune does not "
            "handle such files"
        )
    if wrong := [layer for layer in drop_layers if not 0 <= layer < hp.n_layer]:
        raise DataError(f"{source.path}: --prune-layers {wrong[0]}: the file has layers 0 to {hp.n_layer - 1}")
    tables = (part.table for block in described.blocks for part in block.parts if isinstance(part, blocks.LayerInput))
    if drop_layers and (table := next(tables, None)) is not None:
        raise UnsupportedError(
            f"{source.path}: {table} has the embeddings of all layers side by side; prune leaves no layer out of such "
            "files"
        )
    stay = [layer for layer in range(hp.n_layer) if layer not in set(drop_layers)]
    if not any(layer < hp.n_main for layer in stay):
        raise DataError(f"{source.path}: --prune-layers leaves no layer")
    number_of = {old: new for new, old in enumerate(stay)}
    keep = _checked(source, keep_experts, number_of, described) if keep_experts is not None else {}
    made: list[RewrittenTensor] = []
    for shard, tensor in by_shard(source):
        layer = split_name(tensor.name)[1] if tensor.name.startswith("blk.") else None
        if layer is None or layer in number_of:
            made.append(_tensor(tensor, shard, layer, number_of, keep))
    metadata = _metadata(source.metadata, hp, stay, keep)
    if _SIZE in metadata:
        metadata.set(_SIZE, size_label(hp.arch, [tensor.spec for tensor in made]), "str")
    _require_same_layers(source, described, made, metadata, stay)
    return Rewrite([source], made, metadata)


def _tensor(
    tensor: Tensor, shard: int, layer: int | None, number_of: Mapping[int, int], keep: Mapping[int, Sequence[int]]
) -> RewrittenTensor:
    if layer is None:
        return copied(tensor, shard)
    name = f"blk.{number_of[layer]}.{tensor.name.split('.', 2)[2]}"
    if layer in keep and _OF_EXPERTS.fullmatch(tensor.name):
        return selected(tensor, keep[layer], shard, name)
    return copied(tensor, shard, name)


def _checked(
    source: GGUF, keep: Mapping[int, Sequence[int]], number_of: Mapping[int, int], described: validate.Description
) -> dict[int, list[int]]:
    """The experts to keep of the layers that stay. DataError unless there is one number of them, in range."""
    found: dict[int, list[int]] = {}
    routers = {split_name(n)[1]: t for n, t in source.tensors.items() if n.endswith(".ffn_gate_inp.weight")}
    for layer, tensor in routers.items():
        if layer is None or layer not in number_of:
            continue
        if layer not in keep:
            raise DataError(
                f"{source.path}: nothing says which experts of blk.{layer} stay; saliencies are of the trunk, without "
                "MTP layers: leave them out with --prune-layers, or list their experts in FILE"
            )
        numbers = sorted(keep[layer])
        if not numbers:
            raise DataError(f"{source.path}: none of the {tensor.shape[0]} experts of blk.{layer} stays")
        if wrong := [number for number in numbers if not 0 <= number < tensor.shape[0]]:
            raise DataError(f"{source.path}: blk.{layer} has experts 0 to {tensor.shape[0] - 1}, not {wrong[0]}")
        if twice := [a for a, b in itertools.pairwise(numbers) if a == b]:
            raise DataError(f"{source.path}: expert {twice[0]} of blk.{layer} is listed twice")
        _require_even_groups(source, described.hparams, layer, tensor.shape[0], numbers)
        found[layer] = numbers
    if not found:
        raise UnsupportedError(f"{source.path}: the file has no experts to prune")
    if others := sorted(keep.keys() - routers.keys()):
        raise DataError(
            f"{source.path}: experts of blk.{others[0]} are listed, and the file has none there: the list is of "
            f"another model; experts are in {len(routers)} layers"
        )
    parts = (part for block in described.blocks for part in block.parts if isinstance(part, blocks.Experts))
    if tables := [part.table for part in parts if part.table and split_name(part.table)[1] in found]:
        raise UnsupportedError(
            f"{source.path}: {tables[0]} names the experts of each token, also those that would be left out; prune "
            "handles experts that a router selects"
        )
    counts = {len(numbers): layer for layer, numbers in found.items()}
    if len(counts) > 1:
        (a, one), (b, other), *_ = counts.items()
        raise DataError(f"{source.path}: {a} experts of blk.{one} stay and {b} of blk.{other}; a file has one number")
    return found


def _require_even_groups(source: GGUF, hp: blocks.HParams, layer: int, count: int, keep: Sequence[int]) -> None:
    """DataError if more experts of one group stay than of another, and a token selects groups first."""
    groups, used = hp.n_expert_groups, hp.n_expert_groups_used
    if used >= groups:
        return
    each = count // groups  # a group is a run of consecutive experts
    counts = [sum(number // each == group for number in keep) for group in range(groups)]
    if len(set(counts)) > 1:
        raise DataError(
            f"{source.path}: {max(counts)} experts of one group of blk.{layer} stay and {min(counts)} of another; a "
            f"token selects {used} of the {groups} groups of {each} experts first: keep as many of each"
        )


def _metadata(source: Metadata, hp: blocks.HParams, stay: Sequence[int], keep: Mapping[int, Sequence[int]]) -> Metadata:
    """The metadata of what stays. DataError if fewer experts stay than a token uses."""
    metadata, a = source.copy(), hp.arch
    if keep:
        count = len(next(iter(keep.values())))
        per_group = count // hp.n_expert_groups
        if (
            count < hp.n_expert_used
            or count % hp.n_expert_groups
            or (hp.n_expert_used > hp.n_expert_groups_used * per_group)
        ):
            raise DataError(
                f"{count} experts in {hp.n_expert_groups} groups stay; a token uses {hp.n_expert_used} experts of "
                f"{hp.n_expert_groups_used} groups"
            )
        metadata.set(f"{a}.expert_count", count, "u32")
    if len(stay) == hp.n_layer:
        return metadata
    for key, number in (
        ("block_count", len(stay)),
        ("leading_dense_block_count", sum(layer < hp.n_leading_dense for layer in stay)),
        ("nextn_predict_layers", sum(layer >= hp.n_main for layer in stay)),
    ):
        if key == "block_count" or f"{a}.{key}" in metadata:
            metadata.set(f"{a}.{key}", number, "u32")
    if numbers := source.get(f"{a}.{_NGRAMS}"):
        if lost := [layer for layer in numbers if layer not in stay]:
            raise UnsupportedError(f"blk.{lost[0]} looks up n-grams in a table of its own; it has to stay")
        metadata.set(f"{a}.{_NGRAMS}", [stay.index(layer) for layer in numbers], source.kind(f"{a}.{_NGRAMS}"))
    scalars = {scalar.key for scalar in archs.get(a).layer_scalars}
    for key, value in source.items():
        of_layers = key in scalars and isinstance(value, list) and len(value) == hp.n_layer
        if of_layers or is_of_layers(key, value, a, hp.n_layer):
            metadata.set(key, [value[layer] for layer in stay], source.kind(key))
    return metadata


def _require_same_layers(
    source: GGUF, before: validate.Description, made: Sequence[RewrittenTensor], metadata: Metadata, stay: Sequence[int]
) -> None:
    """UnsupportedError if a layer would compute something else under its new number."""
    specs = {tensor.spec.name: tensor.spec for tensor in made}
    if wrong := validate.problems(metadata, specs):  # not of the file itself, which was checked
        raise UnsupportedError(
            f"{source.path}: {wrong[0]}, if {len(stay)} layers stay and are numbered anew; leave out the last layers, "
            "or whole periods of layers"
        )
    after = validate.describe(metadata, specs, source.path)
    old = {block.layer: block for block in before.blocks}
    count = f"count={before.hparams.n_expert}", f"count={after.hparams.n_expert}"
    for block in after.blocks:
        number = stay[block.layer]
        expected = repr(old[number].parts).replace(f"'blk.{number}.", f"'blk.{block.layer}.").replace(*count)
        if repr(block.parts) != expected:
            raise UnsupportedError(
                f"{source.path}: blk.{number} would become blk.{block.layer}, and {before.arch.name} computes that "
                "layer otherwise: its number decides; leave out whole periods of layers"
            )


def kept_experts(record: Mapping[str, object], path: object) -> dict[int, list[int]]:
    """The experts by layer that a JSON file lists: {"keep": {"3": [0, 2, 5], …}}. FormatError for other contents."""
    listed = record.get("keep")
    if not isinstance(listed, Mapping) or not all(_is_list(key, value, _is_integer) for key, value in listed.items()):
        raise FormatError(f'{path}: expected {{"keep": {{"LAYER": [EXPERT, …], …}}}}')
    return {int(layer): [int(number) for number in numbers] for layer, numbers in listed.items()}


def saliencies(record: Mapping[str, object], path: object, experts: object) -> dict[int, list[float]]:
    """The saliencies by layer of a file of `quantkit saliency`. FormatError for other contents.

    `experts` is how many a layer of the model has.
    """
    if (schema := record.get("schema")) != SALIENCY:
        raise FormatError(f"{path}: schema {schema!r}, not {SALIENCY!r}: not a file of `quantkit saliency`")
    layers = record.get("layers")
    values: dict[Any, Any] = {}
    if isinstance(layers, Mapping):
        values = {key: value.get("saliency") for key, value in layers.items() if isinstance(value, Mapping)}
    if not values or not all(_is_list(key, value, _is_finite) for key, value in values.items()):
        raise FormatError(f"{path}: not a file of `quantkit saliency`")
    for layer, numbers in values.items():
        if len(numbers) != experts:
            raise FormatError(
                f"{path}: layer {layer} has {len(numbers)} saliencies, the model has {experts} experts; they are of "
                "another model: measure them again with `quantkit saliency`"
            )
    return {int(layer): [float(number) for number in numbers] for layer, numbers in values.items()}


def _is_list(key: object, value: object, fits: Callable[[object], bool]) -> bool:
    """Whether a key is the number of a layer and its value a list of numbers that fit."""
    numbers = isinstance(value, list) and all(map(fits, value))
    return isinstance(key, str) and key.isdecimal() and len(key) < 10 and numbers


def _is_integer(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_finite(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max
