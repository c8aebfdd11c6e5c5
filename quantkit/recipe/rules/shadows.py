"""Find shadowed rules: the first match decides, so an earlier rule may leave no tensors to a later one.

    exps=CPU, blk.(3|4).ffn_.*=CUDA0      the second is for experts, which the first takes
    attn_v=q8_0, attn_v.weight=q6_K       both match the same tensors
    blk.1.ffn=q8_0, ffn=q4_0              correct: the narrower rule comes first

This serves the rules of recipes and of -ot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.recipe.rules.layers import listed


@dataclass(frozen=True)
class Ordered:
    """A rule in a list of rules: how messages name it, the names it matches, and the type or device it gives them."""

    label: str
    names: frozenset[str]
    outcome: str


@dataclass(frozen=True)
class Shadow:
    """The message about a rule that comes too late. `harmless`: another order would change nothing."""

    text: str
    harmless: bool = False


def shadow(rules: Sequence[Ordered], index: int) -> Shadow | None:
    """What is wrong with the position of rule `index`; None if it decides what it is probably meant for."""
    own = rules[index]
    earlier = _deciders(rules[:index])
    takers = sorted({earlier[name] for name in own.names if name in earlier})
    left = [name for name in own.names if name not in earlier]
    if not takers:
        return None
    if left:
        return _lost_experts(rules, index, earlier, left)
    if all(rules[j].outcome == own.outcome for j in takers):
        return Shadow(f"adds nothing to {_and(rules, takers)}", harmless=True)
    if any(rules[j].names == own.names for j in takers):
        return Shadow(f"matches the same tensors as {_and(rules, takers)}, which comes first; drop one of the two")
    if all(rules[j].names <= own.names for j in takers):
        return Shadow(f"decides nothing, as {_and(rules, takers)} take all that it matches", harmless=True)
    come = "which comes" if len(takers) == 1 else "which come"
    if all(any(earlier.get(name) == j and name not in own.names for name in rules[j].names) for j in takers):
        return Shadow(
            f"is shadowed by {_and(rules, takers)}, {come} first; put it in front of {rules[takers[0]].label}"
        )
    return Shadow(f"is shadowed by {_and(rules, takers)}, {come} first; drop it, or narrow what comes first")


def _lost_experts(rules: Sequence[Ordered], index: int, earlier: dict[str, int], left: Sequence[str]) -> Shadow | None:
    """A shadow if earlier rules match the experts of a feed-forward rule, which are nearly all of its bytes."""
    own = rules[index]
    experts = {name for name in own.names if "_exps." in name}
    takers = sorted({earlier[name] for name in experts if name in earlier})
    if not experts or not experts <= earlier.keys() or all(rules[j].outcome == own.outcome for j in takers):
        return None
    if any(".ffn_" not in name and ".exp_probs_b" not in name for name in left):
        return None  # the rule matches whole layers: it is for their attention
    if all({name for name in rules[j].names if "_exps." in name} <= experts for j in takers):
        return None  # the wider rule comes last, as it should
    return Shadow(
        f"gets no experts: {_and(rules, takers)} comes first and takes {listed(experts)}, so only {listed(left)} is "
        f"left; put it in front of {rules[takers[0]].label}"
    )


def _deciders(rules: Sequence[Ordered]) -> dict[str, int]:
    """The first rule that matches each tensor."""
    found: dict[str, int] = {}
    for j, rule in enumerate(rules):
        for name in rule.names:
            found.setdefault(name, j)
    return found


def _and(rules: Sequence[Ordered], which: Sequence[int]) -> str:
    labels = [rules[j].label for j in which]
    if len(labels) > 3:
        labels = [*labels[:2], f"{len(labels) - 2} more rules"]
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))
