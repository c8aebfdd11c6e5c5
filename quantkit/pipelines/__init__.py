"""The jobs that turn files into files: convert, export, quantize, repack, convert-mla, verify.

Each streams tensors in bounded memory, writes atomically and, where it takes long, resumes (`resume`). Takes open files
and plans and gives paths and summaries. Imports `recipe`, `archs`, `tokenizers` and `formats`, never `runtime`: what is
evaluated is what was written.
"""
