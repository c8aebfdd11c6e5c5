"""Compiling kernels: numba, LLVM and the disk cache of what they make.

`jit` has the decorators for numba kernels and C callbacks, CPU features and `over_rows`, which shares rows among
threads. `simd` has SIMD intrinsics for kernels, `ir_builder` and `ir_values` the Python that emits their LLVM code,
`native` C functions that need no numba. `disk_cache` stores compiled code, one file a function. Takes Python functions
and gives callables; knows nothing of models or files. Imports `errors` only.
"""
