"""Mixes: which tensors a file type treats better or worse than its default type.

The rules are ik_llama.cpp's, measured and listed in spec/tools.md 2.6 as blocks O (output), E (embedding) and G1 to G7;
here are those that concern the file types of `BUILT`. Some of them go by the position of a tensor among those of its
class, so tensors must be asked for in file order, each once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.recipe.presets import FileType
from quantkit.types import QuantType

BUILT = frozenset(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_0", "Q8_0", "IQ4_NL", "Q4_K_S", "Q4_K_M", "Q6_K", "IQ4_K",
                   "Q4_0_R8", "Q5_0_R4", "Q6_0_R4", "Q8_0_R8", "IQ4_NL_R4", "Q4_K_R4", "Q6_K_R4",
                   "IQ4_K_R4"))  # fmt: skip

# Block O: an output tensor as good as these needs no q6_K.
_FINE_OUTPUTS = frozenset(("q8_0", "q8_0_r8", "iq6_k", "q6_k_r4", "q8_k_r8", "q8_KV", "q8_KV_r8"))
# G1: with 2 queries a key and more, attn_v is small enough to be iq5_k.
_IQ5_VALUES = frozenset(("IQ4_NL", "IQ4_NL_R4", "IQ4_K", "IQ4_K_R4"))
# G4: without an importance matrix the first eighth of ffn_down is q5_K.
_PLAIN_FRONT = frozenset(("IQ4_NL", "IQ4_NL_R4"))
# G4: with one, it goes one step up.
_IMATRIX_FRONT = {"Q4_0": "q4_1", "Q5_0": "q5_1", "Q4_0_R8": "iq4_nl_r4"}
# G5: a mixture of experts spends little on attn_output.
_EXPERTS_ATTN_OUTPUT = frozenset(("Q4_K_S", "Q4_K_M", "Q4_K_R4", "IQ4_NL", "IQ4_NL_R4", "IQ4_K", "IQ4_K_R4"))

# Substring of the name -> class, in the order of the blocks; each is also the name of a class flag.
CLASSES = (("attn_v.weight", "attn_v"), ("attn_k", "attn_k"), ("attn_q", "attn_q"), ("ffn_down", "ffn_down"),
           ("attn_output.weight", "attn_output"), ("ffn_gate", "ffn_gate"), ("ffn_up", "ffn_up"))  # fmt: skip


def tensor_class(name: str) -> str | None:
    """The class whose block, and whose --CLASS-type flag, a tensor obeys."""
    return next((found for part, found in CLASSES if part in name), None)


@dataclass(frozen=True)
class Model:
    """What the mixes ask about a model."""

    architecture: str = ""
    layers: int = 0
    queries_per_key: int = 0
    experts: int = 0
    size_class: str = ""  # "8B", "70B" or neither
    tied: bool = False  # no output.weight: the embedding is the output
    attn_v_tensors: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any], names: Iterable[str]) -> Model:
        arch = str(metadata.get("general.architecture", ""))

        def value(key: str) -> int:
            found = metadata.get(f"{arch}.{key}", 0)
            return int(found[0] if isinstance(found, list) and found else found or 0)

        heads, key_heads = value("attention.head_count"), value("attention.head_count_kv")
        if arch == "deepseek2" and key_heads == 1:  # latent attention in upstream's form
            key_heads = heads
        names = list(names)
        vocabulary = value("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
        return cls(
            architecture=arch,
            layers=value("block_count"),
            queries_per_key=heads // key_heads if key_heads else 0,
            experts=value("expert_count"),
            size_class=_size_class(arch, value("block_count"), value("embedding_length"), vocabulary, heads, key_heads),
            tied="output.weight" not in names,
            attn_v_tensors=sum("attn_v.weight" in name or "attn_qkv.weight" in name for name in names),
        )


def _size_class(arch: str, layers: int, columns: int, vocabulary: int, heads: int, key_heads: int) -> str:
    if arch == "llama":
        eight = layers == 36 or (layers == 32 and vocabulary >= 40000 and vocabulary != 49152)
        return "8B" if eight else "70B" if layers == 80 and heads != key_heads else ""
    if arch in ("qwen2", "qwen2vl", "deci"):
        return "70B" if layers == 80 else ""
    return "8B" if arch in ("qwen3", "qwen3vl") and layers == 36 and columns != 2560 else ""


def more_bits(i: int, n: int) -> bool:
    """Whether layer i of n is one that gets more bits: the first and last eighth, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


class Mix:
    """The mix of one file type over one model. `choose` is called once for each candidate, in file order."""

    def __init__(self, file_type: FileType, default: QuantType, model: Model, has_imatrix: bool):
        self.name = file_type.name
        self.default = default.name
        self.model = model
        self.has_imatrix = has_imatrix
        self._seen: Counter[str] = Counter()

    def choose(self, name: str, columns: int) -> str:
        """Name of the type for a tensor."""
        kind = tensor_class(name)
        index = self._index(name, kind)
        if name == "output.weight" or (name == "token_embd.weight" and self.model.tied):
            return self._output(columns)
        chosen = None
        if kind == "attn_v":
            chosen = self._attn_v(index)
        elif kind == "attn_k" and self.model.experts >= 4:
            chosen = "q8_0"
        elif kind == "ffn_down":
            chosen = self._ffn_down(index)
        elif kind == "attn_output" and self.model.experts >= 4 and self.name in _EXPERTS_ATTN_OUTPUT:
            chosen = "q5_K"
        return chosen or self.default

    def _index(self, name: str, kind: str | None) -> int:
        """Position of a tensor in its class: the layer for experts, otherwise how many came before."""
        if kind is None:
            return 0
        before = self._seen[kind]
        self._seen[kind] += 1
        layer = re.match(r"blk\.(\d+)\.", name)
        return int(layer[1]) if layer and kind.startswith("ffn_") and self.model.experts > 1 else before

    def _output(self, columns: int) -> str:
        if self.model.architecture == "falcon" or columns % 256:
            return "q8_0"
        return self.default if self.default in _FINE_OUTPUTS else "q6_K"

    def _attn_v(self, i: int) -> str | None:
        model = self.model
        if model.experts >= 4:
            return "q8_0"
        if model.size_class == "70B":
            return "q5_K" if self.default == "q4_K" else None
        if model.queries_per_key >= 2 and self.name in _IQ5_VALUES:
            return "iq5_k"
        if self.name == "Q4_K_M" and more_bits(i, model.attn_v_tensors):
            return "q6_K"
        if self.name in ("Q4_K_S", "Q4_K_R4") and i < 4:
            return "q5_K"
        draft = model.architecture == "dflash-draft" and self.name == "Q4_K_M"
        return "q5_K" if model.queries_per_key >= 4 and self.default == "q4_K" and not draft else None

    def _ffn_down(self, i: int) -> str | None:
        falcon = self.model.architecture == "falcon"
        layers = self.model.layers
        front = i < layers // 8
        if self.name == "Q4_K_M":
            if falcon and i >= layers // 16:
                return "q5_K" if more_bits(i, layers) else "q4_K"
            return "q6_K" if falcon or more_bits(i, layers) else None
        if front and not self.has_imatrix and self.name in _PLAIN_FRONT:
            return "q5_K"
        if front and self.name in ("Q4_K_S", "Q4_K_R4") and not falcon:
            return "q5_K"
        return _IMATRIX_FRONT.get(self.name) if front and self.has_imatrix else None
