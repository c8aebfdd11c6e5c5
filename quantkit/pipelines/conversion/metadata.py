"""The `general.*` keys of a converted checkpoint: name, size, license and tags, from the files that describe the model.

    general_keys(Path("SmolLM2-135M"), config, "llama", n_params, outtype, warnings)

Later sources override earlier ones: the directory's name, the front matter of `README.md`, `gguf_metadata.json` (which
`export` writes), the sampling parameters of `generation_config.json`. The keys of the architecture and of the tokenizer
come from `archs` and `tokenizers`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError
from quantkit.formats import front_matter
from quantkit.inputs.json_input import read_object
from quantkit.tokenizers import vocab
from quantkit.types import QuantType

QUANTIZATION_VERSION = 2

MetadataEntries = dict[str, tuple[Any, str]]  # key: (value, its GGUF type)


def general_keys(
    directory: Path,
    config: Mapping[str, object],
    architecture: str,
    n_params: int,
    outtype: QuantType,
    warnings: list[str],
) -> MetadataEntries:
    """The `general.*` keys. What cannot be read in `README.md` is skipped, with a line in `warnings`."""
    name = os.path.basename(str(config.get("_name_or_path") or "").rstrip("/")) or directory.resolve().name
    entries: MetadataEntries = {
        "general.architecture": (architecture, "str"),
        "general.type": ("model", "str"),
        "general.name": (name, "str"),
        "general.size_label": (size_label(n_params), "str"),
    }
    entries |= _model_card(directory / "README.md", warnings)
    for key, value in read_object(directory / vocab.METADATA_FILE).items():
        entries[key] = (value, "str" if isinstance(value, (str, list)) else "u32")
    entries |= vocab.sampling(directory)
    entries["general.file_type"] = (outtype.file_type, "u32")
    entries["general.quantization_version"] = (QUANTIZATION_VERSION, "u32")
    return entries


def _model_card(path: Path, warnings: list[str]) -> MetadataEntries:
    """License, languages and tags from the front matter of `README.md`. A value that cannot be read is a warning."""
    try:
        front = front_matter.read(path) if path.is_file() else {}
    except FormatError as error:
        warnings.append(f"{error}; its license, languages and tags are skipped")
        return {}
    entries: MetadataEntries = {}
    for key, target in (("license", "general.license"), ("tags", "general.tags"), ("language", "general.languages")):
        value = front.get(key)
        listed = [part for part in (value if isinstance(value, list) else [value]) if part not in (None, "")]
        if not all(isinstance(part, str) for part in listed) or (key == "license" and len(listed) > 1):
            warnings.append(f"{path}: front matter key {key} is {value!r:.60}, which {target} cannot hold; skipped")
        elif listed:
            entries[target] = (listed[0] if key == "license" else listed, "str")
    return entries


def size_label(params: int) -> str:
    """A parameter count in the form used in model names: 135M, 1.7B, 70B."""
    for unit, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if params >= unit:
            return f"{params / unit:.{1 if params < 10 * unit else 0}f}{suffix}"
    return f"{params / 1000:.0f}K"
