"""Interrupts and threads: results are the same wherever an interrupt comes, and while other threads run a model."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from quantkit.codegen import blas, thread_pool
from quantkit.errors import DataError, QuantkitError
from quantkit.runtime.compiled import plan_base
from quantkit.runtime.kernels import dispatch
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from quantkit.runtime.parallel import all_reduce
from tests.runtime.conftest import EMBD, FF, VOCAB, rewrite
from tests.runtime.test_recurrent import written
from tests.runtime.test_team import run_python

TOKENS = np.random.default_rng(6).integers(0, VOCAB, 40)


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    return written(folder / "m.gguf", "qwen35", num_hidden_layers=4, full_attention_interval=3)


@pytest.fixture(scope="session")
def quantized(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewrite(tiny, tmp_path_factory.mktemp("quantized") / "m.gguf", "q8_0")


# ----------------------------------------------------------------------------------------- interrupts anywhere


class Interrupting:
    """Raises KeyboardInterrupt in this thread, once, at the n-th of the places inside; counts the places.

    CPython handles signals where a function begins, after a call and where a loop goes back, nowhere else: a lock that
    a `with` has taken is released. The places are the first two kinds, in quantkit; calls of compiled kernels, which
    Python's profiler does not see, are not among them.
    """

    def __init__(self, n: int | None = None):
        self.n, self.places = n, 0

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        # A generator that resumes is left out: the handlers around its `yield` are not in force yet.
        resumes = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if event in ("call", "c_return") and "/quantkit/" in frame.f_code.co_filename and not resumes:
            self.places += 1
            if self.places == self.n:
                raise KeyboardInterrupt

    def __enter__(self) -> Interrupting:
        self._before = sys.getprofile()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)


def interrupted(task: Callable[[], Any], n: int) -> bool:
    """Whether an interrupt at the n-th place met the task. How many places it has differs a little from run to run."""
    try:
        with Interrupting(n):
            task()
    except KeyboardInterrupt:
        return True
    return False


def spread_over(places: int, count: int, seed: int) -> list[int]:
    """Some places, in any order."""
    return [int(n) for n in np.random.default_rng(seed).permutation(np.linspace(1, places, count).astype(int))]


def prompt_and_step(model: Model) -> np.ndarray:
    cache = model.new_cache(64)
    return np.concatenate([model.forward(TOKENS[:20], cache, "last"), model.forward(TOKENS[20:21], cache)])


@pytest.mark.parametrize("options", [{"numerics": "fast"}, {"numerics": "fast", "flash_attention": False}, {}])
def test_a_model_interrupted_while_it_is_prepared(tiny: Path, options: dict) -> None:
    """The first call of a fresh model is cut off; the second one gives what it always does."""
    expected = prompt_and_step(load(tiny, threads=2, **options))
    model = load(tiny, threads=2, **options)
    with Interrupting() as counted:
        prompt_and_step(model)
    hit = 0
    for n in spread_over(counted.places, 60, seed=1):
        model = load(tiny, threads=2, **options)
        hit += interrupted(lambda model=model: prompt_and_step(model), n)
        np.testing.assert_array_equal(prompt_and_step(model), expected)
    assert hit > 40


@pytest.mark.parametrize("options", [{"numerics": "fast"}, {}, {"devices": "cpu:0,cpu:1", "split_mode": "graph"}])
def test_a_sequence_interrupted_and_taken_up(tiny: Path, options: dict) -> None:
    """An interrupted call leaves the cache as it was; the same call again gives what it always does."""
    model = load(tiny, threads=2, **options)
    parts = [TOKENS[:20], TOKENS[20:21], TOKENS[21:22], TOKENS[22:40]]

    def run(interrupts: Iterator[int] | None = None) -> np.ndarray:
        cache, result = model.new_cache(64), []
        for part in parts:
            before = cache.length
            if interrupts is not None:
                interrupted(lambda part=part: model.forward(part, cache), next(interrupts))
                assert cache.length in (before, before + len(part))
                cache.truncate(before)  # where it came at the end, or not at all
            result.append(model.forward(part, cache))
        return np.concatenate(result)

    expected = run()
    with Interrupting() as counted:
        run()
    each = counted.places // len(parts)
    for seed in range(6):
        np.testing.assert_array_equal(run(iter(spread_over(each, len(parts), seed))), expected)


def test_a_recurrent_model_says_when_its_states_are_lost(recurrent: Path) -> None:
    """States cannot be taken back: an error, not other numbers; the mark, what was saved, or the beginning is right."""
    model = load(recurrent, threads=2)
    cache = model.new_cache(64)
    model.forward(TOKENS[:20], cache)
    cache.mark()
    saved = cache.save()
    expected = model.forward(TOKENS[20:24], cache)
    cache.truncate(20)
    with Interrupting() as counted:
        model.forward(TOKENS[20:24], cache)
    messages = []
    for count, n in enumerate(spread_over(counted.places, 40, seed=2)):
        cache.restore(saved)
        cache.mark()
        interrupted(lambda: model.forward(TOKENS[20:24], cache), n)
        if cache.length == 24:
            cache.truncate(20)
        assert cache.length == 20
        try:
            result = model.forward(TOKENS[20:24], cache)
        except DataError as error:
            messages.append(str(error))
            cache.truncate(20) if count % 2 else cache.restore(saved)
            result = model.forward(TOKENS[20:24], cache)
        np.testing.assert_array_equal(result, expected)
    assert len(messages) > 10
    assert all("a pass ended early; clear() it, truncate() to the mark, or restore()" in text for text in messages)
    cache.clear()
    np.testing.assert_array_equal(model.forward(TOKENS[:24], cache)[20:], model.logits(TOKENS[:24])[20:])


@pytest.mark.parametrize("devices", ["", "cpu:0,cpu:1"])
def test_what_is_restored_halfway_is_not_taken_for_whole(recurrent: Path, devices: str) -> None:
    """An interrupted restore, truncate or clear leaves the cache as it was, empty, or refused: never mixed."""
    model = load(recurrent, threads=2, devices=devices)
    other, cache = model.new_cache(64), model.new_cache(64)
    model.forward(TOKENS[20:30], other)
    model.forward(TOKENS[:10], cache)
    other_state, state = other.save(), cache.save()
    after = {"theirs": model.forward(TOKENS[30:33], other), "mine": model.forward(TOKENS[30:33], cache)}
    after["empty"] = model.logits(TOKENS[30:33])

    def rewind() -> None:
        cache.restore(state)
        cache.mark()
        model.forward(TOKENS[10:12], cache)

    rewind()
    after["as it was"] = model.forward(TOKENS[30:33], cache)
    for task in (lambda: cache.restore(other_state), lambda: cache.truncate(10), cache.clear):
        rewind()
        with Interrupting() as counted:
            task()
        for n in range(1, counted.places + 1):
            rewind()
            assert interrupted(task, n)
            try:
                result = model.forward(TOKENS[30:33], cache)
            except DataError:
                continue
            assert any(np.array_equal(result, known) for known in after.values()), (task, n)


def test_another_cache_and_longer_tables_halfway(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations still point to the tables of the last cache, which the next one's have replaced."""
    model = load(tiny, numerics="fast", threads=2)
    short = model.new_cache(24)
    expected = [model.forward([token], short) for token in TOKENS[:20]]
    short.clear()
    tables = plan_base.CompiledPlan._tables

    def cut_off(*args: Any) -> None:
        tables(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_base.CompiledPlan, "_tables", cut_off)
    with pytest.raises(KeyboardInterrupt):
        model.forward(TOKENS[:1], model.new_cache(4000))
    monkeypatch.setattr(plan_base.CompiledPlan, "_tables", tables)
    junk = [np.full((24, 64), np.nan, np.float32) for _ in range(50)]  # where the tables were
    for token, logits in zip(TOKENS[:20], expected):
        np.testing.assert_array_equal(model.forward([token], short), logits)
    assert len(junk) == 50


def test_the_threads_of_blas_are_given_back() -> None:
    functions = blas._functions()
    if functions is None:
        pytest.skip("numpy is built without OpenBLAS")
    get, set_threads = functions

    def task() -> None:
        with blas.single_threaded(), blas.single_threaded():
            assert get() == 1

    before = get()
    set_threads(2)
    try:
        with Interrupting() as counted:
            task()
        assert counted.places >= 4  # the locks
        for n in range(1, counted.places + 1):
            assert interrupted(task, n)
            assert get() == 2, n
            task()
    finally:
        set_threads(before)


# ------------------------------------------------------------------------------------------- threads of this process


def test_helpers_end_before_an_interrupt_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `over_rows`: a slice that goes on would write to memory that the caller has back."""
    working, pool = [0], thread_pool._pool(3)
    submit, calls = ThreadPoolExecutor.submit, []

    def task(start: int, stop: int) -> None:
        working[0] += 1
        time.sleep(0.2)
        working[0] -= 1

    def cut_off(self: ThreadPoolExecutor, *args: Any) -> Any:
        calls.append(submit(self, *args))
        if len(calls) == 2:
            time.sleep(0.05)
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", cut_off)
    with pytest.raises(KeyboardInterrupt):
        thread_pool.over_rows(task, 30, threads=3, is_long=True)
    assert working == [0]
    monkeypatch.undo()
    assert pool.submit(lambda: 5).result() == 5


@pytest.mark.parametrize("where", ["before submit", "after submit", "wait"])
def test_devices_interrupted_between_them(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was left waiting for the others would add its number to those of the next sum."""
    devices = all_reduce.AllReduce([None, None])
    place, name = (all_reduce, "wait") if where == "wait" else (devices._threads[1], "submit")
    original, calls = getattr(place, name), []

    def cut_off(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1 and where == "before submit":
            raise KeyboardInterrupt
        result = original(*args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(place, name, cut_off)

    def total(first: int) -> list[float]:
        return [
            float(x[0])
            for x in devices.run_on_all(lambda rank: devices.sum(rank, np.full(1, first + rank, np.float32)))
        ]

    with pytest.raises(KeyboardInterrupt):
        total(100)
    for first in range(3):
        assert total(first) == [2 * first + 1] * 2


def test_devices_interrupted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = all_reduce.AllReduce([None, None])

    def cut_off(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(all_reduce, "wait", cut_off)
    with pytest.raises(KeyboardInterrupt):
        devices.run_on_all(lambda rank: rank)
    with pytest.raises(QuantkitError, match="load the model again"):
        devices.run_on_all(lambda rank: rank)


@pytest.fixture
def switching() -> Iterator[None]:
    """Python switches between threads very often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*tasks: Callable[[], np.ndarray]) -> list[np.ndarray]:
    """Results of tasks that start together, in a thread each."""
    begin = threading.Barrier(len(tasks))

    def run(task: Callable[[], np.ndarray]) -> np.ndarray:
        begin.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def text_of(model: Model, tokens: np.ndarray, cache: Cache | None = None) -> np.ndarray:
    """Logits of a prompt, of steps, of a batch and of fresh sequences."""
    cache = cache or model.new_cache(64)
    result = [model.forward(tokens[:9], cache)]
    result += [model.forward([token], cache) for token in tokens[9:15]]
    result.append(model.forward_batch([(tokens[15:20], cache), (tokens[:4], model.new_cache(16))]))
    result.append(model.forward_sequences(tokens.reshape(4, 10), slice(2, 5)).reshape(12, -1))
    return np.concatenate(result)


@pytest.mark.parametrize(
    "options", [{"numerics": "fast"}, {}, {"numerics": "fast", "profile": True}, {"devices": "cpu:0,cpu:1"}]
)
def test_two_threads_on_one_model(quantized: Path, options: dict, switching: None) -> None:
    texts = [TOKENS, TOKENS[::-1].copy(), np.roll(TOKENS, 7)]
    expected = [text_of(load(quantized, threads=2, **options), text) for text in texts]
    for _ in range(3):
        model = load(quantized, threads=2, **options)  # its plans are made by both at once
        results = at_once(*(lambda text=text, model=model: text_of(model, text) for text in texts))
        for result, reference in zip(results, expected):
            np.testing.assert_array_equal(result, reference)


def test_two_threads_on_two_models(quantized: Path, recurrent: Path, switching: None) -> None:
    def models() -> list[Model]:
        options = ({"numerics": "fast"}, {"numerics": "fast"}, {"numerics": "fast", "profile": True})
        return [load(quantized, threads=2, **more) for more in options] + [load(recurrent, numerics="fast", threads=2)]

    expected = [text_of(model, TOKENS) for model in models()]
    for _ in range(3):
        results = at_once(*(lambda model=model: text_of(model, TOKENS) for model in models()))
        for result, reference in zip(results, expected):
            np.testing.assert_array_equal(result, reference)


def test_two_threads_generate_by_turns(tiny: Path) -> None:
    """Nobody holds a model between two tokens: after its first token, each thread waits for the other's."""
    model = load(tiny, numerics="fast", threads=2)
    both_began = threading.Barrier(2, timeout=300)

    def reply(number: int, meet: Callable[[], object]) -> np.ndarray:
        cache, token, result = model.new_cache(64), int(TOKENS[number]), []
        for i in range(60):
            token = int(model.forward([token], cache, "last").argmax())
            result.append(token)
            if i == 0:
                meet()
        return np.array(result)

    expected = [reply(number, lambda: None) for number in (0, 1)]
    results = at_once(lambda: reply(0, both_began.wait), lambda: reply(1, both_began.wait))
    np.testing.assert_array_equal(results, expected)


def test_several_threads_multiply_by_one_matrix(quantized: Path, switching: None) -> None:
    """`table.linear` keeps one list of operations, whose parameters are set by whoever runs it."""
    run = dispatch.linear(load(quantized).weights["blk.0.ffn_up.weight"], 2)
    assert run is not None
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal((count, EMBD), np.float32) for count in (1, 40, 7)]

    def products(x: np.ndarray) -> np.ndarray:
        results = [np.zeros((len(x), FF), np.float32) for _ in range(100)]
        for out in results:
            run(x, out)
        return np.stack(results)

    expected = [products(x)[0] for x in inputs]
    for result, reference in zip(at_once(*(lambda x=x: products(x) for x in inputs)), expected):
        np.testing.assert_array_equal(result, np.broadcast_to(reference, result.shape))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_a_model_runs(quantized: Path) -> None:
    """Another thread holds the model's lock at that time; the child does not have that thread."""
    done = run_python(
        f"""
        import os, threading
        import numpy as np
        from quantkit.runtime.loading import load

        model = load({str(quantized)!r}, numerics="fast", threads=2)
        tokens = list(range(40))
        wanted = model.logits(tokens)

        def serve():
            while True:
                model.logits(tokens)

        threading.Thread(target=serve, daemon=True).start()
        for _ in range(3):
            child = os.fork()
            if not child:
                os._exit(7 if np.array_equal(model.logits(tokens), wanted) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """
    )
    assert done.returncode == 0, done.stderr
