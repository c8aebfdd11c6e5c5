"""Measure models: importance matrices, perplexity, KL divergence, comparison, throughput.

The functions take models (`runtime`) and texts, and return results with errors, tables, plots and HTML pages. Only
`cli` imports this package.
"""
