"""What architectures share: hyperparameters, blocks, tensor names and shapes, RoPE, validation.

`base.Arch` is the base class of all architectures. `blocks` describes what the runtime computes. `tensors` and
`transforms` map tensor names and rows between checkpoints and GGUF. `checked` has the bounds of all numbers, and
`validate` their relations. These modules hold data and pure functions; they import `formats` for metadata, and nothing
above it.
"""
