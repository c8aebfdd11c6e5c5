"""Compute the size of the KV cache from a model's metadata, without the model's weights.

    of_layers(metadata, n_ctx, types.layout("f16"), types.layout("q8_0"))    bytes of each layer

    attention     per KV head n_ctx rows of key_length in the key type, and of value_length in the value type; in layers
                  that sliding_window_pattern lists, of key_length_swa and value_length_swa if there are such keys
    latent        n_ctx rows of kv_lora_rank + RoPE dims (of the layer, where rope.dimension_count_per_layer lists
                  them) in the key type (`mla` 1 to 3), and with an indexer of its
                  key in the value type; `mla` 0 caches full heads
    KDA           as recurrent layers, with as many heads as attention.head_count, all dims kda.head_dim
    recurrent     conv_kernel - 1 columns and a state of heads * key dim * value dim in float32, for any context
    compressed    n_ctx rows of key_length in the key type; in layers with a compressor, attention.compress_ratios, rows
                  of what it reads, and its indexer's, in the value type (blocks.CompressedAttention.kept); of the
                  entries and of the indexer's keys, n_ctx / ratio rows in float32 (runtime/kv/entries.py)
    blocks        in recurrent models, attention.compress_ratios: as attention, and n_ctx rows of the indexer's
                  attention.indexer.key_length in the value type, n_ctx / ratio rows in float32 (runtime/kv/entries.py);
                  with attention.indexer.block_size, in layers with experts, n_ctx rows of the key in the value type
    n-grams       beside the state of layers in ple.layers, (ple.conv_kernel - 1) * ple.ngram_size columns of
                  hyper_connection.count * embedding_length in float32, and ple.ngram_size - 1 tokens
    convolution   shortconv.l_cache - 1 columns of embedding_length in float32

In a model with ssm keys, all layers are recurrent except those that full_attention_interval selects and the MTP layers.
In one with shortconv.l_cache, layers whose attention.head_count_kv is 0 are convolutions; in one with kda.head_dim,
they have KDA. Where head_count_kv is a list and full_attention_interval is absent, other layers with 0 KV heads are
recurrent if their feed_forward_length is 0 as well, and have no cache otherwise.
The last attention.shared_kv_layers layers read the cache of an earlier one: 0 bytes.
MTP layers have a cache only while they draft: 0 bytes unless `mtp`.
Sliding windows do not reduce the size: like ik_llama.cpp, the runtime allocates them in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quantkit.archs.common.shapes import OVERLAPPING_RATE
from quantkit.errors import DataError, FormatError
from quantkit.placement.kernel_sizes import entry_rows
from quantkit.types import QuantType

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1", "q6_0", "q8_KV")
_LATENT_DEFAULT = 3


def of_layers(
    metadata: Mapping[str, Any],
    n_ctx: int,
    keys: QuantType,
    values: QuantType,
    mla: int = _LATENT_DEFAULT,
    mtp: bool = False,
) -> list[int]:
    """Bytes of each layer's cache, for one sequence of `n_ctx` tokens. `mtp`: the MTP layers draft."""
    arch = metadata.get("general.architecture")

    def number(key: str, layer: int = 0) -> int:
        value = metadata.get(f"{arch}.{key}") or 0
        if isinstance(value, (list, tuple)):
            if layer >= len(value):
                raise FormatError(
                    f"metadata key {arch}.{key} has {len(value)} entries, one a layer, and {arch}.block_count is "
                    f"{metadata.get(f'{arch}.block_count')}; correct the wrong one with `quantkit metadata set`"
                )
            value = value[layer]
        return int(value)

    layers = number("block_count")
    main = layers - number("nextn_predict_layers")
    heads, interval = number("attention.head_count"), number("full_attention_interval")
    width = number("embedding_length") // heads if heads else 0
    latent = number("attention.kv_lora_rank")
    listed = isinstance(metadata.get(f"{arch}.attention.head_count_kv"), (list, tuple)) and not interval
    rotates = f"{arch}.rope.dimension_count_per_layer" in metadata
    found = []
    for layer in range(layers):
        kv_heads = number("attention.head_count_kv", layer) or heads
        if (layer >= main and not mtp) or main - number("attention.shared_kv_layers") <= layer < main:
            found.append(0)
        elif metadata.get(f"{arch}.attention.compress_ratios") and not number("ssm.inner_size"):
            rows = _row(keys, number("attention.key_length")) + _row(values, _kept(number, layer))
            found.append(n_ctx * rows + _entries(number, layer, n_ctx))
        elif number("shortconv.l_cache") and not number("attention.head_count_kv", layer):
            found.append(4 * (number("shortconv.l_cache") - 1) * number("embedding_length"))
        elif number("kda.head_dim") and not number("attention.head_count_kv", layer):
            inner = heads * number("kda.head_dim")
            found.append(4 * ((number("ssm.conv_kernel") - 1) * 3 * inner + inner * number("kda.head_dim")))
        elif listed and not number("attention.head_count_kv", layer):
            recurrent = number("ssm.inner_size") and not number("feed_forward_length", layer)
            found.append(4 * _state(number) if recurrent else 0)
        elif number("ssm.inner_size") and not listed and layer < main and (layer + 1) % (interval or layers + 1):
            looks_up = layer in (metadata.get(f"{arch}.ple.layers") or ())
            found.append(4 * (_state(number) + (_ngrams(number) if looks_up else 0)))
        elif latent and mla:
            index = number("attention.indexer.key_length")
            rotated = number(f"rope.dimension_count{'_per_layer' if rotates else ''}", layer)
            rows = _row(keys, latent + rotated) + (_row(values, index) if index else 0)
            found.append(n_ctx * rows)
        else:
            kv_heads = heads if latent else kv_heads
            pattern = "attention.sliding_window_pattern"
            is_listed = isinstance(metadata.get(f"{arch}.{pattern}"), (list, tuple))
            own = "_swa" if is_listed and number(pattern, layer) else "_mla"
            k = number(f"attention.key_length{own}") or number("attention.key_length") or width
            v = number(f"attention.value_length{own}") or number("attention.value_length") or width
            row, of_blocks = kv_heads * (_row(keys, k) + _row(values, v)), 0
            if number("attention.indexer.block_size") and layer >= number("leading_dense_block_count"):
                row += _row(values, number("attention.indexer.key_length"))
            if ratio := number("attention.compress_ratios", layer):
                row += _row(values, number("attention.indexer.key_length"))
                of_blocks = 4 * entry_rows(n_ctx, ratio) * number("attention.indexer.key_length")
            found.append(n_ctx * row + of_blocks)
    return found


def _kept(number: Callable[..., int], layer: int) -> int:
    """`blocks.CompressedAttention.kept` of a layer."""
    ratio = number("attention.compress_ratios", layer)
    if ratio != OVERLAPPING_RATE:
        return 2 * number("attention.key_length") if ratio else 0
    return 4 * (number("attention.key_length") + number("attention.indexer.key_length"))


def _entries(number: Callable[..., int], layer: int, n_ctx: int) -> int:
    """Bytes of a layer's entries."""
    ratio = number("attention.compress_ratios", layer)
    width = number("attention.key_length") * (ratio > 0)
    width += number("attention.indexer.key_length") * (ratio == OVERLAPPING_RATE)
    return 4 * entry_rows(n_ctx, ratio) * width


def _state(number: Callable[[str], int]) -> int:
    """Number of float32 values in a recurrent layer's state."""
    inner, state, rank = number("ssm.inner_size"), number("ssm.state_size"), number("ssm.time_step_rank")
    if not rank:
        raise FormatError(
            "metadata key ssm.time_step_rank is missing; it gives the number of heads of recurrent layers"
        )
    columns = inner + 2 * number("ssm.group_count") * state
    return (number("ssm.conv_kernel") - 1) * columns + state * (inner // rank) * rank


def _ngrams(number: Callable[[str], int]) -> int:
    """Number of float32 values that a layer with n-grams keeps: for its dilated convolution, and the last tokens."""
    longest = number("ple.ngram_size")
    columns = (number("ple.conv_kernel") - 1) * longest
    return columns * number("hyper_connection.count") * number("embedding_length") + longest - 1


def _row(kind: QuantType, n: int) -> int:
    if n % kind.block_size:
        raise DataError(
            f"a {kind.name} cache needs rows of a multiple of {kind.block_size} elements, these have {n}; choose "
            "another cache type (-ctk, -ctv)"
        )
    return kind.row_bytes(n)
