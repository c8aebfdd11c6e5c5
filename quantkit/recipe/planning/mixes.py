"""Mixes: the tensors that get more or fewer bits than the default type of a file type.

The rules are ik_llama.cpp's. The tables below are O (output), E (embedding), A, B and C (the smallest file types) and
G1 to G7 (all others, by class of tensor). Some of them depend on the position of a tensor among those of its class, so
`choose` must be called in file order, once per tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.recipe.planning.presets import FileType
from quantkit.repack.eligible import EMBEDDING, EMBEDDINGS, OUTPUT
from quantkit.types import QuantType

# ---------------------------------------------------------------------------------------- outputs and embeddings (O, E)

_SMALL_OUTPUT = frozenset(("IQ1_S", "IQ1_M", "IQ1_S_R4", "IQ1_M_R4", "IQ1_KT", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M",
                           "IQ2_M_R4", "IQ2_K", "IQ2_K_R4", "IQ2_KS", "IQ2_KL", "IQ2_KT", "IQ3_XXS", "IQ3_XXS_R4",
                           "IQ3_K", "IQ3_K_R4", "IQ3_KS", "IQ3_KT"))  # fmt: skip
_SMALL_OUTPUT_R4 = frozenset(("IQ2_XXS_R4", "IQ2_XS_R4"))
_TIED_IQ5 = frozenset(("IQ3_S", "IQ3_S_R4", "IQ3_M", "IQ3_KL", "IQ4_XS", "IQ4_KS", "IQ4_KS_R4", "IQ4_KSS"))
_FINE_OUTPUTS = frozenset(("q8_0", "q8_0_r8", "iq6_k", "q6_k_r4", "q8_k_r8", "q8_KV", "q8_KV_r8"))  # need no q6_K
_EMBEDDINGS = {
    "q2_K": ("IQ1_S", "IQ1_M", "IQ1_S_R4", "IQ1_M_R4", "IQ2_XXS", "IQ2_XXS_R4", "IQ2_XS", "IQ2_XS_R4"),
    "iq3_s": ("IQ2_S", "IQ2_M", "IQ2_M_R4", "IQ3_XXS", "IQ3_KT"),
    "iq3_k": ("IQ3_XXS_R4",),
    "iq4_nl": ("IQ1_BN", "IQ2_BN", "IQ2_BN_R4"),
    "q4_K": ("TQ1_0", "TQ2_0"),  # as in llama.cpp
}
_EMBEDDING = {name: kind for kind, names in _EMBEDDINGS.items() for name in names}

# ------------------------------------------------------------------------------------ the smallest file types (A, B, C)


@dataclass(frozen=True)
class SmallMix:
    """The types that a small file type gives to the most important tensors. None: the default type."""

    values: tuple[str, str, str]  # attn_v: with 4 queries per key or 4 experts, with 2 queries, otherwise
    many: str  # attn_k and attn_q of models with 8 experts or more
    qkv: str
    down: str  # ffn_down of the first eighth
    out: tuple[str, str | None]  # attn_output: with 4 experts or more, otherwise
    first: str | None = None  # experts of the first layer, if there are 8 or more
    shared: str | None = None  # shared experts
    counted: bool = False  # the first eighth of ffn_down counts tensors, not layers, also with experts
    two_experts: bool = False  # attn_v: 2 experts count as 2 queries


_A = SmallMix(("iq4_k_r4", "iq3_k_r4", "q2_k_r4"), "q4_k_r4", "iq2_k_r4", "q2_k_r4", ("q5_k_r4", "iq2_k_r4"),
           "iq3_k_r4", "iq4_k_r4")  # fmt: skip
_B = SmallMix(("iq4_k", "iq3_k", "q2_K"), "q4_K", "iq3_k", "iq3_k", ("q5_K", "iq3_k"), "iq3_k", "iq4_k")
_C = {
    out: SmallMix(("iq4_k", "iq3_k", "q2_K"), "q4_K", "iq2_k", "q2_K", ("q5_K", out), counted=True, two_experts=True)
    for out in ("iq2_k", None)
}
_C_HIGH = SmallMix(("iq4_k", "iq3_k", "iq3_s"), "q4_K", "iq3_xxs", "iq3_s", ("q5_K", "iq3_s"), counted=True,
                two_experts=True)  # fmt: skip
_SMALL = {
    "IQ1_S_R4": _A, "IQ1_M_R4": _A, "IQ2_KT": _B, "IQ1_S": _C["iq2_k"], "IQ1_M": _C["iq2_k"], "IQ2_XXS": _C[None],
    "IQ2_XXS_R4": _C[None], "IQ2_XS": _C[None], "IQ2_XS_R4": _C[None], "IQ2_KS": _C[None], "IQ2_S": _C_HIGH,
    "IQ2_M": _C_HIGH, "IQ2_M_R4": _C_HIGH,
}  # fmt: skip

# ------------------------------------------------------------------------------------------------ all others (G1 to G7)

# G1, attn_v by queries per key: the first pair with at most that many queries decides.
_VALUES: dict[str, tuple[tuple[int, str], ...]] = {
    "Q2_K": ((4, "q4_K"), (0, "q3_K")), "IQ2_K": ((2, "iq4_k"), (0, "iq3_k")),
    "IQ2_K_R4": ((2, "iq4_k_r4"), (0, "iq3_k_r4")), "Q2_K_S": ((4, "q4_K"),), "Q2_K_R4": ((4, "q4_k_r4"),),
    "IQ3_XXS": ((4, "q4_K"), (2, "iq3_k")), "IQ3_XXS_R4": ((4, "q4_k_r4"), (2, "iq3_k_r4")),
    "IQ3_KT": ((4, "iq4_k"), (0, "iq3_k")), "IQ4_KT": ((4, "iq5_k"), (0, "iq4_k")), "IQ3_XS": ((2, "iq4_k"),),
    "IQ3_S": ((2, "iq4_k"),), "IQ3_K": ((2, "iq4_k"),), "IQ3_S_R4": ((2, "iq4_k_r4"),),
    "IQ3_K_R4": ((2, "iq4_k_r4"),), "IQ3_KS": ((2, "iq4_ks"),), "IQ2_KL": ((2, "iq4_ks"),),
    "IQ3_KL": ((2, "iq5_k"), (0, "iq4_k")), "IQ3_M": ((2, "iq5_k"), (0, "iq4_k")), "Q3_K_L": ((0, "q5_K"),),
    "IQ4_KS_R4": ((2, "iq5_k_r4"),),
} | dict.fromkeys(("IQ4_NL", "IQ4_NL_R4", "IQ4_XS", "IQ4_XS_R8", "IQ4_KS", "IQ4_KSS", "IQ4_K", "IQ4_K_R4"),
                  ((2, "iq5_k"),))  # fmt: skip
_VALUES_OF_70B = {"q3_K": "q5_K", "q4_K": "q5_K", "iq3_k": "iq5_k"}
_BETTER = {
    "q2_K": "iq3_s", "iq3_xxs": "iq3_s", "q2_k_r4": "iq3_k_r4", "iq3_xxs_r4": "iq3_k_r4", "q3_K": "q4_K",
    "iq3_s": "q4_K", "iq3_k": "iq4_k", "iq3_ks": "iq4_ks", "iq2_kl": "iq4_ks", "iq3_s_r4": "q4_k_r4",
    "q3_k_r4": "q4_k_r4", "q4_K": "q5_K", "iq4_xs": "q5_K", "iq4_nl": "q5_K", "iq4_nl_r4": "q5_K", "iq4_xs_r8": "q5_K",
    "iq4_k": "iq5_k", "iq4_ks": "iq5_k", "q5_K": "q6_K", "iq5_k": "iq6_k", "iq5_ks": "iq6_k",
}  # fmt: skip
# G1 and G3 of a model of 8B or 70B with a large vocabulary: attn_v goes up, attn_q down.
_TRADED = {"Q5_K_S": ("q6_K", "q4_K"), "IQ5_K": ("iq6_k", "iq4_k"), "IQ5_KS": ("iq6_k", "iq4_ks")}

_KEYS_AND_QUERIES = {"IQ3_XS": "iq3_xxs", "IQ3_XXS": "iq2_s", "IQ3_XXS_R4": "iq2_s"}  # G2, G3

# G4, ffn_down: all layers; the first eighth, without and with an importance matrix; without one, first eighth and rest.
_DOWN = {"Q2_K": "q3_K"}
_DOWN_FRONT = {"Q2_K_S": "q4_K", "Q2_K_R4": "q4_k_r4", "IQ3_M": "iq4_k"}
_DOWN_FRONT_PLAIN = {"IQ4_KS_R4": "q5_k_r4"} | dict.fromkeys(
    ("IQ4_NL", "IQ4_NL_R4", "IQ4_XS", "IQ4_XS_R8", "IQ4_KS", "IQ4_KSS"), "q5_K"
)
_DOWN_FRONT_WEIGHED = {"Q4_0": "q4_1", "Q5_0": "q5_1", "Q4_0_R8": "iq4_nl_r4"}
_DOWN_PLAIN = {"IQ3_XXS": ("q4_K", "q3_K"), "IQ3_KT": ("iq4_k", "iq3_k"), "IQ3_XXS_R4": ("q4_k_r4", "iq3_k_r4")}
_DOWN_MORE = {"Q4_K_M": "q6_K", "Q5_K_M": "q6_K", "IQ3_KL": "iq4_ks"}  # where `more_bits`

# G5: attn_output with 4 experts or more, and with fewer.
_OUT_OF_EXPERTS = {"IQ2_KL": "iq4_ks"} | dict.fromkeys(
    ("Q2_K", "Q2_K_R4", "Q3_K_S", "Q3_K_M", "Q3_K_R4", "Q4_K_S", "Q4_K_M", "Q4_K_R4", "IQ2_K", "IQ2_K_R4", "IQ3_XXS",
     "IQ3_XXS_R4", "IQ3_XS", "IQ3_S", "IQ3_S_R4", "IQ3_M", "IQ3_K", "IQ3_K_R4", "IQ3_KS", "IQ3_KL", "IQ3_KT", "IQ4_NL",
     "IQ4_NL_R4", "IQ4_XS", "IQ4_XS_R8", "IQ4_K", "IQ4_K_R4", "IQ4_KS", "IQ4_KS_R4", "IQ4_KSS", "IQ5_KS", "IQ5_KS_R4"),
    "q5_K",
)  # fmt: skip
_OUT = {"Q2_K": "q3_K", "IQ3_XXS": "iq3_s", "IQ3_XXS_R4": "iq3_k_r4", "Q3_K_M": "q4_K", "Q3_K_L": "q5_K",
        "IQ3_M": "iq4_k", "IQ2_K": "iq3_k", "IQ2_K_R4": "iq3_k_r4", "IQ3_KL": "iq4_ks"}  # fmt: skip

# Substring of the name -> class, in the order of the blocks; each is also the name of a class flag.
CLASSES = (("attn_v.weight", "attn_v"), ("attn_k", "attn_k"), ("attn_q", "attn_q"), ("ffn_down", "ffn_down"),
           ("attn_output.weight", "attn_output"), ("ffn_gate", "ffn_gate"), ("ffn_up", "ffn_up"))  # fmt: skip


def tensor_class(name: str) -> str | None:
    """The class of a tensor, which selects its block of rules and its --CLASS-type flag; None if it has none."""
    return next((found for part, found in CLASSES if part in name), None)


@dataclass(frozen=True)
class ModelTraits:
    """The properties of a model that mixes depend on."""

    architecture: str = ""
    layers: int = 0
    queries_per_key: int = 0
    experts: int = 0
    size_class: str = ""  # "8B", "70B" or neither
    tied: bool = False  # no output.weight: the embedding is the output
    attn_v_tensors: int = 0
    large_vocabulary: bool = False

    @classmethod
    def of(cls, metadata: Mapping[str, Any], names: Iterable[str]) -> ModelTraits:
        """The properties of a model with this metadata and these tensor names."""
        from quantkit.archs.common import validate

        validate.check_sizes(metadata)
        arch = str(metadata.get("general.architecture", ""))

        def value(key: str) -> int:
            found = metadata.get(f"{arch}.{key}", 0)
            return int(found[0] if isinstance(found, list) and found else found or 0)

        heads, key_heads = value("attention.head_count"), value("attention.head_count_kv")
        if arch in ("deepseek2", "deepseek32", "glm-dsa") and key_heads == 1:  # latent attention in upstream's form
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
            large_vocabulary=vocabulary >= 127999,
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

    def __init__(self, file_type: FileType, default: QuantType, model: ModelTraits, has_imatrix: bool):
        self.name = file_type.name
        self.default = default.name
        self.model = model
        self.has_imatrix = has_imatrix
        self._seen: Counter[str] = Counter()

    def choose(self, name: str, columns: int) -> str:
        """Name of the type for a tensor."""
        kind = tensor_class(name)
        count, layer = self._place(name, kind)
        if name == OUTPUT or (name == EMBEDDING and self.model.tied):
            return self._output(columns)
        if name in EMBEDDINGS:
            return _EMBEDDING.get(self.name, self.default)
        small = _SMALL.get(self.name)
        chosen = self._small(small, name, count, layer) if small else self._by_class(kind, count, layer)
        return chosen or self.default

    def _place(self, name: str, kind: str | None) -> tuple[int, int]:
        """(number of tensors of the class before this one, index that rules go by: the layer or that number)."""
        if kind is None:
            return 0, 0
        before = self._seen[kind]
        self._seen[kind] += 1
        layer = re.match(r"blk\.(\d+)\.", name)
        return before, int(layer[1]) if layer and kind.startswith("ffn_") and self.model.experts > 1 else before

    def _output(self, columns: int) -> str:
        tied = self.model.tied
        if self.model.architecture == "falcon" or columns % 256:
            return "q8_0"
        if self.name in _SMALL_OUTPUT:
            return "iq4_k" if tied else "q5_K"
        if self.name in _SMALL_OUTPUT_R4:
            return "iq4_k_r4" if tied else "q5_k_r4"
        if tied and self.name in _TIED_IQ5:
            return "iq5_k"
        return self.default if self.default in _FINE_OUTPUTS else "q6_K"

    def _small(self, mix: SmallMix, name: str, count: int, layer: int) -> str | None:
        """Blocks A, B and C, tested in this order."""
        experts, queries = self.model.experts, self.model.queries_per_key
        if "attn_v.weight" in name:
            much, some = experts >= 4 or queries >= 4, queries >= 2 or (mix.two_experts and experts >= 2)
            return mix.values[0 if much else 1 if some else 2]
        if experts >= 8 and ("attn_k" in name or "attn_q" in name):
            return mix.many
        if experts >= 8 and mix.first and re.search(r"blk\.0\.ffn_(down|gate|up)", name):
            return mix.first
        if "attn_qkv.weight" in name:
            return mix.qkv
        if mix.shared and "_shexp.weight" in name:
            return mix.shared
        if "ffn_down" in name:
            return mix.down if (count if mix.counted else layer) < self.model.layers // 8 else None
        return mix.out[0 if experts >= 4 else 1] if "attn_output.weight" in name else None

    def _by_class(self, kind: str | None, count: int, layer: int) -> str | None:
        """Blocks G1 to G7."""
        if kind == "attn_v":
            return self._attn_v(count)
        if kind == "attn_k":
            return "q8_0" if self.model.experts >= 4 else _KEYS_AND_QUERIES.get(self.name)
        if kind == "attn_q":
            return _TRADED[self.name][1] if self._trades() else _KEYS_AND_QUERIES.get(self.name)
        if kind == "ffn_down":
            return self._ffn_down(layer)
        if kind == "attn_output":
            return self._attn_output()
        if kind in ("ffn_gate", "ffn_up"):
            layers = self.model.layers
            if self.name == "IQ3_XS" and layers // 8 <= layer < 7 * layers // 8:
                return "iq3_xxs"
            return "iq4_ks" if self.name == "IQ3_KL" and more_bits(layer, layers) else None
        return None

    def _trades(self) -> bool:
        return self.name in _TRADED and self.model.large_vocabulary and bool(self.model.size_class)

    def _attn_v(self, i: int) -> str | None:
        model, queries = self.model, self.model.queries_per_key
        if model.experts >= 4:
            return "q8_0"
        if model.size_class == "70B":
            return _VALUES_OF_70B.get(self.default)
        for least, found in _VALUES.get(self.name, ()):
            if queries >= least:
                return found
        if self.name == "IQ3_XXS":
            return "iq3_xxs" if self.has_imatrix else "iq3_s"
        if self.name == "IQ3_XXS_R4":
            return "iq3_xxs_r4" if self.has_imatrix else "iq3_k_r4"
        if self.name == "Q3_K_M":
            return "q5_K" if i < 2 else "q4_K"
        if self.name in ("Q4_K_M", "Q5_K_M") and more_bits(i, model.attn_v_tensors):
            return "q6_K"
        if self.name in ("Q4_K_S", "Q4_K_R4") and i < 4:
            return "q5_K"
        if self.name in _TRADED:
            return _TRADED[self.name][0] if self._trades() else None
        draft = model.architecture == "dflash-draft" and self.name in ("Q4_K_M", "Q5_K_M")
        return _BETTER.get(self.default) if queries >= 4 and not draft else None

    def _ffn_down(self, i: int) -> str | None:
        layers, falcon = self.model.layers, self.model.architecture == "falcon"
        front, more = i < layers // 8, more_bits(i, layers)
        if self.name == "Q3_K_M":
            return "q5_K" if i < layers // 16 else "q4_K" if more or not falcon else "q3_K"
        if self.name == "Q3_K_L":
            return "q4_K" if falcon else "q5_K"
        if self.name == "Q4_K_M" and falcon:
            return "q6_K" if i < layers // 16 else "q5_K" if more else "q4_K"
        if self.name in _DOWN:
            return _DOWN[self.name]
        if self.name in _DOWN_MORE:
            return _DOWN_MORE[self.name] if more else None
        if self.name in _DOWN_PLAIN and not self.has_imatrix:
            return _DOWN_PLAIN[self.name][0 if front else 1]
        if self.name == "IQ3_M" and self.model.experts >= 4 and more:
            return "iq4_k"
        if not front:
            return None
        if self.name in ("Q4_K_S", "Q4_K_R4") and not falcon:
            return "q5_K"
        by_matrix = _DOWN_FRONT_WEIGHED if self.has_imatrix else _DOWN_FRONT_PLAIN
        return _DOWN_FRONT.get(self.name) or by_matrix.get(self.name)

    def _attn_output(self) -> str | None:
        if self.model.architecture == "falcon":
            return "q4_K" if self.name == "Q3_K_L" else None
        if self.model.experts >= 4:
            return _OUT_OF_EXPERTS.get(self.name)
        if self.name == "IQ3_KT":
            return "iq3_k" if self.model.queries_per_key >= 4 else None
        return _OUT.get(self.name)
