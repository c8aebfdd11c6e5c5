"""`Arch`: one description of an architecture, read by the converter, the exporter and the runtime.

    metadata(config)              config.json -> GGUF keys
    config(metadata, tensors)     GGUF keys -> config.json
    to_gguf(config, shapes)       checkpoint tensors -> GGUF tensors, as Pieces
    to_hf(hparams, shapes)        GGUF tensors -> checkpoint tensors, as Pieces
    generated(config)             tensors that a checkpoint has no counterpart of
    tensors(config)               every GGUF tensor's name and shape, by config.json alone
    hparams(metadata, tensors)    the numbers of a model, for to_hf and the runtime
    blocks(hparams), head(hparams)  what is computed

An architecture derives from Arch in a file of its own, which registers it; see archs/llama.py for the pattern. Keys are
`Entries`: name -> (value, kind), kind being a GGUF type ("u32", "f32", "bool", "str", ...).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common import checked, wrapper
from quantkit.archs.common import mtp as mtp_layers
from quantkit.archs.common.blocks import Block, Head, HParams, Norm
from quantkit.archs.common.shapes import ExpectedTensor, Sizes, expected_tensors, has_shape
from quantkit.archs.common.tensors import (
    LazyTensor,
    Piece,
    Rule,
    Shape,
    fill_name,
    missing,
    numbered_experts,
    pieces,
    split_name,
)
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import mapping, real

Config = Mapping[str, object]

_by_name: dict[str, Arch] = {}

# Buffers that old checkpoints saved; every implementation computes them.
IGNORED = re.compile(r"\.(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)$")


def registered() -> dict[str, Arch]:
    return _by_name


class Keys:
    """Reads one architecture's keys from metadata, all of which are checked first. Errors name the key."""

    def __init__(self, arch: str, metadata: Mapping[str, object]):
        self.arch = arch
        self.metadata = metadata
        checked.check_keys(arch, metadata)

    def get(self, key: str, default: Any = None) -> Any:
        checked.bound_of(key)  # a key that nothing bounds is not read
        return self.metadata.get(f"{self.arch}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise FormatError(
                f"metadata key {self.arch}.{key} is missing; the file is not a complete {self.arch} model"
            )
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """A count. An array of equal counts, one a layer, is that count; other arrays are refused."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, (list, tuple, np.ndarray)):
            value = self._alike(key, [int(v) for v in value])
        return int(value)

    def _alike(self, key: str, values: Sequence[int]) -> int:
        """What an array says of every layer alike."""
        layers = self.get("block_count")
        if isinstance(layers, int) and len(values) != layers:
            raise FormatError(
                f"metadata key {self.arch}.{key} has {len(values)} entries, {self.arch}.block_count is {layers}; it "
                "has to be one number or one for each layer"
            )
        if len(distinct := sorted(set(values))) != 1:
            raise UnsupportedError(
                f"{self.arch}.{key} differs between layers ({checked.brief(distinct)}); quantkit expects one value"
            )
        checked.check_key(f"{self.arch}.{key}", distinct[0], checked.bound_of(key))
        return distinct[0]

    def real(self, key: str, default: float | None = None) -> float:
        return float(self.need(key) if default is None else self.get(key, default))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))


class Arch(ABC):
    """An architecture. Its one instance is found with `archs.get(name)` or `archs.from_hf(config)`."""

    name: ClassVar[str]  # general.architecture
    hf: ClassVar[tuple[str, ...]]  # names in config.json "architectures"; the first is the one `export` writes
    model_type: ClassVar[str]  # config.json "model_type" of that first name
    rules: ClassVar[tuple[Rule, ...]]
    ties_by_default: ClassVar[bool] = False  # what transformers assumes where config.json has no tie_word_embeddings
    defaults: ClassVar[Mapping[str, object]] = {}  # further ones, which config.json may omit
    defaults_of: ClassVar[Mapping[str, Mapping[str, object]]] = {}  # those of some of the classes in `hf` only
    rotary_fraction: ClassVar[float | None] = (
        None  # which part of a head rope turns, unless config.json says; None: always all
    )
    mtp: ClassVar[str] = ""  # "keep" or "drop" MTP layers; "": files have no names for them
    own_sizes: ClassVar[Mapping[str, Callable[[Sizes], int]]] = {}  # numbers that mean something else here, see shapes
    EXAMPLE: ClassVar[dict[str, Any]]  # a tiny config.json

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _by_name[cls.name] = cls()

    def __repr__(self) -> str:
        return f"<arch {self.name}>"

    # ------------------------------------------------------------------------------------------------ checkpoint side

    @abstractmethod
    def metadata(self, config: Config) -> Entries:
        """GGUF keys of a config.json. UnsupportedError names what cannot be expressed."""

    @abstractmethod
    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        """config.json of a GGUF's metadata and tensors; of a lazy tensor only `dequantize()` is used, if anything."""

    def accepts(self, config: Config) -> bool:
        """Whether a config.json of one of the classes in `hf` is this architecture's: those may share a class."""
        return True

    def generated(self, config: Config) -> dict[str, np.ndarray]:
        """Tensors float32 that follow from config.json alone."""
        return {}

    def is_generated(self, name: str) -> bool:
        """Whether the GGUF tensor `name` is one of `generated`, so that a checkpoint leaves it out."""
        return False

    def tensors(self, config: Config) -> list[ExpectedTensor]:
        """The tensors that the checkpoint of a config.json becomes, in the order they are written.

        By default those that the rules require, with the biases that `has_bias` tells.
        """
        keys = {key: value for key, (value, _) in self.metadata(config).items()}
        sizes = Sizes(self.name, {f"{self.name}.vocab_size": vocab_size(config)} | keys, self.own_sizes)
        hp = self.hparams(dict(sizes.metadata))
        tied = is_tied(config, self.ties_by_default)
        rules = [rule for rule in self.rules_of(config) if rule.required or (rule.gguf == "output" and not tied)]
        of_layers = [rule for rule in rules if ".N." in rule.gguf]
        first = rules.index(of_layers[0])
        names = [rule.names("gguf")[0] for rule in rules[:first]]
        for i in range(hp.n_layer):
            for rule in (rule for rule in of_layers if rule.is_needed(hp, i)):
                known = rule.names("gguf")
                names += [fill_name(name, i) for name in known[: 2 if self.has_bias(rule, config) else 1]]
        names += [rule.names("gguf")[0] for rule in rules[first:] if rule not in of_layers]
        generated = [ExpectedTensor(name, x.shape, True) for name, x in self.generated(config).items()]
        return generated + expected_tensors(names, sizes)

    def shapes(self, config: Config, names: Iterable[str]) -> dict[str, Shape]:
        """Those of the tensors among `names` whose shape follows from a config.json."""
        keys = {key: value for key, (value, _) in self.metadata(config).items()}
        sizes = Sizes(self.name, {f"{self.name}.vocab_size": vocab_size(config)} | keys, self.own_sizes)
        return {t.name: t.shape for t in expected_tensors((name for name in names if has_shape(name)), sizes)}

    def rules_of(self, config: Config) -> tuple[Rule, ...]:
        """The rules, with what config.json says of tensors that only some models have."""
        return self.rules

    def has_bias(self, rule: Rule, config: Config) -> bool:
        """Whether what a rule names comes with a bias where it may: config.json's attention_bias or mlp_bias."""
        return bool(config.get("mlp_bias" if ".ffn_" in rule.gguf else "attention_bias"))

    def dropped_tensors(self, config: Config, names: Collection[str]) -> dict[str, list[str]]:
        """Tensors of a checkpoint that its GGUF does not get, by what they are; the names as the rules spell them."""
        found = wrapper.encoder_tensors(names)
        return found if self.n_mtp_layers(config) else found | mtp_layers.tensors(config, names)

    def n_mtp_layers(self, config: Config) -> int:
        """MTP layers and are kept, after the main ones."""
        return mtp_layers.count(config) if self.mtp and config.get(mtp_layers.MTP, self.mtp) == "keep" else 0

    def with_mtp(self, config: Config, policy: str, names: Collection[str]) -> dict[str, Any]:
        """config.json with what is done about MTP layers, one of `mtp_layers.POLICIES`.

        `names` are the checkpoint's, as the rules spell them. By "auto" they are kept where the architecture's files
        usually have them and the checkpoint has them. An error says why they cannot be kept.
        """
        there = mtp_layers.tensors(config, names)
        if policy == "keep" and there and not self.mtp:
            what, tensors = next(iter(there.items()))
            raise UnsupportedError(
                f"{what} ({len(tensors)} tensors, {tensors[0]} …) cannot be kept: files of {self.name} have no names "
                "for it; say --mtp drop"
            )
        if policy == "keep" and not there and mtp_layers.count(config):
            raise FormatError(
                f"config.json speaks of {mtp_layers.count(config)} MTP layer(s), of which the "
                "checkpoint has no tensors; say --mtp drop"
            )
        if policy == "auto":
            policy = self.mtp if there and self.mtp else "drop"
        return {**config, mtp_layers.MTP: policy}

    def canonical(self, name: str) -> str:
        """A checkpoint's name for a tensor as the rules spell it; checkpoints of bare models leave out `model.`."""
        name = wrapper.inner_name(name)
        return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """The GGUF tensors that a checkpoint's tensors make, in the order they are written.

        Every tensor must be known and every needed one present; the error names those that are not. `lm_head` is left
        out where the config ties it to the embedding, as transformers ignores it there.
        """
        stored = {self.canonical(name): name for name in shapes if not IGNORED.search(name)}
        for names in self.dropped_tensors(config, stored).values():
            for name in names:
                del stored[name]
        if is_tied(config, self.ties_by_default):
            stored.pop("lm_head.weight", None)
        elif "lm_head.weight" not in stored:
            raise FormatError(
                "the checkpoint has no lm_head.weight and config.json does not say tie_word_embeddings: true; "
                "a shard is missing or config.json is wrong"
            )
        hparams = self.hparams({key: value for key, (value, _) in self.metadata(config).items()})
        rules = self.rules_of(config)
        _check_experts(rules, stored, hparams)
        found = pieces(rules, {name: shapes[stored[name]] for name in stored}, hparams, to_gguf=True)
        self._check(rules, stored, found, hparams, "checkpoint")
        return [replace(piece, sources=tuple(stored[source] for source in piece.sources)) for piece in found]

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """The checkpoint tensors that a GGUF's tensors make."""
        kept = {name: shape for name, shape in shapes.items() if not self.is_generated(name)}
        found = pieces(self.rules, kept, hparams, to_gguf=False)
        self._check(self.rules, kept, found, hparams, "GGUF")
        return found

    def _check(
        self, rules: tuple[Rule, ...], names: Collection[str], found: list[Piece], hp: HParams, kind: str
    ) -> None:
        n_layer = hp.n_layer
        known = {source for piece in found for source in piece.sources if (split_name(source)[1] or 0) < n_layer}
        if unknown := sorted(set(names) - known):
            raise UnsupportedError(
                f"{len(unknown)} tensor(s) of this {kind} are not known to {self.name} of {n_layer} layers"
                f"{f' and {hp.n_expert} experts' if hp.n_expert else ''}: "
                f"{', '.join(unknown[:5])}{', …' if len(unknown) > 5 else ''}; "
                f"the model is a variant that quantkit does not handle (add a rule to quantkit/archs/{self.name}.py)"
            )
        if absent := missing(rules, names, hp, to_gguf=kind != "GGUF"):
            raise FormatError(
                f"this {kind} of {n_layer} layers lacks {len(absent)} tensor(s): {', '.join(absent[:5])}"
                f"{', …' if len(absent) > 5 else ''}; a shard is missing or the file is incomplete"
            )

    # --------------------------------------------------------------------------------------------------- runtime side

    @abstractmethod
    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> HParams:
        """The model's numbers. `tensors` are the names in the file, which tell biases, rope factors and tying."""

    @abstractmethod
    def blocks(self, hparams: HParams) -> list[Block]:
        """The layers, first to last."""

    def head(self, hparams: HParams) -> Head:
        output = "token_embd" if hparams.tied else "output"
        return Head("token_embd.weight", Norm("output_norm.weight", hparams.norm_eps), hparams.linear(output))


def _check_experts(rules: Sequence[Rule], names: Collection[str], hp: HParams) -> None:
    """FormatError where config.json counts other experts than a checkpoint numbers."""
    found = numbered_experts(rules, names)
    needed = any(rule.is_needed(hp, i) for rule in rules if ".E." in rule.hf for i in range(hp.n_layer))
    if (found or needed) and len(found) != hp.n_expert:
        numbers = f" (numbers {min(found)} to {max(found)})" if found else ""
        raise FormatError(
            f"config.json says {hp.n_expert} experts, the checkpoint has {len(found)}{numbers}; config.json is wrong "
            "or a shard is missing"
        )


# ------------------------------------------------------------------------------------------------ shared by many archs

EMBEDDING_RULES = (Rule("token_embd", "model.embed_tokens"),)
OUTPUT_RULES = (
    Rule("output_norm", "model.norm", f32=True),
    Rule("output", "lm_head", required=False),
)
SWIGLU_RULES = (
    Rule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
    Rule("blk.N.ffn_gate", "model.layers.N.mlp.gate_proj", bias=True),
    Rule("blk.N.ffn_up", "model.layers.N.mlp.up_proj", bias=True),
    Rule("blk.N.ffn_down", "model.layers.N.mlp.down_proj", bias=True),
)


def vocab_size(config: Config) -> int:
    return int(need(config, "vocab_size"))


def is_tied(config: Config, by_default: bool = False) -> bool:
    """Whether the embedding is the output matrix too."""
    return bool(config.get("tie_word_embeddings", by_default))


def need(config: Config, key: str) -> Any:
    """config[key], or a FormatError that names it."""
    value = config.get(key)
    if value is None:
        raise FormatError(f"config.json has no '{key}', which {config.get('architectures')} needs")
    return value


def refuse(config: Config, key: str, accepted: Collection[Any]) -> None:
    """UnsupportedError when config.json gives `key` a value that is not accepted; an absent key is."""
    value = config.get(key)
    if value is not None and value not in accepted:
        raise UnsupportedError(
            f"config.json: {key} = {value!r} is not supported by quantkit; accepted: {', '.join(map(repr, accepted))}"
        )


def rope_parameters(config: Config) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and the scaling's own values, from either form of config.json.

    transformers 5 writes `rope_parameters`; before, there were `rope_theta` and `rope_scaling` (with `type`). Where
    they do not say the original context, it is that of the whole config, which is what the model was made for.
    """
    merged: dict[str, Any] = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    if merged.get("rope_theta") is None:
        merged["rope_theta"] = config.get("rope_theta") or 10000.0
    merged["rope_type"] = merged.pop("rope_type", None) or merged.get("type") or "default"
    merged.pop("type", None)
    if merged["rope_type"] in ("llama3", "yarn"):
        stated = merged.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        if original := config.get("original_max_position_embeddings") or stated:
            merged["original_max_position_embeddings"] = original
            context, trained = real(config, "max_position_embeddings"), real(merged, "original_max_position_embeddings")
            if merged["rope_type"] == "yarn" and merged.get("factor") is None and context and trained:
                merged["factor"] = context / trained
    return merged
