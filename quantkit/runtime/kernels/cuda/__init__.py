"""Kernels for NVIDIA GPUs, compiled by numba.cuda. Importing this package or `dispatch` loads neither numba nor torch.

    codecs/        how each type is read: words of four signed bytes, scales, mins; a file for each family
    fields, reader, words   what codecs are written with
    hardware       GPU instructions, and their simulation
    weights, floats, activations …    the kernels; of attention, `decode_attention` is for one token
    kernel         compiling kernels, and caching machine code on disk
    device         the host's side: memory, launching, products of matrices
    staging        streaming matrices from the host through a GPU
    dispatch       which types have which kernels

Codecs describe a block's fields as `types/families/interleave.py` does, and take those of interleaved types from there:
one description serves a base type and its interleaved form. The CPU's readers (`kernels/cpu/formats`) cannot be shared:
they yield vectors of 8 lanes of a whole block, but a GPU thread needs one sub-block in registers. The decoders of
`quantkit/types` decode float32 values one by one, which would be slow; the tests compare with them.
"""
