"""What several tensor types share: the searches of their encoders, codebooks and grids, row interleaving.

A module serves a family (`trellis` the KT types, `kquant*` the K types, `rowscaled` the KS types, …); a type's own file
one level up says which it uses. Takes and gives numpy arrays of rows. Imports `codegen` and `types.base`; the searches
written with SIMD intrinsics (`types.native`) are imported when they first run.
"""
