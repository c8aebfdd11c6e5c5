"""Formats by ggml type id: collected from the families' modules."""

from __future__ import annotations

from types import ModuleType

from quantkit.runtime.kernels.cpu.formats import (
    blocks32,
    blocks32_r,
    few_levels,
    grids,
    grids_r4,
    iq1,
    kquants,
    kquants_r4,
    nonlinear,
    nonlinear_r4,
    rowscaled,
    trellis,
)
from quantkit.runtime.kernels.cpu.formats.base import Format
from quantkit.types import layout

_FAMILIES: tuple[ModuleType, ...] = (
    blocks32, blocks32_r, kquants, kquants_r4, nonlinear, nonlinear_r4, rowscaled, grids, grids_r4, iq1, trellis,
    few_levels,
)  # fmt: skip

FORMATS: dict[int, Format] = {
    layout(f.name).ggml_type: f for family in _FAMILIES for f in vars(family).values() if isinstance(f, Format)
}
