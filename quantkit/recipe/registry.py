"""The shipped recipes: `recipes/*.recipe` in the repository, `library/` in an installed package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from quantkit.errors import UnknownNameError
from quantkit.formats import gguf
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.forms import rules_for_types
from quantkit.recipe.rules.grammar import Recipe, parse

_HERE = Path(__file__).parent
SUFFIX = ".recipe"


def _folder() -> Path:
    """`library` of an installed package; a checkout has the same files in its `recipes`."""
    library = _HERE / "library"
    return library if library.is_dir() else _HERE.parents[1] / "recipes"


def shipped() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.name[: -len(SUFFIX)] for path in _folder().glob(f"*{SUFFIX}"))


def recipe_text(path: Path) -> str:
    """The recipe stored in a GGUF file, or, if there is none, rules for the types that the file has."""
    file = gguf.open(path)
    text = file.metadata.get("quantkit.recipe")
    if isinstance(text, str):
        return text
    about = f"The types of {path.name}, which contains no recipe."
    return str(Recipe(rules_for_types((t.name, t.type) for t in file.tensors.values()).rules, about))


def find(source: str | os.PathLike[str], settings: Mapping[str, str] | None = None, where: str = "RECIPE") -> Recipe:
    """Read a recipe from a text file, a GGUF file, the name of a shipped recipe, or the text of rules itself.

    `settings` replaces the values of some of its settings. `where` names the text of rules in errors.
    """
    text = os.fspath(source)
    path = Path(text)
    if not os.path.isfile(text):  # also false for a text that is too long for a path
        if text in shipped():
            path = _folder() / f"{text}{SUFFIX}"
        elif "=" in text:
            return parse(text, where, settings)
        else:
            raise UnknownNameError("recipe, neither a file nor a shipped one:", text, shipped())
    elif path.suffix == ".gguf":
        return parse(recipe_text(path), f"{path}, quantkit.recipe", settings, printed=True)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8; a recipe is a text file") from None
    if text.lstrip().startswith("{"):
        raise RecipeError(f"{path}: a JSON document, no recipe; a plan is executed by quantize --plan")
    return parse(text, str(path), settings)
