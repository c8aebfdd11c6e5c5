"""Plan the types of tensors from file type, recipe and flags. Pure: names and shapes in, types and reasons out.

These decide a tensor's type, highest priority first, as in ik_llama.cpp:

    1. exact flags      --token-embedding-type, --output-tensor-type, --ffn-gate-inp-type
    2. rules            --custom-q and --recipe, the first that matches
    3. class flags      --attn-q-type, --ffn-down-type, …
    4. the mix of the file type, unless --pure
    5. the file type's default type

and then the tensor's shape: rows that are not a whole number of blocks, or too few to be interleaved, fall back. With
--repack, every tensor that can be is interleaved, also one that keeps its type (`interleaving`).

Differences from ik_llama.cpp, on purpose:

    rules and class flags   ik_llama.cpp ignores them for float file types and under --pure; here they apply, and are
                            an error with --pure
    exact flags             if rows do not fit the type, ik_llama.cpp writes a corrupt tensor; here they fall back
    class flags             ik_llama.cpp ignores most of them for the smallest file types (`mixes.SmallMix`)
    --output-tensor-type    of a model whose output is its embedding, rules have priority there; here the flag has it
    --attn-qkv-type         has no effect there; here it has priority over --attn-q-type
    --repack                ignores TYPE and all flags for types there; that is `quantkit repack` here

A tensor that is interleaved in the source and not in the plan, or the reverse, only changes the order of its bits.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from quantkit import types
from quantkit.errors import DataError
from quantkit.formats.gguf import scales
from quantkit.formats.imatrix import Imatrix
from quantkit.recipe.errors import ImportanceError, RecipeError
from quantkit.recipe.planning import dialects, lint
from quantkit.recipe.planning.fallback import fit_columns, interleaved_rows, row_by_row
from quantkit.recipe.planning.interleaving import Selection
from quantkit.recipe.planning.mixes import CLASSES, Mix, ModelTraits, tensor_class
from quantkit.recipe.planning.planned import Plan, PlannedTensor, RuleUse
from quantkit.recipe.planning.presets import FileType, file_type
from quantkit.recipe.rules.grammar import Recipe, Rule
from quantkit.repack.eligible import EMBEDDING, EMBEDDINGS, LAYER_EMBEDDING, OUTPUT
from quantkit.types import QuantType
from quantkit.types.base import LLAMA_CPP

_INTEGERS = frozenset(("i8", "i16", "i32", "i64"))
# Parts of names of weights that stay as they are: small, and harmful to quantize.
_KEPT = {
    "_norm.weight": "a norm",
    "ssm_conv1d": "a convolution",
    "shortconv.conv": "a convolution",
    "hc_attn_fn": "weights of residual streams",
    "hc_ffn_fn": "weights of residual streams",
    "output_hc_fn": "weights of residual streams",
    "hc_attn_inject": "weights of residual streams",
    "hc_ffn_inject": "weights of residual streams",
    "ple_conv1d": "a convolution",
    "_compressor_ape": "position biases",
    "ssm_x.weight": "a state-space projection",
    "ssm_dt.weight": "a state-space projection",
    "per_layer_model_proj": "a projection that llama.cpp keeps",
    "altup": "small",
    "laurel": "small",
    "attn_rel_b.weight": "a position bias",
    "position_embd.weight": "position embeddings",
    "token_types.weight": "token types",
    "v.patch_embd.weight": "a convolution",  # these three in the files of image encoders
    "mm.patch_merger.weight": "a convolution",
    "mm.input_projection.weight": "a matrix that the loader transposes",
}
# Types that llama.cpp never uses without importance, except for embeddings and output; also q2_K in Q2_K_S.
_VERY_LOW = frozenset(["iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m", "iq1_s_r4", "iq1_m_r4", "iq1_kt", "iq2_kt"])
# For tensors without importance in the matrix: the entry that saw the same input, as runtimes fuse the two products.
_SAME_INPUT = (
    ("ffn_up_exps.weight", "ffn_gate_up_exps.weight"),
    ("ffn_gate_exps.weight", "ffn_gate_up_exps.weight"),
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    ("ffn_gate_up_exps.weight", "ffn_up_exps.weight"),
    ("ffn_gate.weight", "ffn_up.weight"),
    ("attn_v_b.weight", "attn_kv_b.weight"),
    ("attn_kv_b.weight", "attn_v_b.weight"),
)


class Tensor(Protocol):
    """The attributes of a tensor that planning needs; shapes are numpy's."""

    @property
    def name(self) -> str:
        """The name in GGUF."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in numpy's order."""

    @property
    def type(self) -> QuantType:
        """The type that the tensor is stored in now."""


@dataclass(frozen=True)
class Options:
    """The flags that shape a plan. `class_types` is keyed by the classes of `mixes.CLASSES` and "attn_qkv".

    `dialect` is the program that the file is for, one of `types.DIALECTS`, `replace_types` whether types that it does
    not read are replaced (`dialects`). `scale_nvfp4` gives tensors that become NVFP4 a scale (`with_new_scales`).

    `repack_patterns` are ECMAScript regexes: with `repack`, only tensors in whose name one is found are interleaved.
    """

    pure: bool = False
    output_type: QuantType | None = None
    embedding_type: QuantType | None = None
    router_type: QuantType | None = None
    class_types: Mapping[str, QuantType] = field(default_factory=dict)
    leave_output: bool = False
    allow_requantize: bool = False
    ignore_imatrix_rules: bool = False
    repack: bool = False
    repack_patterns: tuple[str, ...] = ()
    dialect: str | None = None
    replace_types: bool = False
    scale_nvfp4: bool = False
    layer_embedding_type: QuantType | None = None

    def __str__(self) -> str:
        """The flags as typed in a shell; `parse` reads them."""
        repacking = ["--repack"] if self.repack and not self.repack_patterns else []
        if self.repack_patterns:
            repacking = [f"--repack-pattern {shlex.quote(','.join(self.repack_patterns))}"]
        program = [f"--dialect {self.dialect}"] if self.dialect else []
        switches = {"--replace-types": self.replace_types, "--scale-nvfp4": self.scale_nvfp4}
        return " ".join([*self._choosing(), *repacking, *program, *(flag for flag, on in switches.items() if on)])

    @classmethod
    def parse(cls, text: str) -> Options:
        """Parse the text of Options; RecipeError for any other text.

        Older files contain patterns without quotes.
        """
        try:
            words = shlex.split(text) if re.search("['\"]", text) else text.split()
        except ValueError as error:
            raise RecipeError(f"'{text}' cannot be read as flags of a plan: {error}") from None
        exact = {"output-tensor": "output_type", "token-embedding": "embedding_type", "ffn-gate-inp": "router_type",
                 "per-layer-token-embedding": "layer_embedding_type"}  # fmt: skip
        classes = {name.replace("_", "-"): name for name in (*(name for _, name in CLASSES), "attn_qkv")}
        switches = ("pure", "leave-output-tensor", "ignore-imatrix-rules", "repack", "replace-types", "scale-nvfp4")
        found: dict[str, Any] = {"class_types": {}}
        rest = iter(words)
        for word in rest:
            name, of_type = word.removeprefix("--"), word.removeprefix("--").removesuffix("-type")
            if not word.startswith("--"):
                raise RecipeError(f"'{word}' is not a flag of a plan")
            if name in switches:
                found[name.replace("-output-tensor", "_output").replace("-", "_")] = True
            elif name == "dialect":
                found["dialect"] = dialects.checked(next(rest, ""))
            elif name == "repack-pattern":
                found["repack_patterns"] = tuple(next(rest, "").split(","))
            elif of_type in exact:
                found[exact[of_type]] = types.layout(next(rest, ""))
            elif of_type in classes:
                found["class_types"][classes[of_type]] = types.layout(next(rest, ""))
            else:
                raise RecipeError(f"'{word}' is not a flag of a plan")
        return cls(**found)

    @property
    def choose(self) -> bool:
        """Whether any of the flags chooses types."""
        return bool(self._choosing())

    def _choosing(self) -> list[str]:
        named = {"output-tensor": self.output_type, "token-embedding": self.embedding_type}
        named |= {"per-layer-token-embedding": self.layer_embedding_type}
        named |= {"ffn-gate-inp": self.router_type} | {k.replace("_", "-"): t for k, t in self.class_types.items()}
        flags = [f"--{name}-type {t.name}" for name, t in named.items() if t is not None]
        switches = {
            "pure": self.pure,
            "leave-output-tensor": self.leave_output,
            "ignore-imatrix-rules": self.ignore_imatrix_rules,
        }
        return flags + [f"--{name}" for name, on in switches.items() if on]


def plan(
    tensors: Iterable[Tensor],
    target: str | FileType,
    recipe: Recipe | None = None,
    *,
    metadata: Mapping[str, object] | None = None,
    imatrix: Imatrix | None = None,
    options: Options | None = None,
) -> Plan:
    """Decide the type of every tensor of a file.

    `tensors` are in file order, because mixes count them; mixes also read `metadata`, the file's. Raises RecipeError
    for flags that contradict each other, DataError for an importance matrix that does not fit or a quantized source
    without `allow_requantize`.
    """
    options = options or Options()
    dialects.checked(options.dialect)
    recipe = recipe or Recipe()
    target = target if isinstance(target, FileType) else file_type(target)
    listed = list(tensors)
    names = [t.name for t in listed]
    if imatrix is not None and imatrix.entries and target.default is not None:  # filters may have left none
        _require_of_model(imatrix, listed)
    selection = Selection(options.repack_patterns, names) if options.repack or options.repack_patterns else None
    planner = _Planner(target, recipe, options, ModelTraits.of(metadata or {}, names), imatrix, selection)
    planned = without_scales(tuple(planner.tensor(t) for t in listed))
    if options.scale_nvfp4:
        planned = with_new_scales(planned)
    if not options.allow_requantize:
        refuse_requantizing(planned, selection is not None)
    dialects.refuse_foreign(planned, options.dialect)
    found = lint.check(planner.uses, planned, imatrix, planner.type_flags(names))
    further = (dialects.unread_mixture(planned), _kept_output_is_absent(options, names))
    warnings = (*found.warnings, *filter(None, further))
    return Plan(target, recipe, str(options), planned, tuple(planner.uses), warnings, found.notes, options.dialect)


def _kept_output_is_absent(options: Options, names: Sequence[str]) -> str:
    """The warning about --leave-output-tensor where there is no output.weight; empty if there is one."""
    if not options.leave_output or OUTPUT in names or EMBEDDING not in names:
        return ""
    return (
        f"--leave-output-tensor has no effect: this model's output matrix is its embedding, {EMBEDDING}; its type is "
        "that of --token-embedding-type"
    )


@dataclass(frozen=True)
class _Choice:
    type: QuantType
    reason: str
    rule: int | None = None


class _Planner:
    """Makes the decisions of one plan; `tensor` is called in file order."""

    def __init__(
        self,
        target: FileType,
        recipe: Recipe,
        options: Options,
        model: ModelTraits,
        imatrix: Imatrix | None,
        selection: Selection | None,
    ):
        self.target, self.recipe, self.options, self.model, self.imatrix = target, recipe, options, model, imatrix
        self.selection = selection  # of what is interleaved
        self.uses = [RuleUse(rule) for rule in recipe.rules]
        self._searches = [rule.regex.search for rule in recipe.rules]
        self._refuse_contradictions()
        mixed = target.default is not None and not options.pure and not target.is_float
        self.mix = Mix(target, target.default, model, imatrix is not None) if mixed and target.default else None

    def _refuse_contradictions(self) -> None:
        flags = (f"--{name.replace('_', '-')}-type" for name in self.options.class_types)
        given = [*map(str, self.recipe.rules), *flags]
        if self.options.pure and given:
            raise RecipeError(
                f"--pure gives every tensor the type of {self.target.name}, so '{given[0]}' would do nothing; drop one"
            )
        if self.options.replace_types and self.options.dialect is None:
            raise RecipeError(
                "--replace-types is about the program that the file is for; pass --dialect ik or llama.cpp"
            )
        if self.options.dialect == LLAMA_CPP and self.selection is not None:
            raise RecipeError("llama.cpp reads no interleaved types; drop --repack or --dialect llama.cpp")
        if self.target.default is None and (given or self.options.choose):
            raise RecipeError(f"COPY changes no tensor, so '{(given or [str(self.options)])[0]}' would do nothing")

    def tensor(self, t: Tensor) -> PlannedTensor:
        planned = self._decide(t)
        if self.selection is None or len(t.shape) < 2 or planned.type.name == "f32":
            return planned
        form, why = self.selection.form(t.name, t.shape, planned.type)
        if form is None:
            kept = planned.wanted is None and self.target.default is not None  # its reason says so already
            return planned if kept else replace(planned, reason=f"{planned.reason}; not repacked: {why}")
        return replace(planned, type=form, reason=f"{planned.reason}; repacked", repacked=True)

    def _decide(self, t: Tensor) -> PlannedTensor:
        kept = self._kept_because(t)
        matching = self._note_matches(t.name, candidate=kept is None)
        if kept is not None or self.target.default is None:
            return PlannedTensor(t.name, t.shape, t.type, t.type, kept or "COPY")
        choice = self._for_dialect(self._choose(t, matching), t)
        if choice.rule is not None:
            self.uses[choice.rule].decided.append(t.name)
        fitted, why = fitted_type(choice.type, t)
        if fitted is not choice.type and (near := self._replacement(fitted, t)):
            fitted, why = near, f"{why}; {near.name} in place of {fitted.name} for --dialect {self.options.dialect}"
        reason = f"{choice.reason}; {why}" if why else choice.reason
        planned = PlannedTensor(t.name, t.shape, t.type, fitted, reason, choice.type, choice.rule)
        if planned.copied or planned.reordered:
            return planned
        importance = self._importance(t, fitted)
        if importance is None:
            self._refuse_very_low(t, fitted)
        return replace(planned, importance=importance)

    def _replacement(self, kind: QuantType, t: Tensor) -> QuantType | None:
        """What takes the place of a type that the program of --dialect does not read; None if it does."""
        dialect = self.options.dialect
        return (
            None if dialect is None or dialects.reads(dialect, kind) else dialects.nearest(kind, dialect, t.shape[-1])
        )

    def _for_dialect(self, choice: _Choice, t: Tensor) -> _Choice:
        """A choice of quantkit's, or with --replace-types any, as a type that the program of --dialect reads."""
        if not (self.options.replace_types or choice.reason.startswith("mix of ")):
            return choice
        near = self._replacement(choice.type, t)
        if near is None:
            return choice
        why = f"{choice.reason}; {near.name} in place of {choice.type.name} for --dialect {self.options.dialect}"
        return _Choice(near, why, choice.rule)

    def _kept_because(self, t: Tensor) -> str | None:
        """The reason why a tensor is always copied; None if it may be quantized."""
        if self.target.default is None:
            return "COPY"
        if why := no_matrix(t):
            return f"kept: {why}"
        for part, what in _KEPT.items():
            if part in t.name:
                return f"kept: {what}"
        if t.name == OUTPUT and self.options.leave_output:
            return "kept: --leave-output-tensor"
        if "ffn_gate_inp.weight" in t.name and self.options.router_type in (None, t.type):
            return "kept: the router"
        return None

    def _note_matches(self, name: str, candidate: bool) -> int | None:
        """Record a tensor with every rule that matches it; returns the index of the first."""
        first = None
        for index, search in enumerate(self._searches):
            if search(name):
                use = self.uses[index]
                use.matched.append(name)
                if candidate:
                    use.candidates.append(name)
                first = index if first is None else first
        return first

    def _choose(self, t: Tensor, matching: int | None) -> _Choice:
        # The mix counts the tensors it sees, so it must see all of them.
        mixed = self.mix.choose(t.name, t.shape[-1]) if self.mix else None
        if exact := self._exact_flag(t.name):
            return exact
        if matching is not None:
            rule: Rule = self.recipe.rules[matching]
            return _Choice(rule.type, f"rule {matching + 1}: {rule}", matching)
        flag = self._class_flag(t.name)
        if flag is not None:
            return _Choice(self.options.class_types[flag], f"--{flag.replace('_', '-')}-type")
        assert self.target.default is not None
        if mixed is not None:
            chosen = types.layout(mixed)
            is_default = chosen is self.target.default
            return _Choice(chosen, self.target.name if is_default else f"mix of {self.target.name}")
        return _Choice(self.target.default, self.target.name)

    def _exact_flag(self, name: str) -> _Choice | None:
        options = self.options
        if name == EMBEDDING and options.embedding_type:
            return _Choice(options.embedding_type, "--token-embedding-type")
        if name == LAYER_EMBEDDING and options.layer_embedding_type:
            return _Choice(options.layer_embedding_type, "--per-layer-token-embedding-type")
        if options.output_type and (name == OUTPUT or (name == EMBEDDING and self.model.tied)):
            return _Choice(options.output_type, "--output-tensor-type")
        if options.router_type and "ffn_gate_inp.weight" in name:
            return _Choice(options.router_type, "--ffn-gate-inp-type")
        return None

    def type_flags(self, names: Sequence[str]) -> list[lint.TypeFlag]:
        """Every flag for a type that is given, with the tensors that it is about."""
        options = self.options
        exact = (
            ("--token-embedding-type", options.embedding_type, EMBEDDING),
            ("--per-layer-token-embedding-type", options.layer_embedding_type, LAYER_EMBEDDING),
            ("--output-tensor-type", options.output_type, EMBEDDING if self.model.tied else OUTPUT),
        )
        found = [lint.TypeFlag(flag, t, (name,) if name in names else ()) for flag, t, name in exact if t is not None]
        if options.router_type is not None:
            routers = tuple(name for name in names if "ffn_gate_inp.weight" in name)
            found.append(lint.TypeFlag("--ffn-gate-inp-type", options.router_type, routers))
        for flag, kind in options.class_types.items():
            of_class = tuple(name for name in names if self._class_flag(name) == flag)
            found.append(lint.TypeFlag(f"--{flag.replace('_', '-')}-type", kind, of_class))
        return found

    def _class_flag(self, name: str) -> str | None:
        for flag in ("attn_qkv" if "attn_qkv.weight" in name else None, tensor_class(name)):
            if flag in self.options.class_types:
                return flag
        return None

    def _importance(self, t: Tensor, chosen: QuantType) -> str | None:
        """The name of a tensor's entry in the importance matrix, after a check of its size."""
        if self.imatrix is None or not chosen.uses_imatrix:
            if chosen.requires_imatrix:
                raise ImportanceError(f"{t.name}: {chosen.name} needs an importance matrix; pass --imatrix FILE")
            return None
        entry = importance_entry(t.name, self.imatrix)
        matrices, columns = math.prod(t.shape[:-2]), t.shape[-1]
        if entry is not None and not self.imatrix[entry].fits(matrices, columns):
            if entry == t.name != EMBEDDING:
                raise DataError(
                    f"{t.name}: the importance matrix has {self.imatrix[entry].size} values for it, the tensor needs "
                    f"{matrices} x {columns} = {matrices * columns}; it was measured on another model"
                )
            entry = None  # a stand-in of another shape, or an embedding, whose entry is not measured by design
        if entry is None and chosen.requires_imatrix:
            raise DataError(
                f"{t.name}: {chosen.name} needs importance and the matrix has no entry for this tensor; choose another "
                "type"
            )
        if entry is not None:
            require_usable(t.name, entry, self.imatrix)
        return entry

    def _refuse_very_low(self, t: Tensor, chosen: QuantType) -> None:
        if is_very_low(t.name, chosen, self.target) and not self.options.ignore_imatrix_rules:
            kind = ImportanceError if self.imatrix is None else DataError
            lacks = "no importance matrix is given" if self.imatrix is None else "the importance matrix lacks it"
            raise kind(
                f"{t.name}: {chosen.name} loses too much without importance, and {lacks}; pass --imatrix FILE with "
                "an entry for it, choose another type, or pass --ignore-imatrix-rules"
            )


def is_very_low(name: str, chosen: QuantType, target: FileType) -> bool:
    """Whether a tensor of that name becomes useless in this type without importance."""
    kind = row_by_row(chosen).name
    return (kind in _VERY_LOW or (kind == "q2_K" and target.name == "Q2_K_S")) and name not in (EMBEDDING, OUTPUT)


def no_matrix(t: Tensor) -> str:
    """Why a tensor is not a matrix that can be quantized; empty if it is one."""
    if t.type.name in _INTEGERS:
        return "integers"
    if not t.name.endswith("weight"):
        return "not a weight"
    return "one-dimensional" if len(t.shape) < 2 or math.prod(t.shape[:-1]) == 1 else ""


def fitted_type(wanted: QuantType, t: Tensor) -> tuple[QuantType, str]:
    """The type that a tensor's shape allows, and the reason if it is not `wanted`."""
    rows, columns = t.shape[-2], t.shape[-1]
    found, why = wanted, []
    if t.name in EMBEDDINGS and interleaved_rows(found) > 1:
        found = row_by_row(found)
        why.append("rows of an embedding are looked up one by one")
    for _ in range(2):  # the base type of an interleaved one may be wider than it
        if columns % found.block_size:
            why.append(f"{columns} columns are no multiple of {found.name}'s {found.block_size}")
            try:
                found = fit_columns(found, columns, t.type)
            except RecipeError as error:
                raise RecipeError(f"{t.name}: {error}") from None
        if rows % interleaved_rows(found):
            why.append(f"{rows} rows are no multiple of {found.name}'s {interleaved_rows(found)}")
            found = row_by_row(found)
    return found, "; ".join(why)


def without_scales(planned: tuple[PlannedTensor, ...]) -> tuple[PlannedTensor, ...]:
    """The tensors without the scales of NVFP4 weights that become another type, whose values have them."""
    left_out = applied_scales(planned)
    return tuple(t for t in planned if t.name not in left_out) if left_out else planned


def with_new_scales(planned: tuple[PlannedTensor, ...]) -> tuple[PlannedTensor, ...]:
    """The tensors, with a scale for each that is encoded to NVFP4, except for embeddings, whose rows are looked up."""
    found: list[PlannedTensor] = []
    names = {t.name for t in planned}
    for t in planned:
        name = scales.scale_name(t.name)
        if t.type.name != scales.SCALED or t.copied or t.name in EMBEDDINGS or name in names:
            found.append(t)
            continue
        f32, shape = types.layout("f32"), (scales.matrices(t.shape),)
        found += [replace(t, scale=scales.ENCODED), PlannedTensor(name, shape, f32, f32, "--scale-nvfp4")]
    return tuple(found)


def applied_scales(planned: Iterable[PlannedTensor]) -> set[str]:
    """Names that scales of NVFP4 weights have, of those weights that become another type."""
    return scales.all_companions({t.name: t.source for t in planned if not t.copied})


def _require_of_model(imatrix: Imatrix, tensors: Sequence[Tensor]) -> None:
    """DataError for an importance matrix that has an entry for none of the matrices."""
    matrices = [t.name for t in tensors if len(t.shape) > 1]
    if matrices and not any(importance_entry(name, imatrix) for name in matrices):
        raise DataError(
            f"none of the importance matrix's {len(imatrix)} entries, such as {next(iter(imatrix.entries))}, is for "
            f"one of the {len(matrices)} matrices, such as {matrices[0]}; it was measured on another model"
        )


def importance_entry(name: str, imatrix: Imatrix) -> str | None:
    """The entry of an importance matrix for a tensor: the one of its name, or that of a tensor with the same input."""
    if name in imatrix:
        return name
    for ending, stand_in in _SAME_INPUT:
        if name.endswith("." + ending) and (other := name[: -len(ending)] + stand_in) in imatrix:
            return other
    return None


def require_usable(name: str, entry: str, imatrix: Imatrix) -> None:
    """DataError for an entry of an importance matrix that is not finite or only zeros; `name` is the tensor's."""
    values = imatrix[entry].values
    if not np.isfinite(values).all():
        raise DataError(f"{name}: the importance matrix holds values that are not finite under {entry}")
    if not values.any():
        raise DataError(
            f"{name}: the importance matrix holds only zeros under {entry}, which say nothing about its columns; "
            f"measure again, or leave it out with --exclude-weights {entry}"
        )


def refuse_requantizing(planned: Iterable[PlannedTensor], repack: bool) -> None:
    """Raise DataError for a plan that quantizes tensors that are quantized already."""
    again = [t for t in planned if not (t.copied or t.reordered) and t.source.block_size > 1]
    if again:
        names = ", ".join(f"{t.name} ({t.source.name} to {t.type.name})" for t in again[:3])
        more = f" and {len(again) - 3} more" if len(again) > 3 else ""
        repacking = "; to repack the file as it is: quantkit repack IN OUT" if repack else ""
        raise DataError(
            f"{names}{more}: already quantized, and quantizing again loses more than quantizing the original; start "
            f"from F16, BF16 or F32, or pass --allow-requantize{repacking}"
        )
