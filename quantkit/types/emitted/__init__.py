"""Searches and moves written with `simd`, which loads numba on import: types import these inside functions only."""
