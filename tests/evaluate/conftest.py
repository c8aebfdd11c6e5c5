"""The F16 and Q8_0 forms of the wheel's model that the golden figures were measured with, made once a session."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.formats import gguf


def rewrite(source: Path, target: Path, name: str, decide: Callable[[gguf.Tensor], bool]) -> Path:
    """Copy a file with the tensors that `decide` chooses encoded as the type `name`; the others stay as they are."""
    file = gguf.open(source)
    chosen = types.get(name)
    specs = [gguf.TensorSpec(t.name, t.shape, chosen if decide(t) else t.type) for t in file.tensors.values()]
    file.metadata.set("general.file_type", chosen.file_type, "u32")
    with gguf.Writer(target, file.metadata, specs) as writer:
        for spec, tensor in zip(specs, file.tensors.values()):
            same = spec.type is tensor.type
            rows = tensor.data if same else chosen.quantize(tensor.decode_rows(0, tensor.n_rows))
            writer.write(spec.name, rows)
    return target


@pytest.fixture(scope="session")
def f16_model(smollm2_q4_1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Q4_1 decoded to float32 and rounded to f16; norms stay f32, as golden/README.md describes."""
    target = tmp_path_factory.mktemp("smollm2") / "f16.gguf"
    return rewrite(smollm2_q4_1, target, "f16", lambda t: t.type.name != "f32")


@pytest.fixture(scope="session")
def q8_0_model(f16_model: Path) -> Path:
    return rewrite(f16_model, f16_model.with_name("q8_0.gguf"), "q8_0", lambda t: t.type.name == "f16")


@pytest.fixture(scope="session")
def golden_ppl(golden: Path) -> list[float]:
    """The running values after each of 11 chunks, from golden/README.md."""
    text = (golden / "README.md").read_text().partition("running value after each of 11 chunks:\n")[2]
    numbers = itertools.takewhile(lambda word: word != "final", text.split())
    found = [float(word.rstrip(",")) for word in numbers]
    assert len(found) == 11
    assert np.isfinite(found).all()
    return found
