"""Formats of q4_K and q6_K."""

from __future__ import annotations

from quantkit.runtime.kernels.cpu.formats.base import BYTES16, BYTES32, Unit, format_of, load_half, pick
from quantkit.simd import I8, I32, vector


@format_of("q4_K", columns=256, nbytes=144, offset=0, largest=15, floor=True)
def _q4_k(e, block):
    # Twelve bytes hold eight 6-bit multipliers of d and eight of dmin: bytes 0..3 and 4..7 the first four of each with,
    # in their top two bits, the high bits of the last four, whose low nibbles share bytes 8..11.
    packed = e.load(vector(4, I8), block + 4), e.load(vector(4, I8), block + 8), e.load(vector(4, I8), block + 12)
    first = e.join(packed[0], packed[2] & 15 | (packed[0] >> 2) & 0x30) & 63
    second = e.join(packed[1], packed[2] >> 4 | (packed[1] >> 2) & 0x30) & 63
    scales = first.unsigned(I32).real() * e.splat(load_half(e, block), 8)
    floors = second.unsigned(I32).real() * e.splat(load_half(e, block + 2) * -1.0, 8)
    for pair in range(4):
        codes = e.load(BYTES32, block + 16 + 32 * pair)
        yield Unit(codes & 15, pick(e, scales, 2 * pair), pick(e, floors, 2 * pair))
        yield Unit(codes >> 4, pick(e, scales, 2 * pair + 1), pick(e, floors, 2 * pair + 1))


@format_of("q6_K", columns=256, nbytes=210, offset=32, largest=63, group=16)
def _q6_k(e, block):
    scales = e.load(BYTES16, block + 192).signed(I32).real() * e.splat(load_half(e, block + 208), 16)
    for part in range(2):
        low = [e.load(BYTES32, block + 64 * part + 32 * i) for i in range(2)]
        high = e.load(BYTES32, block + 128 + 32 * part)
        for t in range(4):
            nibbles = low[t % 2] & 15 if t < 2 else low[t % 2] >> 4
            crumbs = (high << 4 if t == 0 else high << 2 if t == 1 else high if t == 2 else high >> 2) & 0x30
            s = 8 * part + 2 * t
            yield Unit(nibbles | crumbs, pick(e, scales, s, s + 1))
