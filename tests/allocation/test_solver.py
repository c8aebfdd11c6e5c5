"""The solver against brute force, on instances that are small enough for it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import DataError, QuantkitError
from quantkit.placement.allocation.problem import Group, InfeasibleError, Option, Problem
from quantkit.placement.allocation.solver import solve

TYPES = ("a", "b", "c", "d")
amounts = st.integers(0, 10**9)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to 5 groups, 2 resources and 4 types; limits from impossible to generous."""
    resources = ("GPU", "CPU")[: draw(st.integers(1, 2))]
    groups = []
    for number in range(draw(st.integers(1, 5))):
        options = [
            Option((draw(st.sampled_from(TYPES)),), (device,), draw(st.floats(1e-6, 1.0)), {device: draw(amounts)})
            for device in draw(st.lists(st.sampled_from(resources), min_size=1, max_size=4))
        ]
        groups.append(Group((f"tensor {number}",), tuple(options)))
    limits = {name: draw(st.integers(1, 2 * 10**9)) for name in resources}
    return Problem(tuple(groups), limits, draw(st.none() | st.integers(1, 3)))


def brute_force(problem: Problem) -> float:
    """The cost of the cheapest choice within the limits; inf if there is none."""
    best = math.inf
    for chosen in itertools.product(*(group.options for group in problem.groups)):
        few = (
            problem.max_types is None or len({name for option in chosen for name in option.types}) <= problem.max_types
        )
        if few and not problem.exceeded(chosen):
            best = min(best, sum(option.cost for option in chosen))
    return best


@settings(max_examples=200, deadline=None)
@given(problems())
def test_it_finds_what_brute_force_finds(problem: Problem) -> None:
    best = brute_force(problem)
    if best == math.inf:
        with pytest.raises((InfeasibleError, DataError)):
            solve(problem, gap=0)
        return
    found = solve(problem, gap=0)
    assert not problem.exceeded(found.chosen)
    assert problem.max_types is None or len(found.types) <= problem.max_types
    assert found.cost == pytest.approx(best, rel=1e-6)
    assert found.bound <= best * (1 + 1e-6)


def sized(*sizes: int, name: str = "tensor") -> Group:
    """A group whose cost falls with its size."""
    return Group((name,), tuple(Option((f"t{size}",), ("CPU",), 1 / size, {"CPU": size}) for size in sizes))


def test_a_limit_is_kept_to_the_byte() -> None:
    groups = tuple(sized(10**9 + i, 2 * 10**9 + i) for i in range(50))
    limit = sum(group.options[0].uses["CPU"] for group in groups) + 25 * 10**9
    found = solve(Problem(groups, {"CPU": limit}))
    assert sum(option.uses["CPU"] for option in found.chosen) == limit
    with pytest.raises(InfeasibleError):
        solve(Problem(groups, {"CPU": limit - 25 * 10**9 - 1}))


def test_what_does_not_fit_says_by_how_much() -> None:
    problem = Problem((sized(100, 200), sized(300, 400)), {"CPU": 350})
    with pytest.raises(InfeasibleError, match="400 needed, 350 given") as error:
        solve(problem)
    assert error.value.missing == {"CPU": 50}


def test_two_pools_share_what_one_cannot_hold() -> None:
    def both(small: int, large: int) -> Group:
        options = [Option((f"t{size}",), (d,), 1 / size, {d: size}) for size in (small, large) for d in ("GPU", "CPU")]
        return Group(("t",), tuple(options))

    found = solve(Problem((both(100, 200), both(100, 200), both(100, 200)), {"GPU": 200, "CPU": 300}))
    assert sorted(option.types[0] for option in found.chosen) == ["t100", "t200", "t200"]


def test_few_types() -> None:
    groups = (sized(1, 2, 3), sized(1, 2, 3), sized(1, 2, 3))
    free = solve(Problem(groups, {"CPU": 6}))
    one = solve(Problem(groups, {"CPU": 7}, 1))
    assert one.types == {"t2"}
    assert one.cost == pytest.approx(free.cost)


def test_a_group_without_options_and_no_types_at_all() -> None:
    with pytest.raises(DataError, match="tensor: no type is possible"):
        Problem((Group(("tensor",), ()),))
    with pytest.raises(DataError, match="--max-types 0"):
        Problem((sized(1),), {}, 0)
    assert solve(Problem(())).chosen == ()


def test_nothing_is_printed_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints a line on this problem, and a command's stdout may be a JSON document."""
    group = Group(("t",), (Option(("a",), ("GPU",), 1.0, {"GPU": 131074}),))
    with pytest.raises(InfeasibleError):
        solve(Problem((group,), {"GPU": 1}))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("most", "remedy"), [(None, "raise --seconds$"), (2, "raise --seconds, or drop --max-types$")])
def test_a_time_that_is_too_short(most: int | None, remedy: str) -> None:
    groups = tuple(sized(10**6 + i, 2 * 10**6 + i, 3 * 10**6 + 2 * i) for i in range(200))
    with pytest.raises(QuantkitError, match=remedy):
        solve(Problem(groups, {"CPU": 4 * 10**8}, most), seconds=1e-9)
