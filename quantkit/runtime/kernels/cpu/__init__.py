"""SIMD kernels for the CPU.

formats      what each type's blocks hold: codes, scales, floors
activations  a vector quantized for integer products
matvec       weights times one vector
"""
