"""What vision towers compute, in numpy, float32[tokens, columns]."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]  # float32, by the name of the tensor


def linear(weights: Weights, stem: str, x: np.ndarray) -> np.ndarray:
    """The product with `stem`.weight, and its bias where there is one."""
    y = x @ weights[f"{stem}.weight"].T
    bias = weights.get(f"{stem}.bias")
    return y if bias is None else np.asarray(y + bias)


def layer_norm(weights: Weights, stem: str, x: np.ndarray, eps: float) -> np.ndarray:
    """LayerNorm of each row."""
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps)
    return np.asarray(scaled * weights[f"{stem}.weight"] + weights[f"{stem}.bias"])


def rms_norm(weights: Weights, stem: str, x: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm of each row."""
    return np.asarray(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weights[f"{stem}.weight"])


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """GELU in its tanh form, the one that ggml has."""
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def gelu(x: np.ndarray) -> np.ndarray:
    """GELU."""
    erf = np.vectorize(math.erf, otypes=[np.float32])
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x)."""
    return np.asarray(x / (1 + np.exp(-x)))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """float32[tokens, heads * dim] of q, k and v float32[tokens, heads, dim]; every token attends to all of them."""
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares = scores / scores.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", shares, v).reshape(len(q), -1))


def patches(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """float32[rows, columns, n]: the convolution of an image with a kernel [n, channels, size, size]; no overlap.

    Pixels beyond the last whole patch are left out.
    """
    n, channels, size, _ = kernel.shape
    rows, columns = image.shape[1] // size, image.shape[2] // size
    whole = image[:, : rows * size, : columns * size].reshape(channels, rows, size, columns, size)
    return np.asarray(whole.transpose(1, 3, 0, 2, 4).reshape(rows, columns, -1) @ kernel.reshape(n, -1).T)
