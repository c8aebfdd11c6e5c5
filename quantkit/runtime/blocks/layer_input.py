"""Per-layer embeddings (archs.blocks.LayerInput), layer by layer."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quantkit.archs.common import blocks
from quantkit.errors import DataError
from quantkit.runtime.blocks import float_linear
from quantkit.runtime.blocks.float_linear import Weights
from quantkit.runtime.blocks.spans import Span

FACTOR = 2**-0.5  # of the sum of a layer's two embeddings


class LayerInputRun(Protocol):
    """What per-layer embeddings use of a BlockRunner."""

    weights: Weights

    def from_host(self, x: np.ndarray) -> np.ndarray:
        """What is looked up on the host, where this runs."""
        ...

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        """`rms_norm` with the tensors that a block names."""
        ...

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """The product with a weight matrix."""
        ...

    def activate(self, name: blocks.Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """act(gate) * up."""
        ...


def layer_input(run: LayerInputRun, part: blocks.LayerInput, x: np.ndarray, spans: list[Span]) -> np.ndarray:
    """What per-layer embeddings add to x float32[tokens, n_embd]. DataError where spans do not have their tokens."""
    pieces = [span.tokens for span in spans if span.tokens is not None]
    if len(pieces) != len(spans):
        raise DataError(f"{part.table}: rows of it are looked up by tokens, and only states are given")
    u = of_tokens(run, part, np.concatenate(pieces))
    hidden = run.activate("geglu", run.linear(part.gate, x), u)
    return run.norm(part.post_norm, run.linear(part.out, hidden))


def of_tokens(run: LayerInputRun, part: blocks.LayerInput, tokens: np.ndarray) -> np.ndarray:
    """u float32[tokens, width] of int64[tokens]."""
    embedded = run.from_host(float_linear.embed(run.weights, part, tokens))
    rows = table_rows(run.weights, part, tokens)[:, part.first : part.first + part.width]
    result: np.ndarray = run.norm(part.project_norm, run.linear(part.project, embedded)) + run.from_host(rows)
    return result * FACTOR


def table_rows(weights: Weights, part: blocks.LayerInput, tokens: np.ndarray) -> np.ndarray:
    """float32[tokens, layers * width]: the rows of the table that int64[tokens] name, scaled, those of all layers."""
    rows = float_linear.embedding_rows(weights[part.table], tokens)
    result: np.ndarray = rows * np.float32(part.table_scale)
    return result
