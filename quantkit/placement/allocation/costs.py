"""The costs file: how much the KL divergence of a model rises for each matrix and each type.

    {"schema": "quantkit.costs/1", "model": …, "text": …, …,
     "tensors": {"blk.0.attn_q.weight": {"shape": [576, 576], "kld": 0.0012, "kld_error": 0.0001, "probe_error": 3.1,
                                         "errors": {"q4_0": [3.1, 0.1], "q6_0": [0.2, 0.01]}}}}

    cost of a type = kld * error of the type / probe_error * factor of the type

kld          mean KL divergence, in nats per token, with this matrix alone in the probe type, and its standard error
errors       of each type the squared error in the metric of the matrix' inputs, with its standard error, as rows are
             sampled
probe_error  the same of the probe type; if it is 0, so are all errors: the cost of others would not be known
factors      {"q4_0": 1.1, …}: by what `recipe fit --verify` has multiplied the costs of types to agree with files that
             it measured (refine.py); 1 for types that are not there, and in the file that `sensitivity` writes

A squared error raises the divergence in proportion, and those of several matrices add up, as long as they are small:
docs/explanation/allocation.md has how well that holds. `quantkit sensitivity` measures and writes the file.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from quantkit import types
from quantkit.errors import DataError, FormatError, QuantkitError
from quantkit.formats.atomic import writing
from quantkit.inputs import json_input
from quantkit.recipe.planning.planned import PlannedTensor
from quantkit.types import QuantType

SCHEMA = "quantkit.costs/1"
_LARGEST_COST = 1e12  # nats per token; sums and squares of larger numbers would not be finite
_LARGEST_FACTOR = 1e6
_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorCost:
    """What is measured of one matrix; fields as in the module's docstring. `metric` is "second moments", "importance"
    or "plain"; `errors` by names of types without row interleaving."""

    shape: tuple[int, ...]
    kld: float
    kld_error: float
    probe_error: float
    errors: Mapping[str, tuple[float, float]]
    metric: str = "plain"

    def of(self, name: str) -> float | None:
        """The cost of a type in nats per token; None if its error was not measured."""
        found = self.errors.get(name)
        if found is None:
            return None
        return self.kld * found[0] / self.probe_error if self.probe_error > 0 else 0.0

    def error_of(self, name: str) -> float:
        """The standard error of the cost: of the probe's divergence and of the sampled rows."""
        value, error = self.errors[name]
        if self.probe_error <= 0:
            return 0.0
        return math.hypot(self.kld_error * value, self.kld * error) / self.probe_error


def check_probe(probe_error: float, errors: Mapping[str, tuple[float, float]]) -> None:
    """DataError if the probe type changes nothing of a matrix that another type changes."""
    if probe_error <= 0 and (worse := [kind for kind, (value, _) in errors.items() if value > 0]):
        raise DataError(
            f"the probe type has no error, {worse[0]} has {errors[worse[0]][0]:g}: what that costs cannot be told; "
            "measure with quantkit sensitivity --probe and a type of fewer bits"
        )


@dataclass(frozen=True)
class Costs:
    """The costs of a model's matrices by name, and factors of types by name.

    `about` has the other fields of the file: model, text, settings.
    """

    tensors: Mapping[str, TensorCost]
    about: Mapping[str, Any] = field(default_factory=dict)
    where: str = "costs"
    factors: Mapping[str, float] = field(default_factory=dict)

    def types(self) -> list[str]:
        """Names of all types with an error for some matrix, in the order of the file."""
        return list(dict.fromkeys(name for tensor in self.tensors.values() for name in tensor.errors))

    def cost(self, name: str, shape: tuple[int, ...], kind: QuantType, source: QuantType) -> float | None:
        """The cost of a tensor in a type, 0 for its source type and for floats; None if the type was not measured.

        Interleaving changes no value, so an interleaved type costs what its base does. DataError for a tensor that the
        file lacks or has with another shape.
        """
        if kind is source or kind.block_size == 1:
            return 0.0
        tensor = self.tensors.get(name)
        if tensor is None:
            raise DataError(
                f"{self.where}: has no costs of {name}; they were measured on another model, or without this tensor: "
                "measure again with quantkit sensitivity"
            )
        if tensor.shape != tuple(shape):
            raise DataError(
                f"{self.where}: {name} has shape {list(tensor.shape)} there and {list(shape)} here; the costs were "
                "measured on another model"
            )
        measured = measured_name(kind)
        found = tensor.of(measured)
        return None if found is None else found * self.factors.get(measured, 1.0)

    def predicted(self, tensors: Iterable[PlannedTensor]) -> float | None:
        """The divergence that is predicted for a file with these tensors; None if a type was not measured."""
        priced = self._priced(tensors)
        return None if priced is None else sum(cost for _, cost in priced)

    def by_type(self, tensors: Iterable[PlannedTensor]) -> dict[str, float] | None:
        """The same, by the names that types have here."""
        priced = self._priced(tensors)
        if priced is None:
            return None
        total: dict[str, float] = {}
        for name, cost in priced:
            total[name] = total.get(name, 0.0) + cost
        return total

    def _priced(self, tensors: Iterable[PlannedTensor]) -> list[tuple[str, float]] | None:
        """Type and cost of each tensor whose type is free; None if a type was not measured."""
        free = [t for t in tensors if t.wanted is not None]
        costs = [self.cost(t.name, t.shape, t.type, t.source) for t in free]
        if None in costs:
            return None
        return [(measured_name(t.type), cost or 0.0) for t, cost in zip(free, costs)]

    def error(self, name: str, kind: QuantType) -> float:
        """The standard error of a tensor's cost in a type, in nats per token; 0 where it was not measured."""
        tensor, measured = self.tensors.get(name), measured_name(kind)
        if tensor is None or measured not in tensor.errors:
            return 0.0
        return tensor.error_of(measured) * self.factors.get(measured, 1.0)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file; it appears when it is complete."""
        with writing(path) as stream:
            stream.write(json.dumps(self.to_json(), indent=1).encode() + b"\n")

    def to_json(self) -> dict[str, Any]:
        """The document of the file."""
        entries = {
            name: {
                "shape": list(t.shape),
                "kld": t.kld,
                "kld_error": t.kld_error,
                "probe_error": t.probe_error,
                "metric": t.metric,
                "errors": {kind: list(values) for kind, values in t.errors.items()},
            }
            for name, t in self.tensors.items()
        }
        about = {key: value for key, value in self.about.items() if key != "schema"}
        factors = {"factors": dict(self.factors)} if self.factors else {}
        return {"schema": SCHEMA, **about, **factors, "tensors": entries}


def measured_name(kind: QuantType) -> str:
    """The name under which a costs file has a type: interleaving changes no value."""
    return (kind.base or kind.name).lower()


def read(path: str | os.PathLike[str]) -> Costs:
    """Read a costs file. FormatError for anything else, with the tensor that is wrong."""
    return from_json(json_input.read(Path(path)), str(path))


def from_json(document: Any, where: str = "costs") -> Costs:
    """The costs of a document, as `Costs.to_json` gives it."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise FormatError(f"{where}: not a costs file of schema {SCHEMA}; quantkit sensitivity writes one")
    tensors: dict[str, TensorCost] = {}
    entries = document.get("tensors")
    if not isinstance(entries, dict):
        raise FormatError(f"{where}: 'tensors' is missing or not an object")
    for name, entry in entries.items():
        try:
            tensors[name] = _tensor(entry)
            check_probe(tensors[name].probe_error, tensors[name].errors)
        except QuantkitError as error:
            raise FormatError(f"{where}: {name}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{where}: {name}: not as quantkit sensitivity writes it: {error!r}") from None
    about = {key: value for key, value in document.items() if key not in ("tensors", "factors")}
    return Costs(tensors, about, where, _factors(document.get("factors", {}), where))


def _factors(document: Any, where: str) -> dict[str, float]:
    if not isinstance(document, dict):
        raise FormatError(f"{where}: 'factors' is not an object of types and numbers")
    try:
        factors = _by_type({kind: _number(kind, value) for kind, value in document.items()})
    except QuantkitError as error:
        raise FormatError(f"{where}: factors: {error}") from None
    for kind, value in factors.items():
        if not 1 / _LARGEST_FACTOR <= value <= _LARGEST_FACTOR:
            raise FormatError(
                f"{where}: factors: {kind} has {value:g}; a factor is from {1 / _LARGEST_FACTOR:g} to "
                f"{_LARGEST_FACTOR:g}"
            )
    return factors


def _tensor(entry: Mapping[str, Any]) -> TensorCost:
    errors = _by_type(
        {kind: (_number(kind, value), _number(kind, error)) for kind, (value, error) in entry["errors"].items()}
    )
    kld, kld_error, probe = (_number(key, entry[key]) for key in ("kld", "kld_error", "probe_error"))
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n > 0 for n in shape):
        raise DataError(f"shape is {list(shape)!r:.80}, not a list of whole numbers above 0")
    found = TensorCost(shape, kld, kld_error, probe, errors, str(entry.get("metric", "plain")))
    for kind in errors:
        cost, error = found.of(kind) or 0.0, found.error_of(kind)
        if not max(cost, error) <= _LARGEST_COST:
            raise DataError(f"{kind} costs {cost:g} ± {error:g} nats per token; at most {_LARGEST_COST:g} is possible")
    return found


def _by_type(values: Mapping[str, _T]) -> dict[str, _T]:
    """The values by the names that types have here; UnknownNameError, or DataError for a type that is there twice."""
    found = {str(types.layout(kind).name).lower(): value for kind, value in values.items()}
    if len(found) < len(values):
        raise DataError(f"a type is there twice: {', '.join(values)}")
    return found


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise DataError(f"{name} is {value!r}, not a number of at least 0")
    return float(value)
