"""RoPE scaling: config.json <-> GGUF keys, and GGUF keys -> `blocks.Rope`. Shared by all architectures.

A is the architecture's name.

    config.json rope_type   GGUF
    default                 nothing
    linear                  A.rope.scaling.type "linear", .factor
    yarn                    A.rope.scaling.type "yarn", .factor, .original_context_length, betas if given, and
                            .attn_factor: the factor of cos and sin divided by the default 1 + 0.1 ln(factor),
                            if the two differ
    llama3                  a tensor rope_freqs.weight, float32[dim/2]: divisors of the frequencies

The divisor of llama3 depends on the wavelength w = 2 pi theta^(2j/dim). With the original context `old`:
w < old/high -> 1;  w > old/low -> factor;  else 1 / ((1 - s)/factor + s) with s = (old/w - low) / (high - low).

llama_4_scaling_beta, the beta of `blocks.Temperature`, is A.attention.temperature_scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from typing import Any

import numpy as np

from quantkit.archs.common.base import Keys
from quantkit.archs.common.blocks import Rope, Temperature, Yarn
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.json_input import Json
from quantkit.inputs.settings import real

FREQ_FACTORS = "rope_freqs.weight"

# config.json name -> GGUF name, for yarn's optional numbers
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
_ATTN_FACTOR = "rope.scaling.attn_factor"  # ik_llama.cpp reads this key; newer runtimes also read the next one
_YARN_ATTN_FACTOR = "rope.scaling.yarn_attn_factor"


def llama3_factors(parameters: Json, dim: int) -> np.ndarray:
    """Divisors of the RoPE frequencies, float32[dim/2], of Llama 3.1's scaling."""
    parameters = {key: value for key, value in parameters.items() if value is not None}
    try:
        theta, factor = float(parameters["rope_theta"]), float(parameters["factor"])
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        old = float(parameters.get("original_max_position_embeddings", 8192))
    except KeyError as error:
        raise FormatError(f"config.json: rope_scaling of type llama3 has no {error}") from None
    if not 0 < low < high:
        raise FormatError(
            f"config.json: rope_scaling of type llama3 has low_freq_factor {low:g}, which has to be above 0 and below "
            f"high_freq_factor {high:g}"
        )
    wavelength = 2 * math.pi * theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    smooth = (old / wavelength - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(wavelength < old / high, 1.0, np.where(wavelength > old / low, factor, blended))
    return factors.astype(np.float32)


def llama3_parameters(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """The config.json values that give these `llama3_factors`, to a relative 1e-6, among the values in use.

    UnsupportedError if no such values do.
    """
    dim, factor = 2 * len(factors), shortest(factors.max())
    for low, high, log_old in itertools.product((1.0, 2.0), (4.0, 8.0), range(5, 25)):
        found = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": 1 << log_old,
        }
        if np.allclose(llama3_factors(found | {"rope_theta": theta}, dim), factors, rtol=1e-6, atol=0):
            return found
    raise UnsupportedError(
        f"{FREQ_FACTORS}: no llama3 rope_scaling (factor {factor}) gives these {len(factors)} factors, so config.json "
        "cannot express them"
    )


def scaling_entries(arch: str, parameters: Json) -> Entries:
    """GGUF keys of config.json's RoPE scaling. llama3 has none, because it is stored as a tensor."""
    kind, prefix = parameters["rope_type"], f"{arch}.rope.scaling"
    if kind in ("default", "llama3"):
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"config.json: rope scaling of type {kind!r}; known: default, linear, llama3, yarn")
    if parameters.get("factor") is None:
        raise FormatError(f"config.json: rope_scaling of type {kind} has no 'factor'")
    entries: Entries = {f"{prefix}.type": (kind, "str"), f"{prefix}.factor": (float(parameters["factor"]), "f32")}
    if kind == "yarn":
        if "original_max_position_embeddings" not in parameters:
            raise FormatError("config.json: rope_scaling of type yarn has no 'original_max_position_embeddings'")
        original = int(parameters["original_max_position_embeddings"])
        entries[f"{prefix}.original_context_length"] = (original, "u32")
        for name, key in _YARN.items():
            if parameters.get(name) is not None:
                entries[f"{prefix}.{key}"] = (float(parameters[name]), "f32")
        attention = _attention_factor(parameters)
        default = _default_attention_factor(float(parameters["factor"]))
        if attention != default:
            entries[f"{arch}.{_ATTN_FACTOR}"] = (attention / default, "f32")
        if parameters.get("truncate") not in (None, True):
            raise UnsupportedError(f"config.json: yarn with truncate = {parameters['truncate']} is not supported here")
    return entries


def _default_attention_factor(factor: float) -> float:
    """The factor of cos and sin that runtimes use for YaRN by default."""
    return 1 + 0.1 * math.log(factor)


def _attention_factor(parameters: Json) -> float:
    """YaRN's factor of cos and sin: attention_factor, or a ratio if config.json has mscale and mscale_all_dim.

    It is 1 if the context is not extended.
    """
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    logarithm = 0.1 * math.log(max(float(parameters["factor"]), 1.0))
    mscale, all_dim = (parameters.get(name) for name in ("mscale", "mscale_all_dim"))
    return (1 + mscale * logarithm) / (1 + all_dim * logarithm) if mscale and all_dim else 1 + logarithm


def scaling_parameters(keys: Keys) -> dict[str, Any]:
    """The rope_scaling of config.json for GGUF keys; {} if there is none."""
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    found: dict[str, Any] = {"rope_type": kind, "factor": shortest(keys.real("rope.scaling.factor"))}
    if kind == "yarn":
        found["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
        for name, key in _YARN.items():
            if keys.get(f"rope.scaling.{key}") is not None:
                found[name] = shortest(keys.get(f"rope.scaling.{key}"))
        if (attention := _relative_attention_factor(keys)) != 1:
            found["attention_factor"] = shortest(attention * _default_attention_factor(found["factor"]))
    return found


def _relative_attention_factor(keys: Keys) -> float:
    """A file's factor of cos and sin divided by YaRN's default."""
    return keys.real(_ATTN_FACTOR, 1.0) * keys.real(_YARN_ATTN_FACTOR, 1.0)


def rope(keys: Keys, style: str, dim: int, tensors: Collection[str]) -> Rope:
    """The RoPE that the runtime computes, from GGUF keys and the names of the tensors.

    `style` is "norm" or "neox"; `dim` is the number of elements of a head that get RoPE.
    """
    kind = keys.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(f"{keys.arch}.rope.scaling.type = {kind!r}; known: none, linear, yarn")
    yarn = None
    scale = 1.0 if kind == "none" else 1.0 / keys.real("rope.scaling.factor")
    if kind == "yarn" and scale > 1:
        raise FormatError(
            f"metadata key {keys.arch}.rope.scaling.factor = {keys.real('rope.scaling.factor'):g}; yarn extends the "
            "context, so its factor has to be 1 or more"
        )
    if kind == "yarn":
        yarn = Yarn(
            original_context=keys.number("rope.scaling.original_context_length"),
            ext_factor=keys.real("rope.scaling.yarn_ext_factor", 1.0),
            attn_factor=_relative_attention_factor(keys),
            beta_fast=keys.real("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1.0),
        )
    base = keys.real("rope.freq_base", 10000.0)
    return Rope(style, dim, base, scale, FREQ_FACTORS if FREQ_FACTORS in tensors else None, yarn)


def temperature_entries(arch: str, parameters: dict[str, Any]) -> Entries:
    """The GGUF key of position-dependent query scaling; its setting is taken out of `parameters`."""
    beta = real(parameters, "llama_4_scaling_beta")
    parameters.pop("llama_4_scaling_beta", None)
    if not beta:
        return {}
    if parameters["rope_type"] != "yarn" or not parameters.get("original_max_position_embeddings"):
        raise UnsupportedError(f"config.json: llama_4_scaling_beta = {beta} without the original context of yarn")
    return {f"{arch}.attention.temperature_scale": (beta, "f32")}


def temperature(keys: Keys) -> Temperature | None:
    """Position-dependent query scaling by YaRN's original context; None where there is none."""
    beta = keys.real("attention.temperature_scale", 0.0)
    if not beta:
        return None
    length = keys.number("rope.scaling.original_context_length")
    return Temperature(beta, keys.number("attention.temperature_length", length))


def with_temperature(config: dict[str, Any], scaling: Temperature | None, context: int) -> dict[str, Any]:
    """A config.json with its RoPE settings, and llama_4_scaling_beta, in rope_parameters, as Mistral's classes have."""
    found = dict(config)
    parameters = found.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": found.pop("rope_theta")}
    parameters["llama_4_scaling_beta"] = shortest(scaling.beta) if scaling else 0.0
    parameters.setdefault("original_max_position_embeddings", context)
    return found | {"rope_parameters": parameters}
