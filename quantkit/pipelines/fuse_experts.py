"""Fuse gate and up of experts in one tensor, or write them apart: bytes are moved, nothing is decoded.

    job = plan_fuse(open("model.gguf"))        ffn_gate_exps and ffn_up_exps become ffn_gate_up_exps
    job = plan_separate(open("fused.gguf"))    the opposite; after a fuse, the tensors that were fused

`archs/common/fused_experts.py` describes both forms. Layers whose gate and up differ in type stay separate: a
tensor has one type. Quantizing with --custom-q can give both the same.
"""

from __future__ import annotations

from quantkit.archs.common import fused_experts
from quantkit.errors import DataError, UnsupportedError
from quantkit.formats.gguf import GGUF, Tensor, TensorSpec
from quantkit.pipelines.rewrite import Rewrite, RewrittenTensor, Run, by_shard, copied, require_cuttable


def plan_fuse(source: GGUF) -> Rewrite:
    """Plan a file with fused experts. `notes` say which layers stay as they are, and why.

    UnsupportedError if no layer can be fused.
    """
    made: list[RewrittenTensor] = []
    notes: list[str] = []
    fused: set[str] = set()
    for shard, tensor in by_shard(source):
        name = fused_experts.fused_name(tensor.name)
        if name is None:
            made.append(copied(tensor, shard))
            continue
        pair = [source.tensors.get(part) for part in fused_experts.separate_names(name) or ()]
        reason = _why_not(name, source, pair)
        if reason:
            made.append(copied(tensor, shard))
            notes += [reason] if reason not in notes else []
        elif name not in fused:
            fused.add(name)
            made.append(_fused(name, [t for t in pair if t], shard))
    job = Rewrite([source], made, source.metadata.copy(), notes)
    if not job.changed:
        found = notes[0] if notes else "it has no tensors ffn_gate_exps and ffn_up_exps"
        raise UnsupportedError(f"{source.path}: no experts to fuse: {found}")
    return job


def plan_separate(source: GGUF) -> Rewrite:
    """Plan a file with gate and up of experts apart. UnsupportedError if it has no fused experts."""
    made: list[RewrittenTensor] = []
    for shard, tensor in by_shard(source):
        names = fused_experts.separate_names(tensor.name)
        made += [copied(tensor, shard)] if names is None else _separate(names, tensor, shard)
    job = Rewrite([source], made, source.metadata.copy())
    if not job.changed:
        raise UnsupportedError(
            f"{source.path}: it has no tensors {fused_experts.STEM}, so there is nothing to separate"
        )
    return job


def _why_not(name: str, source: GGUF, pair: list[Tensor | None]) -> str:
    """Why gate and up of a layer stay apart; "" if they can be fused."""
    gate, up = pair
    if gate is None or up is None:
        return f"{name}: the file has only one of its halves"
    if gate.type is not up.type:
        return f"{name}: gate is {gate.type.name}, up is {up.type.name}; a tensor has one type"
    if gate.shape != up.shape or len(gate.shape) < 2:
        return f"{name}: gate has shape {gate.shape}, up {up.shape}"
    bias = name.endswith(".bias")
    other = [t.name.rpartition(".")[0] + (".weight" if bias else ".bias") for t in (gate, up)]
    there = [source.tensors[part] for part in other if part in source.tensors]
    if len(there) == 2 and there[0].type is not there[1].type:
        return f"{name}: {there[0].name} is {there[0].type.name}, {there[1].name} {there[1].type.name}"
    if any(part.rpartition(".")[0] + ".scale" in source.tensors for part in other):
        return f"{name}: its halves have scales of their own"
    return ""


def _fused(name: str, pair: list[Tensor], shard: int) -> RewrittenTensor:
    gate, up = pair
    require_cuttable(gate, gate.shape[1] if len(gate.shape) > 2 else 1)
    each = gate.nbytes // gate.shape[0]
    runs = tuple(Run(part, expert * each, each) for expert in range(gate.shape[0]) for part in (gate, up))
    return RewrittenTensor(TensorSpec(name, fused_experts.fused_shape(gate.shape), gate.type), runs, shard)


def _separate(names: tuple[str, str], tensor: Tensor, shard: int) -> list[RewrittenTensor]:
    if len(tensor.shape) < 2 or tensor.shape[1] % 2:
        raise DataError(f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}, which has no two halves")
    if tensor.scale is not None:
        raise UnsupportedError(f"{tensor.path}: tensor {tensor.name} is scaled by {tensor.scale.name}, of both halves")
    shape = fused_experts.half_shape(tensor.shape)
    require_cuttable(tensor, shape[1] if len(shape) > 2 else 1)
    each = tensor.nbytes // tensor.shape[0] // 2
    return [
        RewrittenTensor(
            TensorSpec(name, shape, tensor.type),
            tuple(Run(tensor, (2 * expert + half) * each, each) for expert in range(shape[0])),
            shard,
        )
        for half, name in enumerate(names)
    ]
