"""Weights of tokens in what an observer gets: the attention that a token receives.

    w_t = 1/heads sum over heads and queries of the softmax weight of key t        1 on average without sinks

An error in the key or the value of a token reaches every query that attends to it. The first token of a text receives
a hundred times as much as the others in most models (attention sinks, Xiao et al., 2023). So a mean over tokens with
these weights says more about what an error of W_k or W_v does than one over tokens alike. The observer gets
sqrt(w_t) x_t: squares and products of it have the weight w_t.

Inputs pass by before attention is computed. They wait as a `HeldInput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quantkit.runtime.blocks.spans import Span


@dataclass
class HeldInput:
    """An input float32[tokens, n] that waits for the weights of its tokens.

    weights   names of the matrices whose input it is
    names     those of them that got it, in order
    """

    x: np.ndarray
    weights: set[str]
    names: list[str] = field(default_factory=list)

    def takes(self, name: str, x: np.ndarray) -> bool:
        """Whether x, which enters the matrix `name`, waits; then its name is kept."""
        if x is not self.x or name not in self.weights:
            return False
        self.names.append(name)
        return True


def weighed(x: np.ndarray, spans: Sequence[Span], heads: int) -> np.ndarray:
    """float32[tokens, n] times the square roots of the weights that spans have counted; x itself if they have none."""
    received = [span.received for span in spans if span.received is not None]
    if len(received) < len(spans):
        return x
    roots: np.ndarray = np.sqrt(np.concatenate(received) / heads).astype(np.float32)
    weighted: np.ndarray = x * roots[:, None]
    return weighted
