"""Tokens weighed by the attention that they receive: against plain softmax, and attentions of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import DataError, FormatError, OptionError, QuantkitError
from quantkit.evaluate.imatrix.collect import chosen_weights
from quantkit.evaluate.imatrix.run import ImatrixOptions, imatrix
from quantkit.formats.imatrix import Entry, Imatrix, merge, read, write
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.runtime.blocks import float_attention
from quantkit.runtime.blocks.float_attention import AttentionOptions, Heads
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.loading import load
from tests.archs.checkpoints import tiny
from tests.runtime.test_layers import hparams

LENGTH = 48


def plain(
    heads: Heads, q: np.ndarray, k: np.ndarray, selected: np.ndarray | None = None, past: int = 0
) -> np.ndarray:  # fmt: skip
    """float64[keys]: the sums of softmax weights over queries and heads."""
    received = np.zeros(len(k))
    group = heads.heads // heads.kv_heads
    queries, keys = (x.reshape(len(x), -1, heads.head_dim_k).astype(np.float64) for x in (q, k))
    for head in range(heads.heads):
        for token in range(len(q)):
            s = keys[:, head // group] @ queries[token, head] * heads.scale
            if heads.softcap is not None:
                s = heads.softcap * np.tanh(s / heads.softcap)
            position = past + token
            seen = np.arange(len(k)) <= position
            if heads.window is not None:
                seen &= np.arange(len(k)) > position - heads.window
            if heads.chunk is not None:
                seen &= np.arange(len(k)) >= position // heads.chunk * heads.chunk
            if selected is not None:
                seen &= selected[token]
            s = np.where(seen, s, -np.inf)
            sink = -np.inf if heads.sinks is None else heads.sinks[head]
            top = max(s.max(), sink)
            received += np.exp(s - top) / (np.exp(s - top).sum() + np.exp(sink - top))
    return received


CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "grouped": {"kv_heads": 2}, "window": {"window": 9, "kv_heads": 2}, "softcap": {"softcap": 3.0},
    "sinks": {"sinks": np.array([0.5, -2, 4, 0], np.float32)}, "chunk": {"chunk": 17},
}  # fmt: skip


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("case", list(CASES))
def test_received_attention(
    case: str, flash: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(float_attention, "KEY_ROWS", 13)  # several blocks of keys
    monkeypatch.setattr(float_attention, "QUERY_ROWS", 24)  # several pieces of a span
    heads = Heads(4, CASES[case].get("kv_heads", 4), 16, 16, 0.3)._replace(**CASES[case])
    hp = hparams(4, heads.kv_heads, 16, 16)
    lengths = [50, 1, 33]
    q = rng.standard_normal((sum(lengths), 64), np.float32) * 2
    k, v = rng.standard_normal((2, sum(lengths), heads.kv_heads * 16), np.float32)
    found: dict[int, np.ndarray] = {}
    for threads in (1, 3):
        spans, start = [], 0
        for length in lengths:
            spans.append(Span(start, start + length, Cache(hp, 60, "f32"), None, np.zeros(length)))
            float_attention.append_rows(k[start : start + length], v[start : start + length], spans[-1].cache, 0)
            start += length
        with_sums = float_attention.attend(heads, 0, q, spans, threads, AttentionOptions(flash=flash))
        without = [span._replace(received=None) for span in spans]
        assert np.array_equal(
            with_sums, float_attention.attend(heads, 0, q, without, threads, AttentionOptions(flash=flash))
        )
        received = [span.received for span in spans if span.received is not None]
        found[threads] = np.concatenate(received)
        for span, of_span in zip(spans, received, strict=True):
            rows = slice(span.start, span.stop)
            np.testing.assert_allclose(of_span, plain(heads, q[rows], k[rows]), rtol=1e-4, atol=1e-4)
    assert np.array_equal(found[1], found[3])


def test_positions_that_are_not_selected_and_keys_of_earlier_batches(rng: np.random.Generator) -> None:
    heads, past, length = Heads(4, 2, 16, 16, 0.3), 11, 40
    cache = Cache(hparams(4, 2, 16, 16), past + length, "f32")
    q = rng.standard_normal((length, 64), np.float32)
    k, v = rng.standard_normal((2, past + length, 32), np.float32)
    float_attention.append_rows(k, v, cache, 0)
    cache.length = past
    selected = rng.random((length, past + length)) < 0.3
    selected[np.arange(length), past + np.arange(length)] = True  # its own
    span = Span(0, length, cache, selected, np.zeros(length))
    float_attention.attend(heads, 0, q, [span], 2)
    expected = plain(heads, q, k, selected, past)
    assert span.received is not None
    np.testing.assert_allclose(span.received, expected[past:], rtol=1e-4, atol=1e-4)


def observed(path: Path, weighs: bool, tokens: np.ndarray, **options: Any) -> dict[tuple[str, int], np.ndarray]:
    """What enters each matrix, in the order of tokens."""
    model = load(path, **options)
    found: dict[tuple[str, int], list[np.ndarray]] = {}

    def observe(name: str, x: np.ndarray, number: int = 0, matrices: int = 1) -> None:
        found.setdefault((name, number), []).append(x.reshape(-1, x.shape[-1]).copy())

    model.observer, model.weighs_tokens = observe, weighs
    model.hidden_sequences(tokens, slice(0, 0))
    return {key: np.concatenate(parts) for key, parts in found.items()}


ARCHS = ["llama", "qwen3moe", "gemma2", "gpt-oss", "phi3", "deepseek2", "qwen3next"]
KEYS_AND_VALUES = ("attn_q.", "attn_k.", "attn_v.", "attn_qkv.", "attn_q_a.", "attn_kv_a_mqa.", "attn_kv_b.")


@pytest.fixture(scope="module", params=ARCHS)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """An architecture's name, its model in transformers, and its file."""
    folder = tmp_path_factory.mktemp("weights")
    model = tiny(folder / "hf", arch=request.param)
    convert_checkpoint(folder / "hf", folder / "m.gguf", "f32")
    return request.param, model, folder / "m.gguf"


def test_inputs_of_keys_and_values_are_weighed(converted: tuple[str, Any, Path]) -> None:
    import torch

    arch, reference, path = converted
    tokens = np.random.default_rng(4).integers(2, 300, (2, LENGTH))
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = reference(torch.tensor(tokens), output_attentions=True).attentions
    received = [a.double().mean(1).sum(1).numpy().reshape(-1) for a in attentions if a is not None]  # [2 * LENGTH]
    for options in [{"mla": mla} for mla in (0, 1, 3)] if arch == "deepseek2" else [{}]:
        plainly, weighed = (observed(path, weighs, tokens, **options) for weighs in (False, True))
        assert plainly.keys() == weighed.keys()
        layers = sorted({int(name.split(".")[1]) for name, _ in plainly if "attn_output." in name})
        layers = [n for n in layers if any(f"blk.{n}.attn_k" in name or "attn_qkv" in name for name, _ in plainly)]
        checked = 0
        for (name, number), x in plainly.items():
            layer = int(name.split(".")[1])
            is_weighed = any(kind in name for kind in KEYS_AND_VALUES) and f"blk.{layer}.ssm_a" not in name
            if arch == "qwen3next" and ((f"blk.{layer}.attn_k.weight", 0) not in plainly):
                is_weighed = False  # a layer of the delta net has no attention
            if not is_weighed:
                assert np.array_equal(x, weighed[name, number]), name
                continue
            order = layer if len(received) > max(layers) else layers.index(layer)
            expected = x * np.sqrt(received[order])[:, None]
            np.testing.assert_allclose(weighed[name, number], expected, atol=2e-4 * np.abs(expected).max())
            checked += 1
        assert checked


@pytest.mark.parametrize("converted", ["qwen3moe"], indirect=True)
def test_matrices_say_how_they_were_measured(converted: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, _, path = converted
    text = tmp_path / "t.txt"
    text.write_text("attention goes to the first token of a text more than to the others. " * 40)
    found = {}
    for name, options in {
        "none": {"second_moments": "full", "token_weights": "none"},
        "attention": {"second_moments": "full"},
        "plain": {},
        "asked": {"token_weights": "attention"},
    }.items():
        out = tmp_path / f"{name}.gguf"
        imatrix(path, text, out, ImatrixOptions(ctx_size=64, no_ppl=True, **options))  # type: ignore[arg-type]
        found[name] = read(out)
    assert {name: m.token_weights for name, m in found.items()} == {
        "none": "none", "attention": "attention", "plain": "none", "asked": "attention",
    }  # fmt: skip
    for pair, weight, same in [
        (("plain", "none"), "blk.0.attn_k.weight", True), (("asked", "attention"), "blk.0.attn_k.weight", True),
        (("plain", "asked"), "blk.0.attn_k.weight", False), (("plain", "asked"), "blk.0.ffn_down_exps.weight", True),
    ]:  # fmt: skip
        a, b = (found[name][weight].values for name in pair)
        assert np.array_equal(a, b) == same


@pytest.mark.parametrize("converted", ["qwen3moe"], indirect=True)
def test_several_devices_are_refused(converted: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, _, path = converted
    text, out = tmp_path / "t.txt", tmp_path / "i.gguf"
    text.write_text("some text of several words " * 60)
    options = ImatrixOptions(ctx_size=64, chunks=1, second_moments="full")
    with pytest.raises(OptionError, match="--token-weights none"):
        imatrix(load(path, devices="cpu:0,cpu:1"), text, out, options)
    assert not out.exists()
    imatrix(load(path, devices="cpu:0,cpu:1"), text, out, replace(options, token_weights="none"))
    assert read(out).token_weights == "none"


def test_matrices_with_other_weights_are_not_merged(tmp_path: Path) -> None:
    entry = Entry(np.ones((1, 4), np.float32), np.array([8]), 1)
    parts = [Imatrix({"blk.0.attn_k.weight": entry}, 1, "t", 8, token_weights=w) for w in ("none", "attention")]
    with pytest.raises(DataError, match="different token weights"):
        merge(parts)
    assert merge(parts[1:]).token_weights == "attention"


def test_unknown_weights_are_refused(tmp_path: Path) -> None:
    entry = Entry(np.ones((1, 4), np.float32), np.array([8]), 1)
    write(tmp_path / "i.gguf", Imatrix({"blk.0.attn_k.weight": entry}, 1, "t", 8, token_weights="attention"))
    data = (tmp_path / "i.gguf").read_bytes()
    (tmp_path / "i.gguf").write_bytes(data.replace(b"attention", b"attentiom"))
    with pytest.raises(FormatError, match="attentiom"):
        read(tmp_path / "i.gguf")
    with pytest.raises(QuantkitError, match="--token-weights"):
        chosen_weights("attentiom", True)
