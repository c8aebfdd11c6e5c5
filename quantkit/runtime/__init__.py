"""Running a GGUF file: placement, kernels, layers, model, tokenizer, generation. `quantkit.load` opens the door."""
