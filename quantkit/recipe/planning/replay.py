"""Replay a plan that was written as JSON on the tensors of a file.

Names and shapes must be those of the plan; the types of the file may differ, as they do if the plan is for a
config.json. The checks are those of a plan by rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from quantkit import types
from quantkit.errors import DataError, FormatError, QuantkitError, UnknownNameError
from quantkit.formats.imatrix import Imatrix
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.forms import rules_for_types
from quantkit.recipe.planning.dialects import nearest, refuse_foreign
from quantkit.recipe.planning.fallback import interleaved_rows, row_by_row
from quantkit.recipe.planning.planned import Plan, PlannedTensor, RuleUse
from quantkit.recipe.planning.planner import (
    Options,
    Tensor,
    applied_scales,
    fitted_type,
    importance_entry,
    is_very_low,
    no_matrix,
    refuse_requantizing,
    require_usable,
    with_new_scales,
)
from quantkit.recipe.planning.presets import file_type
from quantkit.recipe.rules.grammar import Recipe, parse
from quantkit.repack.eligible import EMBEDDINGS

# `quantize --json` prints a plan and what was written, `recipe fit --json` a plan and why.
SCHEMAS = ("quantkit.plan/1", "quantkit.quantize/1", "quantkit.recipe-fit/1")


def replay(
    document: Mapping[str, Any],
    tensors: Iterable[Tensor],
    imatrix: Imatrix | None = None,
    *,
    allow_requantize: bool = False,
    where: str = "plan",
    dialect: str | None = None,
) -> Plan:
    """The plan of `Plan.to_json()`, for the tensors of a file in its order.

    The plan is for the program that it names, or for `dialect`. FormatError for a document that is not a plan or has
    another schema, DataError if it does not fit the file or the importance matrix, RecipeError for types that the
    program does not read.
    """
    if not isinstance(document, Mapping):
        raise FormatError(f"{where}: a {type(document).__name__} where `quantkit plan --json` writes an object")
    if document.get("schema", SCHEMAS[0]) not in SCHEMAS:
        raise FormatError(
            f"{where}: the schema is {document['schema']!r}, and a plan's is {SCHEMAS[0]}; `quantkit plan --json` "
            "writes one"
        )
    listed = list(tensors)
    try:
        planned = {entry["name"]: entry for entry in document["tensors"]}
        if len(planned) < len(document["tensors"]):
            raise ValueError("a tensor is there twice")
        replayed = tuple(_tensor(t, planned[t.name], where) for t in listed if t.name in planned)
        target, flags = file_type(document["file_type"]), _text(document, "flags")
        recipe = parse(_text(document, "recipe"), where, printed=True)
        warnings, notes = tuple(map(str, document["warnings"])), tuple(map(str, document.get("notes", ())))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: not a plan as `quantkit plan --json` writes it: {error!r}") from None
    try:
        options = Options.parse(flags)
    except QuantkitError as error:
        raise RecipeError(f"{where}: {error}") from None
    left_out = applied_scales(replayed)
    new = {t.name for t in with_new_scales(replayed)} - {t.name for t in replayed} if options.scale_nvfp4 else set()
    stated = {name: entry for name, entry in planned.items() if name not in new}
    _refuse_other_tensors(stated, [t.name for t in listed if t.name in planned or t.name not in left_out], where)
    replayed = tuple(t for t in replayed if t.name not in left_out)
    if options.scale_nvfp4:
        replayed = with_new_scales(replayed)
    dialect = dialect or options.dialect
    edits = rules_for_types((t.name, t.type) for t in replayed if _is_edited(t, dialect))
    replayed = tuple(_with_edits(t, edits) for t in replayed)
    recipe = edits + recipe  # so that the output's recipe gives its types
    for t in replayed:
        _check_importance(t, imatrix, where)
        if t.importance is None and not (t.copied or t.reordered):
            _check_no_importance(
                t, imatrix, where, is_very_low(t.name, t.type, target) and not options.ignore_imatrix_rules
            )
    if not allow_requantize:
        refuse_requantizing(replayed, repack=False)
    uses = tuple(RuleUse(rule, [t.name for t in replayed if rule.matches(t.name)]) for rule in recipe.rules)
    for t in replayed:
        if t.rule is not None and t.rule < len(uses):
            uses[t.rule].decided.append(t.name)
    refuse_foreign(replayed, dialect)
    return Plan(target, recipe, flags, replayed, uses, warnings, notes, dialect)


def _tensor(t: Tensor, entry: Mapping[str, Any], where: str) -> PlannedTensor:
    at = f"{where}: {t.name}"
    if list(t.shape) != list(entry["shape"]):
        raise DataError(f"{at}: the plan is for a shape of {entry['shape']}, the file has {list(t.shape)}")
    try:
        kind, wanted = types.layout(entry["type"]), types.layout(entry["wanted"])
    except UnknownNameError as error:
        raise DataError(f"{at}: {error}") from None
    if kind is not t.type and kind.block_size > 1 and (why := no_matrix(t)):
        raise DataError(f"{at}: cannot be {kind.name}, because it is {why}; write {t.type.name}")
    if t.name in EMBEDDINGS and interleaved_rows(kind) > 1:
        raise DataError(
            f"{at}: cannot be {kind.name}, because rows of an embedding are looked up one by one; write "
            f"{row_by_row(kind).name}"
        )
    rows = t.shape[-2] if len(t.shape) > 1 else 1
    if t.shape[-1] % kind.block_size or rows % interleaved_rows(kind):
        raise DataError(
            f"{at}: {rows} rows of {t.shape[-1]} columns cannot be {kind.name}, of blocks of {kind.block_size} and "
            f"{interleaved_rows(kind)} rows"
        )
    rule, importance = entry["rule"], entry["importance"]
    if rule is not None and (type(rule) is not int or rule < 0):
        raise ValueError(f"{t.name}: rule is {rule!r:.80}, not the number of a rule")
    if importance is not None:
        importance = _text(entry, "importance")
    return PlannedTensor(
        t.name, t.shape, t.type, kind, str(entry["reason"]), wanted, rule, importance, bool(entry["repacked"])
    )


def _is_edited(t: PlannedTensor, dialect: str | None) -> bool:
    """Whether a tensor has neither the type that its plan wanted, nor what its rows or a program allow instead."""
    if t.wanted is None or t.row_type is t.wanted or len(t.shape) < 2:
        return False
    expected = {t.wanted, fitted_type(t.wanted, t)[0]}
    if dialect is not None:
        expected |= {near for kind in expected if (near := nearest(kind, dialect, t.shape[-1]))}
    return t.row_type not in expected


def _with_edits(t: PlannedTensor, edits: Recipe) -> PlannedTensor:
    """The tensor as a plan has it whose first rules are `edits`."""
    index = next((i for i, rule in enumerate(edits.rules) if rule.matches(t.name)), None)
    if index is not None:
        return replace(t, wanted=t.type, rule=index, reason=f"rule {index + 1}: {edits.rules[index]}", repacked=False)
    return t if t.rule is None else replace(t, rule=t.rule + len(edits.rules))


def _text(entry: Mapping[str, Any], key: str) -> str:
    found = entry[key]
    if not isinstance(found, str):
        raise TypeError(f"{key} is {found!r:.80}, not a text")
    return found


def _refuse_other_tensors(planned: Mapping[str, object], names: list[str], where: str) -> None:
    unplanned = [name for name in names if name not in planned]
    absent = sorted(set(planned).difference(names))
    if unplanned or absent:
        which = (
            f"{len(unplanned)} of the file's tensors are not in it" if unplanned else f"the file lacks {len(absent)}"
        )
        raise DataError(f"{where}: planned for another model: {which}, as {(unplanned or absent)[0]}")


def _check_importance(t: PlannedTensor, imatrix: Imatrix | None, where: str) -> None:
    if t.importance is None or t.copied or t.reordered:
        return
    if imatrix is None or t.importance not in imatrix:
        lacks = "none is given; pass --imatrix FILE" if imatrix is None else "it has no such entry"
        raise DataError(f"{where}: {t.name} is planned with the importance matrix's {t.importance}, and {lacks}")
    if not _fits(t, t.importance, imatrix):
        needed = f"{t.elements // t.shape[-2] // t.shape[-1]} x {t.shape[-1]}"
        raise DataError(
            f"{t.name}: the importance matrix has {imatrix[t.importance].size} values for it, the tensor needs {needed}"
        )
    require_usable(t.name, t.importance, imatrix)


def _fits(t: PlannedTensor, entry: str, imatrix: Imatrix) -> bool:
    return imatrix[entry].fits(t.elements // t.shape[-2] // t.shape[-1], t.shape[-1])


def _check_no_importance(t: PlannedTensor, imatrix: Imatrix | None, where: str, very_low: bool) -> None:
    """DataError for a tensor that is planned without importance, if the matrix has an entry for it or it needs one."""
    entry = importance_entry(t.name, imatrix) if imatrix is not None and t.row_type.uses_imatrix else None
    if imatrix is not None and entry is not None and _fits(t, entry, imatrix):
        raise DataError(
            f"{where}: {t.name} is planned without importance, and the importance matrix has an entry for it; plan "
            f'with --imatrix, write "importance": "{entry}", or leave it out with --exclude-weights {entry}'
        )
    if very_low or t.row_type.requires_imatrix:
        raise DataError(
            f"{where}: {t.name} is planned without importance, which {t.type.name} needs; plan with --imatrix, or "
            "choose another type"
        )
