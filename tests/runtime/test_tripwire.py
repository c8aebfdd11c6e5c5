"""Scales that are not numbers, or are no weight's, are named with their place before they do harm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError
from quantkit.files import gguf
from quantkit.runtime import tripwire
from quantkit.runtime.model import load

ROWS, COLUMNS, ROW = 32, 512, 21
SCALED = [t.name for t in types.all() if t.block_size > 1 and t.name not in ("i2_s",) and t.has_codec]


def written(path: Path, name: str, data: np.ndarray) -> gguf.Tensor:
    metadata = gguf.Metadata()
    metadata.set("general.architecture", "none")
    with gguf.Writer(path, metadata, [gguf.TensorSpec("a.weight", (ROWS, COLUMNS), types.get(name))]) as writer:
        writer.write("a.weight", data)
    return gguf.open(path).tensors["a.weight"]


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((ROWS, COLUMNS)) * 0.05).astype(np.float32)


def poisoned(data: np.ndarray, value: float, name: str) -> np.ndarray:
    """The data with one scale replaced, found without knowing where it is: by what decoding then gives."""
    kind = types.get(name)
    size = kind.row_meta_bytes or kind.block_bytes
    form = np.float32 if kind.row_meta_bytes >= 4 else np.float16
    for at in range(0, size, 2):
        changed = data.copy()
        changed[ROW, at : at + form().itemsize] = np.frombuffer(form(np.nan).tobytes(), np.uint8)
        if not np.isfinite(kind.dequantize(changed, COLUMNS)).all():
            changed[ROW, at : at + form().itemsize] = np.frombuffer(form(value).tobytes(), np.uint8)
            return changed
    raise AssertionError(f"{name} has no scale")


@pytest.mark.parametrize(
    "name", [n if n in ("q8_0", "q4_K", "iq4_ks_r4") else pytest.param(n, marks=pytest.mark.full) for n in SCALED]
)
def test_sound_files_pass(name: str, weights: np.ndarray, tmp_path: Path) -> None:
    kind = types.get(name)
    importance = np.ones(COLUMNS, np.float32) if kind.requires_imatrix else None
    x = weights.copy()
    x[3] = 0
    x[5] *= 40  # outliers of models
    tripwire.require_sound(written(tmp_path / "x.gguf", name, kind.quantize(x, importance, effort="fast")))


@pytest.mark.parametrize("value", [np.nan, np.inf, 60000.0])
@pytest.mark.parametrize(
    "name",
    [
        *("q8_0", "q4_K", "q6_K", "iq4_k", "iq4_ks", "q8_0_r8"),
        *(pytest.param(n, marks=pytest.mark.full) for n in ("q3_K", "iq2_ks", "iq3_kt", "iq1_s", "iq4_ks_r4", "iq1_m")),
    ],
)
def test_a_poisoned_scale_is_named(name: str, value: float, weights: np.ndarray, tmp_path: Path) -> None:
    kind = types.get(name)
    base = kind.base_type if kind.interleave > 1 else kind
    importance = np.ones(COLUMNS, np.float32) if base.requires_imatrix else None
    data = poisoned(base.quantize(weights, importance, effort="fast"), value, base.name)
    tensor = written(tmp_path / "x.gguf", name, kind.interleave_rows(data) if kind.interleave > 1 else data)
    shown = "6" if np.isfinite(value) else str(value)
    with pytest.raises(DataError, match=rf"x\.gguf: a\.weight: row {ROW}, .*a scale of {name} is {shown}"):
        tripwire.require_sound(tensor)


def test_the_models_own_check_stops_before_the_block_runs(tiny: Path, tmp_path: Path) -> None:
    file = gguf.open(tiny)
    q8_0, name = types.get("q8_0"), "blk.1.ffn_up.weight"
    specs = [gguf.TensorSpec(t.name, t.shape, q8_0 if t.name == name else t.type) for t in file.tensors.values()]
    path = tmp_path / "bad.gguf"
    with gguf.Writer(path, file.metadata, specs) as writer:
        for spec, tensor in zip(specs, file.tensors.values()):
            data = tensor.data
            if tensor.name == name:
                data = q8_0.quantize(tensor.dequantize())
                data[3, 34:36] = np.frombuffer(np.float16(65504).tobytes(), np.uint8)
            writer.write(spec.name, data)
    at = gguf.open(path).tensors[name]
    place = at.offset + 3 * at.row_bytes + 34
    with pytest.raises(DataError, match=rf"{name}: row 3, block 1, offset {place}: a scale of q8_0 is 65504"):
        load(path).logits([1, 2, 3])
    assert np.isfinite(load(path, tripwire="off").logits([1, 2, 3])).all()


def test_full_checks_after_every_operation(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    model = load(tiny, tripwire="full")
    monkeypatch.setattr(model, "_require_finite", lambda what, y: checks.append(what))
    model.logits([1, 2, 3])
    assert {"blk.0.attn_q.weight", "blk.1.ffn_down.weight", "blk.0.attn_norm.weight"} <= set(checks)
    checks.clear()
    model.tripwire = "layer"
    model.logits([1, 2, 3])
    assert set(checks) == {model.head.embedding, model.head.output.weight}
