"""Formats: iq2_xxs to iq3_s."""
