"""Importance matrices: collect them over texts, save and resume a run, and show what they cover.

`run.imatrix`, which is `quantkit.imatrix`, is the whole job: it drives `collect` over each text, keeps its state in
`saved_run` and writes the file. `one_pass` quantizes a model while it is measured. `coverage` computes the statistics
of a finished matrix. File formats are in `formats.imatrix`.
"""
