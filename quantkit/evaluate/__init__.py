"""Measuring models: importance matrices, perplexity, KL divergence, comparison. All of it goes through `runtime`."""
