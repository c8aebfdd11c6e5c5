"""Memory that is used through its address must outlive that use. Read from the sources, as no result shows it reliably.

numba releases an array after its last use in a function, and taking its address may be the last one: what the address
is used for then works on freed memory. So compiled functions take addresses only of arrays that their callers hold,
their parameters, or that they return. In Python a name holds its array until the function returns, but nothing holds
the array of an expression.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import quantkit

ROOT = Path(quantkit.__file__).parents[1]
SOURCES = sorted(
    path
    for name in ("quantkit", "tests", "benchmarks")
    for path in (ROOT / name).rglob("*.py")
    if (text := path.read_text(encoding="utf-8")).find("ctypes") >= 0 or text.find("address(") >= 0
)
COMPILED = frozenset(("kernel", "subkernel", "shared_subkernel", "callback"))
HOLDS = frozenset(("keep",))  # methods of op lists that hold the array they return


def name_of(node: ast.expr) -> str:
    """The last name of `a.b.c(…)`, which is c."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_compiled(function: ast.FunctionDef) -> bool:
    return any(name_of(decorator) in COMPILED for decorator in function.decorator_list)


def root(node: ast.expr) -> ast.expr:
    """What an array is a view of: x of x[0].field.reshape(…)."""
    while True:
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
            node = node.func.value
        else:
            return node


VIEWS = frozenset(("reshape", "view", "ravel", "transpose"))


def taken(function: ast.AST, takers: frozenset[str]) -> Iterator[ast.expr]:
    """Arrays whose address a function takes: x.ctypes.data, address(x), f(x) for functions f that return one of x."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.value, ast.Attribute):
            if node.value.attr == "ctypes":
                yield node.value.value
        elif isinstance(node, ast.Call) and name_of(node) in takers:
            yield from node.args


def assigned(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Names and what they are assigned; of `a, b = x, y` each its own, of `a, b = x` both x."""
    for node in ast.walk(function):
        if isinstance(node, (ast.For, ast.comprehension)):
            pairs = [(node.target, node.iter)]
        elif isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        else:
            continue
        for target, value in pairs:
            yield from unpacked(target, value)


def unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        for inner, its in zip(target.elts, values):
            yield from unpacked(inner, its)


def held(function: ast.FunctionDef, takers: frozenset[str]) -> set[str]:
    """Names of arrays that outlive a compiled function: parameters, views of these, and what is returned."""
    returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    addressed = {id(inner) for value in returns for array in taken(value, takers) for inner in ast.walk(array)}
    returned = {
        node.id
        for value in returns
        for node in ast.walk(value)
        if isinstance(node, ast.Name) and id(node) not in addressed
    }
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    given: dict[str, list[ast.expr]] = {}
    for name, value in assigned(function):
        given.setdefault(name, []).append(value)
    names -= set(given)
    while True:
        more = {
            name
            for name, values in given.items()
            if all(isinstance(found := root(value), ast.Name) and found.id in names for value in values)
        }
        if more <= names:
            return names | returned
        names |= more


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_compiled(node)]


def returns_address(value: ast.expr, takers: frozenset[str]) -> bool:
    """Whether a returned value is an address or a tuple of some. What other functions make of one is not one."""
    if isinstance(value, ast.Call) and name_of(value) not in takers:
        is_record = name_of(value)[:1].isupper() or name_of(value) == "int64"
        return is_record and any(returns_address(argument, takers) for argument in value.args)
    if isinstance(value, ast.Tuple):
        return any(returns_address(element, takers) for element in value.elts)
    return next(taken(value, takers), None) is not None


def takers_of(trees: list[ast.AST]) -> frozenset[str]:
    """Names of compiled functions that return addresses of their arguments; `address` and what is written with it."""
    found: frozenset[str] = frozenset()
    while True:
        more = {
            function.name
            for tree in trees
            for function in functions(tree)
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value and returns_address(node.value, found)
        }
        if more <= found:
            return found
        found |= more


def wrong(tree: ast.AST, takers: frozenset[str]) -> list[str]:
    """Addresses taken of arrays that may be gone when they are used."""
    compiled, found = functions(tree), []
    for function in compiled:
        names = held(function, takers)
        for array in taken(function, takers):
            if not (isinstance(start := root(array), ast.Name) and start.id in names):
                found.append(f"line {array.lineno}: {function.name} takes the address of {ast.unparse(array)}, its own")
    inside = {id(node) for function in compiled for node in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) not in inside and isinstance(node, ast.Attribute) and node.attr == "ctypes":
            start = root(node.value)
            if isinstance(start, ast.Call) and name_of(start) not in HOLDS:
                found.append(f"line {node.lineno}: nothing holds {ast.unparse(node.value)}")
    return found


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def takers() -> frozenset[str]:
    return takers_of([parsed(path) for path in SOURCES])


def test_functions_that_return_addresses_are_known(takers: frozenset[str]) -> None:
    assert {"address", "space_of"} <= takers


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrays_outlive_the_use_of_their_addresses(path: Path, takers: frozenset[str]) -> None:
    assert wrong(parsed(path), takers) == []


ASSIGN = """
@kernel
def assign(points, centroids, nearest):
    space = np.empty((3, 16), np.float32)
    at, a = address(centroids), address(space[0])
    for i in range(len(points)):
        nearest[i] = find(at, a)
"""


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (ASSIGN, 1),
        (ASSIGN.replace("points, centroids,", "points, centroids, space,").replace("    space =", "    other ="), 0),
        ("@subkernel\ndef f(state):\n    a, b = state\n    c = b[1:]\n    return g(c.ctypes.data, a.ctypes.data)", 0),
        ("@subkernel\ndef f(n):\n    return address(np.empty(n))", 1),
        ("@subkernel\ndef f(n):\n    x = np.empty(n)\n    return address(x)", 1),
        ("@subkernel\ndef f(n):\n    x = np.empty(n)\n    a = -x.ctypes.data % 64\n    return x[a:]", 0),
        ("@subkernel\ndef f(x):\n    x = x + 1\n    return g(address(x))", 1),
        ("@subkernel\ndef f(scratch):\n    own = np.empty(3)\n    return g(space_of(scratch)), h(space_of(own))", 1),
        ("def f(x):\n    y = np.ascontiguousarray(x)\n    return g(y.ctypes.data)", 0),
        ("def f(x):\n    return g(np.ascontiguousarray(x).ctypes.data)", 1),
        ("def f(x, laid):\n    return laid.keep(np.ascontiguousarray(x)).ctypes.data", 0),
    ],
)  # fmt: skip
def test_the_rule_itself(source: str, count: int) -> None:
    assert len(wrong(ast.parse(source), frozenset(("address", "space_of")))) == count


def test_the_nearest_of_many_centroids(rng: np.random.Generator) -> None:
    """Scratch memory of this size is unmapped as soon as it is freed: using it afterwards would crash."""
    from quantkit.types.native import trellis_index

    points = rng.integers(-100, 100, (20, 8)).astype(np.int8)
    centroids = rng.integers(-100, 100, (16 * 60000, 8)).astype(np.int8)
    wanted = [((point.astype(np.int32) - centroids) ** 2).sum(axis=1).argmin() for point in points]
    np.testing.assert_array_equal(trellis_index._nearest(points, centroids), wanted)
