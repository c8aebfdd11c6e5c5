"""Warnings: what a plan does that its author cannot have meant. Each says what happens and what to look at."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.files.imatrix import Imatrix
from quantkit.recipe.planned import PlannedTensor, RuleUse

# Never measured by default, so nobody expects an entry for them.
_UNMEASURED = frozenset(("token_embd.weight", "output.weight", "per_layer_token_embd.weight"))


def warnings_of(uses: Sequence[RuleUse], planned: Sequence[PlannedTensor], imatrix: Imatrix | None) -> list[str]:
    """All warnings about a plan, rules first."""
    found = [text for index in range(len(uses)) if (text := _idle_rule(uses, index, planned))]
    if imatrix is not None and (text := _missing_importance(planned)):
        found.append(text)
    return found


def _idle_rule(uses: Sequence[RuleUse], index: int, planned: Sequence[PlannedTensor]) -> str | None:
    """What is wrong with a rule that decided nothing."""
    use = uses[index]
    if use.decided:
        return None
    label = f"rule {index + 1} '{use.rule}'"
    if not use.matched:
        return f"{label} matches none of the {len(planned)} tensors"
    reasons = {t.name: t.reason for t in planned}
    if not use.candidates:
        name = use.matched[0]
        return f"{label} matches only tensors that are never quantized, as {name} ({reasons[name]})"
    taken = set(use.candidates)
    for earlier in range(index):
        if taken & set(uses[earlier].decided):
            return f"{label} is shadowed by rule {earlier + 1} '{uses[earlier].rule}', which comes first; swap them"
    name = use.candidates[0]
    return f"{label} is overruled: {name} is decided by {reasons[name]}"


def _missing_importance(planned: Sequence[PlannedTensor]) -> str | None:
    """Tensors whose type would use importance that the matrix does not have."""
    without = [
        t.name
        for t in planned
        if not (t.copied or t.relaid) and t.type.uses_imatrix and t.importance is None and t.name not in _UNMEASURED
    ]
    if not without:
        return None
    names = ", ".join(without[:3]) + (", …" if len(without) > 3 else "")
    return f"the importance matrix has no entry for {len(without)} tensor(s) that would use one: {names}"
