"""Formats: Types with a scale for each row."""
