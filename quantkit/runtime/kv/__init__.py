"""Caches of keys, values and recurrent states: of one device (`cache`) and of several (`sharded_cache`)."""
