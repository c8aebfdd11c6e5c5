"""SIMD kernels for the CPU, written with `quantkit.simd`.

formats       what each type's blocks hold: codes, scales, floors; a new type is one function here
activations   a vector quantized for integer products
matvec        weights times one vector
gemm, floats  weights times a batch, in integers or in float32
decode        rows of weights as float32
attention     one token's attention; batch: that of a prompt, and what else it needs
ops           the other operations of one token
team          operation lists, executed by all threads of a team together
"""
