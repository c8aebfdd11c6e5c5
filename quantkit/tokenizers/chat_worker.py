"""The process that renders chat templates: chat_template.py starts it and it runs `main`.

It reads requests from its standard input, each a length and a pickle of (template, variables) from the process that
started it, and writes replies, each a length and JSON: {"text": …}, {"error": …}, or {"syntax": …} for a template that
jinja2 cannot read. It ends when its input does.
Memory is limited where the system can; time is limited by the process that waits.
"""

from __future__ import annotations

import datetime
import functools
import json
import pickle
import sys
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY = 1 << 30  # bytes of address space; Python with jinja2 takes less than a tenth
MAX_TEXT = 1 << 24  # characters of a prompt
_MAX_ERROR = 1000  # characters of an error


class Generation(Extension):
    """{% generation %} marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        """The content between the tags, as jinja2 calls this for a tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The parameters that transformers allows; others of json.dumps call what they are given."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with the filters and functions that templates may count on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    return environment


@functools.lru_cache(maxsize=8)
def _template(text: str) -> Template:
    return _environment().from_string(text)


def render(template: str, values: dict[str, Any]) -> dict[str, str]:
    """The reply to a request."""
    try:
        pieces, size = [], 0
        for piece in _template(template).generate(values):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                return {"error": f"it makes over {MAX_TEXT} characters"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"error": f"it needs more than {MAX_MEMORY >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it nests or calls itself too deeply"}
    except TemplateSyntaxError as error:
        return {"syntax": f"line {error.lineno}: {error.message}"[:_MAX_ERROR]}
    except Exception as error:  # whatever the template's own text raised
        return {"error": str(error)[:_MAX_ERROR] or type(error).__name__}


def send(stream: BinaryIO, data: bytes) -> None:
    """Write a message, its length first."""
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    """Read a message; None at the end of the stream, even within a message."""
    head = stream.read(8)
    size = int.from_bytes(head, "little")
    data = stream.read(size) if len(head) == 8 else b""
    return data if len(head) == 8 and len(data) == size else None


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer requests from stdin on stdout until stdin ends. Prints of templates go to stderr."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    _limit_memory()
    while (request := receive(requests)) is not None:
        reply = render(*pickle.loads(request))
        send(replies, json.dumps(reply).encode())
