"""Conversion of a Hugging Face checkpoint to a GGUF file.

`plan` reads config, tokenizer and headers and decides which output tensor comes from which tensors of the checkpoint,
and of which type it is. `metadata` makes the `general.*` keys, `tensor` computes ranges of rows, `convert` does the
whole. The package takes directories and gives a `Conversion`, rows or a file. It imports neither `quantize` nor any
other pipeline, only `output`, which writes.
"""
