"""Published kinds of tokenizer, from Hugging Face's files through GGUF's keys: the ids are those of transformers.

The definitions are the published ones, with a small vocabulary trained here. A few hundred strings a kind; with
`-m full` ten thousand, which takes a minute.
"""

from __future__ import annotations

import base64
import functools
import json
import random
import struct
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
from quantkit.tokenizers import hf_tokenizer, pretokenizers, tiktoken, vocab
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.checkpoints import HARD, TEXT, byte_level, sentencepiece, write_tokenizer

# Expressions as the makers' tokenizer.json have them; written out, not taken from the table under test.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
GPT4O = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")
DIGITS = {"type": "Digits", "individual_digits": True}
NFC = {"type": "NFC"}

# name in GGUF -> what comes before ByteLevel, normalizer, settings of the model, special tokens
BYTE_LEVEL: dict[str, tuple[list[Any], Any, dict[str, Any], list[str]]] = {
    "llama-bpe": ([LLAMA3], None, {"ignore_merges": True}, ["<|begin_of_text|>", "<|eot_id|>"]),
    "glm4": ([LLAMA3], None, {}, ["<|endoftext|>", "[gMASK]", "<sop>"]),
    "qwen2": ([QWEN2], NFC, {}, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "qwen35": ([QWEN35], NFC, {}, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "deepseek-v3": ([*DEEPSEEK3], {"type": "Sequence", "normalizers": []}, {},
                    ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"]),
    "deepseek-coder": ([*DEEPSEEK_CODER, DIGITS], None, {}, ["<｜begin▁of▁sentence｜>", "<|EOT|>"]),
    "deepseek-llm": ([*pretokenizers.get("deepseek-llm").splits[:-1], DIGITS], None, {}, ["<｜begin▁of▁sentence｜>"]),
    "gpt-4o": ([("Removed", GPT4O)], None, {}, ["<|startoftext|>", "<|endoftext|>", "<|end|>"]),
    "smollm": ([DIGITS, None], None, {}, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "gpt-2": ([None], None, {}, ["<|endoftext|>"]),
    # not as any name says: kept beside the name
    "gpt-4o with NFC": ([GPT4O], NFC, {"ignore_merges": True}, ["<|endoftext|>"]),
}  # fmt: skip
SENTENCEPIECE = ("bpe", "bpe, new form", "bpe, first only", "bpe, no space", "gemma4", "unigram", "unigram, bytes")

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789½²Ⅷ٣४", "àéîõüßÆœŁžńİıſ", "абвгдежАБВГД",
    "αβγδεζΑΒΓΔὭΏ", "אבגדהוז", "ابتثجحخ", "अआइईकखगहिन्दी", "กขคงจฉ", "你好世界中文漢字龍",
    "ひらがなカタカナ", "한국어가나다",
    "e\u0301o\u0308a\u0323\u0302", "😀👍🏽👩‍👩‍👧❤️🇩🇪", "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "“”‘’…—¿¡€£¥°§",
    " \t\n\r\u00a0\u2003\u3000\u200b",
    "\x00\x01\x07\x1b\x7f\x85\ufeff\u202e\ufffd", "𝔘𝕟𝕚𐐀𐐨ǅǈʰˇ₁ªº",
)  # fmt: skip
CODE = (
    "def f(x: int) -> int:\n    return x * 2  # twice\n", "#include <stdio.h>\nint main() { return 0; }\r\n",
    'for (let i=0;i<10;i++) console.log(`${i}`);', "SELECT * FROM t WHERE a='b';", '{"key": [1, 2.5e-3, null]}',
    "https://example.org/a/b?c=d&e=f#g", "C:\\Users\\x\\n.txt", "I'm, you'RE, they'll; don't 'twas it'S",
    "CamelCaseHTTPServer snake_case 3rd-party 1,234,567.89", "   \n\n \t x", "▁▁ <0x41> <unk> </s> Ġ Ċ",
)  # fmt: skip


@functools.cache
def strings(count: int) -> tuple[str, ...]:
    """Texts of many scripts, emoji, code, spaces, control characters; the same each time."""
    rng = random.Random(5)

    def word() -> str:
        choice = rng.random()
        if choice < 0.1:
            return rng.choice(CODE)
        if choice < 0.25:
            return rng.choice(" ".join(TEXT).split())
        if choice < 0.3:
            return chr(rng.choice([*range(1, 0xD800), *range(0xE000, 0x30000, 3)]))
        return "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 8)))

    gaps = ["", "", " ", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", "   "]
    made = ["".join(rng.choice(gaps) + word() for _ in range(rng.randint(0, 12))) for _ in range(count - 2)]
    return (*made, HARD, " ")


def step(found: Any) -> dict[str, Any]:
    """A step of a `pre_tokenizer`: an expression, isolated; how and an expression; None for GPT-2's own; JSON."""
    if found is None:
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if isinstance(found, dict):
        return found
    how, regex = found if isinstance(found, tuple) else ("Isolated", found)
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": how, "invert": how == "Removed"}


@functools.cache
def trained(name: str) -> dict[str, Any]:
    """tokenizer.json of a byte-level kind, with 1000 tokens learned from the texts that are tokenized afterwards."""
    splits, normalizer, settings, special = BYTE_LEVEL[name]
    steps = [step(found) for found in splits]
    if splits[-1] is not None:
        steps.append(step(None) | {"use_regex": False})
    blank = tokenizers.Tokenizer(tokenizers.models.BPE())
    definition = json.loads(blank.to_str())
    definition |= {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "normalizer": normalizer}
    made = tokenizers.Tokenizer.from_str(json.dumps(definition))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([*strings(300), *TEXT, *CODE], trainer)
    made.add_special_tokens(special)
    made.add_tokens([tokenizers.AddedToken("<tool_call>", special=False, normalized=False)])
    found = json.loads(made.to_str())
    found["model"] |= settings
    return found


@functools.cache
def spaced(kind: str) -> dict[str, Any]:
    """tokenizer.json of a SentencePiece kind."""
    if kind == "unigram":
        return unigram(False)
    if kind == "unigram, bytes":
        return unigram(True)
    made = sentencepiece(600, prefix=kind not in ("bpe, no space", "gemma4"))
    if kind == "gemma4":
        made["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                                 "invert": False}  # fmt: skip
        channel = {"id": len(made["model"]["vocab"]), "content": "<|channel>", "special": True}
        made["added_tokens"].append(channel | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
    if kind in ("bpe, new form", "bpe, first only"):
        scheme = "always" if kind == "bpe, new form" else "first"
        made["normalizer"] = None
        made["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return made


def unigram(byte_fallback: bool) -> dict[str, Any]:
    """As T5 has it: <pad> </s> <unk>, spaces at the end removed, runs of spaces one. Scores are float32, as there."""
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256) if byte_fallback]
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=700, special_tokens=pieces, unk_token="<unk>", show_progress=False, max_piece_length=8
    )
    lines = [*TEXT, *CODE, *(line for line in strings(150) if "😀" not in line)]
    made.train_from_iterator(lines, trainer)
    found = json.loads(made.to_str())
    found["added_tokens"] = [token for token in found["added_tokens"] if token["content"] in special]
    found["model"]["vocab"] = [
        [text, struct.unpack("<f", struct.pack("<f", x))[0]] for text, x in found["model"]["vocab"]
    ]
    found["model"]["byte_fallback"] = byte_fallback
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    found["normalizer"] = {"type": "Sequence", "normalizers": [strip, spaces]}
    return found


def through(directory: Path, size: int, pre: str | None = None, **config: Any) -> Tokenizer:
    """quantkit's tokenizer of a directory's files, by way of GGUF's keys alone."""
    metadata = Metadata()
    for key, (value, kind) in vocab.read(directory, {"vocab_size": size} | config, pre).items():
        metadata.set(key, value, kind)
    return Tokenizer.from_gguf(metadata)


def size_of(definition: dict[str, Any]) -> int:
    return 1 + max([len(definition["model"]["vocab"]) - 1, *(token["id"] for token in definition["added_tokens"])])


def assert_same(ours: Tokenizer, directory: Path, texts: Iterable[str]) -> None:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    texts = list(texts)
    found = [ours.encode(text, bos=False, special=True) for text in texts]
    wanted = theirs(texts, add_special_tokens=False).input_ids
    differing = [(text, a, b) for text, a, b in zip(texts, found, wanted) if a != b]
    assert not differing, f"{len(differing)} of {len(texts)} differ, the first: {differing[0]}"


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [*BYTE_LEVEL, *SENTENCEPIECE])
def test_same_ids_as_transformers(tmp_path: Path, name: str, count: int) -> None:
    definition = trained(name) if name in BYTE_LEVEL else spaced(name)
    write_tokenizer(tmp_path, definition)
    ours = through(tmp_path, size_of(definition) + 3, **({"model_type": "gemma4_text"} if name == "gemma4" else {}))
    named = [token["content"] for token in definition["added_tokens"]]
    marked = [f"{named[i % len(named)]}{text}{named[-1]} x" for i, text in enumerate(strings(300)[::10])]
    assert_same(ours, tmp_path, [*strings(count), *marked])
    if name in BYTE_LEVEL:
        assert ours._metadata["tokenizer.ggml.pre"] == name.split()[0]
        kept = name != name.split()[0]
        assert (hf_tokenizer.OVERRIDES in ours._metadata) == kept
    if name == "gemma4":
        assert ours._metadata["tokenizer.ggml.model"] == "gemma4"
        assert hf_tokenizer.token_types(ours._metadata)[named_id(definition, "<|channel>")] == hf_tokenizer.USER_DEFINED


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


def field(number: int, value: int | float | bool | bytes | str) -> bytes:
    """One field of a protocol-buffers message."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value & (1 << 64) - 1)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def charsmap() -> bytes:
    """A compiled table of replacements with one entry, q for Q: a double-array trie, then the texts."""
    units = [0] * 256
    units[ord("Q")] = ord("Q") | 1 << 8 | 0x80 << 10  # its label, that a key ends here, where the value is
    return struct.pack("<257I", 4 * len(units), *units) + b"q\0"


def sentencepiece_file(definition: dict[str, Any], removes_spaces: bool = False, table: bytes = b"") -> bytes:
    """The tokenizer.model that says what a tokenizer.json of ours says."""
    model = definition["model"]
    if model.get("type") == "Unigram":
        pieces, kind = [(text, float(score)) for text, score in model["vocab"]], 1
    else:
        order = {"".join(merge): -float(i) for i, merge in enumerate(model["merges"])}
        texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
        pieces, kind = [(text, order.get(text, -5000.0)) for text in texts], 2
    types = {"<unk>": 2, "<s>": 3, "</s>": 3, "<pad>": 3}
    out = b""
    for text, score in pieces:
        sort = 6 if text.startswith("<0x") else types.get(text, 1)
        out += field(1, field(1, text) + field(2, score) + (field(3, sort) if sort != 1 else b""))
    ids = {text: i for i, (text, _) in enumerate(pieces)}
    named = ((40, "<unk>"), (41, "<s>"), (42, "</s>"), (43, "<pad>"))
    trainer = field(3, kind) + b"".join(field(number, ids.get(text, -1)) for number, text in named)
    return out + field(2, trainer) + field(3, field(2, table) + field(4, removes_spaces))


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
