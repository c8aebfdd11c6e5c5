"""Tables of `plan` and `quantize`: tensors, rules, fallbacks, types, devices, warnings, sizes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.output import gib, mib, print_table
from quantkit.cli.common.terminal import message

if TYPE_CHECKING:
    from quantkit.formats.imatrix import Imatrix
    from quantkit.placement.budget import Budget
    from quantkit.placement.many_machines import Prediction
    from quantkit.recipe import Plan


def print_imatrix(name: object, matrix: Imatrix | None) -> None:
    """Say what an importance matrix holds, on stderr."""
    if matrix is None:
        return
    policy = f"; experts without tokens: {matrix.policy}" if matrix.policy else ""
    about = f"{len(matrix)} entries, {matrix.chunks} chunks of {matrix.dataset or 'an unnamed text'}{policy}"
    on_message(f"importance matrix {name}: {about}")


def print_plan(plan: Plan, verbose: bool = False, budget: Budget | None = None, explain: bool = False) -> None:
    """Print tensors by class, the effect of each rule, types, devices, warnings and sizes."""
    if verbose:
        each = [(t.name, "x".join(map(str, t.shape)), t.source.name, t.type.name, t.reason, mib(t.bytes_after))
                for t in plan.tensors]  # fmt: skip
        print_table(("tensor", "shape", "from", "to", "why", "size"), each, left=5, end="\n\n")
    print_table(("tensors", "from", "to", "why", "count", "size"), _classes(plan), left=4, end="\n\n")
    if plan.rules:
        rows = [
            (i, str(use.rule), _examples(use.decided), len(use.matched), len(use.decided))
            for i, use in enumerate(plan.rules, 1)
        ]
        print_table(("rule", "regex=type", "tensors", "matches", "decides"), rows, left=3, end="\n\n")
    if plan.fallbacks:
        print_table(("does not fit", "type", "columns", "becomes", "count"), _fallbacks(plan), left=2, end="\n\n")
    if len(plan.types()) > 1:
        print_table(("type", "count", "size", "bpw"), _types(plan), end="\n\n")
    if budget:
        print_budget(budget, explain)
    for note in plan.notes:
        print(f"note: {note}")
    for warning in (*plan.warnings, *(budget.warnings if budget else ())):
        print(f"warning: {message(warning)}")
    print(
        f"{_names(plan)}: {len(plan.tensors)} tensors, {gib(plan.bytes_before)} -> {gib(plan.bytes_after)}, "
        f"{plan.bits_per_weight:.3f} bits per weight"
    )


def print_prediction(found: Prediction) -> None:
    """Print how long a cluster takes to quantize, and what binds."""
    from quantkit.placement.many_machines import PARTS

    m = found.machines
    parts = [(name, duration(getattr(found, name))) for name in PARTS]
    print()
    print_table((f"{m.workers} x {m.cores} cores", "takes"), parts)
    print(
        f"quantize: about {duration(found.seconds)}, {found.binds} binds; encoders as fast as on a core of this machine"
    )
    print(
        f"{found.tasks} tasks, {found.tasks / m.workers:.0f} for each worker, whose results take up to "
        f"{found.worker_bytes / 1e6:.0f} MB of memory there"
    )


def duration(seconds: float) -> str:
    """A time for people, such as "2 h 05 min" or "41 s"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def print_budget(budget: Budget, explain: bool = False) -> None:
    """Print the contents of each device, the cache, whether the model fits, and the predicted speed."""
    rows = []
    for load in budget.loads:
        limits = ("", "") if load.limit is None else (gib(load.limit), gib(load.left or 0))
        sizes = (mib(load.weights), mib(load.cache), mib(load.buffers) if load.buffers else "", gib(load.total))
        rows.append((load.device, load.tensors, *sizes, *limits))
    print_table(("device", "tensors", "weights", "cache", "buffers", "total", "of", "left"), rows, end="\n\n")
    if len(budget.loads) > 1:
        kinds = [
            (load.device, *(f"{what} {gib(size)}" for what, size in load.classes.items())) for load in budget.loads
        ]
        print("\n".join(f"{device}: {', '.join(parts)}" for device, *parts in kinds if parts), end="\n\n")
    if explain:
        print_table(("tensors", "device", "why", "count"), _reasons(budget), left=3, end="\n\n")
    for rule, count in zip(budget.placement.rules, budget.placement.decided):
        print(f"{rule.text} places {count} tensors")
    for note in budget.notes:
        print(note)
    if budget.speed is not None:
        print("\n".join(budget.speed.lines))
    margin = max((load.margin for load in budget.loads), default=0)
    if budget.fits is not None:
        reserve = f", with {mib(margin)} of each GPU reserved for buffers" if margin else ""
        print(f"{'fits' if budget.fits else 'does not fit'}{reserve}")
    print()


def _reasons(budget: Budget) -> list[tuple[Any, ...]]:
    """One row per class of tensors with the same device and reason, layers as ranges."""
    from quantkit.recipe.rules.layers import summarised

    placement = budget.placement
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, device in placement.devices.items():
        where = "/".join(d.name for d in placement.graph) if name in placement.sharded else device.name
        why = re.sub(r"layer \d+", "layer", placement.reasons[name])
        grouped[where, why if len(why) < 80 else f"{why[:78]} …"].append(name)
    return [(kind, where, why, count) for (where, why), names in grouped.items()
            for kind, count in summarised(names).items()]  # fmt: skip


def _examples(names: Sequence[str]) -> str:
    """Up to three classes of the tensors that a rule decided, layers as ranges."""
    from quantkit.recipe.rules.layers import summarised

    classes = list(summarised(names))
    shown = classes if len(classes) < 4 else classes[:2]
    return ", ".join(shown) + (f" and {len(classes) - 2} more classes" if len(classes) > len(shown) else "")


def _fallbacks(plan: Plan) -> list[tuple[Any, ...]]:
    from quantkit.recipe.rules.layers import summarised

    found: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for t in plan.fallbacks:
        found[(t.wanted or t.type).name, t.shape[-1], t.row_type.name].append(t.name)
    return [(name, *key, count) for key, names in found.items() for name, count in summarised(names).items()]


def _types(plan: Plan) -> list[tuple[Any, ...]]:
    return [(use.type.name, use.tensors, mib(use.bytes), f"{use.bits_per_weight:.3f}") for use in plan.by_type()]


def _names(plan: Plan) -> str:
    """The requested file type, and general.file_type of the output if it is another."""
    name, written = plan.file_type.name, plan.written_type.name
    return name if name == written else f"{name}, written as {written}"


def _classes(plan: Plan) -> list[tuple[Any, ...]]:
    """One row per class of tensors with the same source, type and reason; * stands for all layers."""
    from quantkit.recipe.rules.layers import ranges

    grouped: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    layers: dict[Any, set[int]] = defaultdict(set)
    for t in plan.tensors:
        found = re.match(r"blk\.(\d+)\.(.*)", t.name)
        name = f"blk.#.{found[2]}" if found else t.name
        key = (name, t.source.name, t.type.name, t.reason)
        grouped[key].append(t.bytes_after)
        if found:
            layers[key].add(int(found[1]))
            layers[name].add(int(found[1]))
    rows = []
    for key, sizes in grouped.items():
        which = "*" if layers[key] == layers[key[0]] else f"{{{ranges(layers[key])}}}"
        rows.append((key[0].replace("#", which), *key[1:], len(sizes), mib(math.fsum(sizes))))
    return rows
