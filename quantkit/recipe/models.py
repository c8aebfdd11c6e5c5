"""The tensors of a model without its weights, from the config.json of a checkpoint.

    specs, metadata = from_config(read_config("DeepSeek-R1/config.json"))
    plan(specs, "Q4_K_M", recipe, metadata=metadata)

Types are those of the converted file: config.json's dtype, bf16 if weights are in FP8 or another format that is decoded
first, f32 for norms and other tensors that are always f32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit import types
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf import Metadata, TensorSpec
from quantkit.inputs import json_input
from quantkit.inputs.settings import integer

_DTYPES = {"float16": "f16", "float32": "f32"}


def is_config(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a checkpoint's directory or its config.json, rather than a GGUF file."""
    return Path(path).is_dir() or Path(path).suffix == ".json"


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json at a path, or in the directory at it: the language model's part of it."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json_input.read(file)
    except FileNotFoundError:
        raise FormatError(
            f"{file} is missing; a plan needs a GGUF file, a checkpoint's directory or its config.json"
        ) from None
    if not isinstance(config, dict):
        raise FormatError(f"{file}: a {type(config).__name__} where config.json holds an object")
    from quantkit import archs  # imports all architectures, which takes 0.05 s that commands on GGUF files do not need

    with _errors_name(file):
        return archs.language_model(config)


@contextmanager
def _errors_name(file: str | os.PathLike[str]) -> Iterator[None]:
    """Put the path of config.json before errors, which know its name at most."""
    try:
        yield
    except (FormatError, UnsupportedError) as error:
        raise type(error)(f"{file}: {str(error).removeprefix('config.json: ')}") from None


def from_config(
    config: Mapping[str, object], where: str = "config.json", mtp: str = "auto"
) -> tuple[list[TensorSpec], Metadata]:
    """The tensors of the GGUF file that a checkpoint becomes, in its order, and the keys that plans go by.

    `mtp` is one of `archs.common.mtp.POLICIES`: MTP layers with their embedding and output, as far as config.json says.
    """
    from quantkit import archs
    from quantkit.archs.common import validate
    from quantkit.archs.common.mtp import in_head_file

    with _errors_name(where):
        arch = archs.from_hf(config)
        if mtp != "auto":
            config = arch.with_mtp(config, mtp)
        keys, tensors = arch.metadata(config), arch.tensors(config)
    if mtp == "only":
        tensors = [t for t in tensors if in_head_file(t.name, integer(config, "num_hidden_layers"))]
    metadata = Metadata({"general.architecture": arch.name})
    for key, (value, kind) in ({f"{arch.name}.vocab_size": (config["vocab_size"], "u32")} | keys).items():
        metadata.set(key, value, kind)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    weight, f32 = types.layout(_DTYPES.get(dtype, "bf16")), types.layout("f32")
    kinds = [types.layout("i32") if t.integers else f32 if t.f32 else weight for t in tensors]
    specs = [TensorSpec(t.name, t.shape, kind) for t, kind in zip(tensors, kinds)]
    validate.check_planned(metadata, {spec.name: spec for spec in specs}, where)
    return specs, metadata
