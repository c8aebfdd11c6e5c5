"""Files whose hyperparameters contradict each other, the tensors or the tokenizer: refused before anything is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quantkit import archs
from quantkit.archs.common import validate
from quantkit.cli import main
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats import gguf
from tests.archs.files import changed, reshaped, written
from tests.refusals import Refusals

NAN, INF = float("nan"), float("inf")
SCALED = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    made = {name: written(directory / f"{name}.gguf", name, tokenizer=True)
            for name in ("llama", "qwen3moe", "deepseek2", "qwen35", "gemma3", "gemma4")}  # fmt: skip
    made["wide"] = written(directory / "wide.gguf", "llama", head_dim=32)
    made["yarn"] = written(directory / "yarn.gguf", "llama", **SCALED)
    made["mtp"] = written(directory / "mtp.gguf", "glm4moe", num_nextn_predict_layers=1, mtp="keep")
    made["biased"] = written(directory / "biased.gguf", "qwen2")
    return made


@pytest.mark.parametrize("arch", [arch.name for arch in archs.all()])
def test_files_of_every_architecture_agree_with_themselves(arch: str, tmp_path: Path) -> None:
    file = gguf.open(written(tmp_path / "m.gguf", arch, tokenizer=True))
    assert validate.problems(file.metadata, file.tensors) == []
    found = validate.describe(file.metadata, file.tensors, file.path)
    numbers = {layer for block in found.blocks for layer, _ in block.numbered_parts}
    layers = sum(layer < found.hparams.n_layer for layer in numbers)  # others are of states, see Cache
    assert layers == found.hparams.n_main  # of longcat-flash, two a block


@pytest.mark.parametrize(
    ("model", "key", "value", "match"),
    [
        # beyond the head: aborted, crashed, other text, 20 GB
        ("llama", "llama.rope.dimension_count", (1024, "u32"), "dimension_count = 1024, .* key has 16 elements"),
        ("llama", "llama.rope.dimension_count", (18, "u32"), "dimension_count = 18, .* key has 16 elements"),
        ("llama", "llama.rope.dimension_count", (14, "u32"), "rotates all 16 elements"),
        ("llama", "llama.rope.dimension_count", (4294967294, "u32"), "= 4294967294; it has to be .* to 65536"),
        ("llama", "llama.rope.dimension_count", (0, "u32"), "= 0; it has to be a whole number from 1"),
        ("qwen3moe", "qwen3moe.rope.dimension_count", (512, "u32"), "dimension_count = 512, .* key has 32"),
        ("mtp", "glm4moe.rope.dimension_count", (9, "u32"), "has to be even"),
        ("qwen35", "qwen35.rope.dimension_count", None, r"qwen35\.rope\.dimension_count is missing"),
        # heads
        ("llama", "llama.attention.head_count", (8, "u32"), "dimension_count = 16, .* key has 8"),
        ("wide", "llama.attention.head_count", (5, "u32"), "head_count = 5 is not a multiple of .*head_count_kv = 2"),
        ("llama", "llama.attention.head_count", (5, "u32"), "embedding_length = 64 is not a multiple .* = 5"),
        ("llama", "llama.attention.head_count", (0, "u32"), "head_count = 0; it has to be"),
        ("llama", "llama.attention.head_count_kv", (4, "u32"), r"attn_k.weight has shape \(32, 64\), .* \(64, 64\)"),
        ("llama", "llama.attention.head_count_kv", ([2, 2, 2], "u32"), "has 3 entries, llama.block_count is 2"),
        ("llama", "llama.attention.head_count_kv", ([0, 0], "u32"), "head_count_kv = 0; it has to be"),
        ("llama", "llama.attention.head_count_kv", ([2], "f32"), r"head_count_kv = \[2\.0\]"),
        ("llama", "llama.attention.head_count", ("4", "str"), "head_count = '4'; it has to be a whole number"),
        ("llama", "llama.attention.head_count", (4.0, "f32"), r"head_count = 4\.0"),
        ("llama", "llama.attention.head_count", (True, "bool"), "head_count = True"),
        ("llama", "llama.attention.head_count", (-4, "i32"), "head_count = -4"),
        ("llama", "llama.attention.head_count_kv", ([], "u32"), r"head_count_kv = \[\]"),
        # layers
        ("llama", "llama.block_count", (0, "u32"), "block_count = 0; it has to be"),
        ("llama", "llama.block_count", (1, "u32"), r"block_count = 1, but there are tensors of blk\.1"),
        ("llama", "llama.block_count", (3, "u32"), r"block_count = 3, but there are no tensors of blk\.2"),
        ("llama", "llama.block_count", (4294967294, "u32"), "block_count = 4294967294"),
        ("llama", "llama.block_count", None, r"llama\.block_count is missing"),
        ("llama", "llama.nextn_predict_layers", (1, "u32"), r"blk.1 .* no tensor blk\.1\.nextn\.eh_proj"),
        ("llama", "llama.nextn_predict_layers", (2, "u32"), "no layer would run"),
        ("mtp", "glm4moe.nextn_predict_layers", (0, "u32"), r"tensor blk\.3\.nextn\.\w+\.weight is not used"),
        ("mtp", "glm4moe.nextn_predict_layers", (2, "u32"), r"no tensor blk\.2\.nextn\.eh_proj"),
        # sizes
        ("llama", "llama.embedding_length", (128, "u32"), "dimension_count = 16, .* rotates all 32 elements"),
        ("wide", "llama.embedding_length", (128, "u32"), r"token_embd.weight has shape \(320, 64\), .* \(320, 128\)"),
        ("llama", "llama.feed_forward_length", (1 << 31, "u32"), "feed_forward_length = 2147483648"),
        ("llama", "llama.context_length", (4294967295, "u32"), "context_length = 4294967295"),
        ("llama", "llama.vocab_size", (319, "u32"), r"token_embd.weight has shape \(320, 64\)"),
        ("llama", "llama.vocab_size", (1 << 30, "u32"), "vocab_size = 1073741824"),
        ("llama", "tokenizer.ggml.tokens", ([str(i) for i in range(321)], "str"), "has 321 tokens, .* has 320"),
        ("llama", "tokenizer.ggml.tokens", (list(range(320)), "i32"), "has to be a list of strings"),
        ("llama", "tokenizer.ggml.tokens", ("abc", "str"), "has to be a list of strings"),
        ("llama", "tokenizer.ggml.token_type", ([NAN] * 320, "f32"), "tokenizer.ggml.token_type"),
        # numbers
        ("llama", "llama.attention.layer_norm_rms_epsilon", (0.0, "f32"), "rms_epsilon = 0.0; .* above 0"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", (NAN, "f32"), "rms_epsilon = nan"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", (1.0, "f32"), "rms_epsilon = 1.0; .* at most 0.1"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", ("x", "str"), "rms_epsilon = 'x'"),
        ("llama", "llama.rope.freq_base", (INF, "f32"), "freq_base = inf"),
        ("llama", "llama.rope.freq_base", (-1.0, "f32"), "freq_base = -1.0"),
        ("llama", "llama.rope.freq_base", (1.0, "f32"), "freq_base = 1.0; it has to be a number above 1"),
        ("yarn", "llama.rope.scaling.factor", (0.0, "f32"), "scaling.factor = 0.0; .* above 0"),
        ("yarn", "llama.rope.scaling.factor", (0.5, "f32"), "scaling.factor = 0.5; yarn extends"),
        ("yarn", "llama.rope.scaling.factor", None, "rope.scaling.factor is missing"),
        ("yarn", "llama.rope.scaling.original_context_length", (0, "u32"), "original_context_length = 0"),
        ("yarn", "llama.rope.scaling.yarn_beta_slow", (99.0, "f32"), "beta_fast = 32 is below .*beta_slow = 99"),
        ("yarn", "llama.rope.scaling.type", ([1], "i32"), "it has to be a string"),
        ("llama", "llama.attention.sliding_window", (-8, "i32"), "sliding_window = -8"),
        ("gemma4", "gemma4.attention.key_length_swa", (64, "u32"), "length_swa = 64 and value_length_swa = 32"),
        ("gemma4", "gemma4.attention.head_count_kv", ([2, 1, 2], "u32"), "has 3 entries, gemma4.block_count is 4"),
        ("gemma4", "gemma4.attention.head_count_kv", ([2, 0, 2, 1], "u32"), r"head_count_kv\[1\] = 0; it has to be 1"),
        ("gemma4", "gemma4.rope.dimension_count_swa", (128, "u32"), "dimension_count = 128, but a head's key has 32"),
        ("gemma3", "gemma3.attention.sliding_window", (0, "u32"), "sliding_window = 0; a token attends to itself"),
        ("gemma3", "gemma3.attention.sliding_window_pattern", (0, "u32"), "sliding_window_pattern = 0"),
        ("gemma3", "gemma3.attention.scale", (0.0, "f32"), "attention.scale = 0.0"),
        # experts
        ("qwen3moe", "qwen3moe.expert_used_count", (0, "u32"), "expert_used_count is 0 of expert_count 6"),
        ("qwen3moe", "qwen3moe.expert_used_count", (9, "u32"), "expert_used_count is 9 of expert_count 6"),
        ("qwen3moe", "qwen3moe.expert_count", (16, "u32"), r"ffn_gate_inp.weight has shape \(6, 64\)"),
        ("qwen3moe", "qwen3moe.expert_group_count", (4, "u32"), "groups must be of one size"),
        ("qwen3moe", "qwen3moe.expert_weights_scale", (-1.0, "f32"), "expert_weights_scale = -1"),
        ("qwen3moe", "qwen3moe.expert_weights_norm", ("no", "str"), "expert_weights_norm = 'no'"),
        ("deepseek2", "deepseek2.leading_dense_block_count", (2, "u32"), r"blk.1.ffn_gate.weight is missing"),
        ("deepseek2", "deepseek2.expert_shared_count", (0, "u32"), r"ffn_gate_shexp.weight is not used"),
        ("deepseek2", "deepseek2.expert_gating_func", None, r"expert_gating_func is missing"),
        # latent attention: negative nope, shapes
        ("deepseek2", "deepseek2.attention.key_length", (16, "u32"), "key_length = 16 leaves no elements"),
        ("deepseek2", "deepseek2.rope.dimension_count", (30, "u32"), r"attn_kv_a_mqa.weight has shape \(96, 64\)"),
        ("deepseek2", "deepseek2.attention.kv_lora_rank", (0, "u32"), "kv_lora_rank = 0; it has to be 1 or more"),
        ("deepseek2", "deepseek2.attention.q_lora_rank", (0, "u32"), "attn_q.weight is missing"),
        ("deepseek2", "deepseek2.attention.key_length_mla", (1 << 25, "u32"), "key_length_mla = 33554432"),
        # recurrent layers
        ("qwen35", "qwen35.ssm.time_step_rank", (0, "u32"), "time_step_rank = 0"),
        ("qwen35", "qwen35.ssm.time_step_rank", (8, "u32"), r"ssm_beta.weight has shape \(4, 64\)"),
        ("qwen35", "qwen35.ssm.group_count", (3, "u32"), "must be multiples"),
        ("qwen35", "qwen35.ssm.conv_kernel", (5, "u32"), r"ssm_conv1d.weight has shape"),
        ("qwen35", "qwen35.ssm.state_size", (-1, "i32"), "state_size = -1"),
        ("qwen35", "qwen35.full_attention_interval", (0, "u32"), "full_attention_interval = 0"),
        ("qwen35", "qwen35.full_attention_interval", (2, "u32"), r"blk.1.attn_q_norm.weight is missing"),
    ],
)  # fmt: skip
def test_keys_that_cannot_be(
    models: dict[str, Path], tmp_path: Path, model: str, key: str, value: tuple[Any, str] | None, match: str
) -> None:
    path = changed(models[model], tmp_path / "m.gguf", {key: value})
    file = gguf.open(path)
    with pytest.raises(FormatError, match=rf"(?s){path}: .*{match}.*(metadata set|get it again)"):
        validate.describe(file.metadata, file.tensors, path)
    assert validate.problems(file.metadata, file.tensors) or key.endswith(".block_count")


@pytest.mark.parametrize(
    ("model", "name", "shape", "match"),
    [
        ("llama", "rope_freqs.weight", (9,), r"rope_freqs.weight has shape \(9,\), the metadata say \(8,\)"),
        ("deepseek2", "rope_freqs.weight", (32,), r"rope_freqs.weight has shape \(32,\), the metadata say \(16,\)"),
        ("llama", "blk.1.attn_norm.weight", (63,), r"attn_norm.weight has shape \(63,\), the metadata say \(64,\)"),
        ("llama", "output_norm.weight", (1, 64), r"has shape \(1, 64\)"),
        ("llama", "blk.0.attn_q_norm.weight", (16,), "attn_q_norm.weight is not used by llama as quantkit computes it"),
        ("llama", "blk.7.attn_q.weight", (64, 64), r"block_count = 2, but there are tensors of blk\.7"),
        ("llama", "blk.0.attn_q.bias", (64,), r"blk\.1\.attn_q\.bias is missing; 1 other"),
        ("qwen3moe", "blk.0.ffn_up_exps.weight", (7, 32, 64), r"ffn_up_exps.weight has shape \(7, 32, 64\)"),
        ("llama", "blk.²⁹.attn_q.weight", (64,), "is not used"),
        ("llama", f"blk.{'9' * 40}.x.weight", (64,), "is not used"),
    ],
)
def test_tensors_that_cannot_be(
    models: dict[str, Path], tmp_path: Path, model: str, name: str, shape: tuple[int, ...], match: str
) -> None:
    file = gguf.open(reshaped(models[model], tmp_path / "m.gguf", name, shape))
    with pytest.raises(FormatError, match=match):
        validate.describe(file.metadata, file.tensors, file.path)


def test_a_dropped_bias_is_missed(models: dict[str, Path], tmp_path: Path) -> None:
    file = gguf.open(changed(models["biased"], tmp_path / "m.gguf", {}, drop="blk.1.attn_k.bias"))
    with pytest.raises(FormatError, match=r"blk\.1\.attn_k\.bias is missing"):
        validate.describe(file.metadata, file.tensors, file.path)


def test_layers_that_differ_are_unsupported(models: dict[str, Path], tmp_path: Path) -> None:
    file = gguf.open(changed(models["llama"], tmp_path / "m.gguf", {"llama.attention.head_count_kv": ([2, 1], "u32")}))
    with pytest.raises(UnsupportedError, match=r"head_count_kv differs between layers \(\[1, 2\]\)"):
        validate.describe(file.metadata, file.tensors, file.path)


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("llama", {"llama.rope.dimension_count": None, "llama.rope.freq_base": None}),
        ("llama", {"llama.attention.head_count_kv": ([2, 2], "u32"), "llama.feed_forward_length": ([96, 96], "i32")}),
        ("llama", {"llama.attention.sliding_window": (0, "u32"), "llama.expert_count": (0, "u32")}),
        ("llama", {"llama.vocab_size": None, "llama.context_length": (128, "u64")}),
        ("mtp", {}),
    ],
)
def test_what_other_writers_leave_out_or_spell_otherwise(
    models: dict[str, Path], tmp_path: Path, model: str, keys: dict[str, Any]
) -> None:
    file = gguf.open(changed(models[model], tmp_path / "m.gguf", keys))
    assert validate.describe(file.metadata, file.tensors, file.path).hparams.n_main


def test_what_is_no_model_has_no_problems(tmp_path: Path, models: dict[str, Path]) -> None:
    for keys in ({"general.architecture": ("clip", "str")}, {"general.type": ("adapter", "str")}):
        file = gguf.open(changed(models["llama"], tmp_path / "m.gguf", {"llama.block_count": (9, "u32"), **keys}))
        assert validate.problems(file.metadata, file.tensors) == []


@pytest.mark.parametrize("command", ["generate", "perplexity", "imatrix"])
def test_commands_refuse_them(
    command: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(models["llama"], tmp_path / "m.gguf", {"llama.rope.dimension_count": (1024, "u32")})
    text = tmp_path / "text"
    text.write_text("some words " * 50)
    options = {"generate": ["-p", "a", "-n", "2"], "perplexity": ["-f", text, "-c", "16"],
               "imatrix": ["-f", text, "-c", "16", "-o", tmp_path / "o.dat"]}[command]  # fmt: skip
    assert main([command, *map(str, [path, *options])]) == 1
    said = capsys.readouterr().err
    assert f"{path}: blk.0: rope.dimension_count = 1024" in said
    assert "quantkit metadata set" in said


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"general.architecture": ("qwun3", "str")}, "unknown architecture 'qwun3'; did you mean"),
        ({"tokenizer.ggml.model": ("bert", "str")}, "tokenizer.ggml.model = 'bert'"),
        ({"tokenizer.ggml.pre": ("gpt-7", "str")}, r"unknown pre-tokenizer \(tokenizer.ggml.pre\) 'gpt-7'"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
    ],
)
def test_unknown_names_come_with_the_file(
    keys: dict[str, Any], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(written(tmp_path / "llama.gguf", "llama", tokenizer=True), tmp_path / "m.gguf", keys)
    text = tmp_path / "text"
    text.write_text("some words " * 50)
    for command in (["generate", path, "-p", "a", "-n", "1"], ["perplexity", path, "-f", text, "-c", "16"],
                    ["compare", path, path, "-f", text, "-c", "16"]):  # fmt: skip
        assert main([*map(str, command)]) == 1
        assert re.search(f"error: {path}: .*{match}", capsys.readouterr().err), command


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("qwen35.ssm.time_step_rank", None, "ssm.time_step_rank is missing"),
        ("qwen35.attention.head_count", ("x", "str"), "head_count = 'x'"),
        ("qwen35.block_count", (4294967294, "u32"), "block_count = 4294967294"),
    ],
)
def test_plans_refuse_them(
    key: str, value: Any, match: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(models["qwen35"], tmp_path / "m.gguf", {key: value})
    assert main(["plan", str(path), "Q4_0", "--vram", "1", "-c", "64"]) == 1
    assert match in capsys.readouterr().err


def test_inspect_and_verify_list_them(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(models["llama"], tmp_path / "m.gguf", {"llama.feed_forward_length": (97, "u32")})
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert "problem: tensor blk.0.ffn_gate.weight has shape (96, 64), the metadata say (97, 64)" in said
    assert "quantkit metadata set" in said
    assert main(["verify", str(path)]) == 1
    assert f"damaged: {path}: tensor blk.0.ffn_gate.weight has shape (96, 64)" in capsys.readouterr().out


def test_verify_notes_bytes_after_the_last_tensor(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They damage nothing; padding is not among them."""
    path = tmp_path / "m.gguf"
    path.write_bytes(models["llama"].read_bytes())
    assert main(["verify", str(path)]) == 0
    assert "after the last tensor" not in capsys.readouterr().out
    path.write_bytes(models["llama"].read_bytes() + bytes(4096))
    assert main(["verify", str(path)]) == 0
    assert f"note: {path}: 4,096 bytes after the last tensor" in capsys.readouterr().out


def test_heads_that_do_not_share_evenly(tmp_path: Path) -> None:
    """All shapes agree, but five query heads cannot share two KV heads evenly."""
    made = written(tmp_path / "m.gguf", "llama", num_attention_heads=5, head_dim=16)
    file = gguf.open(made)
    assert validate.problems(file.metadata, file.tensors)[0] == (
        "blk.0: attention.head_count = 5 is not a multiple of attention.head_count_kv = 2; "
        "each KV head serves the same number of query heads"
    )


@pytest.mark.parametrize("arch", [arch.name for arch in archs.all()])
def test_contradictory_keys_end_in_errors_of_ours(arch: str, tmp_path: Path) -> None:
    """Each key with values of other types, short lists and numbers out of bounds: read, described, exported."""
    file, of = gguf.open(written(tmp_path / "m.gguf", arch, tokenizer=True)), archs.get(arch)
    shapes, tried = {name: tensor.shape for name, tensor in file.tensors.items()}, Refusals()
    for key in [key for key in file.metadata if key.startswith(f"{arch}.")]:
        for value in (0, 1, 3, -1, 1 << 31, NAN, "x", True, [], [0], [1], [0, 1, 1, 1], [1.5] * 4, ["x"] * 4, {}, None):
            metadata = {k: v for k, v in {**file.metadata, key: value}.items() if v is not None}
            assert all(validate.problems(metadata, file.tensors))
            tried.call(validate.describe, metadata, file.tensors)
            tried.call(of.config, metadata, file.tensors)
            tried.call(lambda given: of.to_hf(of.hparams(given, shapes.keys()), shapes), metadata)
    tried.check_both()
