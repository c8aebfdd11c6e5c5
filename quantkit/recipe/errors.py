"""What is wrong with a recipe or with a plan made of it."""

from __future__ import annotations

from quantkit.errors import QuantkitError


class RecipeError(QuantkitError):
    """A recipe that cannot be read, or that a model and its flags contradict."""
