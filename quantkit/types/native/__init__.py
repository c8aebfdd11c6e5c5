"""Encoder searches and bit moves: SIMD intrinsics (`codegen.simd`) and native functions (`codegen.native`).

`grid_search` and `trellis_search` find codes; `trellis_candidates`, `trellis_index` and `trellis_simd` belong to the
latter. `permute` interleaves rows, `recode` converts floats of one format to another, `writing` writes results to a
file. Importing the searches loads numba, so types and families import them inside functions.
"""
