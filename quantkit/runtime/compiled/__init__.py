"""Models as operation lists for `fast` numerics: a decode plan for one token and a prefill plan for batches.

`plans` builds them from blocks and tensors and runs them on the thread team; `unsupported` says why a model has none
and runs layer by layer.
"""
