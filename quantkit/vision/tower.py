"""`Tower`: the description of a vision tower, read by the converter, and what it computes.

Defining a class registers it by its projector type. A file has general.architecture "clip", general.type "mmproj",
clip.projector_type and `clip.vision.*`; tensors `v.*` of the encoder and `mm.*` of the projector. These are the names
of llama.cpp's clip loader (tools/mtmd/clip-impl.h; in ik_llama.cpp examples/mtmd).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from quantkit.archs.common import checked
from quantkit.archs.common.tensors import COPY, Transform
from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import flag, mapping, real, sequence
from quantkit.vision.operations import Weights

ARCHITECTURE = "clip"
Config = Mapping[str, object]

_SIZES = ("embedding_length", "feed_forward_length", "patch_size", "projection_dim", "image_size")
_MERGE = "clip.vision.spatial_merge_size"
_LAYER = re.compile(r"^(v\.(?:blk|deepstack)\.)\d+\.")

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
        for ours, bound in (("image_mean", checked.Real(-1e6, 1e6)), ("image_std", checked.Real(0, 1e6, True))):
            values = sequence(preprocessor, ours)
            if len(values) != 3 or not all(map(bound.holds, values)):
                raise FormatError(
                    f"preprocessor_config.json: {ours} = {checked.brief(values)}; the three numbers that images are "
                    f"normalised by are needed, each {bound}"
                )
            entries[f"clip.vision.{ours}"] = ([real({ours: x}, ours) for x in values], "f32")
        _refuse_other_pixels(preprocessor)
        return entries

    @abstractmethod
    def shapes(self, keys: Sizes) -> dict[str, tuple[int, ...]]:
        """Shapes of tensors by name, N for a layer, that a file's keys state: `common_shapes` and a tower's own."""

    @abstractmethod
    def parts(self, config: Config, shapes: Mapping[str, tuple[int, ...]], break_token: int | None) -> list[Part]:
        """The tensors of the file, in its order. `shapes` are those of a checkpoint's tensors, by canonical name.

        `break_token` is the id of the token [IMG_BREAK], if the tokenizer has one.
        """

    @abstractmethod
    def forward(self, weights: Weights, keys: Mapping[str, Any], image: np.ndarray) -> np.ndarray:
        """float32[tokens, n]: what the language model gets for a normalised image float32[3, height, width]."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that a file's keys state."""

    width: int
    feed_forward: int
    patch: int
    projection: int
    image: int
    merged: int  # width of a square of merged patches

    @classmethod
    def of(cls, entries: Entries) -> Sizes:
        """The sizes of a file with these keys."""
        n, ff, patch, projection, image = (int(entries[f"clip.vision.{key}"][0]) for key in _SIZES)
        merge = int(entries.get(_MERGE, (1, ""))[0])
        return cls(n, ff, patch, projection, image, n * merge * merge)


def common_shapes(keys: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that several towers have, by name as in `Tower.shapes`."""
    n, ff = keys.width, keys.feed_forward
    matrices = {"attn_out": (n, n), "ffn_up": (ff, n), "ffn_gate": (ff, n), "ffn_down": (n, ff), "attn_qkv": (3 * n, n)}
    matrices |= {f"attn_{part}": (n, n) for part in "qkv"}
    found: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": (n, 3, keys.patch, keys.patch)}
    for name, shape in matrices.items():
        found |= {f"v.blk.N.{name}.weight": shape, f"v.blk.N.{name}.bias": shape[:1]}
    vectors = ("v.blk.N.ln1.weight", "v.blk.N.ln1.bias", "v.blk.N.ln2.weight", "v.blk.N.ln2.bias", "v.patch_embd.bias",
               "v.pre_ln.weight", "v.post_ln.weight", "v.post_ln.bias")  # fmt: skip
    return found | dict.fromkeys(vectors, (n,))


def check_shapes(tower: Tower, entries: Entries, shapes: Mapping[str, tuple[int, ...]], source: object) -> None:
    """FormatError unless a file's tensors have the shapes that its keys state and its heads divide the width."""
    heads, n = (entries[f"clip.vision.{key}"][0] for key in ("attention.head_count", "embedding_length"))
    if n % heads:
        raise FormatError(f"{source}: config.json: hidden_size = {n} is not a multiple of the {heads} heads")
    for name, shape, expected in _other_shapes(tower, entries, shapes):
        raise FormatError(
            f"{source}: tensor {name} of the image encoder would have shape {shape}; config.json makes it "
            f"{expected}: one of the two files belongs to another model"
        )


def _other_shapes(
    tower: Tower, entries: Entries, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...] | None]]:
    """(name, shape, expected) of tensors with another shape than the keys state; None for one that they do not know."""
    wanted = tower.shapes(Sizes.of(entries))
    for name, shape in shapes.items():
        if shape != (expected := wanted.get(_LAYER.sub(r"\1N.", name))):
            yield name, shape, expected


def _refuse_other_pixels(preprocessor: Config) -> None:
    """UnsupportedError for an image processor that does not give (x / 255 - mean) / std, as the loader does."""
    file = "preprocessor_config.json"
    for key in ("do_rescale", "do_normalize"):
        if not (flag(preprocessor, key, file) or preprocessor.get(key) is None):
            raise UnsupportedError(f"{file}: {key} = false; the loader divides by 255 and normalises all images")
    factor = real(preprocessor, "rescale_factor", 1 / 255, file)
    if abs(255 * factor - 1) > 1e-3:
        raise UnsupportedError(f"{file}: rescale_factor = {factor:g}; the loader divides by 255, {1 / 255:g}")


def epsilon(vision: Config, default: float) -> float:
    """The epsilon of a tower's norms."""
    value, bound = vision.get("layer_norm_eps"), checked.Real(0, 0.1, open_below=True)
    if value is not None and not bound.holds(value):
        raise FormatError(f"config.json: layer_norm_eps = {checked.brief(value)}; it has to be {bound}")
    return default if value is None else real(vision, "layer_norm_eps")


def count(config: Config, key: str, maximum: int = 1 << 20, default: int | None = None) -> int:
    """A whole number from 1 on that config.json must have, unless there is a default. FormatError for another value."""
    if (value := config.get(key)) is None:
        value = default
    if value is None:
        raise FormatError(f"config.json has no {key}, which the image encoder needs")
    bound = checked.Count(1, maximum)
    if type(value) is not int or not bound.holds(value):
        raise FormatError(f"config.json: {key} = {checked.brief(value)}; it has to be {bound}")
    return value


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
    """What a file's tower makes of a normalised image.

    DataError for an image of another shape than it takes; FormatError for a file whose tensors do not have the shapes
    that its keys state, or lack.
    """
    projector = file.metadata.get("clip.projector_type")
    if projector not in _towers:
        raise UnsupportedError(f"{file.path}: clip.projector_type {projector!r}; known are {', '.join(_towers)}")
    if image.ndim != 3 or image.shape[0] != 3:
        raise DataError(f"{file.path}: an image is float32[3, height, width], not {image.shape}")
    _require_shapes(file, _towers[str(projector)])
    weights = {name: tensor.dequantize().reshape(tensor.shape) for name, tensor in file.tensors.items()}
    keys = {str(key).removeprefix("clip.vision."): value for key, value in file.metadata.items()}
    try:
        return np.asarray(_towers[str(projector)].forward(weights, keys, image.astype(np.float32)), np.float32)
    except KeyError as missing:
        raise FormatError(
            f"{file.path}: {missing.args[0]} is missing; the file is not a complete {projector}"
        ) from None


def _require_shapes(file: VisionFile, tower: Tower) -> None:
    """FormatError unless the keys of a file have sizes, and its tensors the shapes that follow from them."""
    sizes = (f"clip.vision.{name}" for name in (*_SIZES, "block_count", "attention.head_count"))
    bounds: dict[str, checked.Bound] = dict.fromkeys((*sizes, _MERGE), checked.Count(1, 1 << 20))
    bounds["clip.vision.attention.layer_norm_epsilon"] = checked.Real(0, 0.1, open_below=True)
    for key, bound in bounds.items():
        value = file.metadata.get(key, 1 if key == _MERGE else None)
        if not bound.holds(value):
            raise FormatError(f"{file.path}: {key} = {checked.brief(value)}; it has to be {bound}")
    heads, n = (int(file.metadata[f"clip.vision.{name}"]) for name in ("attention.head_count", "embedding_length"))
    if n % heads:
        raise FormatError(f"{file.path}: clip.vision.embedding_length = {n} is not a multiple of the {heads} heads")
    entries: Entries = {str(name): (value, "") for name, value in file.metadata.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in file.tensors.items()}
    for name, shape, expected in _other_shapes(tower, entries, shapes):
        if expected is not None:
            raise FormatError(
                f"{file.path}: tensor {name} has shape {shape}, the keys clip.vision.* make it {expected}"
            )


def require_multiple(image: np.ndarray, size: int) -> None:
    """DataError unless both sides of an image are multiples of `size`."""
    if any(side % size or not side for side in image.shape[1:]):
        raise DataError(f"an image of {image.shape[2]} x {image.shape[1]} pixels; sides have to be multiples of {size}")
