"""Tasks with choices, by the reference's file formats: hellaswag, winogrande, multiple choice.

A choice's score is the mean log-probability of its tokens after those that all choices of the task begin with; the
choice with the largest score, the first of equals, is the prediction. Where tokens are scored that follow the choice
(winogrande), it is they that tell which fits.
"""

from __future__ import annotations

import csv
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.evaluate.perplexity import check_context, negative_log_likelihood
from quantkit.evaluate.text import read_text
from quantkit.formats.atomic import os_errors

_TRAILING = 3  # winogrande: with more tokens than that behind what is shared, the choice itself is not scored


@dataclass(frozen=True)
class Task:
    """Texts of which one is right. `heads`: where the tokens that are not scored end in each text, or None.

    heads: the texts up to and with the choice's own word
    """

    texts: tuple[str, ...]
    right: int
    heads: tuple[str, ...] | None = None


class Score(NamedTuple):
    """`right` of `tasks`; `chance` the share that guessing gets."""

    right: int
    tasks: int
    chance: float

    @property
    def accuracy(self) -> float:
        return self.right / self.tasks

    @property
    def error(self) -> float:
        """Standard error of the accuracy; NaN for one task."""
        p = self.accuracy
        return math.sqrt(p * (1 - p) / (self.tasks - 1)) if self.tasks > 1 else math.nan


# --------------------------------------------------------------------------------------------------------------- files


def hellaswag(path: str | os.PathLike[str], limit: int = 400) -> list[Task]:
    """Six lines a task: context, number of the right ending, four endings. Drawn as the reference draws them."""
    lines = read_text(path).splitlines()
    if not lines or len(lines) % 6:
        raise FormatError(f"{path}: {len(lines)} lines; hellaswag has six a task")
    tasks = []
    for i in range(0, len(lines), 6):
        context, right, *endings = lines[i : i + 6]
        if right.strip() not in ("0", "1", "2", "3"):
            raise FormatError(f"{path}: line {i + 2}: '{right}' is not the number of an ending, 0 to 3")
        tasks.append(Task(tuple(f"{context} {ending}" for ending in endings), int(right)))
    return drawn(tasks, limit)


def winogrande(path: str | os.PathLike[str], limit: int = 0) -> list[Task]:
    """CSV: index, sentence with _, choice, choice, answer (1 or 2). The first `limit`; 0: all."""
    tasks = []
    for number, row in enumerate(csv.reader(read_text(path).splitlines()), 1):
        if len(row) < 5 or row[-1].strip() not in ("1", "2"):
            raise FormatError(f"{path}: line {number}: not index,sentence,choice,choice,answer with the answer 1 or 2")
        sentence, choices = ",".join(row[1:-3]), row[-3:-1]
        before, gap, after = sentence.partition("_")
        if not gap:
            raise FormatError(f"{path}: line {number}: the sentence has no _ for the choice")
        heads = tuple(before + choice for choice in choices)
        tasks.append(Task(tuple(head + after for head in heads), int(row[-1]) - 1, heads))
    return tasks[: limit or None]


def multiple_choice(path: str | os.PathLike[str], limit: int = 0) -> list[Task]:
    """The binary file: u32 tasks, their places, then question and answers. The first `limit`; 0: all."""
    with os_errors(Path(path), "read"):
        data = Path(path).read_bytes()
    reader = _Reader(Path(path), data)
    count = reader.number()
    places = [reader.number() for _ in range(min(count, len(data) // 4 + 1))]
    tasks = []
    for index in range(len(places) if not limit else min(limit, len(places))):
        start = reader.at
        question = reader.text()
        answers, labels = reader.answers()
        reader.answers()  # of these several may be right: not asked for
        if sum(labels) != 1 or set(labels) - {0, 1}:
            raise FormatError(f"{path}: task {index}, offset {start}: labels {labels}; one answer must be right")
        tasks.append(Task(tuple(f"{question} {answer}" for answer in answers), labels.index(1)))
    return tasks


class _Reader:
    """Takes numbers and strings from bytes; FormatError where they end too soon."""

    def __init__(self, path: Path, data: bytes):
        self.path, self._data, self.at = path, data, 0

    def take(self, size: int) -> bytes:
        found = self._data[self.at : self.at + size]
        if len(found) != size:
            raise FormatError(
                f"{self.path}: offset {self.at}: {size} bytes expected, {len(found)} left; it is truncated"
            )
        self.at += size
        return found

    def number(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def text(self) -> str:
        return self.take(self.number()).decode(errors="replace")

    def answers(self) -> tuple[list[str], list[int]]:
        n = self.number()
        texts = [self.text() for _ in range(n)]
        return texts, list(struct.unpack(f"<{n}i", self.take(4 * n)))


def drawn(tasks: Sequence[Task], limit: int) -> list[Task]:
    """`limit` of the tasks without replacement, all of them at most, in the order the reference draws them.

    That is std::mt19937 with seed 1, and numbers below n from its 32 bits by multiplying and rejecting, as libstdc++
    does (Lemire 2019).
    """
    twister: Any = np.random.MT19937()
    twister._legacy_seeding(1)  # the seeding of std::mt19937
    left, found = list(tasks), []
    for _ in range(min(limit, len(tasks)) if limit else len(tasks)):
        n = len(left)
        product = int(twister.random_raw()) * n
        if product & 0xFFFFFFFF < n:
            least = (1 << 32) % n
            while product & 0xFFFFFFFF < least:
                product = int(twister.random_raw()) * n
        found.append(left.pop(product >> 32))
    return found


# ------------------------------------------------------------------------------------------------------------- scoring


def evaluate(model: Any, tasks: Sequence[Task]) -> Iterator[Score]:
    """Score task after task; yields how it stands after each."""
    right, chance = 0, 0.0
    for done, task in enumerate(tasks, 1):
        right += int(np.argmax(scores(model, task))) == task.right
        chance += 1 / len(task.texts)
        yield Score(right, done, chance / done)


def scores(model: Any, task: Task) -> np.ndarray:
    """float64[texts]: mean log-probability of the tokens that are scored."""
    ids = [model.tokenizer.encode(text, bos=None) for text in task.texts]
    if len(ids) < 2:
        raise DataError(f"a task of {len(ids)} choices: '{task.texts[:1]}'")
    shared = _shared(ids)
    spans = [_scored(i, sequence, shared, task, ids, model) for i, sequence in enumerate(ids)]
    longest = max(map(len, ids))
    check_context(model, longest)
    padded = np.array([sequence + [sequence[-1]] * (longest - len(sequence)) for sequence in ids])
    first = min(start for start, _ in spans) - 1
    hidden = model.hidden_sequences(padded, slice(first, longest - 1))
    found = np.empty(len(ids))
    for i, (start, stop) in enumerate(spans):
        logits = model.project(hidden[i, start - 1 - first : stop - 1 - first])
        found[i] = -negative_log_likelihood(logits, np.array(ids[i][start:stop])).mean()
    return found


def _shared(ids: Sequence[Sequence[int]]) -> int:
    """Tokens that all begin with; at least one, because the first cannot be scored, and less than any has."""
    shortest = min(map(len, ids))
    if shortest < 2:
        raise DataError("a choice of less than two tokens cannot be scored")
    same = next((i for i in range(shortest) if len({sequence[i] for sequence in ids}) > 1), shortest)
    return min(max(1, same), shortest - 1)


def _scored(
    i: int, sequence: Sequence[int], shared: int, task: Task, ids: Sequence[Sequence[int]], model: Any
) -> tuple[int, int]:
    """The tokens start … stop - 1 of text i are scored."""
    if task.heads is None:
        return shared, len(sequence)
    start = shared
    if all(len(other) - shared > _TRAILING for other in ids):
        start = min(len(model.tokenizer.encode(task.heads[i], bos=None)), len(sequence) - 1)
    return start, len(sequence) - (len(sequence) - start > 1)
