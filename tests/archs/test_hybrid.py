"""qwen3next, qwen35, qwen35moe: the order of heads in both directions, MTP layers, stacked experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs
from quantkit.archs.common.qwen_mtp import checkpoint_name, numbered_name
from quantkit.archs.common.transforms import Chain, Elementwise, GatherRows, ShuffleColumns
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats import gguf
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter, open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.export import export_gguf
from tests.archs.checkpoints import byte_level, log_probabilities, tiny, write_tokenizer
from tests.test_architectures import TOKENS

HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")


def rewritten(source: Path, target: Path, change: Any, config: dict[str, Any] | None = None) -> Path:
    """A checkpoint with other tensors: `change` of a dict name -> float32 array."""
    stored = {name: t.dequantize().reshape(t.shape) for name, t in open_checkpoint(source).tensors.items()}
    tensors = change(stored)
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    given = json.loads((source / "config.json").read_text()) | (config or {})
    (target / "config.json").write_text(json.dumps(given))
    with CheckpointWriter(target, [CheckpointSpec(name, x.shape, "F32") for name, x in tensors.items()]) as writer:
        for name, x in tensors.items():
            writer.write(name, np.ascontiguousarray(x, np.float32).reshape(-1).view(np.uint8))
    return target


def test_rows_are_gathered_in_any_pieces_and_back() -> None:
    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    y = -np.arange(8, dtype=np.float32).reshape(2, 4)
    order = GatherRows([(0, 7, 3), (0, 0, 2), (0, 2, 5)])
    made = order.rows([lambda a, b: x[a:b]], 0, 10)
    assert np.array_equal(made, x[[7, 8, 9, 0, 1, 2, 3, 4, 5, 6]])
    for start, stop in ((0, 1), (2, 4), (4, 9), (9, 10)):
        assert np.array_equal(order.rows([lambda a, b: x[a:b]], start, stop), made[start:stop])
    assert np.array_equal(order.inverse().rows([lambda a, b: made[a:b]], 0, 10), x)
    both = GatherRows([(1, 0, 2), (0, 3, 1)], (3,))
    assert both.shape((10, 4), (2, 4)) == (3, 4)
    assert np.array_equal(both.rows([lambda a, b: x[a:b], lambda a, b: y[a:b]], 0, 3), np.concatenate([y, x[3:4]]))
    with pytest.raises(FormatError, match=r"a tensor of 9 rows \(shape \(9, 4\)\) where config.json makes it 10"):
        order.shape((9, 4))
    chain = Chain(order, ShuffleColumns([2, 0, 3, 1]), Elementwise(np.exp, np.log))
    there = chain.rows([lambda a, b: x[a:b]], 0, 10)
    assert np.allclose(there, np.exp(made[:, [2, 0, 3, 1]]))
    assert np.allclose(chain.inverse().rows([lambda a, b: there[a:b]], 3, 8), x[3:8])


@pytest.mark.parametrize("arch", HYBRIDS)
def test_checkpoints_come_back(tmp_path: Path, arch: str) -> None:
    """Moved rows and columns to the bit; norms and decays, with 1 added and an exponential taken, but for rounding."""
    import torch
    import transformers

    model = tiny(tmp_path / "hf", arch=arch, linear_num_value_heads=6)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    export_gguf(tmp_path / "m.gguf", tmp_path / "back")
    before, after = (open_checkpoint(tmp_path / name).tensors for name in ("hf", "back"))
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    for name, tensor in before.items():
        wanted, found = tensor.dequantize(), after[name].dequantize()
        if name.endswith(("norm.weight", "A_log")):
            assert np.abs(found - wanted).max() < 1e-6
        else:
            assert np.array_equal(found, wanted), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [m(torch.tensor(TOKENS[:1, :40])).logits.numpy() for m in (model, again)]
    assert np.abs(logits[0] - logits[1]).max() < 1e-3


def test_files_have_value_heads_in_their_own_order(tmp_path: Path) -> None:
    """Of two key heads with three value heads each, [0 1 2 | 3 4 5], qwen35 has 0 3 1 4 2 5; qwen3next 0 to 5."""
    dims = {"linear_num_value_heads": 6, "linear_key_head_dim": 4, "linear_value_head_dim": 8}
    for arch, order in (("qwen35", [0, 3, 1, 4, 2, 5]), ("qwen3next", list(range(6)))):
        tiny(tmp_path / arch, arch=arch, **dims)
        stored = open_checkpoint(tmp_path / arch).tensors
        convert_checkpoint(tmp_path / arch, tmp_path / "m.gguf", "f32")
        made = gguf.open(tmp_path / "m.gguf").tensors
        there = "model.layers.1.linear_attn."
        assert np.allclose(made["blk.1.ssm_a"].dequantize(), -np.exp(stored[f"{there}A_log"].dequantize())[order])
        assert np.array_equal(made["blk.1.ssm_dt.bias"].dequantize(), stored[f"{there}dt_bias"].dequantize()[order])
        out = stored[f"{there}out_proj.weight"].dequantize().reshape(64, 6, 8)[:, order].reshape(64, 48)
        assert np.array_equal(made["blk.1.ssm_out.weight"].dequantize(), out)
        conv = stored[f"{there}conv1d.weight"].dequantize().reshape(-1, 4)
        values = conv[16:].reshape(6, 8, 4)[order].reshape(48, 4)
        found = made["blk.1.ssm_conv1d.weight"]
        assert found.shape == (64, 4)
        assert np.array_equal(found.dequantize(), np.concatenate([conv[:16], values]))


@pytest.mark.parametrize("arch", HYBRIDS)
def test_f16_files_in_the_reference(tmp_path: Path, arch: str) -> None:
    """Every expert is used, so that rounding turns no choice."""
    libllama = pytest.importorskip("tests.conformance.libllama")
    change = {} if arch == "qwen35" else {"num_experts_per_tok": 8}
    tiny(tmp_path / "hf", arch=arch, linear_num_value_heads=6, **change)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f16")
    wanted = log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(TOKENS[0]))
    with libllama.Llama(tmp_path / "m.gguf", n_ctx=256, threads=1) as llama:
        assert np.abs(log_probabilities(llama.logits(TOKENS[0])) - wanted).max() < 0.05


def test_stacked_experts(tmp_path: Path) -> None:
    """gate_up_proj [experts, 2 ff, n] and down_proj [experts, n, ff], as Qwen3.5 is shipped."""
    tiny(tmp_path / "hf", arch="qwen35moe")

    def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = {name: x for name, x in tensors.items() if ".experts." not in name}
        for i in range(4):
            gate, up, down = (
                np.stack([tensors[f"model.layers.{i}.mlp.experts.{e}.{kind}_proj.weight"] for e in range(8)])
                for kind in ("gate", "up", "down")
            )
            found[f"model.layers.{i}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            found[f"model.layers.{i}.mlp.experts.down_proj"] = down
        return found

    rewritten(tmp_path / "hf", tmp_path / "stacked", stacked)
    one, other = (convert_checkpoint(tmp_path / name, tmp_path / f"{name}.gguf", "f32") for name in ("hf", "stacked"))
    assert [(s.name, s.shape) for s in one.specs] == [(s.name, s.shape) for s in other.specs]
    a, b = (gguf.open(tmp_path / f"{name}.gguf").tensors for name in ("hf", "stacked"))
    assert all(np.array_equal(tensor.data, b[name].data) for name, tensor in a.items())


def with_mtp_layer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With an MTP layer, as Qwen3.5 stores it."""
    rng = np.random.default_rng(2)
    layer = {
        f"mtp.layers.0.{name.removeprefix('model.layers.3.')}": x for name, x in tensors.items() if ".layers.3." in name
    }
    around = {"fc": (64, 128), "norm": (64,), "pre_fc_norm_embedding": (64,), "pre_fc_norm_hidden": (64,)}
    return tensors | layer | {f"mtp.{n}.weight": rng.standard_normal(s, np.float32) for n, s in around.items()}


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "qwen3next"])
def test_mtp_layers_are_dropped_or_kept(tmp_path: Path, arch: str) -> None:
    """Qwen3-Next's config.json does not count them."""
    counted = {} if arch == "qwen3next" else {"mtp_num_hidden_layers": 1}
    tiny(tmp_path / "hf", arch=arch)
    rewritten(tmp_path / "hf", tmp_path / "mtp", with_mtp_layer, counted)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    dropped = convert_checkpoint(tmp_path / "mtp", tmp_path / "dropped.gguf", "f32")
    assert list(dropped.left_out) == ["MTP layers"]
    assert len(dropped.left_out["MTP layers"]) > 10
    kept = convert_checkpoint(tmp_path / "mtp", tmp_path / "kept.gguf", "f32", mtp="keep")
    assert not kept.left_out
    plain, less, more = (gguf.open(tmp_path / f"{name}.gguf") for name in ("m", "dropped", "kept"))
    assert plain.tensors.keys() == less.tensors.keys()
    assert (more.metadata[f"{arch}.block_count"], more.metadata[f"{arch}.nextn_predict_layers"]) == (5, 1)
    names = {name for name in more.tensors if name.startswith("blk.4.nextn.")}
    assert names == {f"blk.4.nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
    stored = open_checkpoint(tmp_path / "mtp").tensors
    assert np.allclose(more.tensors["blk.4.nextn.enorm.weight"].dequantize(),
                       stored["mtp.pre_fc_norm_embedding.weight"].dequantize() + 1)  # fmt: skip
    wanted = quantkit.load(tmp_path / "m.gguf").logits(TOKENS[0][:40])
    for name in ("dropped", "kept"):
        assert np.array_equal(quantkit.load(tmp_path / f"{name}.gguf").logits(TOKENS[0][:40]), wanted)
    export_gguf(tmp_path / "kept.gguf", tmp_path / "back")
    assert open_checkpoint(tmp_path / "back").tensors.keys() == stored.keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["mtp_num_hidden_layers"] == 1


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "lm_head.weight", "model.mtp.other.weight"])
def test_other_names_stay(name: str) -> None:
    assert numbered_name(name, 4) == name
    assert checkpoint_name(name, 4) == name


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_language_model_of_a_multimodal_one(tmp_path: Path, kind: str) -> None:
    import torch
    import transformers

    arch = archs.get("qwen35moe" if kind.endswith("Moe") else "qwen35")
    text = {key: value for key, value in arch.EXAMPLE.items() if key != "architectures"}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
              "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", byte_level(320), bos_token="<|begin|>", eos_token="<|end|>")
    done = convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    assert (done.arch, list(done.left_out)) == (arch, ["image encoder"])
    with torch.no_grad():
        wanted = log_probabilities(model(input_ids=torch.tensor(TOKENS[:1])).logits.numpy()[0])
    found = log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(TOKENS[0]))
    assert np.abs(found - wanted).max() < 2e-3


def test_what_cannot_be_expressed_is_refused() -> None:
    config = archs.get("qwen3next").EXAMPLE
    for change, message in (
        ({"layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"]}, "layer_types"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is not a multiple"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ):
        with pytest.raises((FormatError, UnsupportedError), match=message):
            archs.get("qwen3next").metadata({**config, **change})
