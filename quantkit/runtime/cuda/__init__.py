"""GPUs as devices of a model.

`gpu_worker` is the worker of one GPU; `gpu_attention`, `gpu_latent`, `gpu_indexer`, `gpu_recurrent`, `gpu_mamba2` and
`gpu_experts` are the kinds of blocks, `cuda_graph` replays one token as a CUDA graph, `gpu_rank` is a GPU under
`-sm graph`, `gpu_context` the Protocol of what they need of a worker. Takes and gives torch tensors. The kernels are in
`runtime.kernels.cuda`. Needs torch and a driver when a GPU is opened, not when it is imported.
"""
