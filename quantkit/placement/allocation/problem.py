"""An allocation problem: one option for each group, the lowest total cost, no limit exceeded.

minimize  sum of cost(option of group)
such that sum of uses(option of group)[resource] <= limits[resource]    for every resource
          the number of different types <= max_types
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quantkit.errors import DataError


@dataclass(frozen=True)
class Option:
    """A way to store a group.

    types, devices  the names of the types of its tensors and of the devices that they are on, in their order
    cost            what is minimized: the expected rise of the KL divergence, in nats per token
    uses            amount by resource: bytes of a device, seconds per token, …
    """

    types: tuple[str, ...]
    devices: tuple[str, ...]
    cost: float
    uses: Mapping[str, float]


@dataclass(frozen=True)
class Group:
    """Tensors whose types and device are chosen together: `tensors` are their names."""

    tensors: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Problem:
    """Groups and limits. `limits` has the amount of each resource that is left for the groups."""

    groups: tuple[Group, ...]
    limits: Mapping[str, float] = field(default_factory=dict)
    max_types: int | None = None

    def __post_init__(self) -> None:
        for group in self.groups:
            if not group.options:
                raise DataError(f"{group.tensors[0]}: no type is possible")
        if self.max_types is not None and self.max_types < 1:
            raise DataError(f"--max-types {self.max_types}: a file has at least 1 type")

    def used(self, chosen: Sequence[Option]) -> dict[str, float]:
        """The amount of each limited resource that a choice uses; exact for whole numbers."""
        total: dict[str, float] = defaultdict(int, dict.fromkeys(self.limits, 0))
        for option in chosen:
            for resource, amount in option.uses.items():
                total[resource] += amount
        return {resource: total[resource] for resource in self.limits}

    def exceeded(self, chosen: Sequence[Option]) -> dict[str, float]:
        """By how much a choice exceeds each limit; empty if it keeps all."""
        used = self.used(chosen)
        return {resource: used[resource] - limit for resource, limit in self.limits.items() if used[resource] > limit}


@dataclass(frozen=True)
class Solution:
    """An option for each group in order, their total cost, and `bound`: no choice within the limits costs less."""

    chosen: tuple[Option, ...]
    cost: float
    bound: float

    @property
    def types(self) -> set[str]:
        """The names of all types in use."""
        return {name for option in self.chosen for name in option.types}

    @property
    def gap(self) -> float:
        """The share of the cost by which a better choice could be cheaper: 0.001 is 0.1 %."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


class InfeasibleError(DataError):
    """No choice keeps the limits. `missing` has the amount by which each limit is too small, together the least."""

    def __init__(self, missing: Mapping[str, float], limits: Mapping[str, float]):
        self.missing, self.limits = dict(missing), dict(limits)
        parts = (f"{name}: {limits[name] + amount:,.0f} needed, {limits[name]:,.0f} given" for name, amount in
                 missing.items())  # fmt: skip
        super().__init__(f"no choice of types fits; {'; '.join(parts)}")
