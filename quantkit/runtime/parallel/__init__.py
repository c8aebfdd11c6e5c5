"""A model over several devices: layer split (pipeline parallel) and graph split (tensor parallel).

`split` runs the blocks over workers, which `workers` makes for each device; `rank` computes shards, `all_reduce` adds
them up, `ledger` counts time and bytes.
"""
