"""`quantkit recipe`: list, show, convert and check recipes; `fit`, which makes one, is in `_recipe_fit`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantkit.cli._recipe_fit import fit
from quantkit.cli.common.options import Json
from quantkit.cli.common.output import print_json, print_table
from quantkit.cli.common.plan_options import Dialect, ImatrixFile, Set, Strict, read_settings
from quantkit.cli.common.plan_tables import print_imatrix
from quantkit.cli.common.progress_options import takes_quiet
from quantkit.cli.common.terminal import message

if TYPE_CHECKING:
    from quantkit.formats.imatrix import Imatrix
    from quantkit.pipelines.planning import PlanInput
    from quantkit.recipe import Plan, Recipe

Source = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Name of a shipped recipe, recipe file, GGUF file, or rules 'REGEX=TYPE,…'.",
        show_default=False,
    ),
]
_Model = Annotated[
    Path | None,
    typer.Option("--model", metavar="MODEL", help="A GGUF file, a checkpoint directory or its config.json."),
]


@takes_quiet
def recipe(json: Json = False) -> None:
    """List the shipped recipes; `recipe show` and `recipe lint` read one, `recipe fit` makes one."""
    from quantkit.recipe import find, shipped

    found = {name: find(name) for name in shipped()}
    if json:
        print_json(
            "quantkit.recipe-list/1", {"recipes": [{"name": name, **_document(made)} for name, made in found.items()]}
        )
        return
    print_table(("recipe", "rules", "description"), [_row(name, made) for name, made in found.items()], left=3)


@takes_quiet
def show(
    source: Source,
    form: Annotated[
        Literal["file", "custom-q", "tensor-types", "thireus"], typer.Option("--as", help="Format.")
    ] = "file",
    settings: Set = None,
    model: _Model = None,
    json: Json = False,
) -> None:
    """Print a recipe in one of the formats that tools read.

    file: with comments, settings and the shorthand for layers; custom-q: one line for --custom-q of any tool;
    tensor-types: one rule per line for --tensor-type-file; thireus: every tensor by name, so it needs --model.
    """
    from quantkit.errors import UnknownNameError
    from quantkit.recipe import find
    from quantkit.recipe.forms import FORMS, format_recipe, thireus

    if form not in FORMS:
        raise UnknownNameError("form", form, FORMS)
    found = find(source, read_settings(settings))
    if json:
        print_json("quantkit.recipe-show/1", {"name": _name(source), **_document(found)})
    elif form == "thireus":
        if model is None:
            raise typer.BadParameter("--as thireus names every tensor of a model: pass --model")
        from quantkit.pipelines.planning import open_model

        print(thireus(_plan(found, open_model(model)), str(model)), end="")
    else:
        print(format_recipe(found, form), end="")


@takes_quiet
def lint(
    source: Source,
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A GGUF file, a checkpoint directory or its config.json.", show_default=False
        ),
    ],
    imatrix: ImatrixFile = None,
    settings: Set = None,
    dialect: Dialect = None,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Report probable mistakes in a recipe for a model, with corrections.

    A recipe without mistakes gives no output. `quantkit plan` reports the same, with sizes and types. With --imatrix,
    missing tensors and experts with too few tokens are reported too; without it, a complete importance matrix is
    assumed.
    """
    from quantkit.pipelines import planning
    from quantkit.pipelines.options import TypeOptions
    from quantkit.recipe import RecipeError, find

    found, about = find(source, read_settings(settings)), planning.open_model(model)
    matrix = planning.read_imatrix(TypeOptions(imatrix=imatrix))
    print_imatrix(imatrix, matrix)
    plan = _plan(found, about, matrix or planning.complete_imatrix(about.tensors), dialect)
    warnings = list(plan.warnings)
    if imatrix is None and (missing := planning.missing_imatrix(plan)):
        warnings.append(missing)
    if strict and warnings:
        raise RecipeError("; ".join(warnings))
    if json:
        print_json(
            "quantkit.recipe-lint/1",
            {"warnings": warnings, "notes": list(plan.notes), "rules": [use.to_json() for use in plan.rules]},
        )
        return
    for note in plan.notes:
        print(f"note: {note}")
    for warning in warnings:
        print(f"warning: {message(warning)}")


def _plan(found: Recipe, model: PlanInput, imatrix: Imatrix | None = None, dialect: str | None = None) -> Plan:
    """The plan of a recipe for a model; tensors without a rule are Q8_0."""
    from quantkit.recipe import Options, plan

    options = Options(allow_requantize=True, ignore_imatrix_rules=True, dialect=dialect)
    return plan(model.tensors, "Q8_0", found, metadata=model.metadata, imatrix=imatrix, options=options)


def _name(source: str) -> str | None:
    """The name of a shipped recipe or of a file; None for the text of rules."""
    from quantkit.recipe import shipped

    if source in shipped():
        return source
    return Path(source).name if os.path.isfile(source) else None  # also false for a text too long for a path


def _document(found: Recipe) -> dict[str, object]:
    return {
        "about": found.about,
        "settings": {setting.name: setting.value for setting in found.settings},
        "rules": [{"pattern": rule.pattern, "regex": rule.expanded, "type": rule.type.name} for rule in found.rules],
    }


def _row(name: str, found: Recipe) -> tuple[str, int, str]:
    return name, len(found.rules), found.about.partition("\n")[0]


SUBCOMMANDS = {"show": show, "lint": lint, "fit": fit}
