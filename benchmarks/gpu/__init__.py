"""The stages of `benchmarks/bench_gpu.py`: one file each, and what they share (`run`, `trace`).

A stage is a module with `TABLE`, the table that `--save` writes, `measure(run)`, which puts its figures into the run's,
and `rows(figures)`, the rows of the table from the stage's figures.
"""
