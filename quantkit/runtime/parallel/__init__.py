"""A model over several devices: layer split (pipeline parallel) and graph split (tensor parallel).

`split` runs the blocks on a `worker` for each device, which `workers` makes. `rank` is the worker of a device under
`-sm graph`: it computes shards (`tensor_shards`), which `all_reduce` adds up. `cache_layout` says which device has
which part of the KV cache, `ledger` counts time and bytes, `split_checks` refuses what cannot be split. Takes and gives
arrays [tokens, n]; does not import `cuda`, except in `workers`.
"""
