"""Tokenizer files to keys and back: the same ids from the files, from the keys, and from the files made of them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quantkit.errors import FormatError, UnknownNameError, UnsupportedError
from quantkit.tokenizers import hf_tokenizer, pretokenizers, vocab
from quantkit.tokenizers.hf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.checkpoints import HARD, TEXT, byte_level, sentencepiece, write_tokenizer


def keys(directory: Path, vocab_size: int, **config: Any) -> dict[str, Any]:
    """Values of the keys that the files of a directory make."""
    return {key: value for key, (value, _) in vocab.read(directory, {"vocab_size": vocab_size} | config).items()}


def ids(tokenizer: dict[str, Any], text: str) -> list[int]:
    made = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
    return made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama without prefix", "gemma4"])
def test_round_trip(tmp_path: Path, kind: str) -> None:
    if kind == "gpt2":
        original, special = byte_level(), {"eos_token": "<|end|>"}
    else:
        original = sentencepiece(prefix=kind == "llama")
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_tokenizer(tmp_path / "a", original, **special)
    config = {"model_type": "gemma4_text"} if kind == "gemma4" else {}
    metadata = keys(tmp_path / "a", 410, **config)
    assert metadata["tokenizer.ggml.model"] == kind.split()[0]
    made = hf_tokenizer.tokenizer_json(metadata)
    for text in [*TEXT, HARD, "<|begin|>x</s>y", "", " ", "\n"]:
        assert ids(made, text) == ids(original, text), text
    write_tokenizer(tmp_path / "b", made, **hf_tokenizer.tokenizer_config(metadata, 128))
    assert keys(tmp_path / "b", 410, **config) == metadata


def test_unused_slots_are_padded(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level(300))
    metadata = keys(tmp_path, 310)
    count = len(byte_level(300)["model"]["vocab"])
    assert metadata["tokenizer.ggml.tokens"][count:] == [f"[PAD{i}]" for i in range(count, 310)]
    assert metadata["tokenizer.ggml.token_type"][count:] == [UNUSED] * (310 - count)
    with pytest.raises(FormatError, match=f"token id {count - 1} .* vocab_size of {count - 1}"):
        keys(tmp_path, count - 1)


def test_types_of_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = len(tokenizer["model"]["vocab"])
    for content, special in (("<plain>", False), ("<|looks|>", False), ("flagged", True), ("▁▁", False)):
        entry = {"id": size, "content": content, "special": special, "normalized": False}
        tokenizer["added_tokens"].append(entry | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
        size += 1
    write_tokenizer(tmp_path, tokenizer)
    metadata = keys(tmp_path, size)
    assert metadata["tokenizer.ggml.tokens"][-4:] == ["<plain>", "<|looks|>", "flagged", "  "]
    kinds = [USER_DEFINED, CONTROL, CONTROL, USER_DEFINED]
    assert metadata["tokenizer.ggml.token_type"][-4:] == kinds
    assert metadata["tokenizer.ggml.token_type"][:3] == [
        CONTROL,
        CONTROL,
        NORMAL,
    ]


def test_scores_follow_the_merges(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    write_tokenizer(tmp_path, tokenizer)
    metadata = keys(tmp_path, 400)
    score = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]))
    made = ["".join(merge) for merge in tokenizer["model"]["merges"]]
    assert [score[token] for token in dict.fromkeys(made)] == [-float(i) for i in range(len(set(made)))]
    types = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]))
    assert (types["<unk>"], types["<s>"], types["<0x41>"]) == (
        UNKNOWN,
        CONTROL,
        BYTE,
    )


# ------------------------------------------------------------------------------------------------------- pre-tokenizers


def hf(entry: pretokenizers.PreTokenizer) -> dict[str, Any]:
    return {
        "normalizer": {"type": "NFC"} if entry.nfc else None,
        "pre_tokenizer": pretokenizers.to_json(entry),
        "model": {"ignore_merges": entry.ignore_merges},
    }


@pytest.mark.parametrize("entry", pretokenizers.TABLE, ids=lambda entry: entry.names[0])
def test_every_pre_tokenizer_is_recognised(entry: pretokenizers.PreTokenizer) -> None:
    assert pretokenizers.recognise(hf(entry)) == entry.names[0]


def test_smollm_as_its_own_files_have_it() -> None:
    steps = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
    tokenizer = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "model": {}}
    assert pretokenizers.recognise(tokenizer) == "smollm"


@pytest.mark.parametrize(("module", "name"), [("qwen2", "qwen2"), ("qwen3_5", "qwen35")])
def test_transformers_own_expressions_are_recognised(module: str, name: str) -> None:
    source = importlib.import_module(f"transformers.models.{module}.tokenization_{module}")
    split = {"type": "Split", "pattern": {"Regex": source.PRETOKENIZE_REGEX}, "behavior": "Isolated", "invert": False}
    tokenizer = {"normalizer": {"type": "NFC"}, "pre_tokenizer": split, "model": {}}
    assert pretokenizers.recognise(tokenizer) == name


def test_line_ends_may_stand_for_themselves() -> None:
    """DeepSeek's tokenizer.json has CR and LF in its expression, not their escapes."""
    tokenizer = hf(pretokenizers.get("deepseek-v3"))
    for step in tokenizer["pre_tokenizer"]["pretokenizers"][:-1]:
        regex = step["pattern"]["Regex"]
        step["pattern"]["Regex"] = regex.replace(r"\r", "\r").replace(r"\n", "\n")
    assert pretokenizers.recognise(tokenizer) == "deepseek-v3"


def test_digits_one_by_one_are_deepseek_llms_while_no_token_has_two() -> None:
    tokenizer = hf(pretokenizers.get("deepseek-llm"))
    tokenizer["pre_tokenizer"]["pretokenizers"][-2] = {"type": "Digits", "individual_digits": True}
    tokenizer["model"]["vocab"] = {"1": 0, "a1": 1}
    assert pretokenizers.recognise(tokenizer) == "deepseek-llm"
    tokenizer["model"]["vocab"]["12"] = 2
    with pytest.raises(UnsupportedError, match="unknown pre-tokenizer"):
        pretokenizers.recognise(tokenizer)


def test_models_with_the_same_splitting_keep_their_names() -> None:
    tokenizer = hf(pretokenizers.get("gpt-4o"))
    assert pretokenizers.recognise(tokenizer) == "gpt-4o"
    assert pretokenizers.recognise(tokenizer | {"added_tokens": [{"content": "]~!b["}]}) == "minimax-m2"


def test_an_unknown_pre_tokenizer_says_how_to_name_it(tmp_path: Path) -> None:
    tokenizer = byte_level()
    split = {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated", "invert": False}
    steps = [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    write_tokenizer(tmp_path, tokenizer)
    with pytest.raises(UnsupportedError, match=r"\[a-z\]\+.*--pre NAME"):
        keys(tmp_path, 320)
    entries = vocab.read(tmp_path, {"vocab_size": 320}, pre="bloom")
    assert entries["tokenizer.ggml.pre"] == ("bloom", "str")
    with pytest.raises(UnknownNameError, match="bloom"):
        hf_tokenizer.tokenizer_json({key: value for key, (value, _) in entries.items()})


def test_normalizers_that_gguf_cannot_say_are_refused() -> None:
    tokenizer = hf(pretokenizers.get("gpt-2")) | {"normalizer": {"type": "Lowercase"}}
    with pytest.raises(UnsupportedError, match="Lowercase"):
        pretokenizers.recognise(tokenizer)


# ----------------------------------------------------------------------------------------- special tokens and templates


def test_special_ids_from_every_place(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level(), bos_token={"content": "<|begin|>"}, add_bos_token=True)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|end|>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}))
    metadata = keys(tmp_path, 320, unk_token_id=7)
    found = {name: metadata.get(key) for name, key in hf_tokenizer.SPECIAL.items()}
    assert found == {"bos": 0, "eos": 5, "unk": 7, "pad": 1, "sep": None, "cls": None, "mask": None}
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert "tokenizer.ggml.add_eos_token" not in metadata


def test_bos_from_the_post_processor(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    write_tokenizer(tmp_path, byte_level(post_processor={"type": "Sequence", "processors": [template]}))
    assert keys(tmp_path, 320)["tokenizer.ggml.add_bos_token"] is True
    write_tokenizer(tmp_path, byte_level(post_processor=None))
    assert keys(tmp_path, 320)["tokenizer.ggml.add_bos_token"] is False


def test_end_of_reply_tokens_and_sampling(tmp_path: Path) -> None:
    tokenizer = byte_level()
    end = {"id": 319, "content": "<|eot_id|>", "special": True, "normalized": False}
    tokenizer["added_tokens"].append(end | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
    tokenizer["model"]["vocab"] = {t: i for t, i in tokenizer["model"]["vocab"].items() if i < 319}
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    write_tokenizer(tmp_path, tokenizer, eos_token="<|end|>")
    generation = {"eos_token_id": [1, 319], "do_sample": True, "temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    metadata = keys(tmp_path, 320)
    assert (metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.eot_token_id"]) == (1, 319)
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}  # tests/test_general_keys.py reads them
    assert hf_tokenizer.generation_config(metadata | sampling) == generation


def added(names: list[str]) -> dict[str, Any]:
    """tokenizer.json with control tokens after the first 320."""
    tokenizer = byte_level()
    flags = {"special": True} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [{"id": 320 + i, "content": name} | flags for i, name in enumerate(names)]
    return tokenizer


@pytest.mark.parametrize(
    ("names", "of_generation", "of_config", "eot", "eom"),
    [
        (["<|endoftext|>", "<|user|>", "<|observation|>"], [320, 321, 322], [320], 321, 322),  # GLM
        (["<|endoftext|>", "<|user|>"], None, [320, 321], 321, None),
        (["<|endoftext|>", "<|user|>"], [320], [320, 321], None, None),  # what transformers stops at
        (["<|return|>", "<|endoftext|>", "<|call|>"], [320, 321, 322], 320, None, None),  # known by name
        (["<eos>", "<|eom_id|>", "<|other|>", "<|eot_id|>"], None, [320, 321, 322, 323], 323, 321),
        (["<|eot|>", "<|end_of_text|>", "<|eom|>"], [321, 322, 320], 320, None, 322),  # Llama 4
    ],
)
def test_tokens_at_which_transformers_stops(
    tmp_path: Path, names: list[str], of_generation: object, of_config: object, eot: int | None, eom: int | None
) -> None:
    write_tokenizer(tmp_path, added(names), eos_token=names[0])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": of_generation}))
    metadata = keys(tmp_path, 324, eos_token_id=of_config)
    assert metadata["tokenizer.ggml.eos_token_id"] == 320
    assert (metadata.get("tokenizer.ggml.eot_token_id"), metadata.get("tokenizer.ggml.eom_token_id")) == (eot, eom)


def test_a_reply_of_gpt_oss_goes_on_after_its_analysis(tmp_path: Path) -> None:
    names = ["<|return|>", "<|call|>", "<|endoftext|>"]
    write_tokenizer(tmp_path, added(names), eos_token="<|return|>")
    tokenizer = Tokenizer.from_gguf(keys(tmp_path, 323))
    assert tokenizer.eos_ids == {320, 321, 322}
    assert tokenizer.turn_end_ids == {1, 320, 321, 322}  # 1 is <|end|>
    write_tokenizer(tmp_path, added(names[:1]), eos_token="<|return|>")
    assert Tokenizer.from_gguf(keys(tmp_path, 321)).eos_ids == {1, 320}


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"])
def test_chat_template_wherever_it_is(tmp_path: Path, place: str) -> None:
    template = "{{ messages[0]['content'] }}"
    write_tokenizer(tmp_path, byte_level(), **({"chat_template": template} if place.startswith("tok") else {}))
    if place.endswith("jinja"):
        (tmp_path / place).write_text(template)
    elif place.startswith("chat"):
        (tmp_path / place).write_text(json.dumps({"chat_template": template}))
    assert keys(tmp_path, 320)["tokenizer.chat_template"] == template


def test_a_chat_template_of_its_own_comes_before_the_settings(tmp_path: Path) -> None:
    import transformers

    write_tokenizer(tmp_path, byte_level(), chat_template="old", tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert keys(tmp_path, 320)["tokenizer.chat_template"] == "new"
    assert transformers.AutoTokenizer.from_pretrained(str(tmp_path)).chat_template == "new"


def test_named_chat_templates_come_back(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool-use", "template": "b"}]
    write_tokenizer(tmp_path / "a", byte_level(), chat_template=named)
    metadata = keys(tmp_path / "a", 320)
    assert metadata["tokenizer.chat_template"] == "a"
    assert metadata["tokenizer.chat_template.tool_use"] == "b"
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    write_tokenizer(tmp_path / "b", byte_level(), **hf_tokenizer.tokenizer_config(metadata, 64))
    again = keys(tmp_path / "b", 320)
    assert {k: v for k, v in again.items() if "chat" in k} == {k: v for k, v in metadata.items() if "chat" in k}


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Metaspace"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "neither byte-level nor"),
        ({"version": "1.0"}, "KeyError.*model"),
        ({"model": {"type": "BPE", "vocab": 3, "merges": [], "byte_fallback": True}}, "AttributeError"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, tokenizer: dict[str, Any], message: str) -> None:
    write_tokenizer(tmp_path, tokenizer)
    with pytest.raises((UnsupportedError, FormatError), match=message):
        keys(tmp_path, 10)


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"tokenizer\.json is missing"):
        keys(tmp_path, 10)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"tokenizer\.model: not a SentencePiece model"):
        keys(tmp_path, 10)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        keys(tmp_path, 10)
