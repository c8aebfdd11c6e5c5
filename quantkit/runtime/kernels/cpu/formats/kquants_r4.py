"""Formats: The interleaved k-quants."""
