"""Scales that are NaN, Inf or too large for a weight: an error with their offset before the block runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError
from quantkit.formats import gguf
from quantkit.runtime import scale_check
from quantkit.runtime.generate import Sampler, Sampling
from quantkit.runtime.loading import load

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
    """The data with one scale replaced. Its offset is found by decoding: which values change."""
    kind = types.get(name)
    if name == "iq1_m":  # the top four bits of four words
        changed, bits = data.copy(), int(np.float16(value).view(np.uint16))
        for i in range(4):
            changed[ROW, 49 + 2 * i] = (changed[ROW, 49 + 2 * i] & 15) | (bits >> (4 * i) & 15) << 4
        return changed
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
    tensor = written(tmp_path / "x.gguf", name, kind.quantize(x, importance, effort="fast"))
    scale_check.require_sound(tensor)  # raises nothing
    assert scale_check._count_exponents(tensor, None).any()  # and has looked


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
    text = "6" if np.isfinite(value) else str(value)
    with pytest.raises(DataError, match=rf"x\.gguf: a\.weight: row {ROW}, .*a scale of {name} is {text}"):
        scale_check.require_sound(tensor)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 65504.0])
@pytest.mark.parametrize("kind", ["q8_0", "q4_K", "iq4_k", "iq2_ks", "iq3_xxs"])
def test_a_model_stops_before_the_block_runs(
    kind: str, value: float, numerics: str, tiny: Path, tmp_path: Path
) -> None:
    """One f16 scale of one tensor: prompts, chunks and replies end by naming tensor and block."""
    file, t, name, row = gguf.open(tiny), types.get(kind), "blk.1.ffn_up.weight", 3
    specs = [gguf.TensorSpec(x.name, x.shape, t if x.name == name else x.type) for x in file.tensors.values()]
    path = tmp_path / "bad.gguf"
    block = 0 if t.row_meta_bytes else file.tensors[name].shape[1] // t.block_size - 1
    with gguf.Writer(path, file.metadata, specs) as writer:
        for spec, tensor in zip(specs, file.tensors.values()):
            data = tensor.data
            if tensor.name == name:
                importance = np.ones(tensor.shape[1], np.float32) if t.requires_imatrix else None
                data = t.quantize(tensor.dequantize(), importance, effort="fast")
                start = block * t.block_bytes
                data[row, start : start + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
            writer.write(spec.name, data)
    where = "its header" if t.row_meta_bytes else f"block {block}"
    result = gguf.open(path).tensors[name]
    offset = result.offset + row * result.row_bytes + block * t.block_bytes
    message = rf"{name}: row {row}, {where}, offset {offset}: a scale of {kind} is {value:g}"
    for run in (
        lambda m: m.forward([1, 2, 3], m.new_cache(8), logits="last"),
        lambda m: m.forward_batch([([1, 2, 3], m.new_cache(8))]),
        lambda m: m.hidden_sequences(np.ones((2, 4), int), slice(None)),
        lambda m: m.generate([1, 2, 3], 2),
    ):
        with pytest.raises(DataError, match=message):
            run(load(path, numerics=numerics))
    unchecked = load(path, numerics=numerics, tripwire="off")
    result = unchecked.logits([1, 2, 3])  # whatever comes of it
    assert np.isfinite(result).all() == np.isfinite(value)
    unchecked.hidden_sequences(np.ones((2, 4), int), slice(None))
    if not np.isfinite(value):
        for sampling in (Sampling(temperature=0), Sampling(temperature=0.8)):
            with pytest.raises(DataError, match="the largest logit is nan; --tripwire layer names the cause"):
                Sampler(sampling)(result[-1], [1, 2, 3])


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
