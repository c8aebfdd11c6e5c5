"""SIMD kernels for the CPU, written with `quantkit.codegen.simd`.

formats       what each type's blocks hold: codes, scales, minimums; a new type is one function here
activations   a vector quantized for integer products
matvec        weights times one vector
gemm          weights times a batch in integers; float_gemm: in float32
dequantize    rows of weights as float32
attention     one token's attention; kv_rows: rows of a KV cache
decode_ops    the other operations of one token
prefill_ops   those of a batch; expert_ops: routed experts of both
thread_team   operation lists, executed by all threads of a team together
"""
