"""File formats: GGUF, safetensors, torch's .bin, importance matrices, KL divergence bases.

Readers give lazy tensors over read-only mappings. Writers stream into files that appear under their names when they
are complete (`atomic`, `stream`, `pipeline`). `journal` records the progress of a run, `provenance` what a tensor was
made of. The package takes and returns numpy arrays and metadata and knows nothing of models. It imports `types`,
`inputs`, `errors` and `codegen`.
"""
