"""general.* keys of a converted checkpoint: those that gguf's own `Metadata` gives, for cards of all kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quantkit import types
from quantkit.cli import main
from quantkit.errors import FormatError, OptionError
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.formats.gguf import open as open_gguf
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.conversion.metadata import general_keys
from quantkit.pipelines.conversion.plan import plan_conversion
from quantkit.pipelines.export import export_gguf
from tests.archs.checkpoints import tiny
from tests.cli.running import refused

# Front matter as public cards have it: block lists, flow lists, links, nested results, texts over several lines.
CARDS = {
    "Qwen2.5-7B-Instruct": """
license: apache-2.0
license_link: https://huggingface.co/Qwen/Qwen2.5-7B-Instruct/blob/main/LICENSE
language:
- en
pipeline_tag: text-generation
base_model: Qwen/Qwen2.5-7B
tags:
- chat
library_name: transformers
""",
    "Llama-3.1-8B-Instruct": """
language:
- en
- de
- fr
- it
- pt
- hi
- es
- th
library_name: transformers
base_model: meta-llama/Meta-Llama-3.1-8B
new_version: meta-llama/Llama-3.3-70B-Instruct
license: llama3.1
pipeline_tag: text-generation
tags: [facebook, meta, pytorch, llama, llama-3]
extra_gated_prompt: >-
  ### LLAMA 3.1 COMMUNITY LICENSE AGREEMENT

  "Agreement" means the terms and conditions: use, reproduction, distribution
extra_gated_fields:
  First Name: text
  Date of birth: date_picker
  Job title:
    type: select
    options:
      - Student
      - Other
extra_gated_button_content: Submit
""",
    "DeepSeek-Coder-V2-Lite-Instruct": """
license: other
license_name: deepseek-license
license_link: LICENSE
base_model:
- deepseek-ai/DeepSeek-Coder-V2-Lite-Base
- https://huggingface.co/mistralai/Mistral-7B-v0.1
datasets: [bigcode/the-stack-v2, "https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu",
           open-web-math/open-web-math]
model_creator: DeepSeek
model_name: DeepSeek Coder V2 Lite
""",
    "Mixtral-8x7B-Norsk-v0.2": """
license: apache-2.0
language: [fr, it, de, es, en, "no"]
tags:
- moe
- merge
- "2024"
base_model_relation: merge
base_model:
- mistralai/Mixtral-8x7B-v0.1
- name: Norsk Chat
  organization: NbAiLab
  repo_url: https://huggingface.co/NbAiLab/norsk-chat
inference: false
widget:
- messages:
  - role: user
    content: What is your favorite condiment?
""",
    "SmolLM2-1.7B": """
library_name: transformers
license: apache-2.0
language:
- en
datasets:
- HuggingFaceTB/smollm-corpus
- argilla/dpo-mix-7k
description: >
  A family of compact models,
  in three sizes.
author: Loubna Ben Allal
version: v2
model-index:
- name: SmolLM2-1.7B
  results:
  - task: {type: text-generation}
    dataset: {name: IFEval, type: HuggingFaceH4/ifeval, args: {num_few_shot: 0}}
    metrics:
    - {type: inst_level_strict_acc, value: 56.7, name: strict accuracy}
""",
    "weights": "",
}
GENERATION = {
    "Qwen2.5-7B-Instruct": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "Llama-3.1-8B-Instruct": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 128000},
    "SmolLM2-1.7B": {"bos_token_id": 1},
    "Mixtral-8x7B-Norsk-v0.2": {"temperature": 1, "min_p": 0.05, "top_p": None},
}
CONFIG = {"weights": {"_name_or_path": "acme/Foo-13B-chat-v1.5"}, "SmolLM2-1.7B": {"_name_or_path": "/home/me/a/b"}}
SIZES = {"Qwen2.5-7B-Instruct": 7616, "Llama-3.1-8B-Instruct": 8030, "SmolLM2-1.7B": 1711}  # million; others 13 billion


def specs(name: str) -> list[TensorSpec]:
    f32 = types.get("f32")
    found = [TensorSpec("token_embd.weight", (SIZES.get(name, 13_000), 10**6), f32)]
    if name.startswith("Mixtral"):
        found = [TensorSpec("token_embd.weight", (1000, 1_600_000), f32)]
        found += [TensorSpec(f"blk.{i}.ffn_up_exps.weight", (8, 1000, 700_000), f32) for i in range(8)]
    return found


def directory(parent: Path, name: str) -> Path:
    made = parent / name
    made.mkdir()
    (made / "README.md").write_text(f"---{CARDS[name]}---\n# {name}\nlicense: none\n" if CARDS[name] else "# Title\n")
    (made / "config.json").write_text(json.dumps(CONFIG.get(name, {})))
    if name in GENERATION:
        (made / "generation_config.json").write_text(json.dumps(GENERATION[name]))
    return made


def ours(source: Path, **overrides: Any) -> tuple[dict[str, Any], list[str]]:
    """The keys as gguf reads them from a file of ours, and the warnings."""
    metadata, warnings = Metadata(), list[str]()
    config = json.loads((source / "config.json").read_text())
    keys = general_keys(source, config, "llama", specs(source.name), types.get("bf16"), warnings, **overrides)
    for key, (value, kind) in keys.items():
        metadata.set(key, value, kind)
    path = source / "ours.gguf"
    with Writer(path, metadata, [spec := TensorSpec("a", (1,), types.get("f32"))]) as writer:
        writer.write(spec.name, np.zeros(4, np.uint8))
    return read(path), warnings


def theirs(source: Path, metadata: Path | None = None, model_name: str | None = None) -> dict[str, Any]:
    """The keys as convert_hf_to_gguf.py takes them from gguf."""
    writer = gguf.GGUFWriter(source / "theirs.gguf", "llama")
    count = gguf.GGUFWriter(None, "llama")
    for spec in specs(source.name):
        count.add_tensor_info(spec.name, spec.shape, np.dtype(np.float32), 0)
    total, *rest = count.get_total_parameter_count()
    found = gguf.Metadata.load(metadata, source, model_name, total)
    if found.size_label is None:
        found.size_label = gguf.size_label(total, *rest)
    writer.add_type(gguf.GGUFType.MODEL)
    found.set_gguf_meta_model(writer)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tensor("a", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read(source / "theirs.gguf")


def read(path: Path) -> dict[str, Any]:
    """Types and values of the general.* keys of a file, read by gguf."""
    fields = gguf.GGUFReader(path).fields
    return {key: (f.types, f.contents()) for key, f in fields.items() if key.startswith("general.")}


@pytest.mark.parametrize("name", CARDS)
def test_keys_are_those_of_gguf(tmp_path: Path, name: str) -> None:
    source = directory(tmp_path, name)
    found, warnings = ours(source)
    assert found == theirs(source)
    assert warnings == []


def test_values_of_a_card(tmp_path: Path) -> None:
    """Some of them written out, so that this test does not only compare two programs."""
    found = {key: value for key, (_, value) in ours(directory(tmp_path, "DeepSeek-Coder-V2-Lite-Instruct"))[0].items()}
    assert found["general.name"] == "DeepSeek Coder V2 Lite"
    assert found["general.author"] == "DeepSeek"
    assert (found["general.basename"], found["general.finetune"]) == ("DeepSeek-Coder-V2-Lite", "Instruct")
    assert found["general.size_label"] == "13B"
    assert found["general.license.name"] == "deepseek-license"
    assert found["general.base_model.count"] == found["general.dataset.count"] - 1 == 2
    assert found["general.base_model.0.organization"] == "Deepseek Ai"
    assert found["general.base_model.1.repo_url"] == "https://huggingface.co/mistralai/Mistral-7B-v0.1"
    assert ours(directory(tmp_path, "Mixtral-8x7B-Norsk-v0.2"))[0]["general.size_label"][1] == "8x7B"


OVERRIDES = {
    "general.author": "me",
    "general.version": None,
    "general.license.name": "mine",
    "general.tags": ["a", "b"],
    "general.sampling.top_k": 7,
    "general.base_models": [{"name": "Base", "organization": "Org", "version": "1"}],
    "general.datasets": [],
}


@pytest.mark.parametrize("name", ["SmolLM2-1.7B", "DeepSeek-Coder-V2-Lite-Instruct"])
def test_overrides_are_those_of_gguf(tmp_path: Path, name: str) -> None:
    source = directory(tmp_path, name)
    (tmp_path / "o.json").write_text(json.dumps(OVERRIDES))
    given = {"metadata": tmp_path / "o.json", "model_name": "A model"}
    found, warnings = ours(source, **given)
    assert found == theirs(source, **given)
    assert warnings == []
    assert found["general.name"][1] == "A model"
    assert "general.version" not in found


def test_the_penalty_of_transformers_is_the_one_key_more(tmp_path: Path) -> None:
    source = directory(tmp_path, "Qwen2.5-7B-Instruct")
    (source / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.05, "top_k": 20}))
    found = ours(source)[0]
    types_and_value = found.pop("general.sampling.penalty_repeat")
    assert types_and_value == ([gguf.GGUFValueType.FLOAT32], pytest.approx(1.05))
    assert found == theirs(source)


def test_a_license_can_be_overridden(tmp_path: Path) -> None:
    """gguf reads all keys from such a file but this one."""
    source = directory(tmp_path, "SmolLM2-1.7B")
    (tmp_path / "o.json").write_text(json.dumps({"general.license": "mit", "general.base_model.0.name": "X"}))
    found = ours(source, metadata=tmp_path / "o.json")[0]
    assert (found["general.license"][1], found["general.base_model.0.name"][1]) == ("mit", "X")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"o\.json: expected a JSON object"),
        ("{", r"o\.json: not JSON"),
        ('{"general.authr": "me"}', r"o\.json: unknown key 'general.authr'; did you mean general.author"),
        ('{"general.author": 3}', r"o\.json: general.author is 3, which GGUF cannot hold"),
        ('{"general.author": "\\ud800"}', r"o\.json: general.author is .*, which GGUF cannot hold"),
        ('{"general.tags": "a"}', "general.tags is 'a'"),
        ('{"general.base_models": [{"name": 1}]}', "general.base_models is"),
        ('{"general.sampling.top_p": NaN}', "general.sampling.top_p is nan"),
        ('{"general.sampling.top_k": true}', "general.sampling.top_k is True"),
        ('{"general.sampling.top_k": 3000000000}', "general.sampling.top_k is 3000000000"),
        ('{"general.file_type": 1}', "general.file_type does not describe a model"),
        ('{"llama.block_count": 1}', "llama.block_count does not describe a model"),
    ],
)
def test_files_of_overrides_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "o.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        ours(directory(tmp_path, "SmolLM2-1.7B"), metadata=tmp_path / "o.json")


def test_overrides_that_are_missing_or_empty(tmp_path: Path) -> None:
    source = directory(tmp_path, "SmolLM2-1.7B")
    with pytest.raises(FormatError, match=r"none\.json: cannot be read"):
        ours(source, metadata=tmp_path / "none.json")
    with pytest.raises(OptionError, match="--model-name is empty"):
        ours(source, model_name=" ")


@pytest.mark.parametrize(
    ("card", "generation", "warning"),
    [
        ("tags: [a, {b: c}]", {}, "README.md: tags is"),
        ("license: {a: b}", {}, "README.md: license is"),
        ("author: [a, b]", {}, "README.md: author is"),
        ("base_model: [[a, b]]", {}, "README.md: front matter key base_model is"),
        ("base_model:\n- name: [a]", {}, "README.md: base_models is"),
        ("base_model: " + "a-" * 3000, {}, "README.md: front matter key base_model is"),
        ("datasets:" + "\n- a/b" * 1001, {}, "README.md: front matter key datasets is"),
        ("tags: [a", {}, "the model card is skipped"),
        ("version: 1.10", {"top_p": "high"}, "generation_config.json: sampling_top_p is 'high'"),
        ("version: 1.10", {"top_k": 1.5}, "generation_config.json: sampling_top_k is 1.5"),
        ("version: 1.10", {"temperature": 1e300}, "generation_config.json: sampling_temp is"),
    ],
)
def test_what_gguf_cannot_hold_is_a_warning(
    tmp_path: Path, card: str, generation: dict[str, Any], warning: str
) -> None:
    source = directory(tmp_path, "weights")
    (source / "README.md").write_text(f"---\n{card}\nlanguage: [en, '', ~]\n---\n")
    (source / "generation_config.json").write_text(json.dumps(generation))
    found, warnings = ours(source)
    assert len(warnings) == 1
    assert warning in warnings[0]
    if "skipped" not in warning:
        assert found["general.languages"][1] == ["en"]
    assert found.get("general.version", ["", "v1.5"])[1] == ("1.10" if "1.10" in card else "v1.5")


def test_tabs_in_the_indentation_of_a_card(tmp_path: Path) -> None:
    source = directory(tmp_path, "weights")
    (source / "README.md").write_text("---\nlicense: mit\ntags:\n\t- a\n\t- b\n---\n")
    found, warnings = ours(source)
    assert (found, warnings) == (theirs(source), [])
    assert found["general.tags"][1] == ["a", "b"]


def test_an_export_keeps_its_keys(tmp_path: Path) -> None:
    """Converted, exported into a directory of another name, converted again: the same keys."""
    tiny(tmp_path / "Tiny-Llama-1K-chat")
    card = f"---{CARDS['DeepSeek-Coder-V2-Lite-Instruct']}---\n"
    (tmp_path / "Tiny-Llama-1K-chat" / "README.md").write_text(card)
    generation = {"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.25, "xtc_threshold": 0.5}
    (tmp_path / "Tiny-Llama-1K-chat" / "generation_config.json").write_text(json.dumps(generation))
    convert_checkpoint(tmp_path / "Tiny-Llama-1K-chat", tmp_path / "a.gguf", "f32")
    export_gguf(tmp_path / "a.gguf", tmp_path / "Foo-7B-instruct-v3")
    convert_checkpoint(tmp_path / "Foo-7B-instruct-v3", tmp_path / "b.gguf", "f32")
    before, after = read(tmp_path / "a.gguf"), read(tmp_path / "b.gguf")
    assert before == after
    assert before["general.sampling.xtc_threshold"][1] == 0.5
    assert before["general.name"][1] == "DeepSeek Coder V2 Lite"


def test_options_of_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path / "hf")
    (tmp_path / "o.json").write_text(json.dumps({"general.author": "me"}))
    flags = ["--metadata", str(tmp_path / "o.json"), "--model-name", "A model"]
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "a.gguf"), *flags]) == 0
    assert main(["quantize", str(tmp_path / "hf"), str(tmp_path / "b.gguf"), "Q8_0", *flags]) == 0
    for name in ("a", "b"):
        metadata = open_gguf(tmp_path / f"{name}.gguf").metadata
        assert (metadata["general.name"], metadata["general.author"]) == ("A model", "me")
    plain = plan_conversion(tmp_path / "hf").metadata
    assert (plain["general.name"], plain["general.size_label"]) == ("Hf", "103K")
    said = refused(capsys, "quantize", tmp_path / "a.gguf", tmp_path / "c.gguf", "Q8_0", "--model-name", "B", status=2)
    assert "--override-kv general.name=str:NAME" in said
