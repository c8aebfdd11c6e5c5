"""Measure how much each expert adds to its layer's output: the saliency of REAP (arXiv:2510.13999).

    S_e = mean of w_e(x) * |f_e(x)| over the tokens x that the router sends to expert e

w_e is the weight by which the expert's output f_e(x) is multiplied, |.| the Euclidean norm. An expert that no token was
sent to has saliency 0. Sums are float64. The file is JSON:

    {"schema": "quantkit.saliency/1", "text": PATH, "chunks": N, "ctx_size": N,
     "layers": {"3": {"saliency": [S_0, …], "tokens": [count_0, …]}, …}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantkit.archs.common.tensors import split_name
from quantkit.errors import DataError, UnsupportedError
from quantkit.evaluate.chunk_runs import evaluate_chunks
from quantkit.evaluate.text import Chunks
from quantkit.formats.atomic import writing
from quantkit.pipelines.prune import SALIENCY

if TYPE_CHECKING:
    from quantkit.runtime.model import Model


@dataclass(frozen=True)
class Saliency:
    """What `measure` found. sums: of w |f|, float64[experts] by layer; tokens: int64[experts] by layer."""

    sums: dict[int, np.ndarray]
    tokens: dict[int, np.ndarray]
    chunks: Chunks

    def of_layer(self, layer: int) -> np.ndarray:
        """float64[experts]: the mean of w |f| of each expert."""
        mean: np.ndarray = self.sums[layer] / np.maximum(self.tokens[layer], 1)
        return mean

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file; it appears when it is complete."""
        layers = {
            str(layer): {"saliency": self.of_layer(layer).tolist(), "tokens": self.tokens[layer].tolist()}
            for layer in sorted(self.sums)
        }
        record = {"schema": SALIENCY, "text": self.chunks.source, "chunks": len(self.chunks)}
        record |= {"ctx_size": self.chunks.n_ctx, "layers": layers}
        with writing(Path(path)) as stream:
            stream.write((json.dumps(record, indent=1) + "\n").encode())


def measure(model: Model, chunks: Chunks, on_chunk: Callable[[int], None] | None = None) -> Saliency:
    """Run a model over chunks and measure its experts; `on_chunk(chunks done)` is called after each.

    UnsupportedError for a model without experts, on several devices or with fast numerics; DataError where an expert's
    output is not finite.
    """
    if not any(getattr(part, "router", None) for block in model.blocks for part in block.parts):
        raise UnsupportedError(f"{model.path}: {model.hparams.arch} has no experts to measure")
    if model.split is not None or model.numerics != "exact":
        raise UnsupportedError(f"{model.path}: experts are measured on the CPU with exact numerics")
    found = Saliency({}, {}, chunks)

    def observe(name: str, outputs: np.ndarray, weights: np.ndarray, number: int, count: int) -> None:
        layer = split_name(name)[1] or 0
        if layer not in found.sums:
            found.sums[layer], found.tokens[layer] = np.zeros(count), np.zeros(count, np.int64)
        norms = np.sqrt(np.einsum("tj,tj->t", outputs, outputs, dtype=np.float64))
        found.sums[layer][number] += float(norms @ weights.astype(np.float64))
        found.tokens[layer][number] += len(outputs)

    model.output_observer = observe
    try:
        for index, _ in evaluate_chunks(model, chunks.inputs, rows=slice(0, 0)):
            if on_chunk is not None:
                on_chunk(index + 1)
    finally:
        model.output_observer = None
    for layer, sums in found.sums.items():
        if not np.isfinite(sums).all():
            raise DataError(f"{model.path}: blk.{layer}: NaN or Inf left an expert")
    return found
