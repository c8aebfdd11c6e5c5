"""`Metadata`: the keys of a GGUF file, a dict that remembers the GGUF value type ("kind") of each value.

Readers of GGUF are strict about kinds: they refuse a u32 key stored as i32. So a value that is read, changed and
written keeps its kind.

Kinds, by id: u8 i8 u16 i16 u32 i32 f32 bool str (array) u64 i64 f64. A list is an array; its kind is that of its
elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.inputs import json_input

ARRAY = 9
KINDS = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "array", "u64", "i64", "f64")
IDS = {kind: i for i, kind in enumerate(KINDS)}
DTYPES = {
    kind: np.dtype("u1" if kind == "bool" else f"<{kind[0]}{int(kind[1:]) // 8}")
    for kind in KINDS
    if kind not in ("str", "array")
}
"""How each fixed-size kind is stored."""

_FLOATS = ("f32", "f64")
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,), "bool": (bool,), "f32": (int, float), "f64": (int, float),
}  # fmt: skip  # the others: int
_MAX_F32 = float(np.finfo(np.float32).max)
_OF_DTYPE = {dtype: kind for kind, dtype in DTYPES.items() if kind != "bool"} | {np.dtype(bool): "bool"}
_MISSING = object()


Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]
"""What a key holds. Readers give these types; `Metadata.set` also takes numpy's and tuples."""

Entries = dict[str, tuple[Any, str]]
"""Keys to write: value and kind by key."""


def shortest(value: float) -> float:
    """The shortest decimal that rounds to this float32: 9.999999747e-06 -> 1e-05, as config.json had it."""
    return float(str(np.float32(value)))


class Metadata(dict[str, Any]):
    """Keys and values of a GGUF file, in file order.

    `m[key] = value` and `m.set(key, value)` keep the kind of a key that exists if the value fits it, and choose one
    otherwise: u32 (i32 if negative) or the 64-bit kind for an int, f32 for a float, i32 for the ints of a list.
    """

    def __init__(self, values: Mapping[str, object] | Iterable[tuple[str, Any]] = (), **more: object):
        super().__init__()
        self._kinds: dict[str, str] = {}
        self.update(values, **more)

    def kind(self, key: str) -> str:
        """The kind of a key's value; for a list the kind of its elements. KeyError if the key is missing."""
        return self._kinds[key]

    def set(self, key: str, value: object, kind: str | None = None) -> None:
        """Store a value. DataError if it does not fit `kind`, or if GGUF cannot hold it."""
        if not isinstance(key, str):
            raise DataError(f"metadata keys are strings, got {key!r}")
        natural = _OF_DTYPE.get(value.dtype.newbyteorder("<")) if isinstance(value, (np.ndarray, np.generic)) else None
        if isinstance(value, (np.ndarray, np.generic)):
            value = value.tolist()
        elif isinstance(value, tuple):
            value = list(value)
        if kind is None:
            kind = self._kinds.get(key)
            if kind is None or not _fits(value, kind):
                kind = natural or _infer(key, value)
        elif kind not in IDS or kind == "array":
            raise DataError(f"metadata key {key}: unknown kind '{kind}'; known: {', '.join(DTYPES)}, str")
        if not _fits(value, kind):
            raise DataError(f"metadata key {key}: {_brief(value)} is not a value of kind {kind}")
        self._put(key, value, kind)

    def _put(self, key: str, value: object, kind: str) -> None:
        """Store a value that is known to fit."""
        super().__setitem__(key, value)
        self._kinds[key] = kind

    def copy(self) -> Metadata:
        """A copy with the same kinds; lists are shared."""
        return Metadata(self)

    def __reduce__(self) -> Any:
        return _restore, (dict(self), self._kinds)

    def update(self, values: Any = (), **more: Any) -> None:  # type: ignore[override]
        """As dict.update; another Metadata's kinds are copied too."""
        kinds = values._kinds if isinstance(values, Metadata) else {}
        for key, value in dict(values, **more).items():
            self.set(key, value, kinds.get(key))

    def __setitem__(self, key: str, value: object) -> None:
        self.set(key, value)

    def setdefault(self, key: str, default: object = None) -> Any:
        """As dict.setdefault."""
        if key not in self:
            self.set(key, default)
        return self[key]

    def __ior__(self, other: object) -> Metadata:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self._kinds[key]

    def pop(self, key: str, default: object = _MISSING) -> Any:
        """As dict.pop."""
        if key not in self and default is not _MISSING:
            return default
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """As dict.popitem."""
        key, value = super().popitem()
        del self._kinds[key]
        return key, value

    def clear(self) -> None:
        """Remove all keys."""
        super().clear()
        self._kinds.clear()


def _restore(values: dict[str, Any], kinds: dict[str, str]) -> Metadata:
    made = Metadata()
    for key, value in values.items():
        made._put(key, value, kinds[key])
    return made


def _fits(value: Any, kind: str) -> bool:
    """Whether a value, or every element of a list, can be stored as `kind`."""
    values = value if isinstance(value, list) else [value]
    expected = _PYTHON_TYPES.get(kind, (int,))
    found = set(map(type, values))  # fast for long lists; each value is checked only if there are other types
    odd = () if found <= set(expected) else values
    if not all(isinstance(v, expected) and (bool in expected or not isinstance(v, bool)) for v in odd):
        return False
    if kind in ("str", "bool"):
        return True
    if not values:
        return True
    if kind == "f32" and found == {float}:
        sizes = np.abs(np.array(values))
        return not bool(((sizes > _MAX_F32) & (sizes < np.inf)).any())
    if kind == "f32":
        return all(not _MAX_F32 < abs(v) < float("inf") for v in values)
    if kind == "f64":
        return all(isinstance(v, float) or abs(v) < 1 << 1023 for v in values)
    limits = np.iinfo(DTYPES[kind])
    return bool(limits.min <= min(values) and max(values) <= limits.max)


def _infer(key: str, value: object) -> str:
    """The usual kind of a value, the first that it fits."""
    if isinstance(value, list):
        if not value:
            raise DataError(f"metadata key {key}: an empty list needs a kind")
        candidates = ("bool", "str", "i32", "u32", "i64", "u64", "f32", "f64")
    else:
        candidates = ("bool", "str", "u32", "i32", "u64", "i64", "f32", "f64")
    integers = all(isinstance(v, int) for v in (value if isinstance(value, list) else [value]))
    for kind in candidates:
        if _fits(value, kind) and not (
            integers and kind in _FLOATS
        ):  # an int too large for any kind does not become a float
            return kind
    raise DataError(f"metadata key {key}: GGUF cannot hold {_brief(value)}")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------------------------------- assignments by the user

_INTEGERS = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
_ALIASES = {"int": _INTEGERS, "float": _FLOATS, "string": ("str",)}
"""Type names without a size: the size is that of the existing key, else the usual one."""

_LAYOUT = ("general.architecture", "general.alignment", "tokenizer.ggml.tokens")
_SHAPES = frozenset((
    "block_count", "embedding_length", "embedding_length_out", "feed_forward_length", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "expert_count", "expert_shared_count", "leading_dense_block_count",
    "nextn_predict_layers", "vocab_size", "full_attention_interval", "interleave_moe_layer_step",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.key_length_mla", "attention.value_length_mla", "attention.q_lora_rank", "attention.kv_lora_rank",
    "attention.indexer.head_count", "attention.indexer.key_length",
    "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
))  # fmt: skip


def holds_tensors(key: str) -> bool:
    """Whether names, shapes or offsets of tensors depend on a key, so that a change makes the file unreadable."""
    if key in _LAYOUT or key.startswith("split."):
        return True
    return not key.startswith(("general.", "tokenizer.")) and key.partition(".")[2] in _SHAPES


def assignment(text: str, existing: Metadata) -> tuple[str, Any, str | None]:
    """Parse `KEY=TYPE:VALUE`: key, value and kind (None: the usual kind).

    TYPE is a kind such as u32, f32, bool or str, or int or float with the size that the key has. With [] it is an
    array: VALUE is a JSON list, or comma-separated. Without TYPE the key keeps its kind.
    """
    key, equals, rest = text.partition("=")
    if not key or not equals:
        raise DataError(f"{_brief(text)} is not KEY=TYPE:VALUE, such as general.name=str:Foo or x.list=i32[]:[1,2]")
    kind, colon, value = rest.partition(":")
    name = kind.removesuffix("[]")
    known = name in IDS and name != "array"
    if not colon or not (known or name in _ALIASES):
        if key not in existing:
            raise DataError(
                f"metadata key {key} is new: give its type, as in {key}=str:{rest} (types: {', '.join(DTYPES)})"
            )
        is_list = isinstance(existing[key], list)
        return key, _parsed(key, rest, existing.kind(key), is_list), existing.kind(key)
    if name in _ALIASES:
        found = existing.kind(key) if key in existing else ""
        usual = {"int": None, "float": "f32", "string": "str"}[name]
        chosen = found if found in _ALIASES[name] else usual
        return key, _parsed(key, value, chosen or "i64", kind.endswith("[]")), chosen
    return key, _parsed(key, value, name, kind.endswith("[]")), name


def _parsed(key: str, text: str, kind: str, is_list: bool) -> Any:
    """A text as a value, or a list of values, of a kind."""
    if not is_list:
        return _scalar(key, text, kind)
    if not text.lstrip().startswith("["):
        return [_scalar(key, part if kind == "str" else part.strip(), kind) for part in text.split(",")] if text else []
    try:
        values = json_input.parse(text, "the value")
    except FormatError as error:
        raise DataError(f"metadata key {key}: {_brief(text)} is not a JSON list: {error}") from None
    return [float(v) if kind in _FLOATS and type(v) is int else v for v in values]


def _scalar(key: str, text: str, kind: str) -> Any:
    if kind == "str":
        return text
    try:
        if kind == "bool":
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        return float(text) if kind in _FLOATS else int(text, 0)
    except (KeyError, ValueError):
        raise DataError(f"metadata key {key}: {_brief(text)} is not a value of kind {kind}") from None
