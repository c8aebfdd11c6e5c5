"""The `general.*` keys of a converted checkpoint, as llama.cpp's convert_hf_to_gguf.py writes them.

    general_keys(Path("SmolLM2-135M"), config, "llama", specs, outtype, warnings)

`gguf.Metadata` derives them: name, organization, basename, version, finetune, size label, license, tags, languages,
base models and data sets. Its sources, the first that states a value:

1. `--model-name`, for the name
2. `--metadata FILE`: a JSON object of keys. `general.base_models` and `general.datasets` are lists of objects
3. `gguf_metadata.json` in the directory, which `export` writes. If it has a name, names 5 and 6 say nothing
4. the front matter of `README.md`; for sampling parameters `generation_config.json`
5. `_name_or_path` in `config.json`, if it is a model id
6. the directory's name

Two things differ from convert_hf_to_gguf.py. Every scalar of the front matter is text (`formats/front_matter.py`), so
that a version 1.10 is not 1.1. `repetition_penalty`, as transformers calls it, becomes
`general.sampling.penalty_repeat`.

The keys of the architecture and of the tokenizer come from `archs` and `tokenizers`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.errors import FormatError, OptionError, UnknownNameError
from quantkit.formats import front_matter
from quantkit.formats.gguf import TensorSpec
from quantkit.formats.gguf.metadata import KINDS, Entries
from quantkit.inputs import json_input
from quantkit.tokenizers import vocab
from quantkit.types import QuantType

if TYPE_CHECKING:
    import gguf

MAX_LISTED = 1000  # base models or data sets of a model
MAX_NAME = 4096  # characters of a name that is taken apart
_LISTS = ("base_models", "datasets")
_INTEGERS = ("sampling_top_k", "sampling_penalty_last_n", "sampling_mirostat")
_OWN = ("general.architecture", "general.type", "general.file_type", "general.quantization_version",
        "general.alignment")  # fmt: skip
_ONE_OF_MANY = re.compile(r"general\.(base_model|dataset)\.(count|\d+\.[a-z_]+)")


def general_keys(
    directory: Path,
    config: Mapping[str, object],
    architecture: str,
    specs: Sequence[TensorSpec],
    outtype: QuantType,
    warnings: list[str],
    metadata: Path | None = None,
    model_name: str | None = None,
) -> Entries:
    """The `general.*` keys. `config` is all of config.json; `specs` are the tensors, whose values are counted.

    What a card or a generation_config.json says and GGUF cannot hold is skipped, with a line in `warnings`. In the file
    `metadata` it is a FormatError, and so is a key that is not known.
    """
    import gguf

    writer = _with_tensors(architecture, specs)
    total, *_ = writer.get_total_parameter_count()
    exported = json_input.read_object(directory / vocab.METADATA_FILE)
    found = _described(directory, config, total, "general.name" in exported, warnings)
    others = _override(found, exported, directory / vocab.METADATA_FILE)
    if metadata is not None:
        others |= _override(found, _read_overrides(metadata), metadata, strict=True)
    if model_name is not None:
        if not model_name.strip():
            raise OptionError("--model-name is empty: name the model, or leave the option out")
        found.name = model_name
    if found.name is None:
        found.name = directory.resolve().name.encode("utf-8", "replace").decode()  # a name may be any bytes
    if found.size_label is None and total:
        found.size_label = gguf.size_label(*writer.get_total_parameter_count())
    writer.add_type(gguf.GGUFType.MODEL)
    found.set_gguf_meta_model(writer)
    writer.add_file_type(outtype.file_type or 0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    (collected,) = writer.kv_data
    array = gguf.GGUFValueType.ARRAY  # all of them are of text
    kinds = {key: "str" if entry.type is array else KINDS[entry.type] for key, entry in collected.items()}
    return {key: (entry.value, kinds[key]) for key, entry in collected.items()} | others


def size_label(architecture: str, specs: Sequence[TensorSpec]) -> str:
    """What `general.size_label` says of a model with these tensors, such as 7B or 128x3.4B."""
    import gguf

    return str(gguf.size_label(*_with_tensors(architecture, specs).get_total_parameter_count()))


def _with_tensors(architecture: str, specs: Sequence[TensorSpec]) -> gguf.GGUFWriter:
    """A writer that counts parameters and collects keys; it never opens a file."""
    import gguf

    writer = gguf.GGUFWriter(None, architecture)
    for spec in specs:
        writer.add_tensor_info(spec.name, spec.shape, np.dtype(np.float32), spec.nbytes)
    return writer


# ------------------------------------------------------------------------------------------- what the checkpoint states


def _described(
    directory: Path, config: Mapping[str, object], n_params: int, is_export: bool, warnings: list[str]
) -> gguf.Metadata:
    """What the card, the names and the sampling parameters say. An export has a name, which is not taken apart."""
    import gguf

    card, path = directory / "README.md", config.get("_name_or_path")
    front = _front_matter(card, warnings)
    names = {"_name_or_path": path} if isinstance(path, str) and len(path) <= MAX_NAME and not is_export else {}
    place = None if is_export else directory.resolve()
    found = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), front, names, place, n_params)
    _drop_unfit(found, card, warnings)
    generation = json_input.read_object(directory / "generation_config.json")
    for field in dataclasses.fields(found):
        if field.name.startswith("sampling_"):
            name = field.name.removeprefix("sampling_")
            setattr(found, field.name, generation.get({"temp": "temperature"}.get(name, name)))
    if found.sampling_penalty_repeat is None:
        found.sampling_penalty_repeat = generation.get("repetition_penalty")
    _drop_unfit(found, directory / "generation_config.json", warnings)
    return found


def _front_matter(path: Path, warnings: list[str]) -> dict[str, Any]:
    """The front matter of a card, without empty items and names that are too long. What cannot be read is a warning."""
    try:
        front = front_matter.read(path) if path.is_file() else {}
    except FormatError as error:
        warnings.append(f"{error}; the model card is skipped")
        return {}
    found: dict[str, Any] = {}
    for key, value in front.items():
        items = value if isinstance(value, list) else [value]
        too_many = len(items) > MAX_LISTED
        if key.startswith(("base_model", "dataset")) and (too_many or any(map(_is_no_name, items))):
            warnings.append(
                f"{path}: front matter key {key} is {value!r:.60}, not a list of up to {MAX_LISTED} names; skipped"
            )
        else:
            found[key] = [item for item in value if item not in (None, "")] if isinstance(value, list) else value
    return found


def _is_no_name(item: object) -> bool:
    return isinstance(item, list) or (isinstance(item, str) and len(item) > MAX_NAME)


def _drop_unfit(found: gguf.Metadata, path: Path, warnings: list[str]) -> None:
    """Drop the values that GGUF cannot hold, each with a warning."""
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if value is not None and not _is_fit(field.name, value):
            warnings.append(f"{path}: {field.name} is {value!r:.60}, which GGUF cannot hold; skipped")
            setattr(found, field.name, None)


def _is_fit(field: str, value: object) -> bool:
    """Whether GGUF can hold a value of a field of `gguf.Metadata`."""
    if field in _LISTS:
        return (
            isinstance(value, list)
            and len(value) <= MAX_LISTED
            and all(isinstance(item, dict) and all(map(_is_text, item.values())) for item in value)
        )
    if field in ("tags", "languages", "license") and isinstance(value, list):
        return all(map(_is_text, value))
    if field in ("tags", "languages"):
        return False
    if field.startswith("sampling_") and field != "sampling_sequence":
        expected = int if field in _INTEGERS else (int, float)
        return isinstance(value, expected) and not isinstance(value, bool) and abs(value) < 2**31  # NaN is not
    return _is_text(value)


def _is_text(value: object) -> bool:
    """Whether a value is text that UTF-8 can express: JSON may hold half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


# ------------------------------------------------------------------------------------------------------------ overrides


def _read_overrides(path: Path) -> dict[str, Any]:
    """The object in a file that the user names."""
    try:
        found = json_input.read(path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not isinstance(found, dict):
        raise FormatError(f'{path}: expected a JSON object such as {{"general.author": "…"}}, found {found!r:.40}')
    return found


def _override(found: gguf.Metadata, values: Mapping[str, Any], path: Path, strict: bool = False) -> Entries:
    """Set fields from keys; return the keys that are no fields. With `strict`, only those that GGUF defines may be."""
    fields, others = _fields_of_keys(found), Entries()
    for key, value in values.items():
        if key in _OWN or not key.startswith("general."):
            raise FormatError(f"{path}: {key} does not describe a model; such a file holds general.author and the like")
        field = fields.get(key)
        if field and (value is None or _is_fit(field, value)):
            setattr(found, field, value)
        elif field and strict:
            raise FormatError(f"{path}: {key} is {value!r:.60}, which GGUF cannot hold there")
        elif strict and not _ONE_OF_MANY.fullmatch(key):
            raise FormatError(f"{path}: {UnknownNameError('key', key, fields)}")
        else:
            others[key] = (value, _usual_kind(value))
    return others


def _fields_of_keys(found: gguf.Metadata) -> dict[str, str]:
    """Keys to fields: general.source.url is source_url; the lists are general.base_models and general.datasets."""
    from gguf.constants import Keys

    fields = {field.name for field in dataclasses.fields(found)}
    keys = {*vars(Keys.General).values(), *(f"general.{name}" for name in _LISTS)}
    named = {key: key.removeprefix("general.").replace(".", "_") for key in keys if isinstance(key, str)}
    return {key: field for key, field in named.items() if field in fields}


def _usual_kind(value: object) -> str:
    """The kind of a value that export wrote; `Metadata.set` refuses what does not fit."""
    first = value[0] if isinstance(value, list) and value else value
    return {bool: "bool", float: "f32", int: "u32"}.get(type(first), "str")
