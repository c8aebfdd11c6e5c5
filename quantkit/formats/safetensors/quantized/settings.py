"""The settings of a quantized checkpoint: `quantization_config` of config.json, or a file of its own beside it.

    quantize_config.json    of GPTQ (AutoGPTQ, GPTQModel); also of AWQ in early checkpoints
    quant_config.json       of AWQ (AutoAWQ)
    hf_quant_config.json    of ModelOpt, whose "quantization" has the settings

A file counts where config.json is silent. Its keys get the names that they have there: `w_bit` is `bits`,
`q_group_size` is `group_size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError
from quantkit.inputs.json_input import Json, read_object
from quantkit.inputs.settings import mapping

_MODELOPT = "hf_quant_config.json"
_INTEGERS = ("quantize_config.json", "quant_config.json")
_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
_AGREE = ("bits", "group_size", "sym", "checkpoint_format", "pack_dtype")  # keys that change what codes mean


def settings_of(config: Json, source: Path) -> Json:
    """The settings of the checkpoint in directory `source`, whose config.json is `config`; {} if it has none.

    FormatError if config.json and a file beside it say different things of the same codes.
    """
    settings = _one_spelling(mapping(config, "quantization_config"))
    if config.get("weight_bits") == 1 and not settings:  # the first BitNets, whose own class makes weights ternary
        return {"quant_method": "bitnet", "quantization_mode": "online"}
    name, beside = _of_file(source)
    if not settings:
        return beside
    if settings.get("quant_method") not in ("gptq", "awq") or not beside:
        return settings
    for key in _AGREE:
        if key in settings and key in beside and settings[key] != beside[key]:
            raise FormatError(
                f"{source / name}: {key} is {beside[key]!r}; quantization_config in config.json says {settings[key]!r}"
                ": correct one of the two files"
            )
    return beside | settings


def _of_file(source: Path) -> tuple[str, dict[str, Any]]:
    """The name of the file of settings and what it says; {} if there is none."""
    if not source.is_dir():
        return "", {}
    found: Json = mapping(read_object(source / _MODELOPT), "quantization")
    if found:
        return _MODELOPT, {"quant_method": "modelopt", **found}
    for name in _INTEGERS:
        if found := read_object(source / name):
            method = "awq" if "w_bit" in found else "gptq"
            return name, {"quant_method": method, **_one_spelling(found)}
    return "", {}


def _one_spelling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under the names of newer files."""
    renamed = {_NAMES[key]: value for key, value in settings.items() if key in _NAMES}
    return renamed | dict(settings)
