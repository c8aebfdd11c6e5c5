"""The vectors of spec/repack.md 12, and the formula that descriptions of interleaved layouts stand for.

python -m tests.repack.layouts NAME…     checksums of the specs' tensors there and back, for code made for another CPU
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import types

# CRC-32 of two groups by 512 columns after interleaving `spec_tensor`.
CRCS = {
    "q4_0_r8": "12ea3631", "q5_0_r4": "2afe4957", "q8_0_r8": "7d0b11c0", "q2_k_r4": "44c9f786", "q3_k_r4": "afb98d12",
    "q4_k_r4": "96c7da96", "q5_k_r4": "bc702337", "q6_k_r4": "cbdc65c8", "iq2_xxs_r4": "f6582126",
    "iq2_xs_r4": "6e2dc712", "iq3_xxs_r4": "0c080099", "iq4_nl_r4": "b9902e51", "iq3_s_r4": "18ec740e",
    "iq2_s_r4": "a8a6c99f", "iq4_xs_r8": "2e791e73", "bf16_r16": "814ce1e8", "q6_0_r4": "0554b29b",
    "iq2_bn_r4": "77bbac29", "iq2_k_r4": "c27bf748", "iq3_k_r4": "067a770d", "iq4_k_r4": "45589912",
    "iq5_k_r4": "6a1c7d5d", "iq4_ks_r4": "00b70bc1", "iq5_ks_r4": "b25acbd4", "mxfp4_r8": "a5791b75",
    "q4_0_4x4": "459f47dd", "q4_0_4x8": "58f57fd6", "q4_0_8x8": "5a266fa5", "q8_KV_r8": "c72d18bd",
    "q8_k_r8": "5e15815e", "q8_k_r16": "7ea560e5",
}  # fmt: skip


def spec_tensor(rows: int, row_bytes: int) -> np.ndarray:
    """uint8[rows, row_bytes] of the spec's section 12: the top byte of i * 2654435761 mod 2^32."""
    i = np.arange(rows * row_bytes, dtype=np.uint64)
    return ((i * np.uint64(2654435761) & np.uint64(0xFFFFFFFF)) >> np.uint64(24)).astype(np.uint8).reshape(rows, -1)


def move_bits(data: np.ndarray, rows: int, block_bytes: int, head: int, fields: Any) -> np.ndarray:
    """The formula: headers in row order, then per block and field every element of every row to its position."""
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


def checksums(names: list[str]) -> dict[str, str]:
    """CRC-32 of the spec's tensor interleaved, and of that deinterleaved again."""
    result = {}
    for name in names:
        t = types.get(name)
        there = t.interleave_rows(spec_tensor(2 * t.interleave, t.base_type.row_bytes(512)))
        result[name] = f"{zlib.crc32(there):08x}-{zlib.crc32(t.deinterleave_rows(there)):08x}"
    return result


def checksums_of(environment: dict[str, str], names: list[str]) -> dict[str, str]:
    """`checksums` of a process with other environment variables, such as `NUMBA_CPU_NAME`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.repack.layouts", *names],
        env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


if __name__ == "__main__":
    for name, checksum in checksums(sys.argv[1:]).items():
        print(name, checksum)
