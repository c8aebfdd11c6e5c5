"""Tensor parallelism (-sm graph): which part of each tensor of a layer is on which device. Pure functions.

    recurrent   by key head with its value heads: queries, keys and values in qkv and the convolution, columns of out
    attention   by group of query heads with one KV head: rows of q, k and v, columns of out, sinks
    latents     by head: rows of q, kv_b, k_b and v_b, columns of out; latents and their projections are replicated
    feed-forward, shared experts   rows of gate and up, columns of down
    experts     by number, or by column as a feed-forward
    output      by row, which is a token of the vocabulary
    the rest    norms, routers and biases of sums are replicated

The partial results of the devices are summed (all-reduce). A tensor is split at whole blocks of quantized rows and at
whole groups of interleaved rows, as close to the shares as possible; if that is impossible, an error names the tensor.
With fewer heads than devices, some devices have no head of a layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.archs.common import blocks, validate
from quantkit.errors import UnsupportedError
from quantkit.placement.tensor_info import TensorInfo


@dataclass(frozen=True)
class Sharding:
    """How an axis of a tensor is split over devices.

    Device i has the units bounds[i] to bounds[i + 1] of each segment (offset, size), of `size` elements each; its part
    is the concatenation over segments.
    """

    axis: int
    bounds: tuple[int, ...]
    segments: tuple[tuple[int, int], ...] = ((0, 1),)

    def ranges(self, device: int) -> list[tuple[int, int]]:
        """(start, stop) of the elements of a device on the axis, one pair per segment."""
        first, stop = self.bounds[device], self.bounds[device + 1]
        return [(at + first * size, at + stop * size) for at, size in self.segments]

    def width(self, device: int) -> int:
        """The number of elements of a device on the axis."""
        return sum(stop - first for first, stop in self.ranges(device))

    def shape(self, whole: Sequence[int], device: int) -> tuple[int, ...]:
        """The shape of a device's part of a tensor of shape `whole`."""
        return (*whole[: self.axis], self.width(device), *whole[self.axis + 1 :])


Segments = tuple[tuple[int, int], ...]
SplitAxis = tuple[str, int, Segments]  # a tensor's name, the axis that is split, and its segments


def _split_axis(name: str, axis: int, size: int) -> SplitAxis:
    return name, axis, ((0, size),)


def of_model(
    parts: Sequence[blocks.Block],
    head: blocks.Head,
    tensors: Mapping[str, TensorInfo],
    sharded: Iterable[str],
    shares: Mapping[int, Sequence[float]],
    experts_by: str = "number",
    n_layers: int | None = None,
) -> dict[str, Sharding]:
    """The sharding of each tensor of `sharded` that is split. The others are replicated on the devices of their layer.

    shares      the share of each device, by layer; the output is the layer after the last
    experts_by  "number" or "columns"
    n_layers    the index of the output, if the file has more layers than run

    UnsupportedError for a kind of layer that cannot be sharded, and if alignment allows no split.
    """
    selected, shardings = set(sharded), dict[str, Sharding]()
    for block in parts:
        if block.layer in shares:
            _require_sequential(block)
        for part in block.parts if block.layer in shares else ():
            for axes, count in _groups(part, block.layer, tensors, experts_by):
                if axes[0][0] in selected:
                    shardings |= _split(axes, count, tensors, shares[block.layer])
    last = n_layers or len(parts)
    if last in shares and head.output.weight in selected:
        rows = tensors[head.output.weight].shape[0]
        shardings |= _split(_with_bias(head.output, 0, 1), rows, tensors, shares[last])
    return {name: sharding for name, sharding in shardings.items() if name in selected}


def _groups(
    part: blocks.Part, layer: int, tensors: Mapping[str, TensorInfo], experts_by: str
) -> list[tuple[list[SplitAxis], int]]:
    """Groups of tensors that are split together, with their number of units (heads, columns or experts)."""
    if isinstance(part, (blocks.Attention, blocks.FeedForward)) and part.sub_norm is not None:
        raise UnsupportedError(
            f"{part.sub_norm.weight}: the outputs of all heads or columns are normalized together, which -sm graph "
            "cannot shard; use -sm layer"
        )
    if isinstance(part, blocks.Experts) and part.routed_norm is not None:
        raise UnsupportedError(
            f"{part.routed_norm.weight}: the experts' sum is normalized before the dense feed-forward is added, which "
            "-sm graph cannot shard; use -sm layer"
        )
    if isinstance(part, blocks.Attention):
        return [(_attention(part, tensors), part.kv_heads)]
    if isinstance(part, blocks.LatentAttention):
        return [(_latents(part, tensors), part.heads)]
    if isinstance(part, blocks.DeltaNet):
        return [(_recurrent(part, tensors), part.sizes.key_heads)]
    if isinstance(part, blocks.FeedForward):
        return [_gated(part, tensors)]
    if isinstance(part, blocks.Experts):
        found = [_experts(part, tensors, experts_by)]
        return found if part.shared is None else [*found, _gated(part.shared, tensors)]
    raise UnsupportedError(f"blk.{layer}: -sm graph cannot shard {type(part).__name__} layers yet; use -sm layer")


def _attention(part: blocks.Attention, tensors: Mapping[str, TensorInfo]) -> list[SplitAxis]:
    group = part.heads // part.kv_heads
    first, last = part.q.rows or (0, tensors[part.q.weight].shape[0])
    rows = last - first
    if part.norms_across_heads:
        norm = part.q_norm or part.k_norm
        raise UnsupportedError(
            f"{norm.weight if norm else part.q.weight}: queries of all heads are normalized together, which -sm graph "
            "cannot shard; use -sm layer"
        )
    each = group * part.head_dim_k * (2 if part.gated else 1)
    if rows != part.kv_heads * each:
        raise UnsupportedError(
            f"{part.q.weight} has {rows} rows, {part.heads} heads of {part.head_dim_k} are "
            f"{part.kv_heads * each}: -sm graph cannot shard queries with other rows; use -sm layer"
        )
    return [
        *_with_bias(part.q, 0, each),
        *_with_bias(part.k, 0, part.head_dim_k),
        *_with_bias(part.v, 0, part.head_dim_v),
        _split_axis(part.out.weight, 1, group * part.head_dim_v),
        *([_split_axis(part.sinks, 0, group)] if part.sinks else []),
        *(_with_bias(part.head_gate, 0, group) if part.head_gate else []),
    ]


def _recurrent(part: blocks.DeltaNet, tensors: Mapping[str, TensorInfo]) -> list[SplitAxis]:
    """By key head. The value heads of a key head are adjacent, or, if `tiled`, one key-head count apart."""
    sizes = part.sizes
    each = sizes.value_heads // sizes.key_heads

    def values(dim: int, at: int = 0) -> Segments:
        if not part.tiled or each == 1:
            return ((at, each * dim),)
        return tuple((at + i * sizes.key_heads * dim, dim) for i in range(each))

    keys, dim = sizes.head_dim_k, sizes.head_dim_v
    mixed = ((0, keys), (sizes.keys, keys), *values(dim, 2 * sizes.keys))
    if part.gate is None:
        whole_heads: Segments = ((0, tensors[part.qkv.weight].shape[0] // sizes.key_heads),)
        axes: list[SplitAxis] = [(part.qkv.weight, 0, whole_heads)]
    else:
        axes = [(part.qkv.weight, 0, mixed), (part.gate.weight, 0, values(dim))]
    axes += [(linear.weight, 0, values(1)) for linear in (part.beta, part.alpha) if linear is not None]
    if part.ba is not None:
        axes.append(_split_axis(part.ba.weight, 0, 2 * each))
    axes += [(part.conv, 0, mixed), (part.a, 0, values(1)), (part.dt, 0, values(1))]
    return [*axes, (part.out.weight, 1, values(dim))]


def _latents(part: blocks.LatentAttention, tensors: Mapping[str, TensorInfo]) -> list[SplitAxis]:
    axes = [*_with_bias(part.q, 0, part.head_dim_k), _split_axis(part.out.weight, 1, part.head_dim_v)]
    for linear, rows in (
        (part.kv_b, part.nope + part.head_dim_v),
        (part.k_b, part.kv_lora),
        (part.v_b, part.head_dim_v),
    ):
        if linear is not None:
            axes.append(_split_axis(linear.weight, 0, 1 if len(tensors[linear.weight].shape) == 3 else rows))
    return axes


def _gated(part: blocks.FeedForward, tensors: Mapping[str, TensorInfo]) -> tuple[list[SplitAxis], int]:
    axes = [*_with_bias(part.gate, 0, 1), *_with_bias(part.up, 0, 1), _split_axis(part.down.weight, 1, 1)]
    return axes, tensors[part.gate.weight].shape[0]


def _experts(part: blocks.Experts, tensors: Mapping[str, TensorInfo], by: str) -> tuple[list[SplitAxis], int]:
    if by == "number":
        return [axis for linear in part.matrices for axis in _with_bias(linear, 0, 1)], part.stacked
    segments: Segments = ((0, 1), (part.ff, 1)) if part.fused else ((0, 1),)
    entering = part.matrices[:-1]
    axes: list[SplitAxis] = [(linear.weight, 1, segments) for linear in entering]
    axes.append(_split_axis(part.down.weight, 2, 1))
    return axes + [(linear.bias, 1, segments) for linear in entering if linear.bias], part.ff


def _require_sequential(block: blocks.Block) -> None:
    """UnsupportedError for parallel parts: ranks sum up what each part adds before the next one."""
    if block.parallel:
        raise UnsupportedError(
            f"blk.{block.layer}: attention and feed-forward are computed in parallel, which -sm graph cannot shard; "
            "use -sm layer"
        )


def _with_bias(linear: blocks.Linear, axis: int, size: int) -> list[SplitAxis]:
    if linear.rows is not None:
        raise UnsupportedError(f"{linear.weight} holds several matrices, which -sm graph cannot shard; use -sm layer")
    return [_split_axis(linear.weight, axis, size), *([_split_axis(linear.bias, axis, size)] if linear.bias else [])]


def _split(
    axes: Sequence[SplitAxis], count: int, tensors: Mapping[str, TensorInfo], shares: Sequence[float]
) -> dict[str, Sharding]:
    """The shardings of tensors that are split together into `count` units."""
    unit = 1
    for name, axis, segments in axes:
        align = _alignment(name, axis, tensors)
        for at, size in segments:
            unit = math.lcm(unit, align // math.gcd(align, size), 1 if at % align == 0 else count + 1)
    ends = [min(1.0, end) for end in itertools.accumulate(shares)]
    bounds = (0, *(min(count, round(end * count / unit) * unit) for end in ends[:-1]), count)
    busy, asked = (len({*b}) - 1 for b in (bounds, [0, *(round(end * count) for end in ends)]))
    if busy < 2 <= asked:
        name, axis, segments = max(axes, key=lambda a: _alignment(a[0], a[1], tensors) / a[2][0][1])
        align, kind = _alignment(name, axis, tensors), tensors[name].type
        what = "columns" if _is_last(name, axis, tensors) else "rows"
        raise UnsupportedError(
            f"{name}: {kind.name} can be split at multiples of {align} {what}, so its {tensors[name].shape[axis]} "
            f"cannot be shared by {asked} devices; use -sm layer, or a type with smaller blocks for this tensor"
        )
    return {
        name: Sharding(axis, bounds, segments) if len(segments) > 1 else Sharding(axis, _times(bounds, segments[0][1]))
        for name, axis, segments in axes
    }


def _times(bounds: Iterable[int], size: int) -> tuple[int, ...]:
    return tuple(bound * size for bound in bounds)


def _is_last(name: str, axis: int, tensors: Mapping[str, TensorInfo]) -> bool:
    return axis == len(tensors[name].shape) - 1


def _alignment(name: str, axis: int, tensors: Mapping[str, TensorInfo]) -> int:
    """An axis of a tensor can be split at multiples of this."""
    kind, shape = tensors[name].type, tensors[name].shape
    if kind.whole_tensor:
        return shape[axis]
    if _is_last(name, axis, tensors):
        return kind.block_size
    between = math.prod(shape[axis + 1 : -1])  # rows per element of the axis
    return kind.interleave // math.gcd(kind.interleave, between)


# ----------------------------------------------------------------------------------------------------- bytes, for plans


def of_metadata(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[str, object],
    sharded: Iterable[str],
    shares: Mapping[int, Sequence[float]],
    experts_by: str = "number",
) -> dict[str, Sharding]:
    """`of_model` from metadata and tensor names, without the weights."""
    found = validate.describe(metadata, tensors)
    return of_model(found.blocks, found.head, tensors, sharded, shares, experts_by, found.hparams.n_layer)


def bytes_of(tensor: TensorInfo, cut: Sharding | None, count: int) -> list[int]:
    """Bytes of a tensor on each of `count` devices; without a sharding it is replicated."""
    if cut is None:
        return [tensor.type.tensor_bytes(tensor.shape)] * count
    shapes = (cut.shape(tensor.shape, i) for i in range(count))
    return [tensor.type.tensor_bytes(shape) if math.prod(shape) else 0 for shape in shapes]


def cache_shares(layer: int, found: Mapping[str, Sharding], count: int, mla: int) -> list[float]:
    """The share of a layer's KV cache on each device: by heads; latents are replicated on devices with a head."""
    keys, out = found.get(f"blk.{layer}.attn_k.weight"), found.get(f"blk.{layer}.ssm_out.weight")
    cut = keys or out or found.get(f"blk.{layer}.attn_q_b.weight") or found.get(f"blk.{layer}.attn_q.weight")
    if cut is None:
        return [1.0] * count
    widths = [cut.width(device) for device in range(count)]
    if keys is None and out is None and mla:
        return [float(width > 0) for width in widths]
    return [width / max(1, sum(widths)) for width in widths]
