"""How the CUDA kernels read each type: a family a file."""
