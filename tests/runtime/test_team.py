"""The thread team: order, barriers, sleep; failures, interrupts, forks and the end of the interpreter."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks import stress_team
from quantkit.codegen.callbacks import callback
from quantkit.codegen.simd import call3, load_int, store_int
from quantkit.errors import KernelError
from quantkit.runtime.kernels.cpu import decode_ops, thread_team
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share


@pytest.fixture
def new_team() -> Iterator[type]:
    """Makes thread teams whose workers end with the test."""
    made = []

    def make(threads: int) -> thread_team.ThreadTeam:
        made.append(thread_team.ThreadTeam(threads))
        return made[-1]

    yield make
    for each in made:
        each.close()


def run_python(text: str, timeout: float = 300) -> subprocess.CompletedProcess:
    """A script in a process of its own, that may crash or hang."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=timeout, check=False
    )


class NoteParameters(NamedTuple):
    place: int
    log: int
    next: int


@callback(OPERATION)
def note(parameters, thread, threads):
    """log[next++] = place, by thread 0."""
    p = load_record(NoteParameters, parameters)
    if thread == 0:
        at = load_int(p.next)
        store_int(p.place, p.log + 8 * at)
        store_int(at + 1, p.next)


class GatherParameters(NamedTuple):
    source: int
    target: int


@callback(OPERATION)
def gather(parameters, thread, threads):
    """Each thread writes the sum of all threads' numbers, plus one, beside them."""
    p = load_record(GatherParameters, parameters)
    total = 0
    for i in range(threads):
        total += load_int(p.source + 64 * i)
    store_int(total + 1, p.target + 64 * thread)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_operations_run_in_order(threads: int) -> None:
    ops = OpList(threads)
    log, at = np.zeros(40, np.int64), np.zeros(1, np.int64)
    for place in range(40):
        ops.add(note, NoteParameters(place, log.ctypes.data, at.ctypes.data), barrier=place % 3 == 0)
    ops.run()
    np.testing.assert_array_equal(log, range(40))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_see_what_the_others_wrote(threads: int) -> None:
    """x -> threads * x + 1, back and forth between two buffers, each step needing all of the last."""
    ops = OpList(threads)
    a, b = ops.buffer("a", 64 * threads), ops.buffer("b", 64 * threads)
    for step in range(12):
        source, target = (a, b) if step % 2 == 0 else (b, a)
        ops.add(gather, GatherParameters(source, target), barrier=True)
    ops.run()
    expected = 0
    for _ in range(12):
        expected = threads * expected + 1
    result = np.ctypeslib.as_array(ctypes.cast(a, ctypes.POINTER(ctypes.c_int64)), (8 * threads,))[::8]
    np.testing.assert_array_equal(result, expected)


def test_an_idle_team_uses_no_processor_and_wakes() -> None:
    ops = OpList(2)
    log, at = np.zeros(2, np.int64), np.zeros(1, np.int64)
    ops.add(note, NoteParameters(5, log.ctypes.data, at.ctypes.data), barrier=True)
    ops.run()
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    ops.run()
    assert at[0] == 2


def test_a_roused_team_is_awake_for_a_bounded_time(new_team) -> None:
    """Workers that sleep are waiting again after `rouse`, longer than else; without a list they sleep in the end."""
    mine, chain = new_team(3), stress_team.Chain(3, 3)

    def sleeping(wanted: int, within: float) -> bool:
        end = time.perf_counter() + within
        while mine._asleep != wanted and time.perf_counter() < end:
            time.sleep(1e-4)
        return mine._asleep == wanted

    mine.run(chain.array)
    assert sleeping(2, within=30)
    for _ in range(3):
        mine.rouse()
        assert sleeping(0, within=30)
        assert sleeping(2, within=30)
    mine.rouse()
    chain.buffers[0][:] = 0
    mine.run(chain.array)
    chain.check(0)
    assert mine._fields[thread_team.SOON // 8] == 0


def test_several_callers_take_turns() -> None:
    lists = []
    for _ in range(4):
        ops, log, at = OpList(2), np.zeros(500, np.int64), np.zeros(1, np.int64)
        for place in range(100):
            ops.add(note, NoteParameters(place, log.ctypes.data, at.ctypes.data), barrier=True)
        lists.append((ops, log, at))
    callers = [threading.Thread(target=lambda ops=ops: [ops.run() for _ in range(5)]) for ops, _, _ in lists]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for _, log, at in lists:
        assert at[0] == 500
        np.testing.assert_array_equal(log, np.tile(np.arange(100), 5))


def test_a_list_published_late_is_run_all_the_same(monkeypatch: pytest.MonkeyPatch, new_team) -> None:
    """Threads that look for work and fall asleep while a list is announced but not yet out must not miss it."""
    publish = thread_team._lead

    def late(*args: int) -> None:
        time.sleep(0.1)
        publish(*args)

    monkeypatch.setattr(thread_team, "_lead", late)
    mine, chain = new_team(3), stress_team.Chain(3, 2)
    done = threading.Thread(target=lambda: [mine.run(chain.array) for _ in range(3)], daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive()
    assert mine.epoch == 3
    chain.check(0)


@pytest.mark.parametrize("threads", [2, 3])
def test_random_delays_at_every_synchronisation_point(threads: int) -> None:
    """benchmarks/stress_team.py does a million."""
    assert stress_team.stress(threads, 1000, seed=threads) == 1000


def test_an_empty_list_and_the_one_after_it(new_team) -> None:
    """Without operations there is no barrier: workers must not see such a list, nor take the next one for it."""
    thread_team, chain = new_team(3), stress_team.Chain(3, 3)
    for first in range(300):
        thread_team.run(np.zeros((0, 3), np.int64))
        chain.buffers[0][:: stress_team.LINE // 8] = first
        thread_team.run(chain.array)
        chain.check(first)
    assert thread_team.epoch == 300
    empty = OpList(2)
    empty.add_barrier()
    empty.run()


# ------------------------------------------------------------------------------------------------ kernels that raise


class RaiseParameters(NamedTuple):
    place: int
    who: int = 0
    bytes: int = 0


@callback(OPERATION)
def raises(parameters, thread, threads):
    """Raise on one thread, note on the others."""
    p = load_record(RaiseParameters, parameters)
    if thread == p.who:
        raise ValueError("no")
    store_int(1, p.place + 8 * thread)


@callback(OPERATION)
def allocates(parameters, thread, threads):
    """Allocate `bytes` bytes."""
    p = load_record(RaiseParameters, parameters)
    x = np.empty(p.bytes, np.uint8)
    x[0] = 1
    store_int(int(x[0]), p.place + 8 * thread)


@callback(OPERATION)
def steps(parameters, thread, threads):
    """A range's step of 0 is an error that numba raises."""
    p = load_record(RaiseParameters, parameters)
    for i in range(0, 8, p.who):
        store_int(1, p.place + 8 * (i % threads))


@callback(OPERATION)
def calls(parameters, thread, threads):
    """What is called through an address raises, not this."""
    call3(load_record(RaiseParameters, parameters).bytes, parameters, thread, threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("who", ["leader", "worker"])
def test_an_exception_in_a_kernel_is_an_error(threads: int, who: str, capfd: pytest.CaptureFixture) -> None:
    number = 0 if who == "leader" else threads - 1
    ops, notes = OpList(threads), np.zeros(threads, np.int64)
    ops.add(raises, RaiseParameters(notes.ctypes.data, who=number))
    for _ in range(2):
        with pytest.raises(KernelError, match=rf"{threads} threads .* incomplete: tests\.runtime\.test_team\.raises;"):
            ops.run()
    assert notes.sum() == threads - 1
    assert "Exception ignored" not in capfd.readouterr().err
    chain = stress_team.Chain(threads, 3)
    chain.ops.run()  # the team is as good as before
    chain.check(0)


@pytest.mark.parametrize("name", ["allocates", "steps", "calls"])
def test_whatever_raises_is_seen(name: str) -> None:
    notes = np.zeros(2, np.int64)
    ops = OpList(2)
    fields = {"allocates": {"bytes": 1 << 60}, "steps": {"who": 0}, "calls": {"who": 1, "bytes": raises.address}}[name]
    ops.add(globals()[name], RaiseParameters(notes.ctypes.data, **fields))
    with pytest.raises(KernelError, match="raises" if name == "calls" else name):
        ops.run()


def test_what_raises_outside_of_a_list_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """There no list of operations collects the exception."""
    messages = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: messages.append(str(unraisable.exc_value)))
    parameters = np.zeros(3, np.int64)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(raises.address)(parameters.ctypes.data, 0, 1)
    assert messages == ["kernel tests.runtime.test_team.raises raised an exception; its results are incomplete"]


def test_threads_do_not_write_one_buffer() -> None:
    ops = OpList(2)
    with pytest.raises(AssertionError, match="2 threads would write one buffer"):
        ops.add(decode_ops.norm, decode_ops.NormParameters(0, 0, 0, 0, buffer=ops.buffer("n", 64), private_stride=0))
    OpList(1).add(decode_ops.norm, decode_ops.NormParameters(0, 0, 0, 0, 0, private_stride=0))


def test_parameters_must_be_complete() -> None:
    """A field that is missing or unknown is an error when the plan is built; stored ones are changed by name."""
    fields = {"activation": 0, "gate": 1, "up": 2, "n": 3, "multiple": 4, "buffer": 5, "numbers": 6}
    stored = OpList(1).add(decode_ops.gated, decode_ops.GatedParameters(**fields))
    for wrong in ({"bufer": 5}, {"out": 6}):
        with pytest.raises(TypeError):
            decode_ops.GatedParameters(**{name: fields[name] for name in fields if name != "buffer"}, **wrong)
    stored.set(n=7)
    values = np.ctypeslib.as_array(ctypes.cast(stored.address, ctypes.POINTER(ctypes.c_int64)), (7,))
    np.testing.assert_array_equal(values, [0, 1, 2, 7, 4, 5, 6])
    with pytest.raises(ValueError, match="not in tuple"):
        stored.set(m=7)


@pytest.mark.parametrize(("rows", "multiple", "threads"), [(0, 4, 3), (1, 4, 3), (7, 1, 3), (70, 32, 2), (96, 32, 5)])
def test_shares_of_rows_follow_one_another(rows: int, multiple: int, threads: int) -> None:
    shares = [row_share(rows, multiple, thread, threads) for thread in range(threads)]
    assert [first for first, _ in shares] == [0, *(last for _, last in shares[:-1])]
    assert shares[-1][1] == rows
    assert all(first % multiple == 0 or first == rows for first, _ in shares)
    runs = [-(-(last - first) // multiple) for first, last in shares]
    assert max(runs) - min(runs) <= 1  # no thread has much more than another


def test_kernels_read_parameters_by_name() -> None:
    """No offsets counted by hand: what a kernel loads from an address plus a number is a field of a record."""
    folder = Path(thread_team.__file__).parent
    result = []
    for path in sorted(folder.rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"load_int\(\w+ \+ \d+\)", line):
                result.append(f"{path.name}:{number}: {line.strip()}")
    assert result == []


# ------------------------------------------------------------------------------- threads that do not come, interrupts


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, new_team) -> None:
    """An error, which Ctrl-C is not needed for; once there is room for threads, the same team runs."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "quantkit-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    thread_team, chain = new_team(3), stress_team.Chain(3, 3)
    monkeypatch.setattr(threading.Thread, "start", limited)
    for _ in range(2):
        with pytest.raises(
            KernelError, match=r"thread 3 of 3 cannot be started \(can't start new thread\); .* fewer threads"
        ):
            thread_team.run(chain.array)
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(100):
        thread_team.run(chain.array)
        chain.check(0)
    assert thread_team.epoch == 100


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_threads_are_started(when: str, monkeypatch: pytest.MonkeyPatch, new_team) -> None:
    """A thread that was started, but not counted, must not do its share twice with the one that is started for it."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if when == "after":
            start(thread)
        raise KeyboardInterrupt

    thread_team, chain = new_team(3), stress_team.Chain(3, 3)
    for _ in range(2):
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread_team.run(chain.array)
        monkeypatch.setattr(threading.Thread, "start", start)
    for first in range(300):
        chain.buffers[0][:: stress_team.LINE // 8] = first
        thread_team.run(chain.array)
        chain.check(first)
    assert len(thread_team._workers) == 2


def test_an_interrupt_before_a_list_is_published(monkeypatch: pytest.MonkeyPatch, new_team) -> None:
    mine, chain = new_team(2), stress_team.Chain(2, 3)
    mine.run(chain.array)

    def interrupted(*args: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread_team, "_lead", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine.run(chain.array)
    time.sleep(0.3)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1  # nobody waits for what did not come
    mine.run(chain.array)
    chain.check(0)


def test_interrupts_in_the_middle_of_lists() -> None:
    """Ctrl-C, again and again, wherever it meets the leader: lists before and after are whole."""
    done = run_python(
        """
        import os, signal, threading
        from benchmarks import stress_team
        from quantkit.runtime.kernels.cpu import thread_team as team

        armed = False  # where an interrupt is caught; each that is raised disarms

        def raise_once(*_):
            global armed
            if armed:
                armed = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, raise_once)  # a shell's background jobs ignore it
        mine, chain = team.ThreadTeam(3), stress_team.Chain(3, 40)
        mine.run(chain.array)
        stop = threading.Event()

        def interrupt():
            while not stop.wait(0.003):
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        caught, first = 0, 0
        while caught < 30:
            try:
                armed = True
                while True:
                    first += 1
                    chain.buffers[0][:: stress_team.LINE // 8] = first
                    mine.run(chain.array)
                    chain.check(first)
            except KeyboardInterrupt:
                caught += 1
        stop.set()
        mine.run(chain.array)
        chain.check(int(chain.buffers[0][0]))
        print("whole")
        """
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


# ------------------------------------------------------------------------------------------------- forks and the end


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("leading", [False, True])
def test_a_forked_child_has_a_team_of_its_own(leading: bool) -> None:
    """Also where another thread led a list at the time of the fork."""
    done = run_python(
        f"""
        import os, threading
        from benchmarks import stress_team

        chain, other = stress_team.Chain(2, 3), stress_team.Chain(2, 200)
        chain.ops.run()

        def lead():
            while True:
                other.ops.run()

        if {leading}:
            threading.Thread(target=lead, daemon=True).start()
        for _ in range(5):
            child = os.fork()
            if not child:
                for first in range(20):
                    chain.buffers[0][:: stress_team.LINE // 8] = first
                    chain.ops.run()
                    chain.check(first)
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        chain.buffers[0][:] = 0
        chain.ops.run()
        chain.check(0)
        print("parent")
        """
    )
    assert (done.returncode, done.stdout) == (0, "parent\n"), done.stderr


@pytest.mark.parametrize("attempt", range(3))
def test_the_interpreter_ends_while_a_list_runs(attempt: int) -> None:
    """Led by a daemon thread: the list ends, no other begins, the process leaves with its own status."""
    done = run_python(
        """
        import sys, threading, time
        from benchmarks import stress_team

        chain = stress_team.Chain(3, 500)
        chain.ops.run()

        def lead():
            while True:
                chain.ops.run()

        threading.Thread(target=lead, daemon=True).start()
        time.sleep(0.05)
        sys.exit(5)
        """
    )
    assert done.returncode == 5, done.stderr
    assert done.stderr == "" or "the interpreter is shutting down" in done.stderr
