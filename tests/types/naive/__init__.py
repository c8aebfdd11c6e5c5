"""Decoders in plain Python, one element at a time, written from the byte maps: oracles for the compiled ones.

    DECODERS[name](row: bytes, n) -> list of n float32 values

One module a family; what each calls DECODERS is joined here. `fields` holds what they share.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

DECODERS: dict[str, Callable[[bytes, int], Any]] = {}
for _module in pkgutil.iter_modules(__path__):
    if _module.name != "fields":
        DECODERS.update(importlib.import_module(f"{__name__}.{_module.name}").DECODERS)
