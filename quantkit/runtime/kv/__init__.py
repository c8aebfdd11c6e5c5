"""KV caches and recurrent states of sequences.

`cache` is the cache of one device, `sharded_cache` that of a model over several. `cache_type` parses the types of keys
and values, `saved_state` holds what `Cache.save` copies. Takes and gives arrays of encoded rows; imports
`kernels/kv_rounding`, `types` and `archs`.
"""
