"""Errors in recipes and in plans."""

from __future__ import annotations

from quantkit.errors import DataError, QuantkitError


class RecipeError(QuantkitError):
    """A recipe that cannot be read, or that a model and its flags contradict."""


class ImportanceError(DataError):
    """No importance matrix was given and a type needs one."""
