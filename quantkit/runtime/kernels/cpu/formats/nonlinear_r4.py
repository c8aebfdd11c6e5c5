"""Formats: Interleaved iq2_k to iq5_k."""
