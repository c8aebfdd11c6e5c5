"""Formats: Interleaved types of blocks of 32."""
