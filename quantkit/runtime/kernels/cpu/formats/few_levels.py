"""Formats: Ternary, binary and mxfp4."""
