"""How the CPU kernels read each type."""
