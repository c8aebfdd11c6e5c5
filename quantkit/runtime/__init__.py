"""Running a GGUF file: `loading.load` opens it, `generate` makes text.

`blocks` computes layer by layer, `compiled` runs operation lists on a thread team, `kv` has the caches, `parallel`
several devices, `cuda` GPUs, `kernels` what they all call. Takes files and token ids and gives logits. Imports
`placement`, `tokenizers`, `archs` and `formats`, never `pipelines`.
"""
