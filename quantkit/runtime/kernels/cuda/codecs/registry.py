"""All codecs, by ggml type id."""

from __future__ import annotations

from quantkit.runtime.kernels.cuda.codecs import blocks32, grids, grids_r4, kquants, nonlinear, rowscaled, trellis
from quantkit.runtime.kernels.cuda.reader import Codec
from quantkit.types import layout

CODECS: dict[int, Codec] = {
    layout(codec.name).ggml_type: codec
    for family in (blocks32, kquants, nonlinear, rowscaled, trellis, grids, grids_r4)
    for codecs in vars(family).values()
    if isinstance(codecs, list)
    for codec in codecs
    if isinstance(codec, Codec)
}
