"""`Outline`: the tensors of an architecture and the keys that they follow from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from quantkit.archs import base
from quantkit.archs.base import Config, Entries, need, rope_parameters
from quantkit.archs.shapes import Listed, Sizes, listed

_by_name: dict[str, Outline] = {}


def outlines() -> list[Outline]:
    """Every outline, by name."""
    return [outline for _, outline in sorted(_by_name.items())]


class Outline(ABC):
    """The outline of an architecture; its one instance is found with `archs.outline(config)`."""

    name: ClassVar[str]  # general.architecture
    hf: ClassVar[tuple[str, ...]]  # names in config.json "architectures"
    ties_by_default: ClassVar[bool] = False  # what transformers assumes without tie_word_embeddings
    own_sizes: ClassVar[Mapping[str, Callable[[Sizes], int]]] = {}  # numbers that mean something else here

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _by_name[cls.name] = cls()

    @abstractmethod
    def metadata(self, config: Config) -> Entries:
        """GGUF keys of a config.json."""

    @abstractmethod
    def layer(self, sizes: Sizes, i: int, config: Config) -> str:
        """Names of the tensors of layer i, parted by blanks, without `blk.i.`; .weight is understood."""

    def tensors(self, config: Config) -> list[Listed]:
        """Every tensor, in the order of use."""
        keys = {key: value for key, (value, _) in self.metadata(config).items()}
        sizes = Sizes(self.name, keys | {f"{self.name}.vocab_size": base.vocab_size(config)}, self.own_sizes)
        return listed(self._names(sizes, config), sizes)

    def _names(self, sizes: Sizes, config: Config) -> Iterator[str]:
        yield "token_embd.weight"
        for i in range(sizes.n_layer):
            yield from (f"blk.{i}.{full_name(name)}" for name in self.layer(sizes, i, config).split())
        yield "output_norm.weight"
        if not base.is_tied(config, self.ties_by_default):
            yield "output.weight"


def full_name(name: str) -> str:
    """With .weight, unless it has a suffix; ssm_a has none."""
    return name if name.endswith(".bias") or name == "ssm_a" else f"{name}.weight"


DENSE = "ffn_gate ffn_up ffn_down"
EXPERTS = "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
SHARED = "ffn_gate_shexp ffn_up_shexp ffn_down_shexp"


def decoder_entries(name: str, config: Config) -> Entries:
    """The keys that every decoder with rotary positions has, head length among them."""
    heads = need(config, "num_attention_heads")
    entries: Entries = {
        "block_count": (need(config, "num_hidden_layers"), "u32"),
        "context_length": (need(config, "max_position_embeddings"), "u32"),
        "embedding_length": (need(config, "hidden_size"), "u32"),
        "attention.head_count": (heads, "u32"),
        "attention.head_count_kv": (config.get("num_key_value_heads") or heads, "u32"),
        "attention.layer_norm_rms_epsilon": (float(need(config, "rms_norm_eps")), "f32"),
        "rope.freq_base": (float(rope_parameters(config)["rope_theta"]), "f32"),
    }
    if config.get("intermediate_size"):
        entries["feed_forward_length"] = (config["intermediate_size"], "u32")
    if config.get("head_dim"):
        entries["attention.key_length"] = entries["attention.value_length"] = (config["head_dim"], "u32")
    return {f"{name}.{key}": entry for key, entry in entries.items()}


def extra_layers(config: Config) -> int:
    """Layers after the main ones that predict further tokens."""
    return config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0


def is_dense(sizes: Sizes, i: int) -> bool:
    """Whether layer i stands before the first one with experts."""
    return i < (sizes.key("leading_dense_block_count") or 0)
