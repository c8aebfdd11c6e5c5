"""Recipes: which tensor gets which type, decided and checked before a weight is read.

recipe = parse("ffn_down=iq5_k,ffn=iq4_k")     or parse(text of a file), or find("dense-4.5bpw") for a shipped one
made = plan(file.tensors.values(), "Q8_0", recipe, metadata=file.metadata, imatrix=matrix)
specs, metadata = from_config(read_config("DeepSeek-R1/config.json"))    for plans without weights
made.tensors, made.rules, made.warnings, made.bytes_after
"""

from __future__ import annotations

from quantkit.recipe.errors import RecipeError
from quantkit.recipe.grammar import Recipe, Rule, parse
from quantkit.recipe.models import from_config, is_config, read_config
from quantkit.recipe.planned import Plan, PlannedTensor, RuleUse
from quantkit.recipe.planner import Options, importance_entry, plan
from quantkit.recipe.presets import FileType, file_type, file_types
from quantkit.recipe.replay import replay
from quantkit.recipe.shipped import find, shipped

__all__ = ["FileType", "Options", "Plan", "PlannedTensor", "Recipe", "RecipeError", "Rule", "RuleUse", "file_type",
           "file_types", "find", "from_config", "importance_entry", "is_config", "parse", "plan", "read_config",
           "replay", "shipped"]  # fmt: skip
