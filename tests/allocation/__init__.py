"""Tests of quantkit.placement.allocation."""
