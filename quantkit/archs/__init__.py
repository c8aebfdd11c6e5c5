"""Architectures: one file each, read by the converter, the exporter, the planner and the runtime.

get("llama")             the architecture with this name in general.architecture
from_hf(config)          the architecture of a config.json
all()                    every architecture, sorted by name
language_model(config)   the config of the language model in a multimodal one, with the class's defaults
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from quantkit.archs.common import base, checked, wrapper
from quantkit.archs.common.base import Arch, Config
from quantkit.errors import FormatError, UnknownNameError, UnsupportedError
from quantkit.inputs.settings import sequence

__all__ = ["Arch", "all", "from_hf", "get", "language_model"]

for _module in pkgutil.iter_modules(__path__):
    if not _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")


def get(name: str) -> Arch:
    """The architecture that GGUF calls `name`."""
    found = base.registered().get(name)
    if found is None:
        raise UnknownNameError("architecture", name, base.registered())
    return found


def from_hf(config: Config) -> Arch:
    """The architecture of a config.json. UnsupportedError lists the classes that quantkit knows."""
    name = _class_named(config)
    if (found := _of_class(name, config)) is not None:
        return found
    known = sorted({name for arch in all() for name in arch.hf})
    raise UnsupportedError(
        f"{name} is not an architecture quantkit converts; it knows {', '.join(known)} "
        "(CONTRIBUTING.md says how to add one)"
    )


def all() -> list[Arch]:
    """Every architecture, sorted by name."""
    return [arch for _, arch in sorted(base.registered().items())]


def language_model(config: Config) -> dict[str, Any]:
    """The config.json of the language model, with its class's defaults for settings that are omitted.

    For a multimodal model, "architectures" becomes the class of the language model: the one that its config names, else
    the class of its model_type, else the class of the whole model. FormatError if a setting has a wrong type or is out
    of bounds.
    """
    text = wrapper.text_config(config)
    found = dict(config) if text is None else wrapper.merge_text_config(config, text)
    checked.check_config(found)
    if text is not None:
        stated = [name for name in _classes(text) if _of_class(name, text)]
        by_type = [found for kind, found in _TYPES.items() if kind == text.get("model_type")]
        by_type += [arch.hf[0] for arch in all() if arch.model_type == text.get("model_type")]
        found["architectures"] = stated[:1] or by_type[:1] or _classes(config)
    name = next(iter(_classes(found)), "")
    if (known := _of_class(name, found)) is None:
        return found
    defaults = {**known.defaults, **known.defaults_of.get(name, {})}
    return {**defaults, **{key: value for key, value in found.items() if value is not None or key not in defaults}}


_TYPES = {"mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}


def _of_class(name: str, config: Config) -> Arch | None:
    return next((arch for arch in all() if name in arch.hf and arch.accepts(config)), None)


def _class_named(config: Config) -> str:
    names = _classes(config)
    if not names:
        raise FormatError("config.json has no 'architectures'; this entry names the class of the checkpoint")
    return names[0]


def _classes(config: Config) -> list[str]:
    """The class names in "architectures". FormatError if an entry is not a string."""
    names = sequence(config, "architectures")
    found = [name for name in names if isinstance(name, str)]
    if len(found) < len(names):
        raise FormatError(f"config.json: architectures = {names!r:.80}; it has to be a list of class names")
    return found
