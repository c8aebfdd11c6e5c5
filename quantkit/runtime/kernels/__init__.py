"""Kernels of the runtime. `reference` holds the float32 ones, right on every CPU."""
