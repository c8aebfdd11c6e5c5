"""Warnings: what a plan does that its author cannot have meant. Each says what happens and what to write instead.

rules          that match nothing, are shadowed or overruled, name layers that are not there, or take more than they say
kept tensors   norms and routers matched by a rule that asks for fewer bits; they stay as they are
rows           that cannot hold the type a rule asks for
importance     that is missing, or of experts that saw too little text
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quantkit.files.imatrix import Imatrix
from quantkit.files.imatrix import few as few_seen
from quantkit.recipe import layers
from quantkit.recipe.patterns import advice, hits
from quantkit.recipe.planned import PlannedTensor, RuleUse

# Never measured by default, so nobody expects an entry for them.
_UNMEASURED = frozenset(("token_embd.weight", "output.weight", "per_layer_token_embd.weight"))
_KEPT_FOR_GOOD = ("_norm.weight", "ffn_gate_inp.weight")
FEW_TOKENS = 32  # the mean of so many squares of normal numbers is off by a quarter: sqrt(2 / 32)


def warnings_of(uses: Sequence[RuleUse], planned: Sequence[PlannedTensor], imatrix: Imatrix | None) -> list[str]:
    """All warnings about a plan, rules first."""
    found = []
    of_name = {t.name: t for t in planned}
    names = list(of_name)
    free = set(of_name)  # what no earlier rule matches
    for index in range(len(uses)):
        label = f"rule {index + 1} '{uses[index].rule}'"
        taken = [name for name in uses[index].matched if name in free]
        checks = [_idle(uses, index, of_name)]
        if not checks[0]:
            loose = advice(uses[index].rule.pattern, names, taken)
            kept = _kept(uses[index], of_name, taken)
            if kept and loose.better and not any(_is_kept_for_good(name) for name in hits(loose.better, taken)):
                kept = ""  # what is proposed heals that too
            checks = [str(loose).removeprefix(":").strip(), kept]
            checks += [_absent_layers(uses[index], of_name), _rows(uses[index], of_name)]
        found += [f"{label} {text}" for text in checks if text]
        free.difference_update(uses[index].matched)
    if imatrix is not None:
        found += [text for text in (_missing_importance(planned), _unseen_experts(planned, imatrix)) if text]
    return found


_Tensors = dict[str, PlannedTensor]


def _idle(uses: Sequence[RuleUse], index: int, of_name: _Tensors) -> str:
    """What is wrong with a rule that decided nothing."""
    use = uses[index]
    if use.decided:
        return ""
    if not use.matched:
        return f"matches none of the {len(of_name)} tensors{advice(use.rule.pattern, list(of_name))}"
    if not use.candidates:
        name = use.matched[0]
        if use.rule.type.block_size == 1:
            return ""  # says that norms are floats, which they are
        instead = ", or say --ffn-gate-inp-type" if "ffn_gate_inp." in name else ""
        return f"matches only tensors that are never quantized, as {name} ({of_name[name].reason}); drop it{instead}"
    taken = set(use.candidates)
    for earlier in range(index):
        if taken & set(uses[earlier].decided):
            return f"is shadowed by rule {earlier + 1} '{uses[earlier].rule}', which comes first; swap them"
    name = use.candidates[0]
    return f"is overruled: {name} is decided by {of_name[name].reason}; drop one of the two"


def _kept(use: RuleUse, of_name: _Tensors, taken: Sequence[str]) -> str:
    """Norms and routers that a rule for other tensors matches too."""
    kept = [name for name in taken if _is_kept_for_good(name) and of_name[name].wanted is None]
    if not kept or use.rule.type.block_size == 1 or _takes_whole_layers(use, of_name):
        return ""
    pattern = use.rule.pattern
    stem = re.escape(re.sub(r"^blk\.\d+\.", "", kept[0]))
    wanted = [name for name in taken if name not in kept]
    better = next((p for p in _narrower(pattern) if hits(p, taken) and set(hits(p, taken)) <= set(wanted)), "")
    instead = f"write {better}" if better else f"write a pattern that does not match {stem}"
    return f"matches {kept[0]} too, which stays {of_name[kept[0]].type.name} ({of_name[kept[0]].reason}); {instead}"


def _is_kept_for_good(name: str) -> bool:
    return any(part in name for part in _KEPT_FOR_GOOD)


def _narrower(pattern: str) -> list[str]:
    """Patterns that end where the name of a class of weights does."""
    bare = pattern.removesuffix("$")
    bare = bare.removesuffix(".*").removesuffix(r"\.weight").removesuffix(".weight").removesuffix(r"\.")
    return [rf"{bare}\.weight", rf"{bare}_exps\.weight", rf"{bare}(?!.*(?:norm|_inp)\.)"]


def _takes_whole_layers(use: RuleUse, of_name: _Tensors) -> bool:
    """Whether a rule matches every weight of the layers that it touches: it means all the rest, not the norms."""
    matched = set(use.matched)
    touched = {_layer(name) for name in matched}
    return all(name in matched for name in of_name if name.endswith("weight") and _layer(name) in touched)


def _layer(name: str) -> str:
    found = re.match(r"blk\.\d+\.", name)
    return found[0] if found else ""


def _absent_layers(use: RuleUse, of_name: _Tensors) -> str:
    named = layers.named(use.rule.pattern)
    if not named:
        return ""
    there = {int(found[1]) for name in of_name if (found := re.match(r"blk\.(\d+)\.", name))}
    absent = named - there
    if not absent or not there:
        return ""
    return f"names layers {layers.ranges(absent)}; the model's are {layers.ranges(there)}"


def _rows(use: RuleUse, of_name: _Tensors) -> str:
    """Tensors whose rows cannot hold the type that the rule asks for."""
    wrong = [t for name in use.decided if (t := of_name[name]).wanted and t.shape[-1] % t.wanted.block_size]
    if not wrong:
        return ""
    t, kind = wrong[0], use.rule.type
    stem = re.escape(re.sub(r"^blk\.\d+\.", "", t.name))
    before = r"blk\.\d+\." if _layer(t.name) else "^"
    return (
        f"asks for {kind.name}, which {len(wrong)} tensor(s) as {t.name} cannot hold: rows of {t.shape[-1]} are no "
        f"multiple of {kind.block_size}, so they become {t.type.name}; if you mean that, before this rule write "
        f"{before}{stem}={t.type.name}"
    )


def _missing_importance(planned: Sequence[PlannedTensor]) -> str:
    """Tensors whose type would use importance that the matrix does not have."""
    without = [
        t.name
        for t in planned
        if not (t.copied or t.relaid) and t.type.uses_imatrix and t.importance is None and t.name not in _UNMEASURED
    ]
    if not without:
        return ""
    names = ", ".join(without[:3]) + (", …" if len(without) > 3 else "")
    mla = " (of MLA tensors: run the reference's llama-imatrix with -mla 1)" if _is_mla(without[0]) else ""
    return (
        f"the importance matrix has no entry for {len(without)} tensor(s) that would use one: {names}; measure again "
        f"on this model{mla}, or give them a type of more bits"
    )


def _is_mla(name: str) -> bool:
    return any(part in name for part in ("attn_k_b", "attn_v_b", "attn_kv_b"))


def _unseen_experts(planned: Sequence[PlannedTensor], imatrix: Imatrix) -> str:
    """Experts whose importance comes from too little text to mean anything."""
    unseen, worst = 0, ""
    tensors = 0
    for t in planned:
        if t.importance is None or len(t.shape) < 3 or "_exps" not in t.name:
            continue
        few = few_seen(imatrix[t.importance], t.shape[0], FEW_TOKENS)
        tensors += bool(few)
        if len(few) > unseen:
            unseen, worst = len(few), f"{t.name} has {len(few)} of {t.shape[0]}, as expert {few[0]}"
    if not unseen:
        return ""
    return (
        f"the importance matrix saw fewer than {FEW_TOKENS} tokens of some experts of {tensors} tensor(s): {worst}; "
        "measure on more or more varied text (quantkit imatrix, more --chunks), or merge matrices"
    )
