"""Measure models: importance matrices, perplexity, KL divergence, comparison, throughput.

The functions take models (`runtime`) or paths of GGUF files, texts and options, and return results with errors and
conditions. Only `cli` imports this package. The package imports `pipelines` where a checkpoint is measured while it is
quantized (`layers/checkpoint_model.py`, `imatrix`); `pipelines` never imports it.

    perplexity, divergence, compare, imatrix.run   the public functions; `quantkit.perplexity` and so on
    bench, tasks, task_flips                       throughput; multiple-choice tasks; answers that change
    harness                                        lm-evaluation-harness
    comparison                                     what `compare` finds
    corpus, text, chat_chunks                      texts and conversations as chunks of tokens
    chunk_runs, nll, progress, models              running a model over chunks
    breakdown                                      divergence by position and category
    statistics, bounded                            errors over chunks; bounds for bounded base files
    chunk_log, fingerprint, base_files             resuming; base files
    conditions                                     what figures depend on besides the file
    allocation_check                               a recipe of `recipe fit` against its rivals
    imatrix, layers, report, sensitivity           packages: importance matrices; one layer at a time; tables and plots;
                                                   what each type costs in each matrix
"""
