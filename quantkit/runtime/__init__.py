"""Running a GGUF file: `loading.load` opens it, `generate` makes text.

`model` is the model with its forward passes. `blocks` computes layer by layer, `compiled` runs operation lists on a
thread team, `kv` has the caches, `parallel` splits a model over devices, `cuda` runs it on GPUs, `kernels` has the
loops that all of them call. Takes files and token ids and gives logits. Imports `placement`, `tokenizers`, `archs` and
`formats`, never `pipelines`.
"""
