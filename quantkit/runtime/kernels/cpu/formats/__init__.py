"""How the CPU kernels read the blocks of each type: a module for each family, one reader function for each type.

`base` has `Format` and what readers yield, `registry` finds the format of a type, `points` looks up grid points.
"""
