"""What is installed from a wheel: all packages, the shipped recipes, typing information."""

from __future__ import annotations

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
