"""Typed access to the settings of a config.json, or of another `file` of settings.

    integer(config, "moe_k", 1)              a whole number; 1 if the setting is absent or null
    real(config, "rope_theta", 10000.0)      a finite number
    sequence(config, "layer_types")          a list; [] if it is absent
    mapping(config, "rope_scaling")          an object; {} if it is absent
    flag(config, "use_rslora")               true or false; False if it is absent

Each raises a FormatError with the name and the value of a setting of another type. Bounds of the settings that
several architectures share are in `archs/common/checked.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from quantkit.errors import FormatError

CONFIG = "config.json"


def integer(config: Mapping[str, object], key: str, default: int = 0, file: str = CONFIG) -> int:
    """The whole number `config[key]`; `default` if it is absent or null. A bool or a float is an error."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int:
        raise _wrong(file, key, value, "a whole number")
    return value


def real(config: Mapping[str, object], key: str, default: float = 0.0, file: str = CONFIG) -> float:
    """The finite number `config[key]` as a float; `default` if it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    try:
        number = float(value) if type(value) in (int, float) else math.nan  # type: ignore[arg-type]  # int or float
    except OverflowError:  # a whole number of more than 308 digits
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(file, key, value, "a finite number")
    return number


def sequence(config: Mapping[str, object], key: str) -> Sequence[object]:
    """The list `config[key]`; empty if it is absent or null."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise _wrong(CONFIG, key, value, "a list")
    return value


def mapping(config: Mapping[str, object], key: str, file: str = CONFIG) -> Mapping[str, object]:
    """The object `config[key]`; empty if it is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(file, key, value, "an object or null")
    return value


def flag(config: Mapping[str, object], key: str, file: str = CONFIG) -> bool:
    """The bool `config[key]`; False if it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(file, key, value, "true or false")
    return bool(value)


def _wrong(file: str, key: str, value: object, expected: str) -> FormatError:
    shown = repr(value)
    return FormatError(f"{file}: {key} = {shown if len(shown) <= 80 else shown[:79] + '…'}; it has to be {expected}")
