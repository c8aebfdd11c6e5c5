"""How byte-level BPE tokenizers cut text into words, by the name that GGUF keeps in `tokenizer.ggml.pre`.

A way of cutting is a list of regular expressions, applied one after the other: each match becomes a piece of its own
and so does what lies between. The same table recognises a tokenizer.json and builds the runtime's tokenizer. The
names are those that the loaders of llama.cpp and ik_llama.cpp know; names that cut alike are one entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UnknownNameError, UnsupportedError

_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_LLAMA3 = (
    rf"(?i:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"(?i:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+(?i:{_CONTRACTION})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*(?i:{_CONTRACTION})?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"


@dataclass(frozen=True)
class PreTokenizer:
    names: tuple[str, ...]  # the first is the one written
    splits: tuple[str, ...]
    nfc: bool = False  # text is brought to Unicode's composed form first
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    adds_bos: bool = False  # where the file does not say


TABLE = (
    PreTokenizer(("gpt-2", "phi-2", "olmo", "mpt", "jais", "jina-es", "jina-de", "roberta-bpe", "exaone4"), (_GPT2,)),
    PreTokenizer(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)),
    PreTokenizer(("command-r",), (r"\p{N}", _GPT2), nfc=True),
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "lfm2"), (_LLAMA3,), ignore_merges=True, adds_bos=True
    ),
    PreTokenizer(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), (_LLAMA3,)),
    PreTokenizer(("qwen2",), (_QWEN2,), nfc=True),
    PreTokenizer(("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "bailingmoe", "grok-2"), (_QWEN2,)),
    PreTokenizer(("qwen35",), (_QWEN35,), nfc=True),
    PreTokenizer(("tekken",), (_TEKKEN,), ignore_merges=True, adds_bos=True),
    PreTokenizer(("gpt-4o",), (_GPT4O,)),
    PreTokenizer(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    PreTokenizer(("default",), (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
)
_BY_NAME = {name: entry for entry in TABLE for name in entry.names}


def get(name: str) -> PreTokenizer:
    """The way of cutting that GGUF calls `name`. UnknownNameError lists the nearest."""
    if name not in _BY_NAME:
        raise UnknownNameError("pre-tokenizer (tokenizer.ggml.pre)", name, _BY_NAME)
    return _BY_NAME[name]


def to_json(entry: PreTokenizer) -> dict[str, Any]:
    """The `pre_tokenizer` of a tokenizer.json."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in entry.splits
    ]  # fmt: skip
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {"type": "Sequence", "pretokenizers": steps}


def _splits(step: Mapping[str, Any]) -> list[str]:
    """The regular expressions that one `pre_tokenizer` of a tokenizer.json stands for."""
    kind = step["type"]
    if kind == "Sequence":
        return [regex for inner in step["pretokenizers"] for regex in _splits(inner)]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [_GPT2] if step.get("use_regex", True) else []
    if kind == "Digits" and step.get("individual_digits"):
        return [r"\p{N}"]
    how = (step.get("behavior"), bool(step.get("invert")))
    if kind == "Split" and how in (("Isolated", False), ("Removed", True)):
        pattern = step["pattern"]
        regex = pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"])
        return [regex.replace("\r", r"\r").replace("\n", r"\n")]  # DeepSeek's has the characters themselves
    raise UnsupportedError(f"tokenizer.json: pre_tokenizer step {dict(step)} has no counterpart in GGUF")


def recognise(tokenizer: Mapping[str, Any]) -> str:
    """The GGUF name of a byte-level tokenizer.json's way of cutting; UnsupportedError shows it when there is none.

    The expressions must be the same. Among entries that share them, the one that agrees best in composing and in
    ignoring merges is taken; the two matter for rare texts only, and GGUF has no other way to say them.
    """
    normalizer = tokenizer.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = [step["type"] for step in normalizer.get("normalizers", [normalizer])]
    splits = tuple(_splits(tokenizer["pre_tokenizer"]))
    found = [entry for entry in TABLE if entry.splits == splits]
    if not found or not set(steps) <= {"NFC"}:
        raise UnsupportedError(
            f"tokenizer.json cuts text in a way that has no name here: normalizer {steps}, splits {list(splits)}. "
            "If you know what llama.cpp calls it, say --pre NAME; quantkit's own runtime knows "
            f"{', '.join(entry.names[0] for entry in TABLE)}"
        )
    wanted = (bool(tokenizer["model"].get("ignore_merges")), "NFC" in steps)
    return min(found, key=lambda entry: (entry.ignore_merges != wanted[0]) + (entry.nfc != wanted[1])).names[0]
