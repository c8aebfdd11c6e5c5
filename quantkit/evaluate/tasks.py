"""Multiple-choice tasks in llama-perplexity's file formats: HellaSwag, Winogrande, multiple choice.

A choice's score is the mean log-probability of its tokens after the common beginning of all choices of the task. The
prediction is the choice with the largest score, the first in a tie. In Winogrande the tokens after the choice are
scored, because they tell which choice fits.
"""

from __future__ import annotations

import csv
import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from quantkit.errors import DataError, FormatError, QuantkitError, UnknownNameError
from quantkit.evaluate.chunk_runs import check_context
from quantkit.evaluate.conditions import Conditions, evaluation_conditions
from quantkit.evaluate.corpus import read_text
from quantkit.evaluate.models import ChunkModel, OnMessage, OpenModel, no_message, open_model
from quantkit.evaluate.nll import negative_log_likelihood
from quantkit.formats import gguf
from quantkit.formats.atomic import os_errors
from quantkit.tokenizers.tokenizer import Tokenizer

_TRAILING = 3  # Winogrande: with more tokens than this after the common beginning, the choice itself is not scored


@dataclass(frozen=True)
class Task:
    """A task: texts of which the one at index `correct` is correct.

    heads   per text, its beginning up to and including the choice, which is not scored; None: the common beginning of
            the texts is not scored
    """

    texts: tuple[str, ...]
    correct: int
    heads: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Score:
    """The result over some tasks: `correct` predictions of `tasks`; `chance` is the expected accuracy of guessing.

    answers, expected   of a complete run: the index of the predicted and of the correct choice of each task
    """

    correct: int
    tasks: int
    chance: float
    name: str = ""
    seconds: float = 0.0
    conditions: Conditions = field(default_factory=dict)
    answers: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return self.correct / self.tasks

    @property
    def error(self) -> float:
        """Standard error of the accuracy over tasks; NaN for one task."""
        p = self.accuracy
        return math.sqrt(p * (1 - p) / (self.tasks - 1)) if self.tasks > 1 else math.nan

    def record(self) -> dict[str, object]:
        """The figures by name, for JSON."""
        return {"task": self.name, "accuracy": self.accuracy, "accuracy_error_over_tasks": self.error,
                "tasks": self.tasks, "chance": self.chance}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- files


def hellaswag(path: str | os.PathLike[str], limit: int = 400) -> list[Task]:
    """Read HellaSwag tasks: six lines each (context, number of the correct ending, four endings).

    At most `limit` tasks, sampled as in llama-perplexity.
    """
    lines = _lines(path)
    if not lines or len(lines) % 6:
        raise FormatError(f"{path}: {len(lines)} lines; HellaSwag tasks have six lines each")
    tasks = []
    for i in range(0, len(lines), 6):
        context, correct, *endings = lines[i : i + 6]
        if correct.strip() not in ("0", "1", "2", "3"):
            raise FormatError(f"{path}: line {i + 2}: '{correct}' is not the number of an ending, 0 to 3")
        tasks.append(Task(tuple(f"{context} {ending}" for ending in endings), int(correct)))
    return sampled(tasks, limit)


def winogrande(path: str | os.PathLike[str], limit: int = 0) -> list[Task]:
    """Read the first `limit` Winogrande tasks (0: all): CSV, index, sentence with _, choice, choice, answer 1 or 2."""
    tasks = []
    for number, row in enumerate(csv.reader(_lines(path)), 1):
        if len(row) < 5 or row[-1].strip() not in ("1", "2"):
            raise FormatError(f"{path}: line {number}: not index,sentence,choice,choice,answer with the answer 1 or 2")
        sentence, choices = ",".join(row[1:-3]), row[-3:-1]
        before, gap, after = sentence.partition("_")
        if not gap:
            raise FormatError(f"{path}: line {number}: the sentence has no _ for the choice")
        heads = tuple(before + choice for choice in choices)
        tasks.append(Task(tuple(head + after for head in heads), int(row[-1]) - 1, heads))
    return tasks[: limit or None]


def _lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a text, which LF or CR LF ends: other characters at which `splitlines` cuts are text."""
    lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
    return lines if lines[-1] else lines[:-1]


def multiple_choice(path: str | os.PathLike[str], limit: int = 0) -> list[Task]:
    """Read a binary task file: u32 count, offsets, then questions and answers. The first `limit`; 0: all."""
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
        reader.answers()  # the answers of which several may be correct are not used
        if sum(labels) != 1 or set(labels) - {0, 1}:
            raise FormatError(f"{path}: task {index}, offset {start}: labels {labels}; one answer must be correct")
        tasks.append(Task(tuple(f"{question} {answer}" for answer in answers), labels.index(1)))
    return tasks


class _Reader:
    """Reads numbers and strings from bytes. Raises FormatError at a premature end."""

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


def sampled(tasks: Sequence[Task], limit: int) -> list[Task]:
    """Sample `limit` of the tasks (0: all) without replacement, in llama-perplexity's order.

    Random numbers come from std::mt19937 with seed 1; numbers below n are made of its 32 bits by multiplication and
    rejection, as in libstdc++ (Lemire 2019).
    """
    twister = np.random.MT19937()
    twister.state = np.random.RandomState(1).get_state(legacy=False)  # type: ignore[assignment]  # std::mt19937(1)
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


def evaluate(model: ChunkModel, tasks: Sequence[Task], answers: list[int] | None = None) -> Iterator[Score]:
    """Score task after task and yield the score so far; append the index of each predicted choice to `answers`."""
    correct, chance = 0, 0.0
    for done, task in enumerate(tasks, 1):
        answer = int(np.argmax(scores(model, task)))
        correct += answer == task.correct
        if answers is not None:
            answers.append(answer)
        chance += 1 / len(task.texts)
        yield Score(correct, done, chance / done)


def scores(model: ChunkModel, task: Task) -> np.ndarray:
    """float64[texts]: mean log-probability of each text's scored tokens."""
    ids = [model.tokenizer.encode(text, bos=None) for text in task.texts]
    if len(ids) < 2:
        raise DataError(f"a task has {len(ids)} choices, at least 2 are needed: '{task.texts[:1]}'")
    shared = _common_prefix(ids)
    spans = [_scored_span(i, sequence, shared, task, ids, model) for i, sequence in enumerate(ids)]
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


def _common_prefix(ids: Sequence[Sequence[int]]) -> int:
    """Length of the common beginning; at least 1, since the first token cannot be scored, and less than any length."""
    shortest = min(map(len, ids))
    if shortest < 2:
        raise DataError("a choice of less than two tokens cannot be scored")
    same = next((i for i in range(shortest) if len({sequence[i] for sequence in ids}) > 1), shortest)
    return min(max(1, same), shortest - 1)


def _scored_span(
    i: int, sequence: Sequence[int], shared: int, task: Task, ids: Sequence[Sequence[int]], model: ChunkModel
) -> tuple[int, int]:
    """The tokens start … stop - 1 of text i are scored."""
    if task.heads is None:
        return shared, len(sequence)
    start = shared
    if all(len(other) - shared > _TRAILING for other in ids):
        start = min(len(model.tokenizer.encode(task.heads[i], bos=None)), len(sequence) - 1)
    return start, len(sequence) - (len(sequence) - start > 1)


_READERS = {"hellaswag": hellaswag, "winogrande": winogrande, "multiple-choice": multiple_choice}


def score_tasks(
    model: str | os.PathLike[str],
    kind: str,
    file: str | os.PathLike[str],
    limit: int,
    *,
    numerics: str = "exact",
    threads: int | None = None,
    progress: Callable[[Score, int], None] | None = None,
    on_message: OnMessage = no_message,
    open_model: OpenModel = open_model,
) -> Score:
    """Score a model on the multiple-choice tasks of a file.

    kind      "hellaswag", "winogrande" or "multiple-choice"
    limit     number of tasks; 0: all
    progress  called after each task, with the score so far and the number of all tasks

    Raises FormatError for a file of another format and DataError for tasks longer than the model's context.
    """
    if kind not in _READERS:
        raise UnknownNameError("kind of tasks", kind, _READERS)
    path, file = Path(model), Path(file)
    tasks = _READERS[kind](file, limit)
    if not tasks:
        raise QuantkitError(f"{file} contains no tasks")
    tokenizer = Tokenizer.from_gguf(gguf.require_model(gguf.open(path)).metadata, path)
    longest = max(len(tokenizer.encode(text, bos=None)) for task in tasks for text in task.texts)
    loaded = open_model(path, numerics=numerics, threads=threads, n_ctx=longest, tokenizer=tokenizer)
    on_message(f"{kind}: {len(tasks)} tasks of {file}")
    conditions = evaluation_conditions(loaded, loaded.n_ctx_train, len(tasks), str(file))
    started = time.monotonic()
    score, answers = Score(0, 0, 0.0), list[int]()
    for score in evaluate(loaded, tasks, answers):
        if progress is not None:
            progress(score, len(tasks))
    return replace(
        score, name=kind, seconds=time.monotonic() - started, conditions=conditions, answers=tuple(answers),
        expected=tuple(task.correct for task in tasks),
    )  # fmt: skip
