"""Tokenizers: Hugging Face files to GGUF keys and back, and text to token ids.

`vocab.read` makes the `tokenizer.*` keys from a checkpoint's files; `hf_tokenizer` makes the files from such keys.
`tokenizer` encodes and decodes with the `tokenizers` library. `chat_template` renders prompts in a process with limits.
`checks` validates the contents of files before a library gets them. Imports `formats`, `archs` and `inputs`.
"""
