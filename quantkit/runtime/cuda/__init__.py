"""GPUs as devices of a model: the worker of one, its CUDA graphs, its latent attention and delta net.

The kernels are in `runtime.kernels.cuda`. Needs torch and a driver when a GPU is opened, not when it is imported.
"""
