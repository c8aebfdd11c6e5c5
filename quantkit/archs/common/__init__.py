"""What architectures share: hyperparameters, blocks, tensor names and shapes, rope, validation.

`base.Arch` is the record that every architecture is, `blocks` the description that the runtime executes, `tensors` and
`transforms` how checkpoints and GGUF name and order tensors, `checked` and `validate` the bounds and relations of all
numbers. Pure data and functions of it; imports `formats` for metadata and nothing above.
"""
