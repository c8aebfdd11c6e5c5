"""Kernels for NVIDIA GPUs, compiled by numba.cuda. Importing this package or `dispatch` loads neither numba nor torch.

    codecs/        how each type is read: words of four signed bytes, scales, mins; a family a file
    fields, reader, words, hardware   what codecs are written with, and what the hardware or the simulator does
    weights, floats, activations …    the kernels
    kernel         compiling them, and keeping machine code on disk
    device         the host's side: memory, launching, products of matrices
    staging        what is streamed through a GPU
    dispatch       which types have which kernels

Codecs state a block's fields as `types/families/interleave.py` does, and take interleaved types' from there: one
description serves a base type and its interleaved form. The CPU's readers (`kernels/cpu/formats`) could not be shared:
they yield vectors of 8 lanes of a whole block, where a thread of a GPU wants one sub-block of it in registers. The
plain decoders of `quantkit/types` could be recompiled for the device, but give float32 one by one, from bytes; the
tests compare with what they decode.
"""
