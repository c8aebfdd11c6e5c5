"""Chat templates are programs from files: limits of time, memory and length; options of their `tojson` filter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import DataError, FormatError, QuantkitError
from quantkit.tokenizers import chat_template
from quantkit.tokenizers.chat_template import render

# Every construct that was found to take time or memory without end, by what stops it.
HOSTILE = {
    "power": "{{ 10 ** (10 ** 9) }}",
    "shift": "{% set ns = namespace(n=7) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "adding": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "times": "{{ 'x' * 10 ** 10 }}",
    "width": "{{ '%99999999999d' % 1 }}",
    "format": "{{ '{:99999999999}'.format(1) }}",
    "center": "{{ 'x'|center(10 ** 11) }}",
    "ljust": "{{ 'x'.ljust(10 ** 11) }}",
    "indent": "{{ ('x\\n' * 100000)|indent(10 ** 6) }}",
    "join": "{{ range(99999)|join('x' * 10 ** 6) }}",
    "replace": "{{ ('x' * 10 ** 6)|replace('x', 'x' * 10 ** 6) }}",
    "batch": "{{ [1]|batch(10 ** 10, 1)|list }}",
    "json": "{{ [[[1]]]|tojson(indent=10 ** 11) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "nesting": "{{ " + "(" * 100000 + "1" + ")" * 100000 + " }}",
    "lists of lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10 ** 8) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stops them, it is an error of ours, of a readable length, within seconds."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 1.0)
    started = time.perf_counter()
    with pytest.raises(QuantkitError, match=r"^the model's chat template refuses these messages: .{,1200}$"):
        render(HOSTILE[name], {})
    assert time.perf_counter() - started < 20


LIMITS = {"power": "more than 1 s", "doubling": "MiB of memory", "recursion": "calls itself", "output": "characters"}


@pytest.mark.parametrize("name", LIMITS)
def test_the_error_says_what_was_exceeded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next template is rendered."""
    if name == "power":
        monkeypatch.setattr(chat_template, "MAX_SECONDS", 1.0)
    with pytest.raises(QuantkitError, match=LIMITS[name]):
        render(HOSTILE[name], {})
    monkeypatch.undo()
    assert render("{{ a }}", {"a": 1}) == "1"


@pytest.mark.parametrize(
    "argument", ["default=lipsum", "cls=dict", "object_hook=dict", "skipkeys=true", "allow_nan=false"]
)
def test_json_takes_the_parameters_of_transformers_only(argument: str) -> None:
    """`default=` is called with what cannot be written, and found a way to environment variables in older jinja2."""
    with pytest.raises(QuantkitError, match="unexpected keyword argument"):
        render("{{ x|tojson(" + argument + ") }}", {"x": {1: {2}}})
    given = {"x": {"b": "é", "a": [1]}}
    assert render("{{ x|tojson(true, 1, (',', ':'), true) }}", given) == '{\n "a":[\n  1\n ],\n "b":"\\u00e9"\n}'
    assert render("{{ x|tojson(indent=none, sort_keys=false) }}", given) == '{"b": "é", "a": [1]}'


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}", "{{ (x|attr('__class__')).mro() }}", "{{ lipsum.__globals__.os }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}", "{{ x.append(1) }}", "{{ ('{0.__class__.__mro__}'|attr('format'))(1) }}",
    "{{ cycler.__init__.__globals__.os }}",
])  # fmt: skip
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(QuantkitError, match=r"unsafe|undefined|not safely callable"):
        render(template, {"x": [1]})


def test_values_arrive_as_they_are() -> None:
    """Tuples, bytes, None, text that is no UTF-8; none of JSON's changes."""
    given: dict[str, Any] = {"a": (1, "é"), "b": None, "c": "\udcff", "d": {1: 2.5}, "e": "\u2028\0"}
    assert render("{{ a }}{{ b }}{{ c }}{{ d }}{{ e }}", given) == "(1, 'é')None\udcff{1: 2.5}\u2028\0"
    with pytest.raises(DataError, match="cannot be sent to the process that renders"):
        render("{{ a }}", {"a": threading.Lock()})


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (5, "is int, not text"),
        ([], "is list"),
        ("x" * (1 << 21), "2097152"),
        ("a\n{% for", "cannot be read: line 2: .*metadata set"),
        ("{{ 1|nothing }}", "line 1: No filter named 'nothing'"),
    ],
)
def test_what_is_no_template(template: Any, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        render(template, {})


def test_errors_do_not_steer_a_terminal() -> None:
    with pytest.raises(QuantkitError, match=r"no: \\x1b\[2J"):
        render("{{ raise_exception('no: \x1b[2J') }}", {})


def test_threads_share_the_process() -> None:
    result: list[str] = []
    threads = [threading.Thread(target=lambda i=i: result.append(render("{{ i }}", {"i": i}))) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result, key=int) == [str(i) for i in range(20)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_has_a_renderer_of_its_own() -> None:
    script = """
import os, sys
from quantkit.tokenizers.chat_template import render
assert render("{{ 1 }}", {}) == "1"
child = os.fork()
made = [render("{{ i }}", {"i": i}) for i in range(50)]
assert made == [str(i) for i in range(50)]
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert render("{{ 2 }}", {}) == "2"
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_nothing_is_left_when_python_ends() -> None:
    script = """
from quantkit.tokenizers import chat_template
chat_template.render("x", {})
print(chat_template._renderer._process.pid)
"""
    made = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(made.stdout), 0)


def test_modules_in_the_working_directory_are_not_run(tmp_path: Path) -> None:
    """A folder of a model may hold a jinja2.py."""
    for name in ("jinja2", "json", "pickle"):
        (tmp_path / f"{name}.py").write_text("open('run', 'w'); raise SystemExit")
    code = f"""import os, sys
sys.path[:] = {[path for path in sys.path if path]}
from quantkit.tokenizers.chat_template import render
print(render("{{{{ x }}}}", {{"x": 1}}))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert not (tmp_path / "run").exists()
