"""Architectures that are known by their tensors only: they can be planned, not yet converted or run. One file each.

An architecture that gets an `Arch` of its own leaves this folder; its Outline's `metadata` goes with it.
"""

from __future__ import annotations

import importlib
import pkgutil

from quantkit.archs.outlines.base import Outline, outlines

__all__ = ["Outline", "outlines"]

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "base":
        importlib.import_module(f"{__name__}.{_module.name}")
