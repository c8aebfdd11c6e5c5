"""Measuring models: importance matrices, perplexity, KL divergence, comparison, throughput.

Takes models (`runtime`) and texts and gives results with their errors, tables, plots and pages. Imported by `cli` only.
"""
