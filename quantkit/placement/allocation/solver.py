"""Solve an allocation problem as a mixed-integer program with HiGHS (`scipy.optimize.milp`).

    variables   x[g, o] = 1 if group g has option o;  with max_types y[t] = 1 if type t is used
    rows        sum over o of x[g, o] = 1;  sum of uses x <= limit;  sum over o with type t of x[g, o] <= y[t];
                sum of y <= max_types

A linear relaxation with one choice per group is tight: at an optimum at most as many groups are split between options
as there are limits. So HiGHS proves a gap of 0.01 % in seconds for models of a thousand tensors. It keeps rows within
a tolerance only; here sums are checked exactly, and a limit that is exceeded by rounding is tightened by as much.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantkit.errors import DataError, QuantkitError
from quantkit.placement.allocation.problem import Group, InfeasibleError, Option, Problem, Solution

GAP = 1e-4
SECONDS = 60.0
_ROW = 1e5  # a limit in the units of its row, so that the solver's tolerance of 1e-6 is 1e-11 of it
_COST = 1e4  # the mean total cost in the units of the objective, so that absolute tolerances do not count
_NO_COST = 1e-100  # smaller costs are rounding, and their scale would not be finite
_ATTEMPTS = 8
_INFEASIBLE = 2  # status of scipy's result


def solve(problem: Problem, *, gap: float = GAP, seconds: float = SECONDS) -> Solution:
    """The cheapest choice within the limits, to a relative gap, or the best one found in `seconds`.

    InfeasibleError with the least amounts by which limits are too small; QuantkitError if the time was too short for
    any solution.
    """
    if not problem.groups:
        return Solution((), 0.0, 0.0)
    reduced = problem if problem.max_types is not None else _without_dominated(problem)
    limits, bound = dict(problem.limits), None
    for _ in range(_ATTEMPTS):
        program = _Program(reduced, limits)
        found = program.run(gap, seconds)
        if found.status == _INFEASIBLE:
            if bound is not None:  # only the tightened limits cannot be kept
                break
            raise InfeasibleError(_missing(reduced, seconds), problem.limits)
        if found.x is None:
            also = "" if problem.max_types is None else ", or drop --max-types"
            raise QuantkitError(
                f"no choice of types was found in {seconds:g} seconds ({found.message}); raise --seconds{also}"
            )
        chosen = program.chosen(found.x)
        bound = program.bound(found) if bound is None else bound  # of the limits as given
        exceeded = problem.exceeded(chosen)
        if not exceeded:
            cost = sum(option.cost for option in chosen)
            return Solution(chosen, cost, min(bound, cost))
        for resource, amount in exceeded.items():
            limits[resource] -= amount
    raise QuantkitError("the solver's choices exceed a limit by its rounding errors; give a slightly larger limit")


def _without_dominated(problem: Problem) -> Problem:
    """The problem without options that another option of the group beats in cost and in every resource."""
    return replace(problem, groups=tuple(Group(g.tensors, _undominated(g.options)) for g in problem.groups))


def _undominated(options: tuple[Option, ...]) -> tuple[Option, ...]:
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.cost, sum(o.uses.values()))):
        if not any(_covers(other.uses, option.uses) for other in kept):
            kept.append(option)
    return tuple(kept)


def _covers(less: Mapping[str, float], more: Mapping[str, float]) -> bool:
    """Whether the first uses no more of any resource than the second."""
    return all(amount <= more.get(resource, 0) for resource, amount in less.items())


def _missing(problem: Problem, seconds: float) -> dict[str, float]:
    """The amounts by which limits must grow, the least in shares of the limits together.

    DataError where max_types alone cannot be kept.
    """
    program = _Program(problem, dict(problem.limits), slack=True)
    found = program.run(1e-6, seconds)
    if found.status == _INFEASIBLE:
        raise DataError(
            f"--max-types {problem.max_types}: no {problem.max_types} of the types suit the shapes of all tensors; "
            "raise it, or allow more types"
        )
    if found.x is None:
        raise QuantkitError(f"the limits cannot be kept, and {seconds:g} seconds did not suffice to say by how much")
    return problem.exceeded(program.chosen(found.x))


@contextlib.contextmanager
def _native_output_to_stderr() -> Iterator[None]:
    """A context in which native code that writes to stdout writes to stderr.

    HiGHS prints a line on some problems, whatever its options, and stdout may be a JSON document.
    """
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError, AttributeError):  # there is no stdout
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@dataclass
class _Entries:
    """A sparse matrix that is built entry by entry."""

    rows: list[int]
    columns: list[int]
    values: list[float]

    def add(self, row: int, column: int, value: float) -> None:
        self.rows.append(row)
        self.columns.append(column)
        self.values.append(value)


class _Program:
    """The arrays of a problem. With `slack`, limits may be exceeded, and only that is minimized."""

    def __init__(self, problem: Problem, limits: Mapping[str, float], slack: bool = False):
        self._problem = problem
        self._options = [option for group in problem.groups for option in group.options]
        self._starts = np.cumsum([0, *(len(group.options) for group in problem.groups)])
        mean = float(np.sum([np.mean([o.cost for o in group.options]) for group in problem.groups]))
        self._scale = _COST / mean if mean > _NO_COST else 1.0
        types = sorted({name for o in self._options for name in o.types}) if problem.max_types is not None else []
        first_type = len(self._options)
        first_slack = first_type + len(types)
        self._size = first_slack + (len(limits) if slack else 0)
        self._upper: list[float] = [1.0] * len(problem.groups)
        self._lower: list[float] = [1.0] * len(problem.groups)
        entries = self._entries = _Entries([], [], [])
        for row, (a, b) in enumerate(zip(self._starts, self._starts[1:])):
            for column in range(a, b):
                entries.add(row, column, 1)
        for number, (resource, limit) in enumerate(limits.items()):
            largest = max((option.uses.get(resource, 0) for option in self._options), default=0)
            unit = max(abs(float(limit)), float(largest), 1e-12) / _ROW
            row = self._row(limit / unit)
            for column, option in enumerate(self._options):
                if amount := option.uses.get(resource, 0):
                    entries.add(row, column, amount / unit)
            if slack:
                entries.add(row, first_slack + number, -_ROW)
        self._limit_types(types, first_type)
        costs = [0.0 if slack else option.cost * self._scale for option in self._options]
        self._costs = np.array([*costs, *[0.0] * len(types), *[_COST] * (self._size - first_slack)])
        self._integral = np.array([1] * first_slack + [0] * (self._size - first_slack))
        self._most = np.array([1.0] * first_slack + [np.inf] * (self._size - first_slack))

    def _row(self, upper: float) -> int:
        self._lower.append(-np.inf)
        self._upper.append(upper)
        return len(self._upper) - 1

    def _limit_types(self, types: list[str], first: int) -> None:
        if not types:
            return
        column_of = {name: first + i for i, name in enumerate(types)}
        for a, b in zip(self._starts, self._starts[1:]):
            rows: dict[str, int] = {}
            for column in range(a, b):
                for name in set(self._options[column].types):
                    if name not in rows:
                        rows[name] = self._row(0)
                        self._entries.add(rows[name], column_of[name], -1)
                    self._entries.add(rows[name], column, 1)
        assert self._problem.max_types is not None
        row = self._row(self._problem.max_types)
        for column in column_of.values():
            self._entries.add(row, column, 1)

    def run(self, gap: float, seconds: float) -> Any:
        """scipy's result."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        e = self._entries
        matrix = csr_array((e.values, (e.rows, e.columns)), shape=(len(self._upper), self._size))
        with _native_output_to_stderr():
            return milp(
                self._costs,
                integrality=self._integral,
                bounds=Bounds(0, self._most),
                constraints=LinearConstraint(matrix, self._lower, self._upper),
                options={"mip_rel_gap": gap, "time_limit": seconds},
            )

    def chosen(self, x: np.ndarray) -> tuple[Option, ...]:
        """The option of each group."""
        return tuple(
            self._options[a + int(np.argmax(x[a:b]))] for a, b in zip(self._starts, self._starts[1:])
        )  # fmt: skip

    def bound(self, found: Any) -> float:
        """The proven lower bound of the cost."""
        dual = found.mip_dual_bound
        return float(found.fun if dual is None else dual) / self._scale
