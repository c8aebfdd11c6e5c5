"""DeepSeek V4: both forms of config.json and of names, what is refused, caches, export, fast numerics, plans."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs, types
from quantkit.archs.common import blocks
from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.evaluate.chunk_runs import evaluate_chunks
from quantkit.evaluate.layer_similarity import layer_similarity
from quantkit.evaluate.layers.layer_by_layer import chunks_layer_by_layer
from quantkit.evaluate.layers.tensor_errors import tensor_errors
from quantkit.evaluate.text import Chunks
from quantkit.formats import gguf
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter, open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.conversion.plan import plan_conversion
from quantkit.pipelines.export import export_gguf
from quantkit.placement import kv_size
from quantkit.runtime.blocks import compressed_attention, experts, hyper_connections
from tests.archs.checkpoints import Coded, coded_checkpoint, loaded, log_probabilities, tiny

TOKENS = np.random.default_rng(3).integers(2, 320, 200)
ARCH = archs.get("deepseek4")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint hf and the file m.gguf of it."""
    directory = tmp_path_factory.mktemp("deepseek4")
    tiny(directory / "hf", arch="deepseek4")
    convert_checkpoint(directory / "hf", directory / "m.gguf", "f32")
    return directory


def test_names_of_published_checkpoints(files: Path, tmp_path: Path) -> None:
    """They have no prefix, and a kv_norm; the file is the same."""
    renamed = {
        "model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight",
        **{f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")},
    }  # fmt: skip
    stored = open_checkpoint(files / "hf").tensors
    names = {n: renamed.get(n, n.removeprefix("model.").replace("attn.norm.", "attn.kv_norm.")) for n in stored}
    assert "layers.0.attn.kv_norm.weight" in names.values()
    target = tmp_path / "hf"
    target.mkdir()
    for path in (files / "hf").iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    specs = [CheckpointSpec(names[n], t.shape, t.dtype) for n, t in stored.items()]
    specs.append(CheckpointSpec("mtp.0.enorm.weight", (64,), "F32"))
    with CheckpointWriter(target, specs) as writer:
        for name, tensor in stored.items():
            writer.write(names[name], tensor.raw())
        writer.write("mtp.0.enorm.weight", np.zeros(256, np.uint8))
    planned = plan_conversion(target, "f32")
    assert planned.left_out == {"MTP layers": ["model.mtp.0.enorm.weight"]}
    convert_checkpoint(target, tmp_path / "m.gguf", "f32")
    ours, theirs = gguf.open(tmp_path / "m.gguf"), gguf.open(files / "m.gguf")
    assert {n: t.data.tobytes() for n, t in ours.tensors.items()} == {
        n: t.data.tobytes() for n, t in theirs.tensors.items()
    }


def test_fp8_and_fp4_of_published_checkpoints(files: Path, tmp_path: Path) -> None:
    """Experts are FP4 with a scale for 32 columns, other large matrices FP8 with a scale for 128 x 128; both E8M0."""
    torch = pytest.importorskip("torch")
    stored, rng = open_checkpoint(files / "hf").tensors, np.random.default_rng(5)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    expected: dict[str, np.ndarray] = {}

    def published(name: str, *shape: int) -> Coded:
        scale_name = name.removesuffix("weight") + "scale"
        if re.search(r"\.attn\.w\w+\.weight$|shared_experts|indexer\.wq_b", name):
            codes = rng.integers(0, 0x7F, shape, np.uint8)
            exponents = rng.integers(115, 122, [-(-n // 128) for n in shape], np.uint8)
            scales = np.exp2(exponents.astype(np.float32) - 127).repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
            expected[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy() * scales
            return [(name, "F8_E4M3", codes), (scale_name, "F8_E8M0", exponents)]
        if ".ffn.experts." in name:
            rows, n = shape
            codes = rng.integers(0, 256, (rows, n // 2), np.uint8)
            exponents = rng.integers(115, 122, (rows, n // 32), np.uint8)
            pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape)
            expected[name] = e2m1[pairs] * np.exp2(exponents.astype(np.float32) - 127).repeat(32, 1)
            return [(name, "I8", codes), (scale_name, "F8_E8M0", exponents)]
        raw = stored[name].raw()
        return [(name, stored[name].dtype, raw.view(f"<u{raw.nbytes // math.prod(shape)}").reshape(shape))]

    settings = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    hf = coded_checkpoint(files / "hf", tmp_path / "hf", "", published, settings | {"expert_dtype": "fp4"})
    convert_checkpoint(hf, tmp_path / "m.gguf", "f32")
    found = gguf.open(tmp_path / "m.gguf").tensors
    of_experts = found["blk.1.ffn_up_exps.weight"]
    assert of_experts.type.name == "mxfp4"
    for e, expert in enumerate(of_experts.dequantize()):
        assert np.array_equal(expert, expected[f"model.layers.1.ffn.experts.{e}.w3.weight"])
    for ours, theirs in (
        ("attn_q_a", "attn.wq_a"), ("attn_output_b", "attn.wo_b"), ("indexer.attn_q_b", "attn.indexer.wq_b"),
        ("ffn_down_shexp", "ffn.shared_experts.w2"),
    ):  # fmt: skip
        assert np.array_equal(found[f"blk.1.{ours}.weight"].dequantize(), expected[f"model.layers.1.{theirs}.weight"])
    quantkit.load(tmp_path / "m.gguf").logits(TOKENS[:20])


def test_both_forms_of_config_give_the_same_keys(files: Path) -> None:
    saved = json.loads((files / "hf" / "config.json").read_text())
    assert "layer_types" in saved
    assert "compress_ratios" not in saved
    assert ARCH.metadata(saved) == ARCH.metadata(ARCH.EXAMPLE)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"), ({"norm_topk_prob": False}, "norm_topk_prob = False"),
     ({"compress_ratios": [0, 8, 128, 4]}, "compress_ratios has 8"), ({"n_shared_experts": 2}, "n_shared_experts = 2"),
     ({"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates.compressed_sparse_attention = 8"),
     ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types"),
     ({"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
     ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
     ({"rope_scaling": {**ARCH.EXAMPLE["rope_scaling"], "attention_factor": 1.3}}, "attention_factor = 1.3")],
)  # fmt: skip
def test_settings_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ARCH.metadata(ARCH.EXAMPLE | change)


def test_what_config_has_to_say() -> None:
    with pytest.raises(FormatError, match="neither layer_types nor compress_ratios"):
        ARCH.metadata({key: value for key, value in ARCH.EXAMPLE.items() if key != "compress_ratios"})
    with pytest.raises(FormatError, match="num_hash_layers"):
        ARCH.metadata({key: value for key, value in ARCH.EXAMPLE.items() if key != "num_hash_layers"})


def test_the_table_of_experts_is_i32_and_comes_back(files: Path, tmp_path: Path) -> None:
    table = gguf.open(files / "m.gguf").tensors["blk.1.ffn_gate_tid2eid.weight"]
    assert (table.type.name, table.shape) == ("i32", (320, 3))
    export_gguf(files / "m.gguf", tmp_path / "back")
    name = "model.layers.1.ffn.gate.tid2eid"
    before, after = (open_checkpoint(path).tensors[name] for path in (files / "hf", tmp_path / "back"))
    assert after.dtype == "I64"
    assert before.raw().tobytes() == after.raw().tobytes()
    assert len({tuple(row) for row in before.raw().view("<i8").reshape(320, 3)}) > 50


def test_an_export_computes_the_same_in_transformers(files: Path, tmp_path: Path) -> None:
    import torch

    export_gguf(files / "m.gguf", tmp_path / "back")
    with torch.no_grad():
        first, second = (
            loaded(path)(torch.tensor(TOKENS[None])).logits.numpy() for path in (files / "hf", tmp_path / "back")
        )
    np.testing.assert_array_equal(first, second)


def test_caches_are_truncated_and_continued(files: Path) -> None:
    """In batches that end within a window of each size, after other tokens that were taken back."""
    model = quantkit.load(files / "m.gguf")
    whole = model.logits(TOKENS)
    cache, found = model.new_cache(256), []
    for start, stop in ((0, 3), (3, 130), (130, 131), (131, 200)):
        model.forward(TOKENS[:17], cache)
        cache.truncate(start)
        found.append(model.forward(TOKENS[start:stop], cache))
    assert np.abs(log_probabilities(np.concatenate(found)) - log_probabilities(whole)).max() < 1e-4
    together = [model.new_cache(256) for _ in range(2)]
    ends = model.forward_batch([(TOKENS[:150], together[0]), (TOKENS[:67], together[1])])
    assert np.abs(log_probabilities(ends) - log_probabilities(whole[[149, 66]])).max() < 1e-4


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_predicted_cache_is_the_one_that_is_there(files: Path, kind: str) -> None:
    model = quantkit.load(files / "m.gguf")
    cache, layout = model.new_cache(192, kind), types.layout(kind)
    predicted = kv_size.of_layers(model.metadata, 192, layout, layout)
    assert cache.entries is not None
    entries = [sum(each.nbytes for each in cache.entries.arrays(layer)) for layer in range(4)]
    assert [k.nbytes + v.nbytes + made for k, v, made in zip(cache.k, cache.v, entries)] == predicted
    assert cache.nbytes == sum(predicted)
    whole = model.logits(TOKENS[:100])
    error = np.abs(log_probabilities(model.forward(TOKENS[:100], cache)) - log_probabilities(whole)).mean()
    assert 0 < error < {"f16": 0.01, "q8_0": 0.1}[kind]


def test_fast_numerics_are_compiled(files: Path) -> None:
    model = quantkit.load(files / "m.gguf", numerics="fast")
    assert model.fallback_reason is None
    exact = quantkit.load(files / "m.gguf").logits(TOKENS[:70])
    assert np.abs(log_probabilities(model.logits(TOKENS[:70])) - log_probabilities(exact)).mean() < 0.01


@pytest.mark.parametrize(
    "how",
    [
        {"profile": True},
        {"devices": "cpu:0=1GiB,cpu:1=1GiB", "tensor_split": (1, 1)},
        {"devices": "cpu:0=1GiB", "override_tensor": "exps=CPU", "numerics": "fast"},
        {"devices": "cpu:0=1GiB", "kv_on_cpu": True, "override_tensor": "attn_output_a|hc_ffn=CPU"},
    ],
)
def test_several_devices(files: Path, how: dict[str, Any]) -> None:
    """Residual streams move from device to device; the tokens go to experts from a table wherever they are."""
    whole = quantkit.load(files / "m.gguf", cache_type="f32").logits(TOKENS)
    model = quantkit.load(files / "m.gguf", cache_type="f32", **how)
    cache = model.new_cache(200)
    found = [model.forward(TOKENS[:130], cache), model.forward(TOKENS[130:131], cache)]
    state = cache.save()
    model.forward(TOKENS[:9], cache)
    cache.restore(state)
    found += [model.forward([token], cache) for token in TOKENS[131:134]]
    found.append(model.forward(TOKENS[134:], cache))
    assert np.abs(log_probabilities(np.concatenate(found)) - log_probabilities(whole)).max() < 1e-3
    assert model.split is not None
    assert cache.nbytes == quantkit.load(files / "m.gguf", cache_type="f32").new_cache(200).nbytes


def test_compiled_plans_against_transformers(files: Path) -> None:
    """A prompt, and tokens one by one after a prompt."""
    import torch

    with torch.no_grad():
        wanted = log_probabilities(loaded(files / "hf")(torch.tensor(TOKENS[None])).logits.numpy()[0])
    model = quantkit.load(files / "m.gguf", numerics="fast", cache_type="f32")
    assert np.abs(log_probabilities(model.logits(TOKENS)) - wanted).max() < 1e-3
    cache = model.new_cache(200)
    model.forward(TOKENS[:90], cache)
    steps = np.concatenate([model.forward([token], cache) for token in TOKENS[90:]])
    assert np.abs(log_probabilities(steps) - wanted[90:]).max() < 1e-3


def test_layers_by_themselves(files: Path, tmp_path: Path) -> None:
    """What runs one layer at a time passes all streams on, and the tokens that a table has experts of."""
    model, inputs = quantkit.load(files / "m.gguf"), TOKENS.reshape(2, 100)
    whole = dict(evaluate_chunks(model, inputs))
    for index, logits in chunks_layer_by_layer(model, inputs):
        assert np.array_equal(logits, whole.pop(index))
    assert not whole
    quantkit.quantize(files / "m.gguf", tmp_path / "q.gguf", "Q8_0")
    errors = {error.name: error for error in tensor_errors(model, gguf.open(tmp_path / "q.gguf"), inputs)}
    for name in ("token_embd.weight", "blk.0.ffn_up_exps.weight", "blk.3.attn_q_b.weight", "output.weight"):
        assert 0 < errors[name].error < 0.1, name
    similar = layer_similarity(model, Chunks(inputs, inputs, "tokens"))
    assert len(similar) == 4
    assert all(0 < value < 1 for value in similar)


def test_a_table_with_a_bad_expert_is_an_error(files: Path, tmp_path: Path) -> None:
    for value, message in ((8, "none of 0 to 7"), (-1, "none of 0 to 7"), (None, "one expert twice")):
        data = bytearray((files / "m.gguf").read_bytes())
        table = gguf.open(files / "m.gguf").tensors["blk.0.ffn_gate_tid2eid.weight"]
        row = np.frombuffer(data, "<i4", 3, table.offset + 12 * 5)
        row[0] = row[1] if value is None else value
        (tmp_path / "bad.gguf").write_bytes(data)
        model = quantkit.load(tmp_path / "bad.gguf")
        model.logits([4])
        with pytest.raises(DataError, match=message):
            model.logits([5])


def test_sinkhorn_makes_rows_and_columns_sum_to_one() -> None:
    part = blocks.HyperConnection(blocks.Linear(""), "", "", blocks.Norm("", 1e-6), 3, 20, 1e-6)
    c = hyper_connections.doubly_stochastic(np.random.default_rng(1).normal(size=(5, 3, 3)).astype(np.float32), part)
    np.testing.assert_allclose(c.sum(1), 1, atol=1e-4)
    np.testing.assert_allclose(c.sum(2), 1, atol=1e-4)


class _Run:
    """A runner without RoPE and norms."""

    def vector(self, name: str) -> np.ndarray:
        return np.zeros(1, np.float32) if name == "zero" else np.arange(8, dtype=np.float32) / 8

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        return x

    def rotations(self, rope: blocks.Rope, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
        return np.ones((n_ctx, 1), np.float32), np.zeros((n_ctx, 1), np.float32)


@pytest.mark.parametrize("overlapping", [False, True])
def test_entries_are_means_of_windows(overlapping: bool) -> None:
    """Each element by itself; the tokens left over make none; the first window has none before it."""
    rate, dim = (2, 2) if overlapping else (4, 2)
    part = blocks.Compressor(blocks.Linear(""), blocks.Linear(""), "ape", blocks.Norm("", 0), dim, rate, overlapping)
    kept = np.random.default_rng(2).normal(size=(7, 2 * part.columns)).astype(np.float32)
    found = compressed_attention.entries(_Run(), part, blocks.Rope("norm", 2, 1e4), kept)  # type: ignore[arg-type]
    ape = (np.arange(8) / 8).reshape(rate, part.columns)
    assert found.shape == (7 // rate, dim)
    for w, entry in enumerate(found):
        for e in range(dim):
            pairs = [(t, e + (dim if overlapping else 0)) for t in range(w * rate, (w + 1) * rate)]
            if overlapping and w:
                pairs += [(t, e) for t in range((w - 1) * rate, w * rate)]
            share = np.exp([kept[t, part.columns + i] + ape[t % rate, i] for t, i in pairs])
            wanted = np.dot(share, [kept[t, i] for t, i in pairs]) / share.sum()
            assert entry[e] == pytest.approx(wanted, rel=1e-5)


def test_routing_by_a_table_and_by_scores() -> None:
    part = (
        archs.get("deepseek4")
        .blocks(ARCH.hparams({key: value for key, (value, _) in ARCH.metadata(ARCH.EXAMPLE).items()}))[2]
        .parts[1]
    )
    assert isinstance(part, blocks.Experts)
    logits = np.array([[3, 1, 2, 0, -9, -9, -9, -9]], np.float32)
    p = np.sqrt(np.log1p(np.exp(logits[0].astype(np.float64))))
    chosen, weights = experts.route(part, logits.copy())
    assert chosen.tolist() == [[0, 2, 1]]
    np.testing.assert_allclose(weights[0], 1.5 * p[[0, 2, 1]] / p[[0, 2, 1]].sum(), rtol=1e-5)
    bias = np.array([0, 0, 0, 9, 0, 0, 0, 0], np.float32)
    assert experts.route(part, logits.copy(), bias=bias)[0].tolist() == [[0, 2, 3]]
    chosen, weights = experts.route(part, logits.copy(), given=np.array([[7, 3, 1]]))
    assert chosen.tolist() == [[1, 3, 7]]
    chosen, weights = experts.route(part, logits.copy(), reduction=(1, 0.95))
    assert chosen.tolist() == [[0, -1, -1]]
    np.testing.assert_allclose(weights, [[1.5, 0, 0]])
