"""Reports of results: text tables, the report of llama-perplexity, plots with matplotlib, an HTML page.

These modules take results (`Divergence`, `Comparison`, `Coverage`, `MeasuredSpeed`) and measure nothing. matplotlib is
imported inside functions.
"""
