"""Models as operation lists for `fast` numerics: a decode plan for one token and a prefill plan for batches.

Takes a model's blocks and tensors; gives logits and hidden states. `compiled_model` is the interface that
`runtime/model.py` calls. `decode_plan` and `prefill_plan` each have a function per kind of block; `plan_base` builds an
operation list and points it to KV caches; `unsupported` says why a model has no plan and runs layer by layer. Of a
model on several devices, `worker_plans` has what is on the CPU: `blocks_plan` neighbouring blocks, `experts_plan` the
experts of single blocks, from the same functions.

Imports the kernels (`runtime/kernels`), `runtime/blocks` and `runtime/kv`, not `runtime/model`.

To add a kind of block: write its operations in `runtime/kernels/cpu`, a function `add_...` in `decode_plan` and in
`prefill_plan` with a case in their `add_part`, and remove its reason from `unsupported`.

To add an activation: a formula in `runtime/kernels/cpu/gated_activations.py`.
"""
