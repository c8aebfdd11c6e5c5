"""SIMD kernels for the CPU, written with `quantkit.codegen.simd`.

    operation            C signature, parameters and work split of operations
    op_list              builds a list of operations; thread_team runs it on all threads
    formats              how kernels read each type's blocks: codes, scales, minimums; a new type is one function here
    activations          quantized activations of integer products
    matvec               matrix times one vector
    gemm, float_gemm     matrix times a batch, in integers and in float32
    dequantize           rows of weights as float32
    kv_rows              rows of a KV cache
    decode_*             operations of the decode plan: attention, routed experts, the rest
    prefill_*            operations of the prefill plan: the same; expert_panels: products of one expert's rows

Imports `codegen`, `types`, `placement.kernel_sizes` and `kernels/reference`, nothing else of the runtime.
"""
