"""Encoder searches and bit moves written with SIMD intrinsics (`codegen.simd`, `codegen.native`).

`grid_search` and `trellis_search` find codes, `permute` interleaves rows, `recode` turns floats of one format into
another, `writing` sends what was made to a file. Importing the searches loads numba, so types and families import them
inside functions.
"""
