"""Base files for KL divergence: `base_file` is ik_llama.cpp's format, `bounded_file` (.qkld) takes a twentieth of it.

Both hold a model's distributions over a text, chunk by chunk (`chunk_file`). An interrupted run can be resumed.
"""
