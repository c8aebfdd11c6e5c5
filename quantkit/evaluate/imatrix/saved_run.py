"""The state of an importance matrix run in one file, from which the run resumes with the same bytes.

The file is what `np.savez` writes, uncompressed. `about` is JSON: version, fingerprint, layers done (by layer), chunks
done and weights of each text. For text i and weight j there are `sums.i.j` float64[matrices, n] and `counts.i.j`
int64[matrices], and `nll.i` with perplexity. Second moments: `about` has the form of each weight's input
(`InputForm.key`), the first weight of each input, and their order; `moments.i.k.NAME` are the arrays of input k, by the
names that its sums give them.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import FormatError
from quantkit.evaluate.imatrix.collect import Collector, TextState
from quantkit.evaluate.imatrix.input_sums import ProductSketch, ProductSums
from quantkit.evaluate.imatrix.second_moments import InputForm, MomentsCollector
from quantkit.formats.atomic import writing
from quantkit.formats.owned import read_own
from quantkit.inputs import json_input

_VERSION = 4


@dataclass
class SavedRun:
    """A resumable run over several texts: its fingerprint, and the state of each text.

    layers   of a run by layer: how many have the sums of all chunks
    """

    run: str
    texts: list[TextState] = field(default_factory=list)
    layers: int = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run; an existing file stays until the new one is complete."""
        arrays: dict[str, np.ndarray] = {}
        about: dict[str, Any] = {"version": _VERSION, "run": self.run, "layers": self.layers, "texts": []}
        for i, text in enumerate(self.texts):
            names = list(text.collector.sums)
            output = text.collector.process_output
            about["texts"].append({
                "done": text.done, "names": names, "process_output": output,
                "token_weights": text.collector.token_weights,
            })  # fmt: skip
            if text.collector.moments is not None:
                about["texts"][-1]["moments"] = _add_moments(arrays, i, text.collector.moments)
            for j, name in enumerate(names):
                arrays[f"sums.{i}.{j}"] = text.collector.sums[name]
                arrays[f"counts.{i}.{j}"] = text.collector.counts[name]
            if text.nll is not None:
                arrays[f"nll.{i}"] = text.nll
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        with writing(path, own=True) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SavedRun:
        """Read a run that `save` wrote; FormatError for any other file."""
        try:
            with np.load(_stored(read_own(Path(path))), allow_pickle=False) as file:
                about = json_input.parse(file["about"].tobytes(), f"{path}: not a saved run of quantkit imatrix")
                if about["version"] != _VERSION:
                    raise FormatError(f"{path}: a saved run of version {about['version']}, not {_VERSION}; remove it")
                texts = [_restored(file, i, text) for i, text in enumerate(about["texts"])]
                return cls(about["run"], texts, int(about.get("layers", 0)))
        except (ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile) as error:
            raise FormatError(f"{path}: not a saved run of quantkit imatrix ({error!r:.200}); remove it") from None


def _stored(data: bytes) -> io.BytesIO:
    """Check a file that `np.savez` wrote. ValueError for a compressed member, which could inflate without limit."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        if any(part.compress_type != zipfile.ZIP_STORED or part.file_size > len(data) for part in file.infolist()):
            raise ValueError("a member is compressed")
    return io.BytesIO(data)


def _add_moments(arrays: dict[str, np.ndarray], index: int, moments: MomentsCollector) -> dict[str, Any]:
    """Add the sums of a text to `arrays`; what `about` says of them."""
    for k, sums in enumerate(moments.sums.values()):
        arrays |= {f"moments.{index}.{k}.{name}": array for name, array in sums.arrays().items()}
    forms = {name: form.key for name, form in moments.forms.items()}
    return {"forms": forms, "first": moments.first, "inputs": list(moments.sums)}


def _restored_moments(file: Mapping[str, np.ndarray], index: int, about: dict[str, Any]) -> MomentsCollector:
    forms = {name: InputForm.of(key) for name, key in about["forms"].items()}
    found = MomentsCollector(forms, first=dict(about["first"]))
    for k, name in enumerate(about["inputs"]):
        prefix = f"moments.{index}.{k}."
        arrays = {key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix)}
        found.sums[name] = (ProductSketch if forms[name].rank else ProductSums).of_arrays(arrays)
    return found


def _restored(file: Mapping[str, np.ndarray], index: int, about: dict[str, Any]) -> TextState:
    collector = Collector(bool(about["process_output"]), token_weights=str(about["token_weights"]))
    collector.chunks = int(about["done"])
    for j, name in enumerate(about["names"]):
        collector.sums[name] = file[f"sums.{index}.{j}"]
        collector.counts[name] = file[f"counts.{index}.{j}"]
    if "moments" in about:
        collector.moments = _restored_moments(file, index, about["moments"])
    nll = file.get(f"nll.{index}")
    return TextState(collector, nll, int(about["done"]))
