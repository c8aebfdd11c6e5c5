"""Plan which device holds which tensor, and whether it fits: pure functions of names, shapes, types and flags.

`rules` places tensors by -ngl, -ot and -sm, `fit` fills devices, `budget` adds up weights, KV cache (`kv_size`) and
working memory (`workspace`), `sharding` splits the tensors of a layer over devices, `speed` predicts speed from bytes
and bandwidth, `allocation` chooses types by measured costs so that a file fits. The functions take metadata and tensor
records and return plans. They load no weights and no kernels.
"""
