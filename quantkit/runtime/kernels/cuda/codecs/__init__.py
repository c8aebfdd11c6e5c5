"""How the CUDA kernels read each type: a module for each family.

A codec reads a sub-block of 32 columns of a row: eight words of four signed bytes, scales, mins (`reader.SubBlock`).
"""
