"""Costs refined by measured files: a factor for each type.

    sum over types k of f_k P_jk = M_j   for each file j: P_jk its predicted divergence from tensors of type k,
                                         M_j its measured divergence
    f_k = 1                              for each type k

All equations are solved together by least squares. Those of files are weighted by their relative errors, those of
types by 1/SPREAD: a type that no file has keeps its factor of 1, and one that all files have alike takes what they
have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quantkit.placement.allocation.costs import Costs

SPREAD = 0.5  # expected deviation of factors from 1, without measurements
_MODEL_ERROR = 0.03  # relative; what factors of types cannot explain of a file
_LEAST, _LARGEST = 0.25, 4.0


@dataclass(frozen=True)
class MeasuredFile:
    """A file that was run: predicted divergence by name of type without factors, and the measured one, with its
    standard error, in nats per token."""

    predicted: Mapping[str, float]
    kld: float
    error: float


def refined(costs: Costs, files: Sequence[MeasuredFile]) -> Costs:
    """The costs with factors that explain the measured files. Files without a divergence say nothing."""
    files = [file for file in files if file.kld > 0 and any(file.predicted.values())]
    names = sorted({name for file in files for name in file.predicted})
    if not names:
        return costs
    weights = [1 / float(np.hypot(_MODEL_ERROR, file.error / file.kld)) for file in files]
    rows = [[w * file.predicted.get(name, 0.0) / file.kld for name in names] for w, file in zip(weights, files)]
    prior = np.eye(len(names)) / SPREAD
    matrix, target = np.vstack([rows, prior]), np.concatenate([weights, prior.sum(axis=1)])
    factors = np.linalg.lstsq(matrix, target, rcond=None)[0].clip(_LEAST, _LARGEST)
    return replace(costs, factors=dict(zip(names, factors.tolist())))
