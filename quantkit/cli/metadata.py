"""`quantkit metadata`: read and change the keys of a GGUF file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.dialect import knows_dialect
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.options import DryRun, Json
from quantkit.cli.common.output import print_json, print_table
from quantkit.cli.common.progress_options import shows_progress, takes_quiet
from quantkit.errors import DataError, OptionError, QuantkitError

if TYPE_CHECKING:
    from quantkit.formats.gguf.metadata import Metadata

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="A GGUF file, or any shard of a split one.", show_default=False)
]
Keys = Annotated[list[str], typer.Argument(metavar="KEY…", help="Names of keys.", show_default=False)]
Force = Annotated[
    bool, typer.Option("--force", help="Also change keys that describe tensors, and the types of existing keys.")
]

_SHOWN = 200  # characters of a value in the list of changes


@takes_quiet
@from_hub("path", headers=True)
def metadata(path: File, json: Json = False) -> None:
    """List, get, set and remove the metadata of a GGUF file.

    `metadata FILE` prints every key in full, in the form that `metadata set` reads. `metadata get`, `set` and `remove`
    are subcommands.
    """
    from quantkit.formats import gguf

    found = gguf.open(path).metadata
    if json:
        print_json("quantkit.metadata/1", {"path": path, "metadata": {key: _record(found, key) for key in found}})
        return
    for key in found:
        _print_raw(f"{key}={_kind(found, key)}:{_text(_short(found, key), one_line=True)}")


@takes_quiet
@from_hub("path", headers=True)
def get(path: File, keys: Keys, json: Json = False) -> None:
    """Print the values of keys, one per line; strings verbatim, lists as JSON."""
    from quantkit.formats import gguf

    found = gguf.open(path).metadata
    absent = [key for key in keys if key not in found]
    if absent:
        raise _absent(path, absent, found)
    if json:
        print_json("quantkit.metadata/1", {"path": path, "metadata": {key: _record(found, key) for key in keys}})
        return
    for key in keys:
        _print_raw(_text(_short(found, key)))


@shows_progress
@knows_dialect
def set_(
    path: File,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=TYPE:VALUE…", help="Keys and values.", show_default=False)
    ] = None,
    from_file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=PATH", help="Set a key to the text of a file, for example a chat template. Repeatable."
        ),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Set keys of a GGUF file: KEY=TYPE:VALUE, or KEY=VALUE for a key that exists.

    TYPE is u8 … u64, i8 … i64, f32, f64, bool or str; int and float take the size that the key has. TYPE[] is an array,
    and VALUE is then a JSON list or comma-separated: i32[]:[1,2,3]. If the tensors can stay at their offsets, only the
    bytes that differ are written; else the file is rewritten and replaced when the new one is complete. Keys that
    describe the names, shapes and offsets of tensors need --force, and so do new types of existing keys, because
    readers reject other types.
    """
    from quantkit.formats import gguf
    from quantkit.formats.gguf.metadata import Metadata, assignment

    file = gguf.open(path)
    changed = Metadata()
    for text in values or []:
        key, value, kind = assignment(text, file.metadata)
        _require_once(key, changed)
        changed.set(key, value, kind)
    for text in from_file or []:
        key, equals, name = text.partition("=")
        if not key or not equals:
            raise OptionError(f"--from-file '{text}' is not KEY=PATH")
        _require_once(key, changed)
        changed.set(key, Path(name).read_bytes().decode("utf-8", "surrogateescape"), "str")
    if not changed:
        raise typer.BadParameter("nothing to set: give KEY=TYPE:VALUE, or --from-file KEY=PATH")
    _apply(file.paths[0], file.metadata, changed, [], force, dry_run, json)


@shows_progress
@knows_dialect
def remove(path: File, keys: Keys, force: Force = False, dry_run: DryRun = False, json: Json = False) -> None:
    """Remove keys of a GGUF file."""
    from quantkit.formats import gguf
    from quantkit.formats.gguf.metadata import Metadata

    file = gguf.open(path)
    absent = [key for key in keys if key not in file.metadata]
    if absent:
        raise _absent(path, absent, file.metadata)
    _apply(file.paths[0], file.metadata, Metadata(), list(dict.fromkeys(keys)), force, dry_run, json)


SUBCOMMANDS = {"get": get, "set": set_, "remove": remove}


def _apply(
    path: Path, old: Metadata, changed: Metadata, removed: list[str], force: bool, dry_run: bool, json: bool
) -> None:
    """Check the changes, apply them and print them."""
    from quantkit.formats.gguf.header import rewrite

    if not force:
        _check(path, old, changed, removed)
    in_place = None if dry_run else rewrite(path, changed, removed, progress=True)
    rows = [(key, _side(old, key), _side(changed, key)) for key in (*changed, *removed)]
    if json:
        records = [{"key": key, "before": _record(old, key), "after": _record(changed, key)} for key, *_ in rows]
        print_json("quantkit.metadata-edit/1", {"path": path, "in_place": in_place, "changes": records})
        return
    print_table(("key", "before", "after"), rows, left=3)
    how = {None: "nothing is written", True: "changed in place", False: "rewritten"}[in_place]
    print(f"\n{path}: {how}")


def _check(path: Path, old: Metadata, changed: Metadata, removed: list[str]) -> None:
    """Raise an error for changes after which readers could not use the file."""
    from quantkit.formats.gguf.metadata import holds_tensors

    for key in (*changed, *removed):
        if holds_tensors(key):
            raise QuantkitError(
                f"{path}: {key} describes the names, shapes or offsets of tensors; another value does not change the "
                "tensors and may make the file unreadable. Use --force to set it anyway"
            )
        if key in changed and key in old and _kind(old, key) != _kind(changed, key):
            raise DataError(
                f"{path}: {key} is {_kind(old, key)}, not {_kind(changed, key)}, and readers reject a key of another "
                f"type; write {key}={_kind(old, key)}:…, or use --force"
            )


def _require_once(key: str, changed: Metadata) -> None:
    if key in changed:
        raise OptionError(f"{key} is set twice, to {_side(changed, key)} first; leave out one of the two")


def _absent(path: Path, keys: list[str], found: Metadata) -> QuantkitError:
    import difflib

    near = difflib.get_close_matches(keys[0], list(found), n=3, cutoff=0.6)
    hint = f"; did you mean {', '.join(near)}?" if near else f"; `quantkit metadata {path}` lists its {len(found)}"
    return QuantkitError(f"{path}: no key {', '.join(keys)}{hint}")


def _kind(found: Metadata, key: str) -> str:
    return found.kind(key) + ("[]" if isinstance(found[key], list) else "")


def _record(found: Metadata, key: str) -> dict[str, Any] | None:
    return {"kind": _kind(found, key), "value": found[key]} if key in found else None


def _side(found: Metadata, key: str) -> str:
    if key not in found:
        return "-"
    text = f"{_kind(found, key)}:{_text(_short(found, key), one_line=True)}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… {len(text)} characters"


def _short(found: Metadata, key: str) -> Any:
    """A value with the shortest decimal form of f32 numbers: 1e-05, not 9.999999747378752e-06."""
    value = found[key]
    if found.kind(key) != "f32":
        return value
    import numpy as np

    return [float(str(np.float32(v))) for v in value] if isinstance(value, list) else float(str(np.float32(value)))


def _text(value: object, one_line: bool = False) -> str:
    """A value in the form that `set` reads; with `one_line`, control characters of strings are escaped."""
    import json

    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    if one_line and isinstance(value, str):
        return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else repr(c)[1:-1] for c in value)
    return str(value)


def _print_raw(text: str) -> None:
    """Print a line with the bytes of the file, UTF-8 or not. On a terminal, control characters are escaped."""
    if sys.stdout.isatty():
        print(text)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.buffer.flush()
