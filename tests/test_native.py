"""Native functions: their object code is cached, never stale, and compiled again where a file is damaged.

Tested, as tests/test_jit.py does, on a small package of its own: copies of the modules concerned in a package that is
also called quantkit, with one function that uses a second file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from quantkit.codegen.ir_values import I64
from quantkit.codegen.native import function
from tests.test_jit import small_package

HELPER = "def scaled(x):\n    return x * {}\n"
USER = """
from quantkit.helper import scaled
from quantkit.codegen.native import function
from quantkit.codegen.ir_values import I64


@function
def put(ir, x, out):
    ir.store(scaled(x) + 1, out)
"""
SCRIPT = """
import ctypes, json, sys
from quantkit import user
out = ctypes.c_int64()
user.put(5, ctypes.addressof(out))
print(json.dumps({
    "value": out.value, "compiled": user.put.compiled, "path": str(user.put.path), "numba": "numba" in sys.modules,
}))
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    package = small_package(tmp_path)
    (package / "helper.py").write_text(HELPER.format(2), encoding="utf-8")
    (package / "user.py").write_text(USER, encoding="utf-8")
    (package / "unrelated.py").write_text("a = 1\n", encoding="utf-8")
    return tmp_path


def begin(small: Path, **more: str) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU")}
    environment = clean | {"PYTHONPATH": str(small), "QUANTKIT_CACHE_DIR": str(small / "cache")} | more
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # of edits of one size in one second Python's own cache knows nothing
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True, cwd=small
    )


def end(process: subprocess.Popen[str]) -> dict:
    with process:
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    return json.loads(said)


def run(small: Path, **more: str) -> dict:
    return end(begin(small, **more))


def test_the_second_process_compiles_nothing(small: Path) -> None:
    first, second = run(small), run(small)
    assert first == second | {"compiled": True}
    assert second | {"path": ""} == {"value": 11, "compiled": False, "numba": False, "path": ""}
    assert [str(path) for path in (small / "cache").rglob("*.o*")] == [first["path"]]


def test_an_edit_recompiles_what_depends_on_it_and_nothing_else(small: Path) -> None:
    run(small)
    (small / "quantkit" / "unrelated.py").write_text("a = 2\n", encoding="utf-8")
    assert not run(small)["compiled"]
    (small / "quantkit" / "helper.py").write_text(HELPER.format(3), encoding="utf-8")
    found = run(small)
    assert (found["value"], found["compiled"]) == (16, True)
    (small / "quantkit" / "helper.py").write_text(HELPER.format(2), encoding="utf-8")
    found = run(small)
    assert (found["value"], found["compiled"]) == (11, False)  # that of before the edit is still there


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "other"])
def test_damaged_object_code_is_made_again(small: Path, damage: str) -> None:
    path = Path(run(small)["path"])
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    path.write_bytes({"cut": whole[:-100], "empty": b"", "changed": bytes(changed), "other": b"x" * 4096}[damage])
    assert (run(small)["value"], path.read_bytes()) == (11, whole)
    assert not run(small)["compiled"]


def test_every_cpu_has_its_own(small: Path) -> None:
    cpus = [{}, {"NUMBA_CPU_NAME": "haswell"}, {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}]
    found = [run(small, **cpu) for cpu in cpus]
    assert all(each["compiled"] and each["value"] == 11 for each in found)
    assert len({each["path"] for each in found}) == 3


def test_processes_that_begin_together(small: Path) -> None:
    found = [end(process) for process in [begin(small) for _ in range(4)]]
    assert {each["value"] for each in found} == {11}
    assert [str(path) for path in (small / "cache").rglob("*.o*")] == [found[0]["path"]]
    assert not run(small)["compiled"]


def test_a_cache_that_cannot_be_written_is_done_without(small: Path) -> None:
    (small / "file").write_text("", encoding="utf-8")
    found = run(small, QUANTKIT_CACHE_DIR=str(small / "file"))
    assert (found["value"], found["compiled"]) == (11, True)


@function
def _doubled(ir, x, out, count):
    with ir.loop(0, count) as i:
        ir.store(ir.load(I64, x + i * 8) * 2, out + i * 8)


def test_threads_that_call_it_first_together() -> None:
    x, results = np.arange(1000), [np.zeros(1000, np.int64) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda out=out: _doubled(x.ctypes.data, out.ctypes.data, len(x))) for out in results
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((out == 2 * x).all() for out in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_can_call_it() -> None:
    """Whether the parent has called it before or not."""
    script = """
import os
import numpy as np
from quantkit import types
t = types.get("q4_0_r8")
data = np.arange(8 * 18, dtype=np.uint8).reshape(8, 18)
def same(): return (t.deinterleave_rows(t.interleave_rows(data)) == data).all()
for _ in range(2):
    child = os.fork()
    if child == 0:
        os._exit(0 if same() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same()
"""
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", script], check=True, timeout=60)
