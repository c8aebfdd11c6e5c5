"""What is installed from a wheel: all packages, the shipped recipes, typing information."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import quantkit
from quantkit import recipe

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built in a copy and without network access."""
    out = tmp_path_factory.mktemp("wheel")
    for name in ("quantkit", "recipes"):
        shutil.copytree(ROOT / name, out / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, out)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(out), str(out)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_a_wheel_has_the_version_of_the_package(wheel: Path) -> None:
    assert wheel.name == f"quantkit-{quantkit.__version__}-py3-none-any.whl"


def test_a_wheel_holds_all_modules_and_recipes(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if name.startswith("quantkit/")}
    package = Path(quantkit.__file__).parent
    modules = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.py")}
    recipes = {f"quantkit/recipe/library/{path.name}" for path in (ROOT / "recipes").glob("*.recipe")}
    assert recipes
    assert held == modules | recipes | {"quantkit/py.typed"}


def test_recipes_of_an_installed_package(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    code = "import quantkit.recipe as r; print(r.__file__); print(*r.shipped())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    place, names = done.stdout.splitlines()
    assert Path(place).is_relative_to(tmp_path), done.stderr
    assert names.split() == recipe.shipped()


MODULES = {"google-re2": "re2", "pyyaml": "yaml", "numba-cuda": "numba.cuda", "cuda-core": "cuda"}
"""Names of the modules of packages that are imported under another name."""

OF_OTHERS = {"bokeh"}
"""Packages that a dependency imports if they are there: distributed's dashboard."""


def test_the_extras_are_documented() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall("`(.*?)`", " ".join(rows))) == project["optional-dependencies"].keys()


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    """Dependencies and extras of users; docs and dev are tools."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [items for extra, items in project["optional-dependencies"].items() if extra not in ("docs", "dev")]
    names = {re.match(r"[\w-]+", item)[0].lower() for item in sum(extras, project["dependencies"])}
    assert {MODULES.get(name, name) for name in names - OF_OTHERS} == {
        name for name in imported() if name.partition(".")[0] not in {*sys.stdlib_module_names, "quantkit"}
    }


def test_the_image_is_built_from_what_is_here() -> None:
    """What the Dockerfile copies exists and is not ignored; its extras and its Python are declared."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text, allowed = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().split()
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M) for name in line.split()[:-1]}
    assert copied == {name[1:] for name in allowed if name.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert re.findall(r"\.whl\)\[(.*?)\]", text) == ["${EXTRAS}"] * 2
    extras = {extra for found in re.findall(r"^ARG EXTRAS=(.*)$", text, re.M) for extra in found.split(",")}
    assert extras == {"plots", "serve", "cuda"}
    assert extras <= project["optional-dependencies"].keys()
    versions = set(re.findall(r"^FROM python:([\d.]+)-slim", text, re.M))
    assert len(versions) == 1
    assert f"Programming Language :: Python :: {versions.pop()}" in project["classifiers"]


def imported() -> set[str]:
    """The modules that the package imports anywhere: numba.cuda, and of others the first part of the name."""
    found: set[str] = set()
    for path in Path(quantkit.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {"numba.cuda" if name.startswith("numba.cuda") else name.partition(".")[0] for name in found}
