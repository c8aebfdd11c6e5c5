"""The positions that a token attends to in sparse attention, as indexer.py selects them: a record for each token.

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
