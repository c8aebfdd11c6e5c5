"""Made-up costs for models that are only described: a quarter of the error per bit, weighted by class and layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quantkit import types
from quantkit.placement.allocation.costs import Costs, TensorCost
from quantkit.recipe.planning.planner import Tensor

TYPES = ("iq2_ks", "iq2_k", "iq3_ks", "iq3_k", "iq4_ks", "iq4_k", "iq5_ks", "iq5_k", "iq6_k", "q8_0")
SMALL = ("q4_0", "iq4_nl", "q5_0", "q6_0", "q8_0")


def costs_of(tensors: Sequence[Tensor], names: Sequence[str] = TYPES, seed: int = 0) -> Costs:
    """Costs for every matrix; types of 32 columns too, for rows that need a fallback."""
    rng = np.random.default_rng(seed)
    found = {}
    for t in tensors:
        if len(t.shape) < 2 or not t.name.endswith("weight"):
            continue
        kld = float(1e-3 * rng.lognormal() * (math.prod(t.shape) / 1e6) ** 0.5)
        errors = {}
        for name in dict.fromkeys((*names, *SMALL)):
            bits = types.layout(name).bits_per_weight()
            error = 4.0 ** (4.5 - bits) * float(rng.uniform(0.8, 1.25))
            errors[name] = (error, error / 20)
        found[t.name] = TensorCost(tuple(t.shape), kld, kld / 10, 1.0, errors)
    return Costs(found, {"model": "made up"})
