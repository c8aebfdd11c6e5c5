"""`Arch`: the description of an architecture, read by the converter, the exporter, the planner and the runtime.

`Arch` documents every method and what an architecture overrides. Each architecture is a class in a file of its own;
defining the class registers it. `archs/llama.py` shows the pattern. GGUF keys are `Entries`: name -> (value, kind), and
the kind is a GGUF type ("u32", "f32", "bool", "str", ...).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common import checked, layer_scalars, wrapper
from quantkit.archs.common import mtp as mtp_layers
from quantkit.archs.common.blocks import Block, Head, HParams, MtpLayer
from quantkit.archs.common.layer_scalars import LayerScalar
from quantkit.archs.common.shapes import ExpectedTensor, Sizes, expected_tensors, has_shape
from quantkit.archs.common.tensors import (
    LazyTensor,
    Piece,
    Shape,
    TensorRule,
    fill_name,
    missing,
    numbered_experts,
    pieces,
    split_name,
)
from quantkit.errors import FormatError, UnknownNameError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import mapping, real

Config = Mapping[str, object]

_by_name: dict[str, Arch] = {}

# Buffers that old checkpoints saved. Every implementation computes them.
IGNORED_BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)$")


def registered() -> dict[str, Arch]:
    """Every architecture by its name in `general.architecture`."""
    return _by_name


class Keys:
    """The metadata keys of one architecture, `ARCH.KEY`; all are checked against their bounds first.

    The methods take KEY, without the architecture. Errors name the whole key.
    """

    def __init__(self, arch: str, metadata: Mapping[str, object]):
        self.arch = arch
        self.metadata = metadata
        checked.check_keys(arch, metadata)

    def get(self, key: str, default: object = None) -> Any:
        """The value of a key, or the default."""
        checked.bound_of(key)  # raises for a key without bounds: such a key was not checked
        return self.metadata.get(f"{self.arch}.{key}", default)

    def need(self, key: str) -> Any:
        """The value of a key; FormatError if it is missing."""
        value = self.get(key)
        if value is None:
            raise FormatError(
                f"metadata key {self.arch}.{key} is missing; the file is not a complete {self.arch} model"
            )
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """An integer. An array with the same number for every layer is that number; other arrays are refused."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, (list, tuple, np.ndarray)):
            value = self._alike(key, [int(v) for v in value])
        return int(value)

    def per_layer(self, key: str, default: list[int] | None = None, minimum: int = 0) -> list[int]:
        """An integer for each layer, from a list or from one number. Without a default the key is required."""
        value, layers = self.need(key) if default is None else self.get(key, default), self.number("block_count")
        found = [int(i) for i in value] if isinstance(value, (list, tuple)) else [int(value)] * layers
        if len(found) != layers:
            raise FormatError(
                f"metadata key {self.arch}.{key} has {len(found)} entries, {self.arch}.block_count is {layers}; it has "
                "to have one for each layer"
            )
        if (least := min(found)) < minimum:
            raise FormatError(
                f"metadata key {self.arch}.{key}[{found.index(least)}] = {least}; it has to be {minimum} or more"
            )
        return found

    def _alike(self, key: str, values: Sequence[int]) -> int:
        """The one number in an array with an entry for each layer. UnsupportedError if layers differ."""
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
        """A float. Without a default the key is required."""
        return float(self.need(key) if default is None else self.get(key, default))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        return bool(self.get(key, default))


class Arch(ABC):
    """One architecture. Its only instance is found with `archs.get(name)` or `archs.from_hf(config)`.

    Override what differs from the base class; most architectures derive from `decoder.Decoder`, which implements the
    abstract methods for models like Llama and adds finer hooks (last group).

    Identity:

    | override | for |
    | --- | --- |
    | `name`, `hf`, `model_type` | the names of the architecture in GGUF and in config.json (required) |
    | `accepts` | two architectures that share a class name in config.json |
    | `EXAMPLE` | the tiny config.json from which the tests build a model (required) |

    Tensor names and transforms:

    | override | for |
    | --- | --- |
    | `rules` | names on both sides, with the transform of rows (required) |
    | `rules_of` | tensors that depend on a setting in config.json |
    | `has_bias` | biases under another condition than attention_bias and mlp_bias |
    | `canonical` | checkpoints that spell names in more than one way |
    | `generated`, `is_generated` | GGUF tensors without a counterpart in the checkpoint |
    | `layer_scalars` | numbers of layers that are tensors of a checkpoint and GGUF keys |
    | `size_overrides` | a tensor with another shape than the table in `shapes` says |
    | `shape_overrides` | a tensor with other dimensions than in that table |
    | `mtp` | files that have names for MTP layers |
    | `to_gguf`, `to_hf` | tensors that rules cannot express; call `super()` first or last |

    Metadata, both ways:

    | override | for |
    | --- | --- |
    | `metadata` | config.json -> GGUF keys (abstract) |
    | `config` | GGUF keys -> config.json (abstract) |
    | `defaults`, `defaults_of`, `ties_by_default`, `rotary_fraction` | settings that config.json may omit |

    Computed blocks:

    | override | for |
    | --- | --- |
    | `hparams` | the numbers of a model, from GGUF keys (abstract) |
    | `block` | a layer (abstract) |
    | `head` | embedding and output other than RMS norm and a matrix |

    Added by `Decoder`:

    | override | for |
    | --- | --- |
    | `numbers` | fields of HParams beyond the common ones |
    | `head_dim`, `rope_dim`, `rotary` | the size of a head, and how much of it gets RoPE |
    | `rope_style`, `biased` | "norm" or "neox"; the matrices that attention_bias gives a bias |
    | `attention`, `feed_forward` | the two parts of a layer |

    The callers use `tensors`, `shapes`, `dropped_tensors`, `n_mtp_layers`, `with_mtp`, `blocks` and `mtp_heads` as
    well; these follow from the above.
    """

    name: ClassVar[str]  # general.architecture
    hf: ClassVar[tuple[str, ...]]  # class names in config.json "architectures"; export writes the first
    model_type: ClassVar[str]  # config.json "model_type" of the first class
    rules: ClassVar[tuple[TensorRule, ...]]
    ties_by_default: ClassVar[bool] = False  # what transformers assumes if config.json has no tie_word_embeddings
    defaults: ClassVar[Mapping[str, object]] = {}  # other settings that config.json may omit
    defaults_of: ClassVar[Mapping[str, Mapping[str, object]]] = {}  # the same for single classes in `hf`
    rotary_fraction: ClassVar[float | None] = None  # default fraction of a head that gets RoPE; None: always all of it
    mtp: ClassVar[str] = ""  # "keep" or "drop" MTP layers by default; "": files have no names for them
    size_overrides: ClassVar[Mapping[str, Callable[[Sizes], int]]] = {}  # sizes of `shapes.Sizes` that differ here
    shape_overrides: ClassVar[Mapping[str, str]] = {}  # lines of the table in `shapes` that differ here
    layer_scalars: ClassVar[tuple[LayerScalar, ...]] = ()  # numbers of layers; `metadata` gives the initial ones
    EXAMPLE: ClassVar[dict[str, Any]]  # a tiny config.json

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _by_name[cls.name] = cls()

    def __repr__(self) -> str:
        return f"<arch {self.name}>"

    # ------------------------------------------------------------------------------------------------ checkpoint side

    @abstractmethod
    def metadata(self, config: Config) -> Entries:
        """The GGUF keys of a config.json. UnsupportedError names a setting that GGUF cannot express."""

    @abstractmethod
    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        """The config.json of a GGUF's metadata and tensors. Few architectures decode a tensor for it."""

    def accepts(self, config: Config) -> bool:
        """Whether a config.json with a class in `hf` is of this architecture. Architectures may share a class."""
        return True

    def generated(self, config: Config) -> dict[str, np.ndarray]:
        """GGUF tensors, float32 by name, that follow from config.json alone."""
        return {}

    def scalar_keys(self, config: Config, tensors: Mapping[str, LazyTensor]) -> Entries:
        """The GGUF keys that a checkpoint's tensors say, and not its config.json: those of `layer_scalars`."""
        if not self.layer_scalars:
            return {}
        layers = int(need(config, "num_hidden_layers"))
        found = {self.canonical(name): tensor for name, tensor in tensors.items()}
        return layer_scalars.read(self.layer_scalars, found, layers)

    def scalar_tensors(self, hparams: HParams, metadata: Mapping[str, object]) -> dict[str, np.ndarray]:
        """The tensors of a checkpoint, float32 by name, that a GGUF file has as keys: the inverse of `scalar_keys`."""
        return layer_scalars.written(self.layer_scalars, metadata, hparams.n_layer)

    def is_generated(self, name: str) -> bool:
        """Whether the GGUF tensor `name` has no counterpart in a checkpoint."""
        return False

    def tensors(self, config: Config) -> list[ExpectedTensor]:
        """The GGUF tensors of a model, from its config.json alone, in the order in which they are written.

        These are the generated tensors and those that the rules require, with a bias where `has_bias` is true.
        """
        keys = {key: value for key, (value, _) in self.metadata(config).items()}
        sizes = Sizes(
            self.name, {f"{self.name}.vocab_size": vocab_size(config)} | keys, self.size_overrides, self.shape_overrides
        )
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
        """Shapes of the GGUF tensors among `names` that follow from a config.json."""
        keys = {key: value for key, (value, _) in self.metadata(config).items()}
        sizes = Sizes(
            self.name, {f"{self.name}.vocab_size": vocab_size(config)} | keys, self.size_overrides, self.shape_overrides
        )
        return {t.name: t.shape for t in expected_tensors((name for name in names if has_shape(name)), sizes)}

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        """The rules for a config.json, which may say that a model has further tensors."""
        return self.rules

    def has_bias(self, rule: TensorRule, config: Config) -> bool:
        """Whether the tensor of a rule with `bias=True` has one: attention_bias or mlp_bias in config.json."""
        return bool(config.get("mlp_bias" if ".ffn_" in rule.gguf else "attention_bias"))

    def dropped_tensors(self, config: Config, names: Collection[str]) -> dict[str, list[str]]:
        """Tensors of a checkpoint that its GGUF leaves out, by what they are. Names are `canonical` ones."""
        found = wrapper.encoder_tensors(names)
        return found if self.n_mtp_layers(config) else found | mtp_layers.tensors(config, names)

    def n_mtp_layers(self, config: Config) -> int:
        """The number of MTP layers that the GGUF keeps, after the main layers."""
        return mtp_layers.count(config) if self.mtp and config.get(mtp_layers.MTP, self.mtp) == "keep" else 0

    def with_mtp(self, config: Config, policy: str, names: Collection[str] | None = None) -> dict[str, Any]:
        """A config.json with an entry that says whether MTP layers are kept.

        `policy` is one of `mtp_layers.POLICIES`; "auto" keeps them if files of the architecture usually have them and
        the checkpoint has them, "only" keeps them too. `names` are the checkpoint's tensors, `canonical`; None: not
        known. An error says why "keep" is not possible.
        """
        counted = mtp_layers.count(config)
        if policy not in mtp_layers.POLICIES:
            raise UnknownNameError("policy of --mtp", policy, mtp_layers.POLICIES)
        there = mtp_layers.tensors(config, names or ())
        if names is None and counted:
            there = {"MTP layers": [f"{counted} by config.json"]}
        if policy == "only":
            policy = "keep"
            if not there and not counted:
                raise FormatError("--mtp only: the checkpoint has no MTP layers")
        if policy == "keep" and there and not self.mtp:
            what, tensors = next(iter(there.items()))
            raise UnsupportedError(
                f"{what} ({len(tensors)} tensors, {tensors[0]} …) cannot be kept: files of {self.name} have no names "
                "for it; use --mtp drop"
            )
        if policy == "keep" and not there and counted:
            raise FormatError(
                f"config.json has {counted} MTP layer(s), but the checkpoint has no tensors of them; use --mtp drop"
            )
        if policy == "auto":
            policy = self.mtp if there and self.mtp else "drop"
        return {**config, mtp_layers.MTP: policy}

    def canonical(self, name: str) -> str:
        """A checkpoint's tensor name as the rules spell it. Checkpoints of bare models leave out `model.`."""
        name = wrapper.inner_name(name)
        return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """The GGUF tensors to make from a checkpoint's tensors, in the order in which they are written.

        Errors name tensors that no rule knows and required ones that are missing. `lm_head` is left out if the config
        ties it to the embedding.
        """
        stored = {self.canonical(name): name for name in shapes if not IGNORED_BUFFERS.search(name)}
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
        for name in (name for scalar in self.layer_scalars for name in scalar.names(hparams.n_layer)):
            stored.pop(name, None)
        rules = self.rules_of(config)
        _check_experts(rules, stored, hparams)
        found = pieces(rules, {name: shapes[stored[name]] for name in stored}, hparams, to_gguf=True)
        self._check(rules, stored, found, hparams, "checkpoint")
        self._check_biases(config, found)
        return [replace(piece, sources=tuple(stored[source] for source in piece.sources)) for piece in found]

    def _check_biases(self, config: Config, found: list[Piece]) -> None:
        """FormatError if biases that config.json states are in no layer, or if there are others.

        transformers would take zeros for the former and ignore the latter.
        """
        made = {piece.name for piece in found}
        stated = [tensor.name for tensor in self.tensors(config) if tensor.name.endswith(".bias")]
        others = (piece for piece in found if piece.name.endswith(".bias") and ".exp_probs_b." not in piece.name)
        if added := [piece.name for piece in others if piece.name not in stated]:
            raise FormatError(
                f"this checkpoint has {len(added)} bias(es) that a {self.name} model with this config.json lacks: "
                f"{', '.join(added[:5])}{', …' if len(added) > 5 else ''}; transformers ignores them; if the model was "
                "trained with them, set attention_bias or mlp_bias to true in config.json"
            )
        if absent := [name for name in stated if name not in made]:
            raise FormatError(
                f"this checkpoint lacks {len(absent)} bias(es) of a {self.name} model with this config.json: "
                f"{', '.join(absent[:5])}{', …' if len(absent) > 5 else ''}; a shard is missing or the file is "
                "incomplete, or config.json states biases, such as attention_bias, that the model does not have"
            )

    def expected(self, config: Config, shapes: Mapping[str, Shape]) -> set[str]:
        """Which of a checkpoint's tensors, given by name and shape, a model of this config.json has."""
        stored = {self.canonical(name): name for name in shapes}
        hparams = self.hparams({key: value for key, (value, _) in self.metadata(config).items()})
        required = {tensor.name for tensor in self.tensors(config)}
        found = pieces(self.rules_of(config), {n: shapes[stored[n]] for n in stored}, hparams, to_gguf=True)
        return {stored[source] for piece in found if piece.name in required for source in piece.sources}

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """The checkpoint tensors to make from a GGUF's tensors. Errors are those of `to_gguf`."""
        stored = {name: shape for name, shape in shapes.items() if not self.is_generated(name)}
        found = pieces(self.rules, stored, hparams, to_gguf=False)
        self._check(self.rules, stored, found, hparams, "GGUF")
        return found

    def _check(
        self, rules: tuple[TensorRule, ...], names: Collection[str], found: list[Piece], hp: HParams, kind: str
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
        """The model's numbers. `tensors`, the names in the file, tell biases, RoPE factors and a tied output."""

    @abstractmethod
    def block(self, hp: HParams, i: int) -> Block:
        """What layer `i` computes. That of an MTP layer is the block within."""

    def blocks(self, hparams: HParams) -> list[Block]:
        """What the layers compute, first to last, without MTP layers."""
        return [self.block(hparams, i) for i in range(hparams.n_main)]

    def mtp_heads(self, hparams: HParams) -> list[MtpLayer]:
        """The MTP layers of a file. UnsupportedError if it lacks the projection of one of them."""
        head = self.head(hparams)
        layers = range(hparams.n_main, hparams.n_layer)
        return [mtp_layers.layer(hparams, self.block(hparams, i), head) for i in layers]

    def head(self, hparams: HParams) -> Head:
        """The embedding, the last norm and the output matrix."""
        output = "token_embd" if hparams.tied else "output"
        factor = hparams.linear("token_embd").scale
        norm, matrix = hparams.norm("output_norm"), hparams.linear(output)
        return Head("token_embd.weight", norm, matrix, embedding_factor=factor)


def _check_experts(rules: Sequence[TensorRule], names: Collection[str], hp: HParams) -> None:
    """FormatError if config.json says another number of experts than the checkpoint has."""
    found = numbered_experts(rules, names)
    needed = any(rule.is_needed(hp, i) for rule in rules if ".E." in rule.hf for i in range(hp.n_layer))
    if (found or needed) and len(found) != hp.n_expert:
        numbers = f" (numbers {min(found)} to {max(found)})" if found else ""
        raise FormatError(
            f"config.json says {hp.n_expert} experts, the checkpoint has {len(found)}{numbers}; config.json is wrong "
            "or a shard is missing"
        )


# ------------------------------------------------------------------------------------------------ shared by many archs

EMBEDDING_RULES = (TensorRule("token_embd", "model.embed_tokens"),)
OUTPUT_RULES = (
    TensorRule("output_norm", "model.norm", f32=True),
    TensorRule("output", "lm_head", required=False),
)
SWIGLU_RULES = (
    TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
    TensorRule("blk.N.ffn_gate", "model.layers.N.mlp.gate_proj", bias=True),
    TensorRule("blk.N.ffn_up", "model.layers.N.mlp.up_proj", bias=True),
    TensorRule("blk.N.ffn_down", "model.layers.N.mlp.down_proj", bias=True),
)


def vocab_size(config: Config) -> int:
    """The rows of the embedding. FormatError if config.json does not say it."""
    return int(need(config, "vocab_size"))


def is_tied(config: Config, by_default: bool = False) -> bool:
    """Whether the embedding is also the output matrix."""
    return bool(config.get("tie_word_embeddings", by_default))


def need(config: Config, key: str) -> Any:
    """config[key], or a FormatError that names it."""
    value = config.get(key)
    if value is None:
        raise FormatError(f"config.json has no '{key}', which {config.get('architectures')} needs")
    return value


def refuse(config: Config, key: str, accepted: Collection[Any]) -> None:
    """UnsupportedError if config.json gives `key` a value that is not in `accepted`. An absent key is accepted."""
    value = config.get(key)
    if value is not None and value not in accepted:
        raise UnsupportedError(
            f"config.json: {key} = {value!r} is not supported by quantkit; accepted: {', '.join(map(repr, accepted))}"
        )


def rope_parameters(config: Config, default: Mapping[str, object] | None = None) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and the values of the scaling, from either form of config.json.

    transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling` (with `type`). The
    original context of llama3 and yarn is the config's, else the scaling's, else max_position_embeddings. `default` is
    what a class takes for a config without either form.
    """
    merged: dict[str, Any] = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    merged = merged or dict(default or {})
    if merged.get("rope_theta") is None:
        merged["rope_theta"] = config.get("rope_theta") or 10000.0
    if isinstance(merged["rope_theta"], (list, tuple)):
        raise UnsupportedError(
            f"config.json: rope_theta = {checked.brief(list(merged['rope_theta']))} differs between layers, which "
            f"quantkit does not know of {config.get('architectures')}"
        )
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
