"""Which device holds what, and whether it fits: pure functions of names, shapes, types and flags.

`rules` places tensors as -ngl, -ot and -sm say, `fit` fills devices, `budget` adds up weights, KV cache (`kv_size`) and
working memory (`workspace`), `sharding` divides the tensors of a layer among devices, `speed` predicts from bytes and
bandwidth. Takes metadata and tensor records and gives plans; loads no weights and no kernels.
"""
