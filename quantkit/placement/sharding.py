"""How the tensors of a layer are cut among devices that share it (-sm graph): pure functions of shapes, types, shares.

    recurrent   by key heads, with their value heads: of queries, keys and values, one behind the other in qkv and in
                the convolution, each its own; columns of out
    attention   by groups of query heads that share a key/value head: rows of q, k and v, columns of out, sinks
    latents     by heads: rows of q, kv_b, k_b and v_b, columns of out; the latents and what makes them are on all
    feed-forward, shared experts   rows of gate and up, columns of down
    experts     by number, or by columns as a feed-forward
    output      by rows, so by tokens of the vocabulary
    the rest    norms, routers, biases of what is added up: on all, whole

What a device makes of its part is added up over all. Cuts are at whole blocks of quantized rows and at whole groups of
interleaved ones, the nearest ones to the shares; where there is none, an error says which tensor is in the way. Devices
that get no head of a layer, because there are fewer than devices, attend to nothing there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quantkit.archs.common import blocks, validate
from quantkit.errors import UnsupportedError
from quantkit.types import QuantType


class Info(Protocol):
    """What is asked of a tensor."""

    @property
    def type(self) -> QuantType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Cut:
    """What each device has of an axis of a tensor's shape: of each segment (offset, size) the units bounds[i] …
    bounds[i + 1], of `size` elements each, one segment after another."""

    axis: int
    bounds: tuple[int, ...]
    segments: tuple[tuple[int, int], ...] = ((0, 1),)

    def ranges(self, device: int) -> list[tuple[int, int]]:
        """The elements that a device has."""
        first, stop = self.bounds[device], self.bounds[device + 1]
        return [(at + first * size, at + stop * size) for at, size in self.segments]

    def width(self, device: int) -> int:
        return sum(stop - first for first, stop in self.ranges(device))

    def shape(self, whole: Sequence[int], device: int) -> tuple[int, ...]:
        return (*whole[: self.axis], self.width(device), *whole[self.axis + 1 :])


Segments = tuple[tuple[int, int], ...]
Side = tuple[str, int, Segments]  # a tensor's name, its axis, and of that axis what goes with each unit


def _side(name: str, axis: int, size: int) -> Side:
    return name, axis, ((0, size),)


def of_model(
    parts: Sequence[blocks.Block],
    head: blocks.Head,
    tensors: Mapping[str, Info],
    sliced: Iterable[str],
    shares: Mapping[int, Sequence[float]],
    experts_by: str = "number",
    n_layers: int | None = None,
) -> dict[str, Cut]:
    """The cut of each tensor of `sliced` that is cut; those that are not are on every device of their layer, whole.

    shares      of each layer, and of the output as the layer after the last
    experts_by  "number" or "columns"
    n_layers    the number of the output, where there are more layers than are run

    UnsupportedError for layers of a kind that is not cut, and where alignment leaves no cut.
    """
    mine, found = set(sliced), dict[str, Cut]()
    for block in parts:
        for part in block.parts if block.layer in shares else ():
            for sides, count in _cuttable(part, block.layer, tensors, experts_by):
                if sides[0][0] in mine:
                    found |= _cut(sides, count, tensors, shares[block.layer])
    last = n_layers or len(parts)
    if last in shares and head.output.weight in mine:
        rows = tensors[head.output.weight].shape[0]
        found |= _cut(_with_bias(head.output, 0, 1), rows, tensors, shares[last])
    return {name: cut for name, cut in found.items() if name in mine}


def _cuttable(
    part: blocks.Part, layer: int, tensors: Mapping[str, Info], experts_by: str
) -> list[tuple[list[Side], int]]:
    """Tensors that are cut alike, and the number of units they have: heads, columns, experts."""
    if isinstance(part, (blocks.Attention, blocks.FeedForward)) and part.sub_norm is not None:
        raise UnsupportedError(
            f"{part.sub_norm.weight}: what all heads or columns make is normed together, which -sm graph does not cut; "
            "take -sm layer"
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
    raise UnsupportedError(
        f"blk.{layer}: -sm graph cannot cut {type(part).__name__} layers among devices yet; take -sm layer"
    )


def _attention(part: blocks.Attention, tensors: Mapping[str, Info]) -> list[Side]:
    group = part.heads // part.kv_heads
    rows = tensors[part.q.weight].shape[0]
    if part.norms_together:
        norm = part.q_norm or part.k_norm
        raise UnsupportedError(
            f"{norm.weight if norm else part.q.weight}: queries of all heads are normed together, which -sm graph does "
            "not cut; take -sm layer"
        )
    each = group * part.head_dim_k * (2 if part.gated else 1)
    if rows != part.kv_heads * each:
        raise UnsupportedError(
            f"{part.q.weight} has {rows} rows, {part.heads} heads of {part.head_dim_k} are "
            f"{part.kv_heads * each}: -sm graph does not cut queries with more in them; take -sm layer"
        )
    return [
        *_with_bias(part.q, 0, each),
        *_with_bias(part.k, 0, part.head_dim_k),
        *_with_bias(part.v, 0, part.head_dim_v),
        _side(part.out.weight, 1, group * part.head_dim_v),
        *([_side(part.sinks, 0, group)] if part.sinks else []),
    ]


def _recurrent(part: blocks.DeltaNet, tensors: Mapping[str, Info]) -> list[Side]:
    """By key heads. Value heads of a key head stand together, or with `tiled` one in each of so many rounds."""
    sizes = part.sizes
    each = sizes.value_heads // sizes.key_heads

    def values(dim: int, at: int = 0) -> Segments:
        if not part.tiled or each == 1:
            return ((at, each * dim),)
        return tuple((at + turn * sizes.key_heads * dim, dim) for turn in range(each))

    keys, dim = sizes.head_dim_k, sizes.head_dim_v
    mixed = ((0, keys), (sizes.keys, keys), *values(dim, 2 * sizes.keys))
    if part.gate is None:
        together: Segments = ((0, tensors[part.qkv.weight].shape[0] // sizes.key_heads),)
        sides: list[Side] = [(part.qkv.weight, 0, together)]
    else:
        sides = [(part.qkv.weight, 0, mixed), (part.gate.weight, 0, values(dim))]
    sides += [(linear.weight, 0, values(1)) for linear in (part.beta, part.alpha) if linear is not None]
    if part.ba is not None:
        sides.append(_side(part.ba.weight, 0, 2 * each))
    sides += [(part.conv, 0, mixed), (part.a, 0, values(1)), (part.dt, 0, values(1))]
    return [*sides, (part.out.weight, 1, values(dim))]


def _latents(part: blocks.LatentAttention, tensors: Mapping[str, Info]) -> list[Side]:
    sides = [*_with_bias(part.q, 0, part.head_dim_k), _side(part.out.weight, 1, part.head_dim_v)]
    for linear, rows in (
        (part.kv_b, part.nope + part.head_dim_v),
        (part.k_b, part.kv_lora),
        (part.v_b, part.head_dim_v),
    ):
        if linear is not None:
            sides.append(_side(linear.weight, 0, 1 if len(tensors[linear.weight].shape) == 3 else rows))
    return sides


def _gated(part: blocks.FeedForward, tensors: Mapping[str, Info]) -> tuple[list[Side], int]:
    sides = [*_with_bias(part.gate, 0, 1), *_with_bias(part.up, 0, 1), _side(part.down.weight, 1, 1)]
    return sides, tensors[part.gate.weight].shape[0]


def _experts(part: blocks.Experts, tensors: Mapping[str, Info], by: str) -> tuple[list[Side], int]:
    if by == "number":
        three = (part.gate, part.up, part.down)
        return [side for linear in three for side in _with_bias(linear, 0, 1)], part.count
    sides = [_side(part.gate.weight, 1, 1), _side(part.up.weight, 1, 1), _side(part.down.weight, 2, 1)]
    return sides + [_side(linear.bias, 1, 1) for linear in (part.gate, part.up) if linear.bias], part.ff


def _with_bias(linear: blocks.Linear, axis: int, size: int) -> list[Side]:
    return [_side(linear.weight, axis, size), *([_side(linear.bias, axis, size)] if linear.bias else [])]


def _cut(sides: Sequence[Side], count: int, tensors: Mapping[str, Info], shares: Sequence[float]) -> dict[str, Cut]:
    """The cuts of tensors that go together, `count` units of them."""
    unit = 1
    for name, axis, segments in sides:
        align = _alignment(name, axis, tensors)
        for at, size in segments:
            unit = math.lcm(unit, align // math.gcd(align, size), 1 if at % align == 0 else count + 1)
    ends = [min(1.0, end) for end in itertools.accumulate(shares)]
    bounds = (0, *(min(count, round(end * count / unit) * unit) for end in ends[:-1]), count)
    busy, asked = (len({*b}) - 1 for b in (bounds, [0, *(round(end * count) for end in ends)]))
    if busy < 2 <= asked:
        name, axis, segments = max(sides, key=lambda side: _alignment(side[0], side[1], tensors) / side[2][0][1])
        align, kind = _alignment(name, axis, tensors), tensors[name].type
        what = "columns" if _is_last(name, axis, tensors) else "rows"
        raise UnsupportedError(
            f"{name}: {kind.name} can be cut at multiples of {align} {what}, and its {tensors[name].shape[axis]} "
            f"cannot be shared by {asked} devices so; take -sm layer, or for this tensor a type of smaller blocks"
        )
    return {
        name: Cut(axis, bounds, segments) if len(segments) > 1 else Cut(axis, _times(bounds, segments[0][1]))
        for name, axis, segments in sides
    }


def _times(bounds: Iterable[int], size: int) -> tuple[int, ...]:
    return tuple(bound * size for bound in bounds)


def _is_last(name: str, axis: int, tensors: Mapping[str, Info]) -> bool:
    return axis == len(tensors[name].shape) - 1


def _alignment(name: str, axis: int, tensors: Mapping[str, Info]) -> int:
    """Cuts of an axis of a tensor are at multiples of this."""
    kind, shape = tensors[name].type, tensors[name].shape
    if kind.whole_tensor:
        return shape[axis]
    if _is_last(name, axis, tensors):
        return kind.block_size
    between = math.prod(shape[axis + 1 : -1])  # rows that one element of the axis stands for
    return kind.interleave // math.gcd(kind.interleave, between)


# ----------------------------------------------------------------------------------------------------- bytes, for plans


def of_metadata(
    tensors: Mapping[str, Info],
    metadata: Mapping[str, Any],
    sliced: Iterable[str],
    shares: Mapping[int, Sequence[float]],
    experts_by: str = "number",
) -> dict[str, Cut]:
    """`of_model` of a model that may not be here: its blocks follow from the metadata and the names of its tensors."""
    found = validate.describe(metadata, tensors)
    return of_model(found.blocks, found.head, tensors, sliced, shares, experts_by, found.hparams.n_layer)


def bytes_of(tensor: Info, cut: Cut | None, count: int) -> list[int]:
    """Bytes of a tensor on each of `count` devices; without a cut each has all of it."""
    if cut is None:
        return [tensor.type.tensor_bytes(tensor.shape)] * count
    shapes = (cut.shape(tensor.shape, i) for i in range(count))
    return [tensor.type.tensor_bytes(shape) if math.prod(shape) else 0 for shape in shapes]


def cache_shares(layer: int, found: Mapping[str, Cut], count: int, mla: int) -> list[float]:
    """How much of what a layer remembers each device has: of its heads; of latents all, where it has a head."""
    keys, out = found.get(f"blk.{layer}.attn_k.weight"), found.get(f"blk.{layer}.ssm_out.weight")
    cut = keys or out or found.get(f"blk.{layer}.attn_q_b.weight") or found.get(f"blk.{layer}.attn_q.weight")
    if cut is None:
        return [1.0] * count
    widths = [cut.width(device) for device in range(count)]
    if keys is None and out is None and mla:
        return [float(width > 0) for width in widths]
    return [width / max(1, sum(widths)) for width in widths]
