"""The cache on disk: nothing of it is used that another user could have written, and no kernel is taken for another."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quantkit.codegen import digests, disk_cache, jit
from quantkit.codegen.callbacks import callback

POSIX = pytest.mark.skipif(os.name == "nt", reason="mode bits and owners are POSIX's")

FACTORY = '''
"""Kernels that one factory makes. Größe: this file is not ASCII."""
import functools

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel

@functools.cache
def simple(k):
    """A callback that captures a number, as those of one type or one shape do."""

    @callback("int64(int64)")
    def run(x):
        return x * k

    def check():
        import ctypes
        got = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(run.address)(10)
        assert got == 10 * k, f"the kernel of {k} is that of {got // 10}"
        return run._compiled.cache_hits

    return check


@functools.cache
def make(k):
    """One that captures a kernel, which is compiled into it but not inlined."""

    @kernel
    def inner(x):
        total = 0
        for i in range(x):
            for j in range(i, x):
                total += k if (i ^ j) % 7 == k % 7 else -i
                for q in range(j):
                    total ^= q * k
                    total = total // 3 + k if total % 11 == 3 else total % 1000 - k
        return total

    @callback("int64(int64)")
    def run(x):
        return inner(x) + inner(x + 1) + inner(x + 2) * inner(x * 3)

    def check():
        import ctypes
        f = inner.function
        got = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(run.address)(10)
        assert got == f(10) + f(11) + f(12) * f(30), f"the kernel of {k} is another one's"
        assert inner(9) == f(9)
        return run._compiled.cache_hits

    return check
'''
# argv: where the processes meet; then for each value of a closure; the environment says how long each write waits.
TOGETHER = """
import os, random, sys, time
from pathlib import Path
from factory import simple
replace, delays = os.replace, list(map(float, os.environ["DELAYS"].split()))
meeting, count, *values = sys.argv[1:]

def late(source, target):
    if not Path(meeting, str(os.getpid())).exists():  # the first time: wait for the others
        Path(meeting, str(os.getpid())).touch()
        while len(os.listdir(meeting)) < int(count):
            time.sleep(0.002)
    time.sleep(delays.pop(0) if delays else 0.0)
    replace(source, target)

os.replace = late
print(sum(simple(int(value))() for value in values))
"""
ALONE = "import sys; from factory import make; print(sum(make(int(v))() for v in sys.argv[1:]))"
SIMPLE = ALONE.replace("make", "simple")


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    root = str(Path(jit.__file__).parents[2])
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), root]), "QUANTKIT_CACHE_DIR": str(tmp_path / "cache")}
    return os.environ | path | {"PYTHONDONTWRITEBYTECODE": "1"} | more


def alone(tmp_path: Path, *values: int, code: str = ALONE, **more: str) -> tuple[str, str]:
    command = [sys.executable, "-c", code, *map(str, values)]
    done = subprocess.run(
        command, env=environment(tmp_path, **more), capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def together(tmp_path: Path, name: str, delays: list[list[float]]) -> None:
    """Processes with an empty cache that write at the same time, each the kernels of another closure."""
    cache, meeting, values = tmp_path / name, tmp_path / f"{name}-meeting", [3, 5, 8, 11][: len(delays)]
    meeting.mkdir()
    begun = []
    for value, seconds in zip(values, delays):
        command = [sys.executable, "-c", TOGETHER, str(meeting), str(len(delays)), str(value)]
        said = environment(tmp_path, QUANTKIT_CACHE_DIR=str(cache), DELAYS=" ".join(map(str, seconds)))
        begun.append(subprocess.Popen(command, env=said, cwd=tmp_path))
    assert [process.wait(timeout=120) for process in begun] == [0] * len(begun)
    # Every kernel is there afterwards, and is its own.
    assert alone(tmp_path, *values, code=SIMPLE, QUANTKIT_CACHE_DIR=str(cache))[0] == str(len(values))


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    (tmp_path / "factory.py").write_text(FACTORY, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("first", [0.0, 1.0], ids=["index first", "data first"])
def test_closures_of_processes_that_begin_together_are_their_own(factory: Path, first: float) -> None:
    """Delays between writes: what one process writes last must not go with what another wrote last."""
    together(factory, "cache", [[first, 1.0 - first], [0.3, 0.0]])


@pytest.mark.full
def test_cold_processes_at_once_fifty_times(factory: Path, rng: np.random.Generator) -> None:
    for i in range(50):
        together(factory, f"cache-{i}", rng.choice([0.0, 0.02, 0.1, 0.4], (3, 2)).tolist())


def test_closures_compiled_by_processes_of_their_own_are_linked_to_their_own_functions(factory: Path) -> None:
    """numba's symbols count the functions a process compiled before: those of two closures are the same."""
    for value in (3, 5):
        assert alone(factory, value)[0] == "0"
    assert alone(factory, 3, 5, 8)[0] == "2"
    assert alone(factory, 8, 5, 3)[0] == "3"


def test_damaged_kernels_are_compiled_again(factory: Path) -> None:
    values = (3, 5, 8, 11)
    alone(factory, *values, code=SIMPLE)
    files = sorted((factory / "cache").rglob("*.kernel"))
    assert len(files) == len(values)
    whole = [path.read_bytes() for path in files]
    changed = bytearray(whole[0])
    changed[len(changed) // 2] ^= 1
    for path, damaged in zip(files, (bytes(changed), whole[1][:-100], b"", b"x" * 4096)):
        path.write_bytes(damaged)
    assert alone(factory, *values, code=SIMPLE)[0] == "0"
    assert alone(factory, *values, code=SIMPLE)[0] == "4"
    assert sorted((factory / "cache").rglob("*.kernel")) == files


def test_the_locale_does_not_matter(factory: Path) -> None:
    """Sources are UTF-8, whatever the locale: none of them could be read where that is ASCII."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert alone(factory, 3, **ascii_only)[0] == "0"
    assert alone(factory, 3)[0] == "1"


def test_a_source_edited_while_a_process_runs_caches_nothing(factory: Path) -> None:
    """What was imported before the edit would be cached as if it were made of the new source."""
    code = "import factory, pathlib, time, sys; time.sleep(0.05); p = pathlib.Path('factory.py')\n"
    code += "p.write_bytes(p.read_bytes().replace(b'q * k', b'q + k')); __import__('os').utime(p, (1, 1))\n"
    code += "print(factory.make(3)())"
    _, said = alone(factory, code=code)
    assert said.count("is newer than this process") == 1
    assert not list((factory / "cache").rglob("*.kernel"))
    assert alone(factory, 3)[0] == "0"


# ------------------------------------------------------------------------------------------------------- closures


def identities(*functions) -> list[str]:
    return [digests.identity(f) or "" for f in functions]


def test_what_closures_capture_tells_them_apart() -> None:
    def of(value, default=1):
        def f(x=default):
            return value, x

        return f

    a = np.arange(3)
    kernels = [
        jit.kernel(of(1)),
        jit.kernel(of(2)),
        jit.kernel(of(1), fastmath=True),
        callback("int64(int64)")(of(1)),
    ]
    captured = [1, 2, 1.0, True, "1", b"1", None, (1,), (1, 2), [1], a, a[::-1], a.astype(np.int32), a[0],
                a.dtype, np.sin, np.cos, int, np, len, {"a": 1}, {1}, of(1), of(2), of(1, 2), *kernels]  # fmt: skip
    texts = identities(*map(of, captured), of(1, 2))
    assert "" not in texts
    assert len(set(texts)) == len(texts)
    assert texts == identities(*map(of, captured), of(1, 2))
    assert of(a).__closure__ is not None
    assert identities(of(np.arange(3))) == identities(of(a))


def test_a_closure_that_captures_itself_has_an_identity() -> None:
    def f(n):
        return 1 if n == 0 else f(n - 1)

    assert identities(f) == identities(f) != [""]


def test_what_no_digest_is_known_of_is_refused() -> None:
    thing = object()

    @jit.kernel
    def f():
        return thing

    with pytest.raises(TypeError, match=r"f cannot be cached on disk: it captures 'thing', and no digest of a"):
        f()


# ---------------------------------------------------------------------------------------------------------- trust


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "root"
    monkeypatch.setenv("QUANTKIT_CACHE_DIR", str(root))
    disk_cache.notice.cache_clear()
    return root


@POSIX
def test_directories_and_files_are_private(cache: Path) -> None:
    before = os.umask(0)
    try:
        disk_cache.write(cache / "sub" / "a", b"contents")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (cache, cache / "sub", cache / "sub" / "a")] == [
        0o700,
        0o700,
        0o600,
    ]
    assert disk_cache.read(cache / "sub" / "a") == b"contents"
    assert [p.name for p in (cache / "sub").iterdir()] == ["a"]


def refused(path: Path, capsys: pytest.CaptureFixture[str], *expected: str) -> None:
    """A file there is not used, and none is written; that is said once."""
    for _ in range(2):
        assert disk_cache.read(path) is None
        disk_cache.write(path.with_name("other"), b"contents")
        assert not path.with_name("other").exists()
    said = capsys.readouterr().err
    assert said.count("is not used") == 1
    assert all(text in said for text in expected), said


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
@pytest.mark.parametrize("which", ["root", "sub"])
def test_a_directory_that_others_can_write_is_not_used(
    cache: Path, mode: int, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cache / "sub" / "a"
    disk_cache.write(path, b"contents")
    directory = cache if which == "root" else cache / "sub"
    directory.chmod(mode)
    refused(path, capsys, f"mode {mode:o}", f"chmod 700 {directory}", "QUANTKIT_CACHE_DIR")
    directory.chmod(0o700)
    assert disk_cache.read(path) == b"contents"


@POSIX
@pytest.mark.parametrize("which", ["root", "sub"])
def test_another_users_directory_is_not_used(
    cache: Path, which: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache / "sub" / "a"
    disk_cache.write(path, b"contents")
    others(cache if which == "root" else cache / "sub", monkeypatch)
    refused(path, capsys, "belongs to the user with id 4321", "QUANTKIT_CACHE_DIR")


def others(path: Path, monkeypatch: pytest.MonkeyPatch, *, link: bool = False) -> None:
    """Give a file to another user. Without root's rights the process takes itself for another user instead."""
    if os.geteuid() == 0:
        os.chown(path, 4321, -1, follow_symlinks=not link)
        return
    real, inode = Path.stat, path.stat(follow_symlinks=not link).st_ino

    def stat_of_others(self: Path, **options: bool) -> os.stat_result:
        found = real(self, **options)
        return os.stat_result((*found[:4], 4321, *found[5:])) if found.st_ino == inode else found

    monkeypatch.setattr(Path, "stat", stat_of_others)


@POSIX
def test_another_users_link_is_not_followed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "real")
    path = cache / "sub" / "a"
    disk_cache.write(path, b"contents")
    assert disk_cache.read(path) == b"contents"
    others(cache, monkeypatch, link=True)
    refused(path, capsys, "symbolic link of the user with id 4321")


@POSIX
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_not_used(cache: Path, mode: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = cache / "sub" / "a"
    disk_cache.write(path, b"contents")
    path.chmod(mode)
    assert [disk_cache.read(path) for _ in range(2)] == [None, None]
    assert capsys.readouterr().err.count(f"{path} is not used: other users can write in it") == 1
    disk_cache.write(path, b"contents")
    assert disk_cache.read(path) == b"contents"


@POSIX
def test_a_link_to_a_file_is_not_read(cache: Path, tmp_path: Path) -> None:
    path = cache / "sub" / "a"
    disk_cache.write(path, b"contents")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert disk_cache.read(path) is None


@POSIX
def test_kernels_are_not_loaded_from_a_directory_that_others_can_write(factory: Path) -> None:
    assert "is not used" not in alone(factory, 3)[1]
    (factory / "cache").chmod(0o770)
    for _ in range(2):
        hits, said = alone(factory, 3)
        assert hits == "0"
        assert said.count("is not used") == 1
    (factory / "cache").chmod(0o700)
    assert alone(factory, 3) == ("1", "")


def test_files_nobody_used_for_long_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sub = cache / "sub"
    for name in ("used", "unused"):
        disk_cache.write(sub / name, b"contents")
        os.utime(sub / name, (0, time.time() - 61 * 86400))
    assert disk_cache.read(sub / "used") == b"contents"
    disk_cache._remove_unused.cache_clear()
    disk_cache.write(sub / "new", b"contents")
    assert sorted(path.name for path in sub.iterdir()) == ["new", "used"]


# --------------------------------------------------------------------------------- what the working directory says


@pytest.mark.parametrize(
    "statement",
    [
        "import quantkit.codegen.simd",
        "from quantkit.codegen import numba_loader; numba_loader.load_numba()",
        "import quantkit.runtime.kernels.dispatch",
    ],
)
def test_a_configuration_of_numba_in_the_working_directory_is_refused(tmp_path: Path, statement: str) -> None:
    (tmp_path / ".numba_config.yaml").write_text("opt: 0\nboundscheck: 1\n")
    code = f"from quantkit.errors import QuantkitError\ntry:\n    {statement}\nexcept QuantkitError as e: print(e)"
    said, _ = alone(tmp_path, code=code)
    assert f"{tmp_path}/.numba_config.yaml changes numba's settings" in said
    (tmp_path / ".numba_config.yaml").unlink()
    assert alone(tmp_path, code=code)[0] == ""


def test_settings_of_numba_are_part_of_what_a_kernel_is(factory: Path) -> None:
    assert alone(factory, 3)[0] == "0"
    assert alone(factory, 3, NUMBA_OPT="1")[0] == "0"
    assert alone(factory, 3, NUMBA_OPT="1")[0] == "1"
    assert alone(factory, 3)[0] == "1"
