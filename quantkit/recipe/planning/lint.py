"""Warnings about probable mistakes in a recipe. Each says what happens and what to write instead.

rules        that match nothing, are shadowed or overruled, name absent layers, or match more than intended
flags        for types of tensors that the model does not have, or that something else decides
rows         that do not fit the type of a rule
types        that quantkit does not encode weights to, such as i8 and q8_K
importance   that is missing, of layers that the model lacks, or of experts with too few tokens

Notes: what looks like a mistake and has no effect, such as rules for norms, which are never quantized.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quantkit.formats.imatrix import Imatrix, rarely_active
from quantkit.recipe.planning.planned import PlannedTensor, RuleUse
from quantkit.recipe.rules import layers
from quantkit.recipe.rules.layers import listed
from quantkit.recipe.rules.patterns import advice, unanchored
from quantkit.recipe.rules.shadows import OrderedRule, shadow
from quantkit.repack.eligible import EMBEDDING, EMBEDDINGS, OUTPUT
from quantkit.types import QuantType

# imatrix does not measure these by default, so a missing entry is not a mistake.
_UNMEASURED = frozenset((*EMBEDDINGS, OUTPUT))
FEW_PER_COLUMN = 4  # tokens: of fewer, more than a fifth of the correlations is noise
FEW_TOKENS = 32  # the mean of 32 squares of normal numbers has a relative error of sqrt(2 / 32) = 1/4


@dataclass(frozen=True)
class Findings:
    """Full sentences: `warnings` about probable mistakes, `notes` about rules without effect."""

    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TypeFlag:
    """A flag for the type of some tensors, such as --attn-v-type: the flag, the type, the names of these tensors."""

    flag: str
    type: QuantType
    names: tuple[str, ...]


def check(
    uses: Sequence[RuleUse],
    planned: Sequence[PlannedTensor],
    imatrix: Imatrix | None,
    flags: Sequence[TypeFlag] = (),
) -> Findings:
    """All warnings and notes about a plan, rules first."""
    linter = _Linter(uses, {t.name: t for t in planned})
    for index in range(len(uses)):
        linter.rule(index)
    found = linter.warnings
    found += _without_encoder(planned)
    found += [text for flag in flags if (text := _unused(flag, linter.of_name))]
    if imatrix is not None:
        found += [text for text in (
            _other_layers(planned, imatrix), _missing_importance(planned), _unseen_experts(planned, imatrix),
            _uncertain_moments(planned, imatrix),
        ) if text]  # fmt: skip
    return Findings(tuple(found), tuple(linter.notes))


@dataclass
class _Linter:
    """Check the rules of a plan, one after the other.

    free       tensors that no earlier rule matches
    misplaced  tensors that an earlier rule matches by mistake, already reported
    """

    uses: Sequence[RuleUse]
    of_name: Mapping[str, PlannedTensor]
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    free: set[str] = field(init=False)
    misplaced: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = set(self.of_name)
        self.ordered = [
            OrderedRule(f"rule {i} '{use.rule}'", frozenset(use.candidates), use.rule.type.name)
            for i, use in enumerate(self.uses, 1)
        ]

    def rule(self, index: int) -> None:
        """Record the warnings and notes about one rule."""
        use, label = self.uses[index], self.ordered[index].label
        taken = [name for name in use.matched if name in self.free]
        self.free.difference_update(use.matched)
        if self._means_absent_output(use):
            found = [self._output_of_tied(index, taken)]
        elif not use.matched:
            names = list(self.of_name)
            found = [f"matches none of the {len(names)} tensors{advice(use.rule.pattern, names)}"]
        elif not use.candidates:
            self._note_kept_only(use, label)
            found = []
        else:
            found = [self._too_late(index), self._takes_too_much(index, taken), _absent_layers(use, self.of_name),
                     _rows(use, self.of_name)]  # fmt: skip
            self._note_kept(use, label, taken)
        self.warnings += [f"{label} {text}" for text in found if text]

    def _means_absent_output(self, use: RuleUse) -> bool:
        """Whether a rule means output.weight in a model without it; the rule may match attn_output.weight."""
        if EMBEDDING not in self.of_name or OUTPUT in self.of_name or not use.rule.matches(OUTPUT):
            return False
        return not use.matched or unanchored(use.rule.pattern, [*use.matched, OUTPUT]).right == (OUTPUT,)

    def _output_of_tied(self, index: int, taken: Sequence[str]) -> str:
        """Message about a rule for the absent output matrix; "" if the embedding gets as many bytes and no other tensor
        is taken.
        """
        kind, embedding = self.uses[index].rule.type, self.of_name[EMBEDDING]
        wrong = [name for name in taken if self._matters(name, index)]
        self.misplaced.update(wrong)
        if not wrong and embedding.bytes_after >= kind.tensor_bytes(embedding.shape):
            return ""
        return (
            f"{f'matches {listed(wrong)}, and' if wrong else 'does nothing:'} this model's output matrix is its "
            rf"embedding, which becomes {embedding.type.name}; if you mean that, write ^token_embd\.weight"
        )

    def _too_late(self, index: int) -> str:
        """Message about a rule whose tensors an earlier rule or a flag decides; "" if there is none."""
        use = self.uses[index]
        if set(use.candidates) <= self.misplaced:
            return ""  # the rule that matches them is already reported
        if found := shadow(self.ordered, index):
            if not found.harmless:
                return found.text
            self.notes.append(f"{self.ordered[index].label} {found.text}")
            return ""
        others = [t for name in use.candidates if (t := self.of_name[name]).wanted is not use.rule.type]
        if use.decided or not others:
            return ""
        return f"is overruled: {others[0].name} is decided by {others[0].reason}; drop one of the two"

    def _takes_too_much(self, index: int, taken: Sequence[str]) -> str:
        """Message about a pattern that matches other tensors than it seems to mean; "" if there are none."""
        use = self.uses[index]
        found = advice(use.rule.pattern, list(self.of_name), taken)
        wrong = [name for name in found.wrong if self._matters(name, index)]
        if found.wrong and not wrong:
            return ""  # the types would be the same without the mistake
        self.misplaced.update(wrong)
        return str(found).removeprefix(":").strip()

    def _matters(self, name: str, index: int) -> bool:
        """Whether a tensor would have another type if a rule did not match it."""
        if self.of_name[name].wanted is None:
            return False  # it is never quantized
        later = next((use.rule.type for use in self.uses[index + 1 :] if name in use.candidates), None)
        return later is not self.uses[index].rule.type

    def _note_kept_only(self, use: RuleUse, label: str) -> None:
        if use.rule.type.block_size == 1:
            return  # a rule that gives norms a float type, which they have
        name = use.matched[0]
        instead = "; --ffn-gate-inp-type changes that" if "ffn_gate_inp." in name else ""
        self.notes.append(f"{label} matches only tensors that stay as they are: {self._kept_as(use.matched)}{instead}")

    def _note_kept(self, use: RuleUse, label: str, taken: Sequence[str]) -> None:
        kept = [name for name in taken if self.of_name[name].wanted is None]
        if kept and use.rule.type.block_size > 1 and not _takes_whole_layers(use, self.of_name):
            self.notes.append(f"{label} also matches tensors that stay as they are: {self._kept_as(kept)}")

    def _kept_as(self, names: Sequence[str]) -> str:
        """Tensors that are not quantized, each kind with its type and the reason."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in names:
            found[f"{self.of_name[name].type.name}, {self.of_name[name].reason}"].append(name)
        return "; ".join(f"{listed(same)} ({why})" for why, same in found.items())


_Tensors = Mapping[str, PlannedTensor]


def _unused(flag: TypeFlag, of_name: _Tensors) -> str:
    """Message about a flag that decides no tensor; "" if it does, or if its tensors have the type anyway."""
    there = [of_name[name] for name in flag.names]
    label = f"{flag.flag} {flag.type.name}"
    if not there:
        return f"{label} is about none of the {len(of_name)} tensors"
    if any(flag.type in (t.wanted, t.type) for t in there):
        return ""
    decided = there[0].reason.removeprefix("kept: ")
    return f"{label} is overruled: {there[0].name} is decided by {decided}; drop one of the two"


def _takes_whole_layers(use: RuleUse, of_name: _Tensors) -> bool:
    """Whether a rule matches every weight of the layers that it touches: it means all the rest, not the norms."""
    matched = set(use.matched)
    touched = {_layer(name) for name in matched}
    return all(name in matched for name in of_name if name.endswith("weight") and _layer(name) in touched)


def _layer(name: str) -> str:
    found = re.match(r"blk\.\d+\.", name)
    return found[0] if found else ""


def _absent_layers(use: RuleUse, of_name: _Tensors) -> str:
    """Message about layers that the pattern names and the model does not have; "" if there are none."""
    named = layers.named(use.rule.pattern)
    if not named:
        return ""
    there = {int(found[1]) for name in of_name if (found := re.match(r"blk\.(\d+)\.", name))}
    absent = named - there
    if not absent or not there:
        return ""
    return f"names layers {layers.ranges(absent)}; the model's are {layers.ranges(there)}"


def _rows(use: RuleUse, of_name: _Tensors) -> str:
    """Message about tensors whose rows do not fit the type of the rule; "" if there are none."""
    wrong = [t for name in use.decided if (t := of_name[name]).wanted and t.shape[-1] % t.wanted.block_size]
    if not wrong:
        return ""
    kind, widths = use.rule.type, sorted({t.shape[-1] for t in wrong})
    become = ", ".join(dict.fromkeys(t.row_type.name for t in wrong))
    return (
        f"asks for {kind.name}, which does not fit {len(wrong)} tensor(s), {listed(t.name for t in wrong)}: rows of "
        f"{' and '.join(map(str, widths))} are no multiple of {kind.block_size}, so they become {become}; if you mean "
        f"that, before this rule write {','.join(_pinned(wrong, of_name))}"
    )


def _without_encoder(planned: Sequence[PlannedTensor]) -> list[str]:
    """Messages about types that `quantize` will refuse, one for each."""
    of_type = defaultdict(list)
    for t in planned:
        if t.lacks_encoder:
            of_type[t.type.name].append(t.name)
    return [
        f"{listed(names)} become{'s' if len(names) == 1 else ''} {kind}, which quantkit does not encode weights to; "
        "choose another type (`quantkit types` lists them)"
        for kind, names in of_type.items()
    ]


def _pinned(wrong: Sequence[PlannedTensor], of_name: _Tensors) -> list[str]:
    """Rules that give these tensors the types that they get now, and match no other tensor."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for t in wrong:
        found[_stem(t.name), t.row_type.name].add(_layer_number(t.name))
    rules = []
    for (stem, kind), where in found.items():
        there = {_layer_number(name) for name in of_name if _stem(name) == stem}
        before = "^" if where == {-1} else r"blk\.\d+\." if where == there else rf"blk\.({layers.regex_of(where)})\."
        rules.append(f"{before}{re.escape(stem)}={kind}")
    return rules


def _stem(name: str) -> str:
    """A name without its layer."""
    return re.sub(r"^blk\.\d+\.", "", name)


def _layer_number(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _other_layers(planned: Sequence[PlannedTensor], imatrix: Imatrix) -> str:
    """Message about entries for more layers than the model has, but for MTP layers; "" if there are none."""
    count = 1 + max((_layer_number(t.name) for t in planned), default=-1)
    beyond = {number for name in imatrix.entries if (number := _layer_number(name)) >= count}
    beyond -= {_layer_number(name) for name in imatrix.entries if ".nextn." in name}
    if not beyond or not count:
        return ""
    return (
        f"the importance matrix has entries for blk.{max(beyond)}, the model has {count} layers: it was measured on "
        "another model, or before layers were left out and the others got new numbers; measure again on this model"
    )


def _missing_importance(planned: Sequence[PlannedTensor]) -> str:
    """Message about tensors whose type uses importance and that have no entry; "" if there are none."""
    without = [
        t.name
        for t in planned
        if not (t.copied or t.reordered) and t.type.uses_imatrix and t.importance is None and t.name not in _UNMEASURED
    ]
    if not without:
        return ""
    names = ", ".join(without[:3]) + (", …" if len(without) > 3 else "")
    mla = " (for MLA tensors: run ik_llama.cpp's llama-imatrix with -mla 1)" if _is_mla(without[0]) else ""
    return (
        f"the importance matrix has no entry for {len(without)} tensor(s) that would use one: {names}; measure again "
        f"on this model{mla}, or give them a type of more bits"
    )


def _is_mla(name: str) -> bool:
    return any(part in name for part in ("attn_k_b", "attn_v_b", "attn_kv_b"))


def _unseen_experts(planned: Sequence[PlannedTensor], imatrix: Imatrix) -> str:
    """Message about experts whose importance comes from too few tokens; "" if there are none."""
    unseen, worst = 0, ""
    tensors = 0
    for t in planned:
        if t.importance is None or len(t.shape) < 3 or "_exps" not in t.name:
            continue
        few = rarely_active(imatrix[t.importance], t.shape[0], FEW_TOKENS)
        tensors += bool(few)
        if len(few) > unseen:
            unseen, worst = len(few), f"{t.name} has {len(few)} of {t.shape[0]}, as expert {few[0]}"
    if not unseen:
        return ""
    return (
        f"the importance matrix saw fewer than {FEW_TOKENS} tokens of some experts of {tensors} tensor(s): {worst}; "
        "measure on more or more varied text (quantkit imatrix, more --chunks), or merge matrices"
    )


def _uncertain_moments(planned: Sequence[PlannedTensor], imatrix: Imatrix) -> str:
    """Message about second moments that too few tokens were measured for; "" if there are none."""
    used = {id(m): (t.name, m) for t in planned if t.importance and (m := imatrix.second_moments.get(t.importance))}
    few = [(int(m.tokens.max()) / min(m.block, m.columns), name, m) for name, m in used.values()]
    few.sort(key=lambda row: row[:2])
    few = [row for row in few if row[0] < FEW_PER_COLUMN]
    if not few:
        return ""
    _, name, worst = few[0]
    return (
        f"second moments of {len(few)} of {len(used)} inputs come from fewer than {FEW_PER_COLUMN} tokens a column: "
        f"{int(worst.tokens.max())} tokens for {min(worst.block, worst.columns)} columns of {name}; they count less; "
        "measure on more text, or --second-moments blocks:64"
    )
