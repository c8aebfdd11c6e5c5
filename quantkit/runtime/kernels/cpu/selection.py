"""The positions that a token attends to in sparse attention, as indexer.py selects them: a record for each token.

Where whole blocks of positions are selected (pooled_indexer.py), the record has the numbers of blocks.

offset    bytes      content
0         8          int64: number of selected positions; 0: the token attends to all positions up to its own
8         8 top_k    int64[top_k]: the positions, ascending
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import floats, integers, load_int

_HIDDEN = -1e30  # below any score


@kernel
def selected_positions(record, count):
    """(number of positions, address of their list): with 0 for the list, the first `count` positions."""
    if record == 0:
        return count, 0
    chosen = load_int(record)
    if chosen == 0:
        return count, 0
    return chosen, record + 8


@kernel
def hide_others(record, start, stop, scores):
    """Make the scores float32[stop - start] of positions that a selection leaves out lower than any other."""
    count = load_int(record)
    if count == 0:
        return
    chosen, x = integers(record + 8, count), floats(scores, stop - start)
    low, high = 0, count  # the first selected position from `start` on
    while low < high:
        middle = (low + high) // 2
        if chosen[middle] < start:
            low = middle + 1
        else:
            high = middle
    at = 0
    while low < count and chosen[low] < stop:
        x[at : chosen[low] - start] = np.float32(_HIDDEN)
        at = chosen[low] - start + 1
        low += 1
    x[at:] = np.float32(_HIDDEN)


@kernel
def _first_block(record, count, rate, start):
    """The first selected block, as a place in the list, that does not end before position `start`."""
    chosen, low, high = integers(record + 8, count), 0, count
    while low < high:
        middle = (low + high) // 2
        if (chosen[middle] + 1) * rate <= start:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def sees_blocks(record, rate, end, start, stop):
    """Whether a token sees one of the positions start … stop - 1, of which `end` and later ones are in no block."""
    count = load_int(record)
    if count == 0 or stop > end:
        return True
    low = _first_block(record, count, rate, start)
    return low < count and integers(record + 8, count)[low] * rate < stop


@kernel
def hide_blocks(record, rate, end, start, stop, scores):
    """Make the scores float32[stop - start] of positions below `end` in blocks left out lower than any other."""
    count = load_int(record)
    if count == 0:
        return
    chosen, x = integers(record + 8, count), floats(scores, stop - start)
    last, at, low = min(stop, end) - start, 0, _first_block(record, count, rate, start)
    while low < count and chosen[low] * rate < stop:
        for i in range(at, chosen[low] * rate - start):
            x[i] = np.float32(_HIDDEN)
        at = (chosen[low] + 1) * rate - start
        low += 1
    for i in range(at, last):
        x[i] = np.float32(_HIDDEN)
