"""Architectures: one file each, data for the converter, the exporter and the runtime alike.

get("llama")      by the name in general.architecture
from_hf(config)   by the class named in config.json
all()             every architecture, by name
"""

from __future__ import annotations

import importlib
import pkgutil

from quantkit.archs import base
from quantkit.archs.base import Arch, Config
from quantkit.errors import FormatError, UnknownNameError, UnsupportedError

__all__ = ["Arch", "all", "from_hf", "get"]

_SHARED = {"base", "blocks", "decoder", "pretokenizers", "rope", "tensors", "vocab"}
for _module in pkgutil.iter_modules(__path__):
    if _module.name not in _SHARED:
        importlib.import_module(f"{__name__}.{_module.name}")


def get(name: str) -> Arch:
    """The architecture that GGUF calls `name`."""
    found = base.registered().get(name)
    if found is None:
        raise UnknownNameError("architecture", name, base.registered())
    return found


def from_hf(config: Config) -> Arch:
    """The architecture of a config.json."""
    names = config.get("architectures") or []
    if not names:
        raise FormatError("config.json has no 'architectures'; it says which class the checkpoint is of")
    for arch in all():
        if names[0] in arch.hf:
            return arch
    known = sorted(name for arch in all() for name in arch.hf)
    raise UnsupportedError(
        f"{names[0]} is not an architecture quantkit converts; it knows {', '.join(known)} "
        "(CONTRIBUTING.md says how to add one)"
    )


def all() -> list[Arch]:
    """Every architecture, by name."""
    return [arch for _, arch in sorted(base.registered().items())]
