"""The recipes that come with quantkit: `recipes/*.recipe` of the repository, `library/` of an installed package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from quantkit.errors import UnknownNameError
from quantkit.files import gguf
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.forms import pinned
from quantkit.recipe.grammar import Recipe, parse

_HERE = Path(__file__).parent
SUFFIX = ".recipe"


def _folder() -> Path:
    """`library` is a link to the repository's `recipes`; a checkout without links still has the original."""
    library = _HERE / "library"
    return library if library.is_dir() else _HERE.parents[1] / "recipes"


def shipped() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.name[: -len(SUFFIX)] for path in _folder().glob(f"*{SUFFIX}"))


def carried(path: Path) -> str:
    """The text of the recipe that a GGUF was made by, or where it carries none rules for the types that it has."""
    file = gguf.open(path)
    text = file.metadata.get("quantkit.recipe")
    if isinstance(text, str):
        return text
    about = f"The types of {path.name}, which does not say what recipe made it."
    return str(Recipe(pinned((t.name, t.type) for t in file.tensors.values()).rules, about))


def find(name: str | os.PathLike[str], settings: Mapping[str, str] | None = None) -> Recipe:
    """The recipe in a text file, of a GGUF file or of that name, with other values for some of its settings."""
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return parse(carried(path), f"{path}, quantkit.recipe", settings, printed=True)
    if not path.is_file():
        if str(name) not in shipped():
            raise UnknownNameError("recipe, neither a file nor a shipped one:", str(name), shipped())
        path = _folder() / f"{name}{SUFFIX}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8; a recipe is a text file") from None
    return parse(text, str(path), settings)
