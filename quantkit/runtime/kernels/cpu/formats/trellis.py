"""Formats: The trellis types."""
