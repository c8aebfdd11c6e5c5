"""Tokenizer files of every kind that `convert` reads, small and trained here; strings; comparison with transformers.

`files` writes a kind twice: as a checkpoint would have it, for quantkit, and as tokenizer.json, for transformers.
`differences` lists what the two tokenizers disagree on.
"""

from __future__ import annotations

import base64
import functools
import json
import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import field as member
from pathlib import Path
from typing import Any

import tokenizers

from quantkit.formats.gguf import Metadata
from quantkit.tokenizers import hf_tokenizer, pretokenizers, tiktoken, vocab
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.checkpoints import HARD, TEXT, sentencepiece, write_tokenizer

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
TEKKEN = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
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
    "glm4, as cl100k": ([CL100K], None, {}, ["<|endoftext|>", "[gMASK]", "<sop>"]),
    "hunyuan": ([BAILING], None, {}, ["<|startoftext|>", "<|eos|>"]),
    "deepseek-r1-qwen": ([QWEN2], None, {}, ["<｜begin▁of▁sentence｜>", "<｜User｜>"]),
    "minimax-m2": ([GPT4O], None, {}, ["]~!b[", "[e~[", "]~b]"]),
    "llama4": ([GPT4O], None, {}, ["<|begin_of_text|>", "<|header_start|>", "<|eot|>"]),
    "tekken": ([TEKKEN], None, {"ignore_merges": True}, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]),
    "command-r": ([DIGITS, None], NFC, {}, ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>"]),
    "kimi-k2": ([KIMI], None, {}, ["[BOS]", "[EOS]", "<|im_end|>"]),
    "seed-coder": ([SEED], None, {}, ["<seed:bos>", "<seed:eos>"]),
    "falcon": ([r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"], None, {}, ["<|endoftext|>"]),
    "default": ([r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], None, {}, ["<|endoftext|>"]),
    # not as any name says: kept beside the name
    "qwen2 with flags": ([QWEN2], NFC, {}, ["<|endoftext|>", "<|im_start|>"]),
    "tekken with NFC": ([TEKKEN], NFC, {}, ["<s>", "</s>"]),
    "gpt-4o with NFC": ([GPT4O], NFC, {"ignore_merges": True}, ["<|endoftext|>"]),
}  # fmt: skip
SENTENCEPIECE = (
    "bpe", "bpe, new form", "bpe, first only", "bpe, no space", "bpe with flags", "gemma4", "unigram", "unigram, bytes",
)  # fmt: skip
OTHER_FILES = (
    "tiktoken.model", "tokenizer.model, bpe", "tokenizer.model, unigram", "tokenizer.model, unigram, bytes",
    "vocab.json, gpt-2", "vocab.json, qwen2",
)  # fmt: skip
KINDS = (*BYTE_LEVEL, *SENTENCEPIECE, *OTHER_FILES)
FLAGGED = (  # added tokens that take spaces beside them, are whole words only, or are matched in the normalized text
    ("<|left|>", {"special": True, "lstrip": True}), ("<|right|>", {"special": True, "rstrip": True}),
    ("[both]", {"special": False, "lstrip": True, "rstrip": True, "normalized": False}),
    ("word", {"special": False, "single_word": True, "normalized": False}),
    ("тёска", {"special": False, "normalized": True}),
)  # fmt: skip

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


# Texts that case folding, composition or the bounds of characters make hard.
_ODD = (
    "'\u017f 'S\u017f '\u212a 'LL\u0301", "\u1e9e\u00df\ufb06 \u0130i\u0131I", "\u2126\u212b\u2000 \u0958\u09dc",
    "\u1112\u1161\u11ab\u1100\u1173\u11af", "a\u0315\u0300\u05ae\u0062 e\u0302\u0301",
    "👨\u200d👩\u200d👧\u200d👦🏳️\u200d🌈", "🇩🇪🇫🇷🇯 1\ufe0f\u20e3#\ufe0f\u20e3", "👍🏿👍\u200d",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334", "\ufdd0\ufffe\U0001ffff\U0010ffff",
    "\ue000\U000f0000\u0378\U000e0001", "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\x1f",
    "\u180e\u1680\u202f\u205f\u2060\u200e",
    "\u0661\u0662\u0663\u0664 \u096a\u096b \U0001d7d8\U0001d7d9 \uff11\uff12\uff13\uff14 \u2460\u3007\u5341",
    "\x00\x00 \x00a", "▁▁▁ ▁a <0x0A><0xE4> Ġa", "3.14e-10 0xFF 1_000_000 12345678901", "\r\r\n\n\r", " \n \n  x  \n",
    "\t\t\tif (x) {\n\t\t\t\treturn;\n\t\t\t}\n", "\u00a0\u00a0a\u00a0 b", "ﷺ㍿ǆŉ", "\u0300 \u0301a", "//////\n/ /\n",
)  # fmt: skip
_SPACE_RUNS = (
    " ",
    "  ",
    "       ",
    "\n",
    "\n\n\n",
    "\r\n",
    "\t\t",
    " \n",
    "\n ",
    "\u3000",
    "\u00a0 ",
    "\v\f",
    "\u2003\u2003",
)


def mixed(count: int, named: Sequence[str] = (), seed: int = 7) -> list[str]:
    """Strings of many scripts, code, runs of spaces, odd Unicode, very long words, and the added tokens `named`."""
    rng = random.Random(seed)
    ordinary, flags, words = strings(3000), [content for content, _ in FLAGGED], " ".join(TEXT).split()

    def part() -> str:
        choice = rng.random()
        if choice < 0.35:
            return "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 10)))
        if choice < 0.50:
            return rng.choice(_ODD)
        if choice < 0.60:
            text = rng.choice(_ODD + CODE)
            return text[rng.randrange(len(text)) :]
        if choice < 0.70:
            return rng.choice(CODE)
        if choice < 0.78:
            return chr(rng.choice([rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
        if choice < 0.90 and named:
            text = rng.choice(named)
            return text[: rng.randint(1, len(text))] if rng.random() < 0.2 else text
        return rng.choice(flags) if choice < 0.92 else rng.choice(words)

    def text() -> str:
        choice = rng.random()
        if choice < 0.25:
            return rng.choice(ordinary)
        if choice < 0.26:  # one very long word
            return part() + "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(100, 700))) + part()
        gaps = rng.choice((("",), (" ",), ("", " ", *_SPACE_RUNS), _SPACE_RUNS))
        return "".join(rng.choice(gaps) + part() for _ in range(rng.randint(1, 5))) + rng.choice(("", "", " ", "\n"))

    return [text() for _ in range(count)]


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
    if name.endswith("flags"):
        made.add_tokens([tokenizers.AddedToken(content, **flags) for content, flags in FLAGGED])
    found = json.loads(made.to_str())
    found["model"] |= settings
    found["decoder"] = step(None)
    return found


@functools.cache
def spaced(kind: str) -> dict[str, Any]:
    """tokenizer.json of a SentencePiece kind."""
    if kind == "unigram":
        return unigram(False)
    if kind == "unigram, bytes":
        return unigram(True)
    prefix = kind not in ("bpe, no space", "gemma4")
    made = sentencepiece(600, prefix=prefix)
    made["decoder"] = _back_from_spaces(prefix)
    if kind == "gemma4":
        made["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                                 "invert": False}  # fmt: skip
        channel = {"id": len(made["model"]["vocab"]), "content": "<|channel>", "special": True}
        made["added_tokens"].append(channel | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
    if kind == "bpe with flags":
        size = len(made["model"]["vocab"])
        blank = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, (content, flags) in enumerate(FLAGGED, size):
            made["added_tokens"].append({"id": i, "content": content} | blank | flags)
    if kind in ("bpe, new form", "bpe, first only"):
        scheme = "always" if kind == "bpe, new form" else "first"
        made["normalizer"] = None
        made["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return made


def _back_from_spaces(prefix: bool) -> dict[str, Any]:
    """The decoder of Llama 2 (with `prefix`) and of Gemma."""
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}


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
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    found["decoder"] = _back_from_spaces(True) if byte_fallback else metaspace
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


# ---------------------------------------------------------------------------------------------------- files and results


@dataclass(frozen=True)
class Files:
    """A tokenizer's files for quantkit, the tokenizer.json for transformers, and settings of config.json."""

    source: Path
    json: Path
    config: dict[str, Any]
    named: tuple[str, ...]  # the added tokens


def files(kind: str, directory: Path) -> Files:
    """Write the files of one of KINDS."""
    place, made = directory / "source", directory / "json"
    if kind in OTHER_FILES:
        definition = _OTHERS[kind.partition(",")[0]](kind.partition(", ")[2], place)
    else:
        definition = trained(kind) if kind in BYTE_LEVEL else spaced(kind)
        write_tokenizer(place, definition)
    write_tokenizer(made, definition)
    config: dict[str, Any] = {"vocab_size": size_of(definition) + 3}
    if kind == "gemma4":
        config["model_type"] = "gemma4_text"
    named = tuple(token["content"] for token in definition["added_tokens"])
    return Files(place, made / "tokenizer.json", config, named)


def _tiktoken_files(_: str, place: Path) -> dict[str, Any]:
    """Kimi's files with the tokens of another tokenizer; ranks give its merges."""
    definition = json.loads(json.dumps(trained("kimi-k2")))
    byte = {character: i for i, character in enumerate(tiktoken.byte_alphabet())}
    tokens = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].__getitem__)
    lines = [base64.b64encode(bytes(byte[c] for c in token)) + f" {i}".encode() for i, token in enumerate(tokens)]
    place.mkdir(parents=True)
    (place / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    settings: dict[str, Any] = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]"}
    settings["added_tokens_decoder"] = {str(len(tokens)): {"content": "[BOS]", "special": True}}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    blank = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    names = ["[BOS]", *(f"<|reserved_token_{i}|>" for i in range(len(tokens) + 1, len(tokens) + 256))]
    definition["added_tokens"] = [{"id": i, "content": name} | blank for i, name in enumerate(names, len(tokens))]
    definition["model"]["ignore_merges"] = True
    return definition


def _sentencepiece_files(kind: str, place: Path) -> dict[str, Any]:
    definition = json.loads(json.dumps(spaced(kind)))
    if kind != "bpe":  # what SentencePiece itself does: whole text, no runs of spaces, none at the ends
        ends = {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
        runs = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        definition["normalizer"] = {"type": "Sequence", "normalizers": [ends, runs]}
        definition["pre_tokenizer"] |= {"split": False}
    place.mkdir(parents=True)
    (place / "tokenizer.model").write_bytes(sentencepiece_file(definition, kind != "bpe"))
    return definition


def _vocab_files(kind: str, place: Path) -> dict[str, Any]:
    definition = json.loads(json.dumps(trained(kind)))
    place.mkdir(parents=True)
    model = definition["model"]
    (place / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (place / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")
    names = {"gpt-2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer"}
    decoder = {str(token["id"]): token for token in definition["added_tokens"]}
    settings = {"tokenizer_class": names[kind], "added_tokens_decoder": decoder}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return definition


_OTHERS = {"tiktoken.model": _tiktoken_files, "tokenizer.model": _sentencepiece_files, "vocab.json": _vocab_files}


@dataclass
class Differences:
    """The first of the texts (or ids) that differ, with both results, for every direction; and their number."""

    tokens: int = 0
    compared: dict[str, int] = member(default_factory=dict)
    counts: dict[str, int] = member(default_factory=dict)
    first: dict[str, tuple[Any, Any, Any]] = member(default_factory=dict)

    def add(self, direction: str, given: Iterable[Any], ours: Iterable[Any], theirs: Iterable[Any]) -> None:
        all_ = list(zip(given, ours, theirs, strict=True))
        found = [three for three in all_ if three[1] != three[2]]
        self.compared[direction] = len(all_)
        self.counts[direction] = len(found)
        if found:
            self.first[direction] = min(found, key=lambda three: len(three[0]))


def _written_out(path: Path) -> list[str]:
    """The control tokens that transformers finds in a text even if told not to; SentencePiece never does.

    They are pieces of its unigram models.
    """
    definition = json.loads(path.read_text(encoding="utf-8"))
    unigram = definition["model"].get("type") == "Unigram"
    return [token["content"] for token in definition["added_tokens"] if unigram and token["special"]]


def differences(ours: Tokenizer, path: Path, texts: Sequence[str]) -> Differences:
    """Where `ours` and transformers with the tokenizer.json `path` disagree.

    Directions: "encode", with control tokens found in the text; "encode as text", without; "decode" and "decode
    without control tokens" of the ids that transformers gives.
    """
    import transformers

    theirs, found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path)), Differences()
    ids = theirs(texts, add_special_tokens=False).input_ids
    found.tokens = sum(map(len, ids))
    found.add("encode", texts, [ours.encode(text, bos=False, special=True) for text in texts], ids)
    plain = [text for text in texts if not any(name in text for name in _written_out(path))]
    as_text = theirs(plain, add_special_tokens=False, split_special_tokens=True).input_ids
    found.add("encode as text", plain, [ours.encode(text, bos=False) for text in plain], as_text)
    for direction, special in (("decode", True), ("decode without control tokens", False)):
        back = theirs.batch_decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        kept = [i for i, text in enumerate(texts) if _decodes_alike(text, ids[i], back[i], special, ours)]
        given = [ids[i] for i in kept]
        found.add(direction, given, [ours.decode(each, special) for each in given], [back[i] for i in kept])
    return found


def _decodes_alike(text: str, ids: Sequence[int], back: str, special: bool, ours: Tokenizer) -> bool:
    """Whether the text of ids has to be transformers'. There are two exceptions.

    A text may name byte tokens whose bytes are not UTF-8: transformers replaces each of the bytes, also valid ones
    beside them. Special tokens of Gemma 4 that a reply shows are user-defined in GGUF, and not left out.
    """
    if back.count("\ufffd") > text.count("\ufffd"):
        return not any(hf_tokenizer.token_types(ours._metadata)[i] == hf_tokenizer.BYTE for i in ids)
    return special or ours._metadata["tokenizer.ggml.model"] != "gemma4" or "<|channel>" not in text
