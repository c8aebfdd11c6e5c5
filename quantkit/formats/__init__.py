"""File formats: GGUF, safetensors, torch's .bin, importance matrices, KL divergence bases.

Readers give lazy tensors over read-only mappings, writers stream into files that appear when they are complete
(`atomic`, `stream`, `pipeline`); `journal` and `provenance` note what was made of what. Takes and gives numpy arrays
and metadata; knows nothing of models. Imports `types`, `inputs` and `errors`.
"""
