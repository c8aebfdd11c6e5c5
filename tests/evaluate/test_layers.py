"""Which tensors add error: found where it was put, and none where nothing differs."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.evaluate.layers.tensor_errors import tensor_errors
from quantkit.formats import gguf
from quantkit.runtime.loading import load
from tests.evaluate.conftest import rewrite

TOKENS = np.arange(10, 74).reshape(2, 32)


def test_error_is_found_where_it_is(f16_model, tmp_path):
    names = {"blk.7.ffn_down.weight", "blk.29.attn_q.weight", "token_embd.weight"}
    path = rewrite(f16_model, tmp_path / "x.gguf", "q4_0", lambda t: t.name in names)
    reference, file = load(f16_model), gguf.open(path)
    before = reference.hidden_sequences(TOKENS, slice(0, 32))
    found = {a.name: a for a in tensor_errors(reference, file, TOKENS)}
    assert set(found) == {*names, "token_embd.weight as output"}
    assert found["blk.7.ffn_down.weight"].layer == 7
    assert found["token_embd.weight"].layer is None
    assert all(0 < a.error < 0.5 and a.type == "q4_0" for a in found.values())
    assert sum(a.share for a in found.values()) == pytest.approx(1)
    np.testing.assert_array_equal(reference.hidden_sequences(TOKENS, slice(0, 32)), before)  # as it was
    assert tensor_errors(reference, gguf.open(f16_model), TOKENS) == []
