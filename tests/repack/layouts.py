"""Interleaved layouts of spec/repack.md 5 as descriptions, and the formula they stand for.

Each entry: rows, bytes of a base block, bytes of a row header, columns of a block, CRC-32 of the spec's test tensor
after interleaving (section 12), fields. Types that quantkit has are taken from their files by the tests; those here
show that a description is all that the others need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from quantkit.types.interleave import (
    CRUMB,
    NIB,
    PLANE_A,
    PLANE_B,
    PLANE_C,
    PLANE_D,
    QUAD,
    EvenOdd,
    Field,
    Lines,
    Slots,
    packed,
    planes,
)


class Layout(NamedTuple):
    rows: int
    block_bytes: int
    head: int
    columns: int
    crc: str
    fields: tuple[Field, ...]


def _bytes(count: int, base: int, group: int, width: int = 8) -> Field:
    """Whole elements, one per slot."""
    return Field(width, packed(width, count, base), Slots(0, group))


_D4 = _bytes(1, 0, 0, 16)
_NIBBLES_32 = planes(4, 16, 32, 0)


def _six_bit(at: int) -> tuple[list[int], list[int]]:
    """Addresses of low 4 and high 2 bits of the scales (at 0) or minima (at 4) of Q4_K and Q5_K, from byte 4 on."""
    low = [8 * (4 + at + j) for j in range(4)] + [8 * (12 + j) + at for j in range(4)]
    high = [8 * (4 + at + j) + 4 for j in range(4)] + [8 * (4 + at + j) + 6 for j in range(4)]
    return low, high


def _k_scales() -> tuple[Field, ...]:
    (s_low, s_high), (m_low, m_high) = _six_bit(0), _six_bit(4)
    return (
        _D4, _bytes(1, 2, 8, 16),
        Field(4, s_low, Slots(0, 32, pitch=8)), Field(4, m_low, Slots(0, 32, pitch=8, bit=4)),
        Field(2, s_high, Slots(16, 16, pitch=4)), Field(2, m_high, Slots(16, 16, pitch=4, bit=2)),
    )  # fmt: skip


def _q6_0_high() -> list[int]:
    return [8 * (2 + j % 16 % 8) + 4 * (j % 16 // 8) + 2 * (j // 16) for j in range(32)]


def _iq3_s_entries() -> list[int]:
    return [8 * (2 + 8 * ib + e) for ib in range(8) for e in (0, 4, 1, 5, 2, 6, 3, 7)]


LAYOUTS: dict[str, Layout] = {
    "q4_0_r8": Layout(8, 18, 0, 32, "12ea3631", (_D4, Field(8, packed(8, 16, 2), Lines(QUAD, 16)))),
    "mxfp4_r8": Layout(8, 17, 0, 32, "a5791b75", (_bytes(1, 0, 0), Field(8, packed(8, 16, 1), Lines(QUAD, 8)))),
    "iq4_nl_r4": Layout(4, 18, 0, 32, "b9902e51", (_D4, Field(4, _NIBBLES_32 + 16, Lines(NIB, 8)))),
    "q5_0_r4": Layout(4, 22, 0, 32, "2afe4957", (
        _D4, Field(1, packed(1, 32, 2), Lines(PLANE_B, 8)), Field(4, _NIBBLES_32 + 48, Lines(NIB, 24)))),
    "q6_0_r4": Layout(4, 26, 0, 32, "0554b29b", (
        _D4, Field(2, _q6_0_high(), Lines(CRUMB, 8)), Field(4, _NIBBLES_32 + 80, Lines(NIB, 40)))),
    "q2_k_r4": Layout(4, 84, 0, 256, "44c9f786", (
        _bytes(1, 80, 0, 16), _bytes(1, 82, 8, 16), _bytes(16, 0, 16),
        Field(2, planes(2, 32, 256, 16), Lines(CRUMB, 80)))),
    "q3_k_r4": Layout(4, 110, 0, 256, "afb98d12", (
        _bytes(1, 108, 0, 16), Field(4, planes(4, 8, 16, 96), Slots(32, 24)),
        Field(2, planes(2, 4, 16, 104), Slots(16, 8)), Field(2, planes(2, 32, 256, 32), Lines(CRUMB, 184)),
        Field(1, planes(1, 32, 256, 0), Lines(PLANE_A, 56)))),
    "q4_k_r4": Layout(4, 144, 0, 256, "96c7da96", (
        *_k_scales(), Field(4, planes(4, 32, 256, 16), Lines(NIB, 64)))),
    "q5_k_r4": Layout(4, 176, 0, 256, "bc702337", (
        *_k_scales(), Field(4, planes(4, 32, 256, 48), Lines(NIB, 192)),
        Field(1, planes(1, 32, 256, 16), Lines(PLANE_C, 64)))),
    "q6_k_r4": Layout(4, 210, 0, 256, "cbdc65c8", (
        _bytes(1, 208, 0, 16), _bytes(16, 192, 8), Field(4, planes(4, 64, 256, 0), Lines(NIB, 328)),
        Field(2, planes(2, 32, 256, 128), Lines(((0, 8, 4, 12),), 72)))),
    "iq2_s_r4": Layout(4, 82, 0, 256, "a8a6c99f", (
        _D4, _bytes(8, 2, 8, 32), _bytes(8, 34, 168, 32),
        _bytes(8, 66, 136), _bytes(8, 74, 296))),
    "iq3_s_r4": Layout(4, 110, 0, 256, "18ec740e", (
        _D4, Field(8, _iq3_s_entries(), Slots(0, 8)), _bytes(8, 66, 264),
        Field(1, packed(1, 256, 74), Lines(PLANE_A, 296)), Field(4, packed(4, 8, 106), Slots(16, 424)))),
    "iq4_xs_r8": Layout(8, 136, 0, 256, "2e791e73", (
        _D4, Field(4, packed(4, 8, 4), Slots(32, 32)), Field(2, packed(2, 8, 2), Slots(16, 16)),
        Field(4, planes(4, 16, 256, 8), Lines(((0, 4),), 64)))),
    "iq2_k_r4": Layout(4, 76, 0, 256, "c27bf748", (
        _D4, Field(1, packed(1, 16, 2), EvenOdd(8)), Field(4, packed(4, 16, 4), Slots(32, 16)),
        Field(2, planes(2, 32, 256, 12), Lines(CRUMB, 48)))),
    "iq3_k_r4": Layout(4, 110, 0, 256, "067a770d", (
        _D4, Field(1, packed(1, 16, 2), EvenOdd(8)), Field(1, packed(1, 16, 4), Slots(8, 16)),
        Field(4, packed(4, 16, 6), Slots(32, 24)), Field(2, planes(2, 32, 256, 14), Lines(CRUMB, 56)),
        Field(1, planes(1, 32, 256, 78), Lines(PLANE_A, 312)))),
    "iq5_k_r4": Layout(4, 176, 0, 256, "6a1c7d5d", (
        _D4, Field(1, packed(1, 16, 2), EvenOdd(8)), Field(2, packed(2, 16, 4), Slots(16, 16)),
        Field(4, packed(4, 16, 8), Slots(32, 32)), Field(4, planes(4, 32, 256, 16), Lines(NIB, 64)),
        Field(1, planes(1, 32, 256, 144), Lines(PLANE_D, 576)))),
    "iq4_ks_r4": Layout(4, 136, 4, 256, "00b70bc1", (
        _bytes(8, 0, 0), Field(4, planes(4, 16, 256, 8), Lines(NIB, 32)))),
    "iq5_ks_r4": Layout(4, 168, 4, 256, "b25acbd4", (
        _bytes(8, 0, 0), Field(4, planes(4, 32, 256, 8), Lines(NIB, 32)),
        Field(1, planes(1, 32, 256, 136), Lines(PLANE_D, 544)))),
    "iq2_bn_r4": Layout(4, 16, 4, 64, "77bbac29", (Field(2, planes(2, 16, 64, 0), Lines(CRUMB, 0)),)),
    "bf16_r16": Layout(16, 4, 0, 2, "814ce1e8", (_bytes(1, 0, 0, 32),)),
}  # fmt: skip


def spec_tensor(rows: int, row_bytes: int) -> np.ndarray:
    """uint8[rows, row_bytes] of the spec's section 12: the top byte of i * 2654435761 mod 2^32."""
    i = np.arange(rows * row_bytes, dtype=np.uint64)
    return ((i * np.uint64(2654435761) & np.uint64(0xFFFFFFFF)) >> np.uint64(24)).astype(np.uint8).reshape(rows, -1)


def move_bits(data: np.ndarray, rows: int, block_bytes: int, head: int, fields: Any) -> np.ndarray:
    """The formula: headers in row order, then per block and field every element of every row to its place."""
    groups = len(data) // rows
    blocks = (data.shape[1] - head) // block_bytes
    bits = np.unpackbits(data, axis=1, bitorder="little").reshape(groups, rows, -1)
    heads, body = bits[:, :, : 8 * head], bits[:, :, 8 * head :].reshape(groups, rows, blocks, -1)
    out = np.full((groups, blocks, 8 * rows * block_bytes), 255, np.uint8)
    for field in fields:
        base, group = np.asarray(field.base), field.group.addresses(rows, field.width, len(field.base))
        for k in range(rows):
            for bit in range(field.width):
                out[:, :, group[k] + bit] = body[:, k][:, :, base + bit]
    packed_bits = np.concatenate([heads.reshape(groups, -1), out.reshape(groups, -1)], axis=1)
    assert packed_bits.max() <= 1
    return np.packbits(packed_bits, axis=1, bitorder="little").reshape(data.shape)
