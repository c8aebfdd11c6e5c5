"""Run a model one layer at a time: over many chunks to save memory, or to measure the error that each tensor adds.

The functions take a `runtime.model.Model`, or open a checkpoint as one (`checkpoint_model`), and use its blocks
directly. Numerics must be exact.
"""
