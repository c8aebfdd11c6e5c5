"""Formats: iq1_s, iq1_m and kin."""
