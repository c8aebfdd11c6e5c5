"""Kernels of the runtime.

`reference` has the plain float32 kernels, the reference implementations for tests; `kv_rounding` encodes rows of KV
caches in numpy. `cpu` has SIMD kernels, `cuda` kernels for NVIDIA GPUs. `dispatch` says which CPU kernel serves a type.
"""
