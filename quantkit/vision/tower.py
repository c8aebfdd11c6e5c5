"""`Tower`: the description of a vision tower, read by the converter, and what it computes.

Defining a class registers it by its projector type. A file has general.architecture "clip", general.type "mmproj",
clip.projector_type and `clip.vision.*`; tensors `v.*` of the encoder and `mm.*` of the projector. These are the names
of llama.cpp's clip loader (tools/mtmd/clip-impl.h; in ik_llama.cpp examples/mtmd).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from quantkit.archs.common import checked
from quantkit.archs.common.base import need
from quantkit.archs.common.tensors import COPY, Transform
from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import mapping, real, sequence
from quantkit.vision.operations import Weights

ARCHITECTURE = "clip"
Config = Mapping[str, object]

_towers: dict[str, Tower] = {}


@dataclass(frozen=True)
class Part:
    """A tensor of the file: its name, the checkpoint's tensor, canonical, and how its rows are made.

    kind   a type that it always has; "" for that of the file
    """

    name: str
    source: str
    transform: Transform = COPY
    kind: str = ""


class VisionFile(Protocol):
    """What `embed` needs of an open GGUF file."""

    @property
    def path(self) -> object:
        """The path, for messages."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The keys."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name."""


class Tower(ABC):
    """A vision tower.

    projector   clip.projector_type
    classes     class names in config.json
    unused      beginnings of the canonical names of tensors that the language model does not use
    """

    projector: ClassVar[str]
    classes: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _towers[cls.projector] = cls()

    def canonical(self, name: str) -> str:
        """A checkpoint's tensor name as `parts` spells it: without the outer model's prefix."""
        return name.removeprefix("model.")

    def entries(self, config: Config, preprocessor: Config) -> Entries:
        """The GGUF keys of a config.json and of the image processor's config. A tower adds its own to these."""
        vision, text = mapping(config, "vision_config"), mapping(config, "text_config")
        entries: Entries = {
            "clip.has_vision_encoder": (True, "bool"),
            "clip.projector_type": (self.projector, "str"),
            "clip.vision.projection_dim": (count(text, "hidden_size"), "u32"),
            "clip.vision.embedding_length": (count(vision, "hidden_size"), "u32"),
            "clip.vision.feed_forward_length": (count(vision, "intermediate_size"), "u32"),
            "clip.vision.patch_size": (count(vision, "patch_size"), "u32"),
        }
        for ours in ("image_mean", "image_std"):
            values = [real({ours: x}, ours) for x in sequence(preprocessor, ours)]
            if len(values) != 3:
                raise FormatError(
                    f"preprocessor_config.json: {ours} = {values}; the three numbers that images are normalised by are "
                    "needed"
                )
            entries[f"clip.vision.{ours}"] = (values, "f32")
        return entries

    @abstractmethod
    def parts(self, config: Config, shapes: Mapping[str, tuple[int, ...]], break_token: int | None) -> list[Part]:
        """The tensors of the file, in its order. `shapes` are those of a checkpoint's tensors, by canonical name.

        `break_token` is the id of the token [IMG_BREAK], if the tokenizer has one.
        """

    @abstractmethod
    def forward(self, weights: Weights, keys: Mapping[str, Any], image: np.ndarray) -> np.ndarray:
        """float32[tokens, n]: what the language model gets for a normalised image float32[3, height, width]."""


def count(config: Config, key: str, maximum: int = 1 << 20) -> int:
    """A whole number from 1 on that config.json must have. FormatError for another value."""
    value, bound = need(config, key), checked.Count(1, maximum)
    if not bound.holds(value):
        raise FormatError(f"config.json: {key} = {checked.brief(value)}; it has to be {bound}")
    return int(value)


def layers(vision: Config, key: str = "num_hidden_layers") -> int:
    """The layers of a tower."""
    return count(vision, key, 1 << 12)


def linear_parts(name: str, source: str, transform: Transform = COPY, bias: bool = True) -> list[Part]:
    """The weight and the bias of a matrix; both are made alike."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Part(f"{name}.{kind}", f"{source}.{kind}", transform) for kind in kinds]


def of_config(config: Config) -> Tower:
    """The tower of a config.json. UnsupportedError for one without a tower here, by name."""
    if not mapping(config, "vision_config"):
        raise UnsupportedError("config.json has no vision_config: the checkpoint has no image encoder to convert")
    names = [str(name) for name in sequence(config, "architectures")]
    for tower in _towers.values():
        if names and names[0] in tower.classes:
            return tower
    known = ", ".join(name for tower in _towers.values() for name in tower.classes)
    raise UnsupportedError(
        f"the image encoder of {names[0] if names else 'a checkpoint without architectures'} (vision_config.model_type "
        f"{mapping(config, 'vision_config').get('model_type')!r}) is not converted; those of {known} are"
    )


def require_names(found: Sequence[Part], names: Sequence[str], tower: Tower) -> None:
    """UnsupportedError for tensors of a checkpoint's encoder that no part uses."""
    used = {part.source for part in found}
    if unknown := [n for n in names if n not in used and not n.startswith(tower.unused or ("\0",))]:
        raise UnsupportedError(
            f"{len(unknown)} tensor(s) of the image encoder are not known to {tower.projector}: "
            f"{', '.join(unknown[:5])}{', …' if len(unknown) > 5 else ''}"
        )


def embed(file: VisionFile, image: np.ndarray) -> np.ndarray:
    """What a file's tower makes of a normalised image. DataError for an image of another shape than it takes."""
    projector = file.metadata.get("clip.projector_type")
    if projector not in _towers:
        raise UnsupportedError(f"{file.path}: clip.projector_type {projector!r}; known are {', '.join(_towers)}")
    if image.ndim != 3 or image.shape[0] != 3:
        raise DataError(f"{file.path}: an image is float32[3, height, width], not {image.shape}")
    weights = {name: tensor.dequantize().reshape(tensor.shape) for name, tensor in file.tensors.items()}
    keys = {str(key).removeprefix("clip.vision."): value for key, value in file.metadata.items()}
    try:
        return np.asarray(_towers[str(projector)].forward(weights, keys, image.astype(np.float32)), np.float32)
    except KeyError as missing:
        raise FormatError(
            f"{file.path}: {missing.args[0]} is missing; the file is not a complete {projector}"
        ) from None


def require_multiple(image: np.ndarray, size: int) -> None:
    """DataError unless both sides of an image are multiples of `size`."""
    if any(side % size or not side for side in image.shape[1:]):
        raise DataError(f"an image of {image.shape[2]} x {image.shape[1]} pixels; sides have to be multiples of {size}")
