"""Tokenizers: Hugging Face's files to GGUF keys and back, and text to token ids.

`vocab.read` gives the `tokenizer.*` keys of a checkpoint's files, `hf_tokenizer` the files of such keys, `tokenizer`
encodes and decodes with the `tokenizers` library, `chat_template` renders prompts in a process with limits. `checks`
checks the contents of files before a library gets them. Imports `formats`, `archs` and `inputs`.
"""
