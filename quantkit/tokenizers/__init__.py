"""Tokenizers: Hugging Face's files to GGUF keys and back, and text to token ids.

`vocab.read` gives the `tokenizer.*` keys of a checkpoint's files, `hf_tokenizer` the files of such keys, `tokenizer`
encodes and decodes with the `tokenizers` library, `chat_template` renders prompts in a process with limits. What files
say is checked (`checks`) before a library gets it. Imports `formats` and `archs`.
"""
