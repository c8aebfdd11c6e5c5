"""Encoders of the K types: q2_K to q6_K, blocks of 256 in sub-blocks with integer multipliers of a half-precision d.

`scale_min_search` serves q2_K, q4_K and q5_K, `scale_search` q3_K and q6_K; `lanes` holds what both share. Takes and
gives numpy arrays of blocks.
"""
