"""Compiling kernels: numba, LLVM and the disk cache of what they make.

| module | holds |
| --- | --- |
| `jit`, `callbacks` | kernels that numba compiles; the same as C functions for op lists |
| `simd`, `ir_builder`, `ir_values` | SIMD intrinsics for kernels, and the builder of LLVM code they are written with |
| `native` | C functions written with that builder; they need no numba |
| `half` | conversions of float16 and bfloat16, which numba lacks |
| `blas` | keeping numpy's matrix products on one thread |
| `thread_pool`, `cpu_target` | slices of rows on several threads; CPU features and SIMD code paths |
| `digests`, `disk_cache`, `array_cache` | what names a cached file; the files; arrays cached like kernels |
| `numba_loader`, `numba_internals`, `compile_notice` | importing numba; every private name of it; progress on stderr |
| `interrupts` | Ctrl-C while numba compiles |

Takes Python functions and returns callables; knows nothing of models or files. Imports `errors` only.
"""
