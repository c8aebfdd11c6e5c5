"""ModelOpt: FP8 and NVFP4, also both in one checkpoint.

    NAME.weight F8_E4M3 with NAME.weight_scale                     FP8 (`fp8`)
    NAME.weight U8 with NAME.weight_scale and NAME.weight_scale_2  NVFP4 (`nvfp4`)

`quant_algo` names the algorithm of all layers, or MIXED_PRECISION: then `quantized_layers` has one for each module. The
dtype of a tensor says how it is stored; a setting that names another storage for its module is an error.
"""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.safetensors.quantized import fp8, nvfp4
from quantkit.formats.safetensors.quantized.matrix import ScaledTensor
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs.json_input import Json
from quantkit.inputs.settings import integer, mapping

_MIXED = "MIXED_PRECISION"
_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL_QUANT")
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
_SMOOTHED = ".pre_quant_scale"  # of AWQ: factors of the inputs, which the weights of a GGUF cannot carry


def check(settings: Json, where: Path) -> None:
    """UnsupportedError for an algorithm that is not read; FormatError for another size of NVFP4's blocks."""
    layers = mapping(settings, "quantized_layers")
    stated = {"all layers": settings} | {name: mapping(layers, name) for name in layers}
    for name, entry in stated.items():
        algo = entry.get("quant_algo")
        if algo not in (*_FP8, *_NVFP4, None) and not (algo == _MIXED and entry is settings):
            raise UnsupportedError(
                f"{where}: the checkpoint is quantized already (modelopt, {algo} for {name}); of this method quantkit "
                f"reads {', '.join((*_FP8, *_NVFP4))} and {_MIXED} of them"
            )
        size = integer(entry, "group_size", nvfp4.BLOCK)
        if algo in _NVFP4 and size != nvfp4.BLOCK:
            raise FormatError(
                f"{where}: group_size of {name} is {size}; blocks of NVFP4 have {nvfp4.BLOCK} columns: another format, "
                "or a mistake in the settings"
            )


def matrix(checkpoint: Checkpoint, codes: CheckpointTensor, settings: Json) -> ScaledTensor | None:
    """The matrix of a tensor of codes; None for a tensor that holds none."""
    if codes.name.endswith(_SMOOTHED):
        raise UnsupportedError(
            f"{codes.path}: tensor {codes.name} scales the inputs of its layer, which a GGUF file cannot say; export "
            "the model without AWQ"
        )
    if codes.dtype == "U8" and codes.name.endswith(".weight"):
        module = codes.name.removesuffix(".weight")
        _require_algo(codes, module, settings, _NVFP4)
        return nvfp4.of_modelopt(checkpoint, module, codes)
    made = fp8.matrix(checkpoint, codes, settings)
    if made is not None:
        _require_algo(codes, codes.name.removesuffix(".weight"), settings, _FP8)
    return made


def _require_algo(codes: CheckpointTensor, module: str, settings: Json, expected: tuple[str, ...]) -> None:
    """FormatError if the settings name another storage for a module, or for one that it is part of."""
    layers = mapping(settings, "quantized_layers")
    parts = module.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    name = next((name for name in around if name in layers), None)
    algo = mapping(layers, name).get("quant_algo") if name else settings.get("quant_algo")
    if algo not in (*expected, _MIXED, None):
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype}, as {expected[0]} has it; the settings say {algo}"
            f"{f' for {name}' if name else ''}: the settings belong to another checkpoint"
        )
