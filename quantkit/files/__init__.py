"""Files: GGUF, safetensors, imatrix, KLD bases. Lazy tensors over read-only mappings, atomic streaming writers."""
