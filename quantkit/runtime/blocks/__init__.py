"""The parts of a model, layer by layer in float32: attention, latent attention, delta net, experts.

`block_runner.BlockRunner` computes the blocks that an architecture describes. `float_linear`, `float_ops` and
`float_attention` have the matrix products, the norms, activations and RoPE, and attention; `latent`, `recurrent` and
`experts` the other kinds of layers; `spans` says which rows of a batch belong to which sequence. Takes and gives
float32 arrays [tokens, n].
"""
