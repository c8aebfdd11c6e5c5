"""Find shadowed rules: the first match decides, so an earlier rule may leave no tensors to a later one.

    exps=CPU, blk.(3|4).ffn_.*=CUDA0      the second is meant for experts, which the first matches already
    attn_v=q8_0, attn_v.weight=q6_K       both match the same tensors
    blk.1.ffn=q8_0, ffn=q4_0              correct: the narrower rule comes first

This serves the rules of recipes and of -ot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.recipe.rules.layers import listed


@dataclass(frozen=True)
class OrderedRule:
    """A rule of a list: its label in messages, the names that it matches, and the type or device that it assigns."""

    label: str
    names: frozenset[str]
    outcome: str


@dataclass(frozen=True)
class Shadow:
    """The message about a shadowed rule. `harmless`: another order would change nothing."""

    text: str
    harmless: bool = False


def shadow(rules: Sequence[OrderedRule], index: int) -> Shadow | None:
    """What is wrong with the position of rule `index`; None if nothing is."""
    rule = rules[index]
    earlier = _deciders(rules[:index])
    others = sorted({earlier[name] for name in rule.names if name in earlier})
    left = [name for name in rule.names if name not in earlier]
    if not others:
        return None
    if left:
        return _lost_experts(rules, index, earlier, left)
    if all(rules[j].outcome == rule.outcome for j in others):
        return Shadow(f"adds nothing to {_and(rules, others)}", harmless=True)
    if any(rules[j].names == rule.names for j in others):
        return Shadow(f"matches the same tensors as {_and(rules, others)}, which comes first; drop one of the two")
    if all(rules[j].names <= rule.names for j in others):
        return Shadow(f"decides nothing, as {_and(rules, others)} match all of its tensors", harmless=True)
    come = "which comes" if len(others) == 1 else "which come"
    if all(any(earlier.get(name) == j and name not in rule.names for name in rules[j].names) for j in others):
        return Shadow(
            f"is shadowed by {_and(rules, others)}, {come} first; put it in front of {rules[others[0]].label}"
        )
    return Shadow(f"is shadowed by {_and(rules, others)}, {come} first; drop it, or narrow what comes first")


def _lost_experts(
    rules: Sequence[OrderedRule], index: int, earlier: dict[str, int], left: Sequence[str]
) -> Shadow | None:
    """A shadow if earlier rules match the experts of a feed-forward rule, which are nearly all of its bytes."""
    rule = rules[index]
    experts = {name for name in rule.names if "_exps." in name}
    others = sorted({earlier[name] for name in experts if name in earlier})
    if not experts or not experts <= earlier.keys() or all(rules[j].outcome == rule.outcome for j in others):
        return None
    if any(".ffn_" not in name and ".exp_probs_b" not in name for name in left):
        return None  # the rule matches whole layers: it is for their attention
    if all({name for name in rules[j].names if "_exps." in name} <= experts for j in others):
        return None  # the wider rule comes last, as it should
    return Shadow(
        f"gets no experts: {_and(rules, others)} comes first and matches {listed(experts)}, so only {listed(left)} is "
        f"left; put it in front of {rules[others[0]].label}"
    )


def _deciders(rules: Sequence[OrderedRule]) -> dict[str, int]:
    """The first rule that matches each tensor."""
    found: dict[str, int] = {}
    for j, rule in enumerate(rules):
        for name in rule.names:
            found.setdefault(name, j)
    return found


def _and(rules: Sequence[OrderedRule], which: Sequence[int]) -> str:
    labels = [rules[j].label for j in which]
    if len(labels) > 3:
        labels = [*labels[:2], f"{len(labels) - 2} more rules"]
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))
