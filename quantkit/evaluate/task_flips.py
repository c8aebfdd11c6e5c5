"""Answers that change between models: the same multiple-choice tasks by a reference and by models made from it.

Two models of equal accuracy may answer differently. Of the answers that change, some become wrong and some right:

    lost       right by the reference, wrong by the model
    gained     wrong by the reference, right by the model
    changed    another choice, whether one of the two is right or not

accuracy - accuracy of the reference = (gained - lost) / tasks. Its standard error is paired by task. McNemar's exact
test gives the probability of a split of lost and gained that is as uneven, if either were equally likely.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quantkit.errors import DataError, printable
from quantkit.evaluate.conditions import Conditions
from quantkit.evaluate.models import OnMessage, OpenModel, no_message, open_model
from quantkit.evaluate.tasks import Score, score_tasks


@dataclass(frozen=True)
class TaskFlips:
    """A model's answers against the reference's.

    name      of the model's file
    path      the file
    score     the model's score
    lost, gained, changed   numbers of tasks, see the top of this file
    difference, error       of the accuracy, model minus reference, and its standard error over tasks; NaN for one task
    """

    path: Path
    score: Score
    lost: int
    gained: int
    changed: int
    difference: float
    error: float

    @property
    def name(self) -> str:
        """The name in tables."""
        return printable(self.path.stem)

    @property
    def p_value(self) -> float:
        """McNemar's exact test, two-sided: small where lost and gained differ by more than chance."""
        n, few = self.lost + self.gained, min(self.lost, self.gained)
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(few + 1)) / (1 << n))

    def record(self) -> dict[str, object]:
        """The figures by name, for JSON."""
        return {
            "name": self.name, "path": self.path, "accuracy": self.score.accuracy,
            "accuracy_error_over_tasks": self.score.error, "lost": self.lost, "gained": self.gained,
            "changed": self.changed, "difference": self.difference, "difference_error_over_tasks": self.error,
            "p_value": self.p_value,
        }  # fmt: skip


@dataclass(frozen=True)
class TaskComparison:
    """The result of `compare_tasks`.

    kind         "hellaswag", "winogrande" or "multiple-choice"
    reference    the reference's file and score
    models       the others, in the order given
    conditions   what the figures depend on besides the files
    """

    kind: str
    path: Path
    reference: Score
    models: list[TaskFlips]
    conditions: Conditions = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """The comparison as JSON data."""
        return {
            "task": self.kind, "reference": self.path, "tasks": self.reference.tasks,
            "accuracy": self.reference.accuracy, "accuracy_error_over_tasks": self.reference.error,
            "chance": self.reference.chance, "models": [model.record() for model in self.models],
            "conditions": self.conditions,
        }  # fmt: skip


def flips(path: Path, reference: Score, score: Score) -> TaskFlips:
    """A model's answers against the reference's, both of the same tasks in the same order."""
    if reference.expected != score.expected:
        raise DataError(f"{path}: {score.tasks} tasks, the reference has answered {reference.tasks} others")
    before, after = (np.equal(s.answers, s.expected) for s in (reference, score))
    change = after.astype(np.int64) - before
    error = float(change.std(ddof=1)) / math.sqrt(len(change)) if len(change) > 1 else math.nan
    changed = int(np.not_equal(reference.answers, score.answers).sum())
    return TaskFlips(
        path, score, int((change < 0).sum()), int((change > 0).sum()), changed, float(change.mean()), error
    )


def compare_tasks(
    reference: str | os.PathLike[str],
    models: Sequence[str | os.PathLike[str]],
    kind: str,
    file: str | os.PathLike[str],
    limit: int,
    *,
    numerics: str = "exact",
    threads: int | None = None,
    progress: Callable[[str, Score, int], None] | None = None,
    on_message: OnMessage = no_message,
    open_model: OpenModel = open_model,
) -> TaskComparison:
    """Let a reference and models answer the multiple-choice tasks of a file, and count the answers that change.

    kind       "hellaswag", "winogrande" or "multiple-choice"
    limit      number of tasks; 0: all
    progress   called after each task with the model's name, its score so far and the number of all tasks

    One model is open at a time. Raises as `tasks.score_tasks`.
    """

    def score(path: Path) -> Score:
        def report(so_far: Score, tasks: int) -> None:
            if progress is not None:
                progress(path.name, so_far, tasks)

        try:
            return score_tasks(
                path, kind, file, limit, numerics=numerics, threads=threads, progress=report, on_message=on_message,
                open_model=open_model,
            )  # fmt: skip
        finally:
            gc.collect()  # a model and its parts refer to each other; the next one needs its memory

    first = Path(reference)
    of_reference = score(first)
    found = [flips(path, of_reference, score(path)) for path in map(Path, models)]
    return TaskComparison(kind, first, of_reference, found, of_reference.conditions)
