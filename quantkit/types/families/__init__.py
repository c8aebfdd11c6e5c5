"""What several tensor types share: the searches of their encoders, codebooks and grids, row interleaving.

| module | serves |
| --- | --- |
| `block32` | blocks of 32: q4_0 … q8_0, iq4_nl, mxfp4; q2_0, nvfp4 |
| `kquant` | q2_K … q6_K |
| `nonlinear` | iq2_k … iq6_k: a codebook, one d a block of 256 |
| `rowscaled` | iq2_ks … iq5_ks, iq4_kss, iq4_xs: a codebook, groups of 32 |
| `grid_points`, `grid_type` | iq2_xxs … iq3_s: points of a grid with signs |
| `iq1`, `ternary` | iq1_s, iq1_m; iq1_bn, iq2_bn |
| `ternary_blocks` | tq1_0, tq2_0 |
| `e2m1` | the codes of mxfp4 and nvfp4 |
| `four_rows` | iq1_s_r4, iq1_m_r4 |
| `trellis_code`, `trellis_type` | iq1_kt … iq4_kt |
| `interleave`, `interleave_fields`, `permutation` | all types of interleaved rows |
| `codebooks` | codebooks of the non-linear types and their rounding tables |
| `superblock`, `super_scale` | loading and storing blocks of 256; the super-scale d of many sub-blocks |
| `code_bits` | which bits of a block are the code of an element |

Takes and gives numpy arrays of rows. Imports `codegen` and `types.base`; the searches written with SIMD intrinsics
(`types.native`) are imported when they first run.
"""
