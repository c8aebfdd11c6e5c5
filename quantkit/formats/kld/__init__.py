"""Base files of KL divergence: `base_file` in ik_llama.cpp's format, `bounded_file` (.qkld) in a twentieth of the size.

Both hold a model's distributions over a text, chunk by chunk (`chunk_file`), and resume after a kill.
"""
