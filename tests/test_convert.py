"""convert and export: checkpoints of transformers become GGUFs that compute the same, and come back bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs, types
from quantkit.cli import main
from quantkit.errors import DataError, FormatError, QuantkitError, UnknownNameError, UnsupportedError
from quantkit.formats.gguf import GGUF
from quantkit.formats.gguf import open as open_gguf
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter, open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.conversion.plan import plan_conversion
from quantkit.pipelines.export import export_gguf
from tests.archs.checkpoints import as_fp8, as_int4, loaded, log_probabilities, tiny

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_parameters": LLAMA3, "num_attention_heads": 2, "num_key_value_heads": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
}


def data(file: GGUF) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (t.type.name, t.shape, t.data.tobytes()) for name, t in file.tensors.items()}


def keys(file: GGUF, *without: str) -> dict[str, tuple[Any, str]]:
    metadata = file.metadata
    return {key: (metadata[key], metadata.kind(key)) for key in metadata if key not in without}


# --------------------------------------------------------------------------------------------------- against references


@pytest.mark.parametrize("arch", [arch.name for arch in archs.all()])
def test_every_architectures_example(tmp_path: Path, arch: str) -> None:
    """Converted, run by quantkit, exported again: the logits are those of transformers all the way."""
    import torch

    model = tiny(tmp_path / "hf", arch=arch)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    tokens = np.random.default_rng(3).integers(2, 320, 100).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits
    ours = log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(tokens))
    assert np.abs(ours - log_probabilities(expected[0].numpy())).max() < 1e-3
    if arch == "step35":
        with pytest.raises(UnsupportedError, match="has no class of the language model alone"):
            export_gguf(tmp_path / "m.gguf", tmp_path / "back")
        return
    export_gguf(tmp_path / "m.gguf", tmp_path / "back")
    if arch in ("bailingmoe2", "longcat-flash"):  # transformers does not know the first, and loads the second one wrong
        before, after = (open_checkpoint(tmp_path / name).tensors for name in ("hf", "back"))
        unused = {name for name in before if arch == "longcat-flash" and re.search(r"\.experts\.[678]\.", name)}
        assert before.keys() - after.keys() == unused
        assert not after.keys() - before.keys()
        assert all(np.array_equal(before[name].dequantize(), after[name].dequantize()) for name in after)
        return
    if arch == "mistral-large4":  # the encoder that an export leaves out, of the size of the test's
        whole, exported = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
        exported["vision_config"] = whole["vision_config"]
        (tmp_path / "back" / "config.json").write_text(json.dumps(exported))
    again = loaded(tmp_path / "back")
    with torch.no_grad():
        back = again(torch.tensor([tokens])).logits
        # float32 rounds norm weights plus 1 (Gemma, Nemotron) and exponentials: of A_log (recurrent layers), of alpha
        rounded = arch in ("gemma2", "gemma3", "nemotron", "mistral-large4") or any(
            "A_log" in name for name in model.state_dict()
        )
        limit = 1e-3 if arch == "mistral-large4" else 1e-4  # the frequencies of all layers are rounded
        assert torch.allclose(back, expected, atol=limit) if rounded else torch.equal(back, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_file_computes_what_transformers_does(tmp_path: Path, variant: str) -> None:
    """A checkpoint in transformers, its GGUF in quantkit and in the reference: float32 all.

    The reference (wheel 0.1.5) ignores rope_freqs.weight: for the llama3 variant its logits are those of the model
    without rope scaling, off by more than 5, so there it is no oracle.
    """
    import torch

    model = tiny(tmp_path / "hf", **VARIANTS[variant])
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    tokens = np.random.default_rng(3).integers(2, 320, 100).tolist()
    with torch.no_grad():
        expected = log_probabilities(model(torch.tensor([tokens])).logits[0].numpy())
    ours = log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(tokens))
    assert np.abs(ours - expected).max() < 1e-3
    if variant != "llama3":
        libllama = pytest.importorskip("tests.conformance.libllama")
        with libllama.Llama(tmp_path / "m.gguf", n_ctx=128) as llama:
            theirs = log_probabilities(llama.logits(tokens))
        # Its cache is f16. Rows in a wrong order give differences above 1.
        assert np.abs(theirs - expected).max() < 0.05


@pytest.mark.parametrize("differs", [False, True])
def test_an_output_matrix_beside_a_tied_embedding(tmp_path: Path, differs: bool) -> None:
    """config.json ties the two, and the checkpoint has both: transformers uses lm_head if its values are others."""
    import torch
    from safetensors.torch import load_file, save_file

    tiny(tmp_path / "hf", tie_word_embeddings=True)
    weights = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(weights)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 3.0 if differs else 0.0
    save_file(tensors | {"lm_head.weight": head}, weights, {"format": "pt"})
    found = convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    assert ("output.weight" in open_gguf(tmp_path / "m.gguf").tensors) is differs
    assert any("lm_head.weight differs from the embedding" in text for text in found.warnings) is differs
    with torch.no_grad():
        expected = log_probabilities(loaded(tmp_path / "hf")(torch.tensor([[5, 6, 7]])).logits[0].numpy())
    ours = log_probabilities(quantkit.load(tmp_path / "m.gguf").logits([5, 6, 7]))
    assert np.abs(ours - expected).max() < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_checkpoints_come_back_bit_for_bit(tmp_path: Path, variant: str, dtype: str) -> None:
    tiny(tmp_path / "a", dtype, **VARIANTS[variant])
    convert_checkpoint(tmp_path / "a", tmp_path / "m.gguf", "bf16" if dtype == "bfloat16" else "f32")
    export_gguf(tmp_path / "m.gguf", tmp_path / "b")
    before, after = open_checkpoint(tmp_path / "a").tensors, open_checkpoint(tmp_path / "b").tensors
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.shape == after[name].shape
        np.testing.assert_array_equal(tensor.dequantize(), after[name].dequantize(), err_msg=name)
        if len(tensor.shape) > 1:
            assert tensor.dtype == after[name].dtype
    convert_checkpoint(tmp_path / "b", tmp_path / "n.gguf", "bf16" if dtype == "bfloat16" else "f32")
    assert data(open_gguf(tmp_path / "n.gguf")) == data(open_gguf(tmp_path / "m.gguf"))
    # transformers writes head_dim even where it is the default; export writes it where the file says it
    assert keys(open_gguf(tmp_path / "n.gguf")) == keys(open_gguf(tmp_path / "m.gguf"))


def test_transformers_loads_what_is_exported(tmp_path: Path) -> None:
    import torch
    import transformers

    model = tiny(tmp_path / "a", **VARIANTS["llama3"])
    convert_checkpoint(tmp_path / "a", tmp_path / "m.gguf", "f32")
    export_gguf(tmp_path / "m.gguf", tmp_path / "b")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    tokens = torch.tensor([np.random.default_rng(3).integers(2, 320, 100).tolist()])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    text = "The fox, 123 <|end|> naïve 你好"
    assert ours(text).input_ids == theirs(text).input_ids
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)


# ------------------------------------------------------------------------------------------------------ the real model


@pytest.fixture(scope="module")
def smollm2(smollm2_q4_1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 exported to a directory."""
    directory = tmp_path_factory.mktemp("smollm2") / "hf"
    export_gguf(smollm2_q4_1, directory, "bf16")
    return directory


def test_smollm2_there_and_back(smollm2: Path, smollm2_q4_1: Path, tmp_path: Path) -> None:
    """bf16 values of the file's own, and all its keys."""
    convert_checkpoint(smollm2, tmp_path / "m.gguf")
    source, made = open_gguf(smollm2_q4_1), open_gguf(tmp_path / "m.gguf")
    assert keys(made, "general.file_type") == keys(source, "general.file_type")
    assert made.metadata["general.file_type"] == 32
    assert made.tensors.keys() == source.tensors.keys()
    bf16 = types.get("bf16")
    for name, tensor in source.tensors.items():
        if len(tensor.shape) == 1:
            assert (made.tensors[name].type.name, made.tensors[name].data.tobytes()) == ("f32", tensor.data.tobytes())
        elif "blk.0." in name or "blk.29." in name:
            np.testing.assert_array_equal(made.tensors[name].data, bf16.quantize(tensor.dequantize()), err_msg=name)


def test_an_export_replaces_only_exports(checkpoint: Path, tmp_path: Path) -> None:
    """The checkpoint of which the file was made is no export, and a template beside one would be taken by `convert`."""
    original, out = shutil.copytree(checkpoint, tmp_path / "hf"), tmp_path / "out"
    weights = (original / "model.safetensors").read_bytes()
    convert_checkpoint(checkpoint, tmp_path / "m.gguf")
    for dry_run in (True, False):
        with pytest.raises(DataError, match=r"hf: holds model.safetensors of another checkpoint"):
            export_gguf(tmp_path / "m.gguf", original, dry_run=dry_run)
    assert (original / "model.safetensors").read_bytes() == weights
    export_gguf(tmp_path / "m.gguf", out)
    export_gguf(tmp_path / "m.gguf", out)
    (out / "chat_template.jinja").write_text("{{ x }}")
    with pytest.raises(DataError, match=r"out: holds chat_template.jinja of another checkpoint"):
        export_gguf(tmp_path / "m.gguf", out)


def test_float32_export_loses_nothing(smollm2_q4_1: Path, tmp_path: Path) -> None:
    """Every decoded value of the quantized file is in the checkpoint; rows of q and k are in the other order."""
    plan = export_gguf(smollm2_q4_1, tmp_path / "hf", dry_run=True)
    assert {spec.dtype for spec in plan.specs} == {"F32"}
    assert not (tmp_path / "hf").exists()
    source = open_gguf(smollm2_q4_1)
    wanted = {"model.layers.7.self_attn.k_proj.weight", "model.layers.7.mlp.down_proj.weight"}
    made: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for name, job in plan.jobs():
        if name in wanted:
            made[name].append(job())
    found = {name: np.concatenate([p.reshape(-1) for p in parts]).view("<f4") for name, parts in made.items()}
    down = source.tensors["blk.7.ffn_down.weight"].dequantize()
    np.testing.assert_array_equal(found["model.layers.7.mlp.down_proj.weight"], down.reshape(-1))
    k = source.tensors["blk.7.attn_k.weight"].dequantize().reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(found["model.layers.7.self_attn.k_proj.weight"], k)


def test_killed_at_any_moment_leaves_no_file(smollm2: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    command = [sys.executable, "-m", "quantkit", "convert", str(smollm2), str(out), "--outtype", "f32"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("m.gguf.partial-*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    assert any(tmp_path.glob("m.gguf.partial-*")), "the conversion was over before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    convert_checkpoint(smollm2, out, "bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


# ------------------------------------------------------------------------------------------------------ types and order


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "Tiny-Llama"
    tiny(directory, "bfloat16")
    return directory


@pytest.mark.parametrize(("outtype", "file_type"), [("auto", 32), ("bf16", 32), ("f16", 1), ("f32", 0), ("q8_0", 7)])
def test_outtypes(checkpoint: Path, tmp_path: Path, outtype: str, file_type: int) -> None:
    done = convert_checkpoint(checkpoint, tmp_path / "m.gguf", outtype)
    made = open_gguf(tmp_path / "m.gguf")
    name = "bf16" if outtype == "auto" else outtype
    assert done.outtype.name == name
    assert made.metadata["general.file_type"] == file_type
    assert made.metadata["general.name"] == "Tiny Llama"
    for tensor in made.tensors.values():
        assert tensor.type.name == ("f32" if len(tensor.shape) == 1 else name)
    stored = open_checkpoint(checkpoint).tensors["model.layers.1.mlp.down_proj.weight"].dequantize()
    expected = types.get(name).quantize(stored)
    np.testing.assert_array_equal(made.tensors["blk.1.ffn_down.weight"].data, expected)


def test_order_is_that_of_use(checkpoint: Path) -> None:
    names = [spec.name for spec in plan_conversion(checkpoint).specs]
    assert (names[0], names[-2:]) == ("token_embd.weight", ["output_norm.weight", "output.weight"])
    assert [name for name in names if name.endswith("attn_q.weight")] == ["blk.0.attn_q.weight", "blk.1.attn_q.weight"]


def test_rows_that_do_not_fit_become_f16(tmp_path: Path) -> None:
    tiny(tmp_path / "hf", intermediate_size=72)
    done = convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "q8_0")
    assert done.fallbacks == ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]
    made = open_gguf(tmp_path / "m.gguf").tensors
    assert (made["blk.0.ffn_down.weight"].type.name, made["blk.0.ffn_up.weight"].type.name) == ("f16", "q8_0")


def test_shards_and_threads_do_not_change_the_data(checkpoint: Path, tmp_path: Path) -> None:
    convert_checkpoint(checkpoint, tmp_path / "one.gguf", "q8_0", threads=1)
    done = convert_checkpoint(checkpoint, tmp_path / "many.gguf", "q8_0", split_max_bytes=40_000, threads=3)
    assert len(done.paths) > 1
    assert data(open_gguf(done.paths[0])) == data(open_gguf(tmp_path / "one.gguf"))


def test_small_pieces_make_the_same_file(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_checkpoint(checkpoint, tmp_path / "a.gguf", "f16")
    monkeypatch.setattr("quantkit.formats.pipeline.PIECE_ELEMENTS", 200)
    convert_checkpoint(checkpoint, tmp_path / "b.gguf", "f16")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    done = convert_checkpoint(checkpoint, tmp_path / "m.gguf", dry_run=True)
    assert done.n_params == sum(int(np.prod(spec.shape)) for spec in done.specs)
    assert done.paths == []
    assert list(tmp_path.iterdir()) == []


def test_the_output_may_not_replace_an_input(checkpoint: Path, tmp_path: Path) -> None:
    weights = next(checkpoint.glob("*.safetensors"))
    before = weights.read_bytes()
    (tmp_path / "m.gguf").symlink_to(weights)
    with pytest.raises(QuantkitError, match="this is the input"):
        convert_checkpoint(checkpoint, tmp_path / "m.gguf")
    assert weights.read_bytes() == before


def test_a_tensor_in_two_spellings(checkpoint: Path, tmp_path: Path) -> None:
    """One of them would be converted, and which one is an accident of their order."""
    opened, twice = open_checkpoint(checkpoint), "model.layers.0.mlp.down_proj.weight"
    specs = [CheckpointSpec(name, t.shape, t.dtype) for name, t in opened.tensors.items()]
    other = f"model.language_{twice}"
    shutil.copytree(checkpoint, tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    with CheckpointWriter(
        tmp_path / "hf", [*specs, CheckpointSpec(other, *((t := opened.tensors[twice]).shape, t.dtype))]
    ) as w:
        for name, tensor in opened.tensors.items():
            w.write(name, tensor.raw())
        w.write(other, opened.tensors[twice].raw())
    with pytest.raises(FormatError, match=rf"tensor {other} is another spelling of {twice}, which is in"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf")


def test_model_card_and_general_keys(tmp_path: Path) -> None:
    tiny(tmp_path / "hf")
    card = "---\nlicense: mit\nlanguage:\n- en\n- de\ntags: []\nother:\n  - x\n---\n# A model\nlicense: none\n"
    (tmp_path / "hf" / "README.md").write_text(card)
    (tmp_path / "hf" / "gguf_metadata.json").write_text(
        json.dumps({"general.author": "me", "general.languages": ["fr"]})
    )
    metadata = plan_conversion(tmp_path / "hf").metadata
    assert metadata["general.license"] == "mit"
    assert metadata["general.author"] == "me"
    assert metadata["general.languages"] == ["fr"]
    assert metadata["general.size_label"] == f"{plan_conversion(tmp_path / 'hf').n_params / 1000:.0f}K"


@pytest.mark.parametrize(("card", "keys", "warning"), [
    ("license: mit # or so\nlanguage: [en, no]\ntags: a\n",
     {"license": "mit", "languages": ["en", "no"], "tags": ["a"]}, ""),
    ("license: >-\n  my own\n  license\n", {"license": "my own license"}, ""),
    ("license: [mit]\nlanguage:\ntags: []\n", {"license": "mit"}, ""),
    ("license: [mit, apache-2.0]\ntags: [a, {b: c}]\nlanguage: en\n",
     {"license": "mit,apache-2.0", "languages": ["en"]}, "tags is ['a'"),
    ("license: mit\ntags: [a\n", {}, "the model card is skipped"),
    ("license: mit\nlicense: gpl\n", {}, "a second key"),
])  # fmt: skip
def test_front_matter_in_the_metadata(tmp_path: Path, capsys, card: str, keys: dict[str, Any], warning: str) -> None:
    """Right or not at all; what is left out is said."""
    tiny(tmp_path / "hf")
    (tmp_path / "hf" / "README.md").write_text(f"---\n{card}---\n")
    made = plan_conversion(tmp_path / "hf")
    found = {key: made.metadata.get(f"general.{key}") for key in ("license", "languages", "tags")}
    assert {key: value for key, value in found.items() if value is not None} == keys
    assert bool(made.warnings) == bool(warning)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "m.gguf"), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert warning in said
    assert ("warning" in said) == bool(warning)


# --------------------------------------------------------------------------------------------------------------- errors


def edit(source: Path, target: Path, **config: Any) -> Path:
    """A copy of a checkpoint with other settings in config.json; a value of None removes one."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    content = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return target


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, UnsupportedError, "FooForCausalLM is not an architecture"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedError, r"quantized already \(hqq\)"),
        ({"num_hidden_layers": 3}, FormatError, r"lacks 9 tensor\(s\): model\.layers\.2\."),
        ({"num_hidden_layers": 1}, UnsupportedError, r"9 tensor\(s\) .* not known .* model\.layers\.1\."),
        (
            {"vocab_size": 400},
            FormatError,
            r"embed_tokens\.weight has shape \(320, 64\).*config\.json requires \(400, 64\)",
        ),
        ({"rms_norm_eps": None}, FormatError, "rms_norm_eps"),
    ],
)
def test_what_cannot_be_converted_is_named(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], error: type[QuantkitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        convert_checkpoint(edit(checkpoint, tmp_path / "hf", **change), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_bad_arguments(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="outtype 'q4_1'"):
        convert_checkpoint(checkpoint, tmp_path / "m.gguf", "q4_1")
    with pytest.raises(FormatError, match="not a directory"):
        convert_checkpoint(tmp_path / "none", tmp_path / "m.gguf")
    with pytest.raises(FormatError, match=r"config\.json is missing"):
        convert_checkpoint(tmp_path, tmp_path / "m.gguf")
    with pytest.raises(UnknownNameError, match="dtype 'q8_0'"):
        export_gguf(checkpoint, tmp_path / "x", "q8_0")


BAD = "model.layers.1.mlp.up_proj.weight"


def with_value(checkpoint: Path, source: Path, value: float) -> Path:
    """The checkpoint in float32 with one odd value in BAD, at row 5, column 3."""
    edit(checkpoint, source)
    stored = open_checkpoint(checkpoint)
    (source / "model.safetensors").unlink()
    specs = [CheckpointSpec(t.name, t.shape, "F32") for t in stored.tensors.values()]
    with CheckpointWriter(source, specs) as writer:
        for tensor in stored.tensors.values():
            x = tensor.dequantize().copy()
            if tensor.name == BAD:
                x[5, 3] = value
            writer.write(tensor.name, x.view(np.uint8))
    return source


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
def test_values_that_are_not_finite_are_named(checkpoint: Path, tmp_path: Path, outtype: str) -> None:
    """Also where bits go through unchanged: a NaN in a file is found out only by its nonsense."""
    source = with_value(checkpoint, tmp_path / "hf", np.nan)
    with pytest.raises(DataError, match=rf"{re.escape(BAD)}.*row 5, column 3 is nan"):
        convert_checkpoint(source, tmp_path / "m.gguf", outtype)
    assert not (tmp_path / "m.gguf").exists()


def test_values_that_overflow_are_named(checkpoint: Path, tmp_path: Path) -> None:
    """1e5 is a bfloat16 but not a half."""
    source = with_value(checkpoint, tmp_path / "hf", 1e5)
    with pytest.raises(DataError, match=re.escape(BAD)):
        convert_checkpoint(source, tmp_path / "m.gguf", "f16")
    assert not (tmp_path / "m.gguf").exists()
    convert_checkpoint(source, tmp_path / "m.gguf", "bf16")


def test_commands(checkpoint: Path, tmp_path: Path) -> None:
    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quantkit", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    out = tmp_path / "m.gguf"
    done = run("convert", checkpoint, out, "--outtype", "q8_0", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["outtype"], record["tensors"], record["paths"]) == ("q8_0", 21, [str(out)])
    done = run("export", out, tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    assert "21 tensors" in done.stdout
    assert run("convert", tmp_path / "hf", tmp_path / "n.gguf", "--outtype", "q8_0").returncode == 0
    again, before = open_gguf(tmp_path / "n.gguf"), open_gguf(out)
    for name in ("blk.0.attn_q.weight", "output_norm.weight"):
        np.testing.assert_array_equal(again.tensors[name].dequantize(), before.tensors[name].dequantize())
    failed = run("convert", tmp_path / "none", out)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")


# ---------------------------------------------------------------------------------------------------- codes and scales


@pytest.fixture
def fp8(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Experts and attention in FP8, blocks of 32 x 64."""
    return fp8_of("qwen3moe", tmp_path, rng, hidden_size=128, moe_intermediate_size=96)


def fp8_of(arch: str, tmp_path: Path, rng: np.random.Generator, **config: Any) -> Path:
    tiny(tmp_path / "bf16", "bfloat16", arch, **config)
    return as_fp8(tmp_path / "bf16", tmp_path / "fp8", rng, (32, 64))


def test_fp8_becomes_what_torch_makes_of_it(fp8: Path, tmp_path: Path) -> None:
    import torch

    stored = open_checkpoint(fp8).tensors
    convert_checkpoint(fp8, tmp_path / "m.gguf")
    made = open_gguf(tmp_path / "m.gguf")
    assert made.metadata["general.file_type"] == types.get("bf16").file_type
    for i in range(6):
        name = f"model.layers.1.mlp.experts.{i}.down_proj.weight"
        codes, scales = (torch.from_numpy(stored[n].raw().copy()) for n in (name, f"{name}_scale_inv"))
        values = codes.view(torch.float8_e4m3fn).reshape(128, 96).float()
        grid = scales.view(torch.float32).reshape(4, 2).repeat_interleave(32, 0).repeat_interleave(64, 1)[:, :96]
        expected = (values * grid).bfloat16().view(torch.uint8).numpy()
        np.testing.assert_array_equal(
            made.tensors["blk.1.ffn_down_exps.weight"].data[i * 128 : i * 128 + 128], expected
        )


@pytest.mark.parametrize("outtype", ["bf16", "f16"])
def test_matrices_are_made_without_numba(fp8: Path, tmp_path: Path, outtype: str) -> None:
    """Its import takes as long as converting a gigabyte."""
    code = (
        "import sys; from quantkit.pipelines.conversion.convert import convert_checkpoint; "
        "convert_checkpoint(*sys.argv[1:]); "
        "print('numba' in sys.modules)"
    )
    for source in (fp8, fp8.parent / "bf16"):
        command = [sys.executable, "-c", code, str(source), str(tmp_path / "m.gguf"), outtype]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_experts_of_four_bits(tmp_path: Path, rng: np.random.Generator) -> None:
    """As Kimi K2 Thinking ships them: codes less 8, times the scale of their 32 columns; bf16 holds four bits more."""
    tiny(tmp_path / "bf16", "bfloat16", "deepseek2")
    source = as_int4(tmp_path / "bf16", tmp_path / "int4", rng)
    done = convert_checkpoint(source, tmp_path / "m.gguf")
    assert done.outtype.name == "bf16"
    stored, made = open_checkpoint(source).tensors, open_gguf(tmp_path / "m.gguf").tensors
    for i in (0, 7):
        name = f"model.layers.1.mlp.experts.{i}.up_proj.weight"
        data = stored[f"{name}_packed"].raw().reshape(32, -1)
        codes = np.stack([data & 15, data >> 4], axis=-1).reshape(32, -1).astype(np.float32) - 8
        x = codes * stored[f"{name}_scale"].dequantize().repeat(32, 1)
        np.testing.assert_array_equal(made["blk.1.ffn_up_exps.weight"].data[i * 32 : i * 32 + 32],
                                      types.get("bf16").quantize(x))  # fmt: skip
    assert np.isfinite(quantkit.load(tmp_path / "m.gguf").logits([5, 6, 7])).all()


@pytest.mark.parametrize("target", ["Q4_K_M", "COPY", "Q8_0"])
def test_straight_from_a_checkpoint_or_by_a_detour(fp8: Path, tmp_path: Path, target: str) -> None:
    """The same file, whichever way: mixes, rules, interleaving, rows that fall back."""
    convert_checkpoint(fp8, tmp_path / "bf16.gguf")
    flags = [target, "--custom-q", "attn_q=iq4_nl_r4,down_exps=q6_0", "2"] if target != "COPY" else [target]
    for source, out in ((fp8, "straight.gguf"), (tmp_path / "bf16.gguf", "detour.gguf")):
        assert main(["quantize", str(source), str(tmp_path / out), *flags]) == 0
    straight, detour = ((tmp_path / name).read_bytes() for name in ("straight.gguf", "detour.gguf"))
    name = [
        key["general.name"] for key in (open_gguf(tmp_path / f"{way}.gguf").metadata for way in ("straight", "detour"))
    ]
    assert name == ["Fp8", "Fp8"]
    assert straight == detour


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_checkpoints_are_read_as_they_are(tmp_path: Path, dtype: str) -> None:
    """Also of float32, which `convert` would round; a plan of the bare config.json is the plan that is carried out."""
    tiny(tmp_path / "hf", dtype)
    out = tmp_path / "m.gguf"
    assert main(["quantize", str(tmp_path / "hf"), str(out), "Q8_0", "--pure", "--leave-output-tensor"]) == 0
    made, stored = open_gguf(out).tensors, open_checkpoint(tmp_path / "hf").tensors
    x = stored["model.layers.1.mlp.down_proj.weight"].dequantize()
    np.testing.assert_array_equal(made["blk.1.ffn_down.weight"].data, types.get("q8_0").quantize(x))
    np.testing.assert_array_equal(made["output.weight"].dequantize(), stored["lm_head.weight"].dequantize())


def test_latent_attention_straight_from_fp8(tmp_path: Path, rng: np.random.Generator) -> None:
    """Tensors that are made of parts of others, turned round."""
    source = fp8_of("deepseek2", tmp_path, rng)
    convert_checkpoint(source, tmp_path / "bf16.gguf")
    for path, out in ((source, "straight.gguf"), (tmp_path / "bf16.gguf", "detour.gguf")):
        assert main(["quantize", str(path), str(tmp_path / out), "IQ4_NL", "2"]) == 0
    straight, detour = ((tmp_path / name).read_bytes() for name in ("straight.gguf", "detour.gguf"))
    assert straight == detour
    assert main(["verify", str(tmp_path / "straight.gguf"), "--source", str(source)]) == 0


def test_what_quantize_needs_of_a_checkpoint(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["quantize", str(checkpoint / "config.json"), str(tmp_path / "m.gguf"), "Q8_0"]) == 1
    assert "contains no weights" in capsys.readouterr().err
    assert main(["quantize", str(checkpoint), str(tmp_path / "m.gguf"), "Q8_0", "--keep-split"]) == 1
    assert "--split-max-size" in capsys.readouterr().err
    assert main(["quantize", str(checkpoint), str(checkpoint / "model.safetensors"), "Q8_0"]) == 1
    assert "this is the input" in capsys.readouterr().err


def test_a_program_that_the_file_is_for(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every outtype is one of both programs; a type of one of them is refused for the other."""
    from quantkit.types import floats

    out = tmp_path / "a.gguf"
    quantkit.convert(checkpoint, out, "bf16", quantkit.ConvertOptions(dialect="llama.cpp"))
    assert quantkit.open(out).metadata["quantkit.dialect"] == "llama.cpp"
    monkeypatch.setattr(floats.BF16, "readers", ("ik",))
    with pytest.raises(UnsupportedError, match=r"become bf16, which --dialect llama.cpp does not read"):
        quantkit.convert(checkpoint, tmp_path / "b.gguf", "bf16", quantkit.ConvertOptions(dialect="llama.cpp"))
    assert not (tmp_path / "b.gguf").exists()
