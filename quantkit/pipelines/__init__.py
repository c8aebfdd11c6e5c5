"""The pipelines that turn files into files: convert, export, quantize, repack, convert-mla, verify.

Each pipeline streams tensors in bounded memory and writes atomically. `conversion` makes a GGUF file from a checkpoint.
Quantization resumes after an interrupt (`resume`). `api` has the public functions, `options` their options and
`planning` what they have in common: opening the input, types, devices. The functions of the other modules take open
files and plans, and return paths and summaries. The package imports `recipe`, `archs`, `tokenizers` and `formats`,
never `runtime`: evaluation reads the file that was written.
"""
