"""Embeddings of n-grams (PLE): their settings in config.json, their keys in GGUF, and shards of their table.

`blocks.NGrams` says what is computed. archs/qwen4exp.py lists the settings and the keys.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.archs.common.base import Config, Keys, need
from quantkit.archs.common.blocks import TABLE_MULTIPLE, StateShapes
from quantkit.archs.common.shapes import Sizes
from quantkit.archs.common.tensors import Shape, Stack, Transform
from quantkit.archs.common.transforms import GatherRows
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, sequence

_MASK64, _GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15  # of splitmix64
_SEEDS = 1 << 16  # export looks for a seed below it
_MAX_VOCAB = 1 << 24  # float32 states hold tokens
EMBEDDING = "ple.ple_embedding"  # a part of names in checkpoints
_SHARD = re.compile(rf"(.*\.{EMBEDDING}\.ngram_embedding)\.shard_([0-9]+)(\.weight)")


@dataclass(frozen=True)
class NGramNumbers:
    """The numbers of a model's n-grams.

    layers                      those that look them up; none or one
    kernel, width, end          as in `blocks.NGrams`, as are the others
    """

    layers: tuple[int, ...] = ()
    kernel: int = 0
    width: int = 0
    end: int = 0
    multipliers: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()

    def state_shapes(self, channels: int) -> StateShapes:
        """Of the last inputs of the convolution, and of the last tokens, each plus 1; 0 for none."""
        longest = len(self.multipliers)
        return StateShapes(((self.kernel - 1) * longest, channels), (1, 1, longest - 1))


def entries(config: Config, recurs: list[bool]) -> Entries:
    """The keys of the n-grams, given which layers are recurrent; none where no layer looks them up."""
    given = sequence(config, "ple_layer_ids")
    if not given:
        return {}
    number = given[0]
    if len(given) > 1 or type(number) is not int or not 1 <= number <= len(recurs) or not recurs[number - 1]:
        raise UnsupportedError(
            f"config.json: ple_layer_ids = {given!r:.80}; one recurrent layer of {len(recurs)} may have n-grams, as in "
            "llama.cpp"
        )
    size, each = integer(config, "ngram_size"), integer(config, "heads_per_ngram")
    heads, width = (size - 1) * each, integer(config, "ple_embed_dim") or int(need(config, "hidden_size"))
    if width % heads:
        raise FormatError(f"config.json: ple_embed_dim = {width} is not a multiple of the {heads} hashes of a token")
    ends = need(config, "eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) != 1 or type(ends[0]) is not int or ends[0] < 0:
        raise UnsupportedError(
            f"config.json: eos_token_id = {ends!r:.80}; of several, transformers resets n-grams at the first, "
            "llama.cpp at the last"
        )
    primes = _primes(integer(config, "ngram_vocab_size_base"), heads)
    return {
        "ple.layers": ([number - 1], "u32"),
        "ple.ngram_size": (size, "u32"),
        "ple.heads_per_ngram": (each, "u32"),
        "ple.conv_kernel": (need(config, "ple_conv_kernel_size"), "u32"),
        "ple.eos_token_id": (ends[0], "u32"),
        "embedding_length_per_layer_input": (width // heads, "u32"),
        "ple.layer_multipliers": (_multipliers(need(config, "vocab_size"), size, integer(config, "seed")), "u64"),
        "ple.head_offsets": ([sum(primes[:i]) for i in range(heads)], "u64"),
        "ple.head_vocab_sizes": (list(primes), "u64"),
    }


def numbers(keys: Keys, vocab: int, recurrent: Collection[int]) -> NGramNumbers:
    """Those of a file with so many tokens and these recurrent layers. FormatError or UnsupportedError where they cannot
    be."""
    layers = tuple(keys.get("ple.layers", []))
    if not layers:
        return NGramNumbers()
    size, each = keys.number("ple.ngram_size"), keys.number("ple.heads_per_ngram")
    lists = [tuple(keys.need(f"ple.{key}")) for key in ("layer_multipliers", "head_vocab_sizes", "head_offsets")]
    hashes = (size - 1) * each
    if [len(each) for each in lists] != [size, hashes, hashes]:
        raise FormatError(
            f"{keys.arch}.ple.layer_multipliers, head_vocab_sizes and head_offsets have "
            f"{', '.join(str(len(x)) for x in lists)} entries; ngram_size and heads_per_ngram make it "
            f"{size}, {hashes} and {hashes}"
        )
    multipliers, sizes, offsets = lists
    if len(layers) > 1 or layers[0] not in recurrent:
        raise UnsupportedError(
            f"{keys.arch}.ple.layers = {layers}; one recurrent layer may have n-grams, as in llama.cpp"
        )
    end = keys.number("ple.eos_token_id")
    if max(vocab, end + 1) >= _MAX_VOCAB or max(multipliers) * max(vocab, end + 1) >= 1 << 63:
        raise UnsupportedError(
            f"{keys.arch}: hashes of a vocabulary of {vocab} with ple.layer_multipliers up to {max(multipliers)} do "
            "not fit 63 bits, or a token not 24"
        )
    if list(offsets) != [sum(sizes[:i]) for i in range(hashes)]:
        raise FormatError(f"{keys.arch}.ple.head_offsets are not the sums of {keys.arch}.ple.head_vocab_sizes before")
    return NGramNumbers(
        layers=layers,
        kernel=keys.number("ple.conv_kernel"),
        width=keys.number("embedding_length_per_layer_input"),
        end=end,
        multipliers=multipliers,
        sizes=sizes,
        offsets=offsets,
    )


def settings(arch: str, vocab: int, ngrams: NGramNumbers, metadata: Mapping[str, object]) -> dict[str, Any]:
    """The settings of n-grams in config.json. UnsupportedError where transformers would compute other hashes."""
    if not ngrams.layers:
        return {"ple_layer_ids": []}
    if metadata.get("tokenizer.ggml.eos_token_id", ngrams.end) != ngrams.end:
        raise UnsupportedError(
            f"{arch}.ple.eos_token_id = {ngrams.end}, tokenizer.ggml.eos_token_id = "
            f"{metadata['tokenizer.ggml.eos_token_id']}; config.json has one number for both"
        )
    count, size = len(ngrams.sizes), len(ngrams.multipliers)
    seed = next((n for n in range(_SEEDS) if _multipliers(vocab, size, n) == list(ngrams.multipliers)), None)
    if seed is None or ngrams.sizes != _primes(ngrams.sizes[0], count):
        raise UnsupportedError(
            f"{arch}.ple.layer_multipliers and head_vocab_sizes follow from no seed below {_SEEDS} and no first "
            "prime, which config.json has in their place"
        )
    return {
        "ple_layer_ids": [i + 1 for i in ngrams.layers],
        "ple_embed_dim": ngrams.width * count,
        "ple_conv_kernel_size": ngrams.kernel,
        "ngram_size": size,
        "heads_per_ngram": count // (size - 1),
        "ngram_vocab_size_base": ngrams.sizes[0],
        "split_ngram_parts": TABLE_MULTIPLE,
        "seed": seed,
        "eos_token_id": ngrams.end,
    }


def table_rows(sizes: Sizes) -> int:
    """Rows of the table of all hashes."""
    vocabularies = sizes.metadata[f"{sizes.arch}.ple.head_vocab_sizes"]
    assert isinstance(vocabularies, list)
    return -(-int(sum(vocabularies)) // TABLE_MULTIPLE) * TABLE_MULTIPLE


@functools.cache
def _primes(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `start` on."""
    found: list[int] = []
    n = max(2, start)
    while len(found) < count:
        if n == 2 or (n % 2 and all(n % d for d in range(3, math.isqrt(n) + 1, 2))):
            found.append(n)
        n += 1
    return tuple(found)


def _multipliers(vocab: int, count: int, seed: int) -> list[int]:
    """Odd factors of a token's number, of each place in an n-gram, from splitmix64; products are below 2^63."""
    bound = max(1, ((1 << 63) - 1) // vocab // 2)
    return [2 * (_splitmix64(seed + _GAMMA * (i + 1)) % bound) + 1 for i in range(count)]


def _splitmix64(state: int) -> int:
    x = (state + _GAMMA) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def join_shards(shapes: Mapping[str, Shape]) -> tuple[dict[str, Shape], tuple[str, ...]]:
    """The shapes with one table in place of its shards, and the shards in order. FormatError unless they fit."""
    numbered = {int(found[2]): name for name in shapes if (found := _SHARD.fullmatch(name))}
    if not numbered:
        return dict(shapes), ()
    shards = tuple(name for _, name in sorted(numbered.items()))
    if sorted(numbered) != list(range(len(shards))):
        raise FormatError(f"{len(shards)} shards of the table of n-grams, the last one is {shards[-1]}; one is missing")
    first, *_, last = [shapes[name] for name in (shards[0], *shards)]
    for name in shards:
        if len(shapes[name]) != 2 or shapes[name][1] != first[1] or (shapes[name] != first and name != shards[-1]):
            raise FormatError(f"tensor {name} is {shapes[name]}, {shards[0]} {first}; shards have the same rows")
    found = _SHARD.fullmatch(shards[0])
    assert found is not None
    others = {name: shape for name, shape in shapes.items() if name not in numbered.values()}
    return others | {f"{found[1]}{found[3]}": ((len(shards) - 1) * first[0] + last[0], first[1])}, shards


class _Joined(Stack):
    """The rows of several sources, which have as many, one below the other."""

    def shape(self, *sources: Shape) -> Shape:
        return (len(sources) * sources[0][0], sources[0][1])


def joined(rows: Sequence[int]) -> Transform:
    """The transform that joins shards of so many rows."""
    if len({*rows}) == 1:
        return _Joined(rows[0])
    return GatherRows((i, 0, count) for i, count in enumerate(rows))
