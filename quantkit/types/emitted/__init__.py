"""Searches written with `simd`, which loads numba when it is imported: types import these inside functions only."""
