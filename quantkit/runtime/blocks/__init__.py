"""The parts of a model, layer by layer in float32: attention, latent attention, delta net, experts.

`block_runner.BlockRunner` runs the blocks that an architecture describes over the tensors that are there; `layers` has
linear maps, norms, rope and attention. Takes and gives float32 arrays [tokens, n].
"""
