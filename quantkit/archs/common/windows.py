"""Sliding windows in some of the layers: config.json <-> GGUF key, for architectures that mix two kinds of layers.

config.json lists layer_types, or gives sliding_window_pattern = n: every n-th layer attends to all tokens. The GGUF key
attention.sliding_window_pattern is n as well, or an array of one flag for each layer: whether it has a window.
"""

from __future__ import annotations

from typing import Any

from quantkit.archs.common.base import Config, Keys, need
from quantkit.errors import FormatError, UnsupportedError
from quantkit.inputs.settings import integer, sequence

_KEY = "attention.sliding_window_pattern"
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def layers_of_config(config: Config, every: int) -> tuple[bool, ...]:
    """Whether each layer has a window. By default every `every`-th one attends to all tokens.

    UnsupportedError for another kind of layer, or a pattern that is not a number.
    """
    count = int(need(config, "num_hidden_layers"))
    kinds = sequence(config, "layer_types")
    if not kinds:
        every = integer(config, "sliding_window_pattern") or every
        return tuple((i + 1) % every != 0 for i in range(count))
    if len(kinds) != count or any(kind not in (_LOCAL, _GLOBAL) for kind in kinds):
        raise UnsupportedError(
            f"config.json: layer_types has {len(kinds)} entries {sorted(set(map(str, kinds)))}; known are {_LOCAL} and "
            f"{_GLOBAL}, one for each of the {count} layers"
        )
    return tuple(kind == _LOCAL for kind in kinds)


def layers_of_keys(keys: Keys, every: int) -> tuple[bool, ...]:
    """Whether each layer has a window, from GGUF keys. By default every `every`-th one attends to all tokens."""
    count, value = keys.number("block_count"), keys.get(_KEY, every)
    if not isinstance(value, (list, tuple)):
        return tuple((i + 1) % int(value) != 0 for i in range(count))
    if len(value) != count:
        raise FormatError(
            f"metadata key {keys.arch}.{_KEY} has {len(value)} entries, {keys.arch}.block_count is {count}"
        )
    return tuple(map(bool, value))


def config(windowed: tuple[bool, ...]) -> dict[str, Any]:
    """The layer_types of config.json."""
    return {"layer_types": [_LOCAL if local else _GLOBAL for local in windowed]}


def kv_sources(arch: str, local: tuple[bool, ...], shared: int) -> tuple[int, ...]:
    """The layer whose keys and values each layer attends to: of the last `shared` ones, the last other of its kind."""
    first = len(local) - shared
    if not shared:
        return tuple(range(len(local)))
    if first < 2 or local[first - 2 : first] != (True, False):
        raise UnsupportedError(
            f"{arch}.attention.shared_kv_layers = {shared} of {len(local)} layers: of the layers before, the last but "
            "one has to have a sliding window and the last one none, as llama.cpp reads them"
        )
    return (*range(first), *(first - 2 if local[i] else first - 1 for i in range(first, len(local))))
