"""Architectures: one file each, data for the converter, the exporter and the runtime alike.

get("llama")      by the name in general.architecture
from_hf(config)   by the class named in config.json
all()             every architecture, by name
outline(config)   what tensors a model has, by its config.json alone; of more architectures than can be converted
"""

from __future__ import annotations

import importlib
import pkgutil

from quantkit.archs import base
from quantkit.archs.base import Arch, Config
from quantkit.archs.outlines import Outline, outlines
from quantkit.errors import FormatError, UnknownNameError, UnsupportedError

__all__ = ["Arch", "all", "from_hf", "get", "outline"]

_SHARED = {"base", "blocks", "decoder", "experts", "hybrid", "outlines", "rope", "shapes", "tensors", "transforms"}
_SHARED |= {"hf_tokenizer", "pretokenizers", "sentencepiece", "tiktoken", "vocab"}  # tokenizers
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
    name = _class_named(config)
    for arch in all():
        if name in arch.hf:
            return arch
    known = sorted(name for arch in all() for name in arch.hf)
    raise UnsupportedError(
        f"{name} is not an architecture quantkit converts; it knows {', '.join(known)} "
        "(CONTRIBUTING.md says how to add one)"
    )


def all() -> list[Arch]:
    """Every architecture, by name."""
    return [arch for _, arch in sorted(base.registered().items())]


def outline(config: Config) -> Arch | Outline:
    """What tells the tensors of a model with this config.json: `.name`, `.metadata(config)`, `.tensors(config)`."""
    name = _class_named(config)
    known: list[Arch | Outline] = [*all(), *outlines()]
    for found in known:
        if name in found.hf:
            return found
    listed = sorted({name for found in known for name in found.hf})
    raise UnsupportedError(f"{name} is not an architecture whose tensors quantkit knows; it knows {', '.join(listed)}")


def _class_named(config: Config) -> str:
    names = config.get("architectures") or []
    if not names:
        raise FormatError("config.json has no 'architectures'; it says which class the checkpoint is of")
    return names[0]
