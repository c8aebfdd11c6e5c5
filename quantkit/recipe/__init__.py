"""Recipes: decide the type of every tensor, and check the decisions, before any weight is read.

    recipe = parse("ffn_down=iq5_k,ffn=iq4_k")     or parse(text of a file), or find("dense-iq4_k") for a shipped one
    result = plan(file.tensors.values(), "Q8_0", recipe, metadata=file.metadata, imatrix=matrix)
    result.tensors, result.rules, result.warnings, result.bytes_after
    specs, metadata = from_config(read_config("DeepSeek-R1/config.json"))    tensors for a plan without weights

Each name imports its module on first use, because repacking needs only the names of file types from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.recipe.errors import ImportanceError, RecipeError
    from quantkit.recipe.models import from_config, is_config, read_config
    from quantkit.recipe.planning.planned import Plan, PlannedTensor, RuleUse
    from quantkit.recipe.planning.planner import Options, importance_entry, plan
    from quantkit.recipe.planning.presets import FileType, file_type, file_types
    from quantkit.recipe.planning.replay import replay
    from quantkit.recipe.registry import find, shipped
    from quantkit.recipe.rules.grammar import Recipe, Rule, parse

__all__ = ["FileType", "ImportanceError", "Options", "Plan", "PlannedTensor", "Recipe", "RecipeError", "Rule",
           "RuleUse", "file_type", "file_types", "find", "from_config", "importance_entry", "is_config", "parse",
           "plan", "read_config", "replay", "shipped"]  # fmt: skip

_NAMES_OF_MODULE = {
    "errors": ("ImportanceError", "RecipeError"),
    "rules.grammar": ("Recipe", "Rule", "parse"),
    "models": ("from_config", "is_config", "read_config"),
    "planning.planned": ("Plan", "PlannedTensor", "RuleUse"),
    "planning.planner": ("Options", "importance_entry", "plan"),
    "planning.presets": ("FileType", "file_type", "file_types"),
    "planning.replay": ("replay",),
    "registry": ("find", "shipped"),
}
_MODULE_OF = {name: file for file, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
