"""Measure how much the KL divergence of a model rises for each matrix and each type: the costs of `recipe fit`.

    encoding_errors   the error of each type in the metric of a matrix' inputs, from a sample of its rows
    probes            the KL divergence with one matrix alone in a coarse type
    run               both for all matrices of a model, resumable; writes the costs file

Takes a model, a text and an importance matrix; gives `placement.allocation.costs.Costs`.
"""
