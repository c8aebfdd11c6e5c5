"""Which tensors add error: found where it was put, and none where nothing differs."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.errors import UnsupportedError
from quantkit.evaluate.layer_similarity import layer_similarity
from quantkit.evaluate.layers.tensor_errors import tensor_errors
from quantkit.evaluate.text import Chunks
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


def test_similarity_of_the_input_and_the_output_of_each_layer(smollm2_q4_1):
    """As computed from the states before each block, whatever the number of chunks that run together."""
    model, chunks = load(smollm2_q4_1), Chunks(TOKENS, TOKENS, "tokens")
    states, run_block = [], model.run_block_checked

    def keep(block, x, spans):
        output = run_block(block, x, spans)
        states.append((x.copy(), output.copy()))
        return output

    model.run_block_checked = keep
    found = layer_similarity(model, chunks, n_batch=32)  # a chunk at a time
    model.run_block_checked = run_block
    cosines = [(x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1) for x, y in states]
    layers = len(model.blocks)
    assert len(states) == 2 * layers
    expected = [(cosines[i].mean() + cosines[layers + i].mean()) / 2 for i in range(layers)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert min(found) < 0.9 < max(found)
    done = []
    np.testing.assert_allclose(layer_similarity(model, chunks, on_chunk=done.append), found, rtol=1e-5)
    assert done == [2]
    with pytest.raises(UnsupportedError, match="exact numerics"):
        layer_similarity(load(smollm2_q4_1, numerics="fast"), chunks)
