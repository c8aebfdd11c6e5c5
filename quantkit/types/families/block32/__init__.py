"""Encoders of blocks of 32: q4_0, q4_1, q5_0, q5_1, q6_0, q8_0, iq4_nl, mxfp4.

`scale_search` finds the scale of types without a minimum, `scale_min_search` scale and minimum of the others,
`closed_form` either where all elements weigh the same and effort is below "best". Takes and gives numpy arrays of
blocks.
"""
