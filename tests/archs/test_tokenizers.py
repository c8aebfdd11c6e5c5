"""Published kinds of tokenizer, from Hugging Face's files through GGUF's keys: the ids are those of transformers.

A few hundred strings a kind; with `-m full` ten thousand, as `benchmarks/bench_tokenizers.py` has them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from quantkit import types
from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.formats.gguf import open as open_gguf
from quantkit.tokenizers import hf_tokenizer, tiktoken, vocab
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.checkpoints import HARD, byte_level, write_tokenizer
from tests.archs.tokenizer_files import (
    BYTE_LEVEL,
    KINDS,
    charsmap,
    differences,
    field,
    files,
    mixed,
    sentencepiece_file,
    size_of,
    spaced,
    step,
    strings,
    through,
    trained,
)


def assert_same(ours: Tokenizer, directory: Path, texts: Iterable[str]) -> None:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    texts = list(texts)
    found = [ours.encode(text, bos=False, special=True) for text in texts]
    wanted = theirs(texts, add_special_tokens=False).input_ids
    differing = [(text, a, b) for text, a, b in zip(texts, found, wanted) if a != b]
    assert not differing, f"{len(differing)} of {len(texts)} differ, the first: {differing[0]}"


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", KINDS)
def test_same_ids_and_texts_as_transformers(tmp_path: Path, name: str, count: int) -> None:
    made = files(name, tmp_path)
    ours = through(made.source, made.config.pop("vocab_size"), **made.config)
    found = differences(ours, made.json, mixed(count, made.named))
    assert not found.first, f"{found.counts} of {found.compared} differ"
    assert found.compared["encode"] == count
    assert min(found.compared.values()) > count // 2
    if name in BYTE_LEVEL:
        assert ours._metadata["tokenizer.ggml.pre"] == name.split()[0].rstrip(",")
        assert (hf_tokenizer.OVERRIDES in ours._metadata) == (" with " in name)
    if name == "gemma4":
        assert ours._metadata["tokenizer.ggml.model"] == "gemma4"
        channel = named_id(spaced("gemma4"), "<|channel>")
        assert hf_tokenizer.token_types(ours._metadata)[channel] == hf_tokenizer.USER_DEFINED


def named_id(definition: dict[str, Any], content: str) -> int:
    """The id of an added token."""
    return next(token["id"] for token in definition["added_tokens"] if token["content"] == content)


CLASSES = {
    "LlamaTokenizer": ("llama", "default"),
    "GemmaTokenizer": ("llama", "default"),
    "T5Tokenizer": ("t5", "default"),
    "Qwen2Tokenizer": ("gpt2", "qwen2"),
    "Qwen3_5Tokenizer": ("gpt2", "qwen35"),
    "GPT2Tokenizer": ("gpt2", "gpt-2"),
    "CohereTokenizer": ("gpt2", "command-r"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_what_transformers_own_classes_save(tmp_path: Path, name: str) -> None:
    """With the tokens that they add before and after a text."""
    import transformers

    kind = {"llama": "bpe", "t5": "unigram"}.get(CLASSES[name][0])
    model = (spaced(kind) if kind else trained("qwen2"))["model"]
    vocab = model["vocab"]
    given = {"vocab": [tuple(piece) for piece in vocab] if isinstance(vocab, list) else vocab}
    if "merges" in model:
        given["merges"] = [tuple(merge) for merge in model["merges"]]
    theirs = getattr(transformers, name)(**given)
    theirs.save_pretrained(tmp_path)
    ours = through(tmp_path, size_of(json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))))
    assert tuple(ours._metadata[f"tokenizer.ggml.{key}"] for key in ("model", "pre")) == CLASSES[name]
    for text in strings(300)[:150]:
        assert ours.encode(text, special=True) == theirs(text).input_ids, text


@pytest.mark.parametrize("text", ["\ud800", "a\udcff", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"ab\xe2\x82"])
def test_invalid_utf8_is_refused(tmp_path: Path, text: str | bytes) -> None:
    write_tokenizer(tmp_path, trained("gpt-2"))
    ours = through(tmp_path, size_of(trained("gpt-2")))
    assert ours.encode("é".encode()) == ours.encode("é")
    with pytest.raises(DataError, match="not valid UTF-8"):
        ours.encode(text)


# --------------------------------------------------------------------------------------------------- tokenizer.model


@pytest.mark.parametrize("kind", ["bpe", "unigram", "unigram, bytes"])
def test_a_directory_with_only_tokenizer_model(tmp_path: Path, kind: str) -> None:
    definition = json.loads(json.dumps(spaced(kind)))
    if kind != "bpe":  # what SentencePiece itself does: whole text, no runs of spaces, none at the ends
        ends = {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
        runs = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        definition["normalizer"] = {"type": "Sequence", "normalizers": [ends, runs]}
        definition["pre_tokenizer"] |= {"split": False}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.model").write_bytes(sentencepiece_file(definition, kind != "bpe"))
    size = size_of(definition) + 5
    added = {size - 5: "<tool>", size - 4: "<|x|>"}
    decoder = {str(size - 4): {"content": "<|x|>", "special": True}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    (tmp_path / "model" / "added_tokens.json").write_text(json.dumps({"<tool>": size - 5}))
    blank = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    definition["added_tokens"] += [blank | {"id": i, "content": text} for i, text in added.items()]
    write_tokenizer(tmp_path / "json", definition)
    ours = through(tmp_path / "model", size)
    assert_same(ours, tmp_path / "json", [*strings(300), "<tool>a <|x|> b</s>c"])
    assert hf_tokenizer.OVERRIDES not in ours._metadata
    wanted = {"bpe": (1, 2), "unigram": (None, 1), "unigram, bytes": (None, 1)}[kind]
    assert (ours.bos_id, ours.eos_id) == wanted
    assert ours.adds_bos == (kind == "bpe")
    with pytest.raises(FormatError, match=r"token id \d+, config.json a vocab_size of 10"):
        through(tmp_path / "model", 10)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("source", ["tokenizer.json", "tokenizer.model"])
def test_compiled_replacements(tmp_path: Path, kind: str, source: str) -> None:
    """Their own key where GGUF has one; beside it the JSON that says where in the normalizer they stand."""
    definition = json.loads(json.dumps(spaced(kind)))
    precompiled = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap()).decode()}
    own = definition["normalizer"]["normalizers"] if kind == "bpe" or source == "tokenizer.json" else []
    definition["normalizer"] = {"type": "Sequence", "normalizers": [precompiled, *own]}
    if source == "tokenizer.model" and kind == "unigram":
        definition["pre_tokenizer"] |= {"split": False}
    write_tokenizer(tmp_path / "json", definition)
    directory = tmp_path / "json"
    if source == "tokenizer.model":
        directory = tmp_path / "model"
        directory.mkdir()
        (directory / source).write_bytes(sentencepiece_file(definition, table=charsmap()))
    elif kind == "bpe":
        with pytest.raises(UnsupportedError, match=r"'Precompiled', 'Prepend', 'Replace'.* no counterpart"):
            through(directory, size_of(definition))
        return
    ours = through(directory, size_of(definition))
    assert_same(ours, tmp_path / "json", [*strings(60), "the Quick Q"])
    assert ours.encode("the Quick", bos=False) == ours.encode("the quick", bos=False)
    if kind == "unigram":
        assert bytes(ours._metadata["tokenizer.ggml.precompiled_charsmap"]) == charsmap()
        assert (hf_tokenizer.OVERRIDES in ours._metadata) == (source == "tokenizer.json")


def test_a_broken_tokenizer_model_is_refused(tmp_path: Path) -> None:
    data = sentencepiece_file(spaced("bpe"))
    for broken in (b"", b"x", data[:-1], data[: len(data) // 2], b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"):
        (tmp_path / "tokenizer.model").write_bytes(broken)
        with pytest.raises(FormatError, match=r"tokenizer\.model: not a SentencePiece model"):
            through(tmp_path, 1000)
    (tmp_path / "tokenizer.model").write_bytes(data + field(2, field(3, 4)))
    with pytest.raises(UnsupportedError, match="type 4"):
        through(tmp_path, 1000)


def test_ids_below_0_are_refused(tmp_path: Path) -> None:
    """A negative id would name a token from the end of the vocabulary."""
    definition = json.loads(json.dumps(spaced("bpe")))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(definition))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": -1}))
    with pytest.raises(FormatError, match=r"tokenizer\.model: the added token '<tool>' has the id -1"):
        through(tmp_path, 1000)
    definition["added_tokens"].append({"id": -2, "content": "<tool>", "special": False})
    write_tokenizer(tmp_path, definition)
    with pytest.raises(FormatError, match=r"tokenizer\.json has token id -2 \('<tool>'\); ids count from 0"):
        through(tmp_path, 1000)


def test_through_a_file(tmp_path: Path) -> None:
    """Scores that float32 does not hold, the compiled table and the rest come back from a GGUF."""
    definition = json.loads(json.dumps(spaced("unigram")))
    definition["model"]["vocab"] = [[text, score / 3] for text, score in definition["model"]["vocab"]]
    precompiled = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap()).decode()}
    definition["normalizer"]["normalizers"].insert(0, precompiled)
    write_tokenizer(tmp_path / "hf", definition)
    metadata = Metadata({"general.architecture": "llama"})
    for key, (value, kind) in vocab.read(tmp_path / "hf", {"vocab_size": size_of(definition)}).items():
        metadata.set(key, value, kind)
    with Writer(tmp_path / "x.gguf", metadata, [TensorSpec("x", (1, 32), types.get("f32"))]) as writer:
        writer.write("x", np.zeros(128, np.uint8))
    ours = Tokenizer.from_gguf(open_gguf(tmp_path / "x.gguf").metadata)
    assert hf_tokenizer.SCORES in ours._metadata
    assert_same(ours, tmp_path / "hf", strings(100))


# ---------------------------------------------------------------------------------------------------------- tiktoken


def test_tiktokens_ranks(tmp_path: Path) -> None:
    """Merges from ranks: the tokenizer they were taken from, through Kimi's files."""
    definition = json.loads(json.dumps(trained("gpt-4o")))
    byte = {character: i for i, character in enumerate(tiktoken.byte_alphabet())}
    tokens = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].__getitem__)
    tokens.append("zqzqzq")  # no merges make it: a whole word only
    lines = [base64.b64encode(bytes(byte[c] for c in token)) + f" {i}".encode() for i, token in enumerate(tokens)]
    (tmp_path / "kimi").mkdir()
    (tmp_path / "kimi" / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    size = len(tokens) + 256
    settings: dict[str, Any] = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]"}
    settings["added_tokens_decoder"] = {str(len(tokens)): {"content": "[BOS]", "special": True}}
    (tmp_path / "kimi" / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = through(tmp_path / "kimi", size)
    assert (ours._metadata["tokenizer.ggml.pre"], ours.bos_id) == ("kimi-k2", len(tokens))
    assert ours.encode("zqzqzq, zqzqzq", bos=False)[0] == len(tokens) - 1
    assert ours.encode("zqzqzq, zqzqzq", bos=False).count(len(tokens) - 1) == 1
    named = f"<|reserved_token_{len(tokens) + 9}|>"
    assert ours.encode(f"[BOS]{named}", bos=False, special=True) == [len(tokens), len(tokens) + 9]

    definition["added_tokens"] = []
    letters = [rf"[{kinds}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}")]
    end = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = [rf"{lead}{letters[0]}*{letters[1]}+{end}", rf"{lead}{letters[0]}+{letters[1]}*{end}"]
    rest = [r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
    definition["pre_tokenizer"]["pretokenizers"][0] = step("|".join([r"[\p{Han}]+", *words, *rest]))
    write_tokenizer(tmp_path / "json", definition)
    assert_same(ours, tmp_path / "json", strings(300))

    (tmp_path / "kimi" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Other"}))
    with pytest.raises(UnsupportedError, match=r"class Other .*--pre NAME"):
        through(tmp_path / "kimi", size)
    assert through(tmp_path / "kimi", size, pre="gpt-2").encode("a") == [tokens.index("a")]
    (tmp_path / "kimi" / "tiktoken.model").write_bytes(b"\n".join([*lines, b"YQ== x"]))
    with pytest.raises(FormatError, match=rf"line {len(lines) + 1} is not a token"):
        through(tmp_path / "kimi", size, pre="gpt-2")
    (tmp_path / "kimi" / "tiktoken.model").write_bytes(b"\n".join(lines[5:]))
    with pytest.raises(FormatError, match="5 single bytes are no tokens"):
        through(tmp_path / "kimi", size, pre="gpt-2")


# -------------------------------------------------------------------------------------------------- vocab.json, merges


@pytest.mark.parametrize(("kind", "pre"), [("GPT2Tokenizer", "gpt-2"), ("Qwen2Tokenizer", "qwen2")])
def test_vocab_and_merges(tmp_path: Path, kind: str, pre: str) -> None:
    """The ids of transformers' class, which reads the same two files."""
    import transformers

    made = byte_level(400)
    vocab_, merges = made["model"]["vocab"], made["model"]["merges"]
    control = [token["content"] for token in made["added_tokens"]]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab_, ensure_ascii=False), encoding="utf-8")
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|extra|>": len(vocab_)}))
    settings = {"tokenizer_class": kind, "bos_token": control[0], "eos_token": control[1], "unk_token": control[1],
                "pad_token": control[1]}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    entries = vocab.read(tmp_path, {"vocab_size": len(vocab_) + 1})
    metadata = {key: value for key, (value, _) in entries.items()}
    assert metadata["tokenizer.ggml.pre"] == pre
    assert metadata["tokenizer.ggml.tokens"][-1] == "<|extra|>"
    assert metadata["tokenizer.ggml.bos_token_id"] == vocab_[control[0]]
    ours = tokenizers.Tokenizer.from_str(json.dumps(hf_tokenizer.tokenizer_json(metadata)))
    theirs = getattr(transformers, kind)(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), **settings)
    for text in (HARD, "a<|end|>b  2024 e\u0301 I'LL", "\n\n  x"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"the pre-tokenizer of the class \(not named\) .* --pre NAME"):
        vocab.read(tmp_path, {"vocab_size": len(vocab_) + 1})
    assert vocab.read(tmp_path, {"vocab_size": len(vocab_) + 1}, "qwen2")["tokenizer.ggml.pre"][0] == "qwen2"
    (tmp_path / "merges.txt").write_text("a bcd\n")
    with pytest.raises(FormatError, match="line 1 is not a merge"):
        vocab.read(tmp_path, {"vocab_size": len(vocab_) + 1}, "qwen2")
