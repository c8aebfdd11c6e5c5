"""Pre-tokenizers: how byte-level BPE tokenizers split text into words, by their name in `tokenizer.ggml.pre`.

A pre-tokenizer is a list of regular expressions that are applied in turn: each match becomes a piece, and so does the
text between matches. One table serves both to recognise a tokenizer.json and to build the runtime's tokenizer. It has
the names that llama.cpp and ik_llama.cpp know; names that split text in the same way share an entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import UnknownNameError, UnsupportedError
from quantkit.inputs.json_input import Json

_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
_DIGITS = {r"\p{N}": True, r"\p{N}+": False}  # the step Digits, by its individual_digits
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
    r'[!"#$%&' + r"'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_SEED = (
    rf"(?i:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}"
)
# Gives the same pieces as _QWEN2: backtracking into the possessive parts could not make a match, and \s* matches
# line ends too.
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}"
)
_CL100K = _BAILING.replace(r"|\p{N}|", r"|\p{N}{1,3}|")  # gives the same pieces as _LLAMA3
_UPPER_NOT_HAN, _LOWER_NOT_HAN = rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+(?i:{_CONTRACTION})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*(?i:{_CONTRACTION})?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
# The letters with case that DeepSeek LLM's tokenizer.json lists; those that NFC would change are escaped.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _ASIAN)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """The regular expressions of a pre-tokenizer, and the settings that its tokenizers share."""

    names: tuple[str, ...]  # files get the first
    splits: tuple[str, ...]
    nfc: bool = False  # text is normalized to NFC first
    ignore_merges: bool = False  # a word that is a token stays that token, whatever the merges say
    adds_bos: bool = False  # if the file has no add_bos_token
    equivalents: tuple[tuple[str, ...], ...] = ()  # other published expressions that give the same ids


_LIKE_GPT2 = (
    "gpt-2", "phi-2", "olmo", "mpt", "jais", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "roberta-bpe",
    "jina-v1-en", "jina-v2-code", "exaone4", "a.x-4.0", "mellum", "modern-bert", "trillion", "granite-docling",
)  # fmt: skip
_LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "falcon-h1", "midm-2.0", "lfm2")
_LIKE_QWEN2 = (
    "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "bailingmoe", "bailingmoe2", "llada-moe", "grok-2", "kormo",
    "solar-open",
)  # fmt: skip
TABLE = (
    PreTokenizer(_LIKE_GPT2, (_GPT2,)),
    PreTokenizer(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)),
    PreTokenizer(("command-r",), (r"\p{N}", _GPT2), nfc=True),
    PreTokenizer(_LIKE_LLAMA3, (_LLAMA3,), ignore_merges=True, adds_bos=True),
    PreTokenizer(("glm4", "chatglm-bpe", "smaug-bpe", "dbrx"), (_LLAMA3,), equivalents=((_CL100K,),)),
    PreTokenizer(("qwen2",), (_QWEN2,), nfc=True),
    PreTokenizer(_LIKE_QWEN2, (_QWEN2,), equivalents=((_BAILING,),)),
    PreTokenizer(("qwen35",), (_QWEN35,), nfc=True),
    PreTokenizer(("tekken",), (_TEKKEN,), ignore_merges=True, adds_bos=True),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    PreTokenizer(("kimi-k2",), (_KIMI,)),
    PreTokenizer(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    # Its tokenizer.json splits digits one by one. No token has two digits, so splitting runs gives the same ids.
    PreTokenizer(("deepseek-llm",), (*_DEEPSEEK_LLM, r"\p{N}+"), equivalents=((*_DEEPSEEK_LLM, r"\p{N}"),)),
    PreTokenizer(("deepseek-coder",), _DEEPSEEK_CODER),
    PreTokenizer(("seed-coder",), (_SEED,)),
    PreTokenizer(("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    PreTokenizer(("default",), (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
)
# Control tokens that tell apart models with one splitting but several names: runtimes expect each model's own name.
_NAME_BY_TOKEN = {"[gMASK]": "glm4", "]~!b[": "minimax-m2", "<|startoftext|>": "hunyuan", "<|header_start|>": "llama4"}
_BY_NAME = {name: entry for entry in TABLE for name in entry.names}


def get(name: str) -> PreTokenizer:
    """The pre-tokenizer that GGUF calls `name`. UnknownNameError lists the nearest names."""
    if name not in _BY_NAME:
        raise UnknownNameError("pre-tokenizer (tokenizer.ggml.pre)", name, _BY_NAME)
    return _BY_NAME[name]


def known(name: str) -> bool:
    """Whether the runtime has the pre-tokenizer `name`."""
    return name in _BY_NAME


def tokenizer_class(path: Path, settings: Json, by_class: Mapping[str, str], pre: str | None) -> str:
    """The class that `settings` (tokenizer_config.json) names, without the ending "Fast".

    UnsupportedError if `by_class`, the pre-tokenizers by class, lacks it and no `pre` is given. `path` is for the
    message.
    """
    kind = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    if pre is None and kind not in by_class:
        raise UnsupportedError(
            f"{path}: the pre-tokenizer of the class {kind or '(not named)'} is not known. If you know its name in "
            f"llama.cpp, give it with --pre NAME; known classes: {', '.join(by_class)}"
        )
    return kind


def to_json(entry: PreTokenizer) -> dict[str, Any]:
    """The `pre_tokenizer` of a tokenizer.json."""
    steps = [_step(regex) for regex in entry.splits]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {"type": "Sequence", "pretokenizers": steps}


def _step(regex: str) -> dict[str, Any]:
    """One step of a `pre_tokenizer`. Published files use Digits, which covers newer Unicode digits than \\p{N}."""
    if regex in _DIGITS:
        return {"type": "Digits", "individual_digits": _DIGITS[regex]}
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _splits(step: Json) -> list[str]:
    """The regular expressions of a `pre_tokenizer` in a tokenizer.json."""
    kind = step["type"]
    if kind == "Sequence":
        return [regex for inner in step["pretokenizers"] for regex in _splits(inner)]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [_GPT2] if step.get("use_regex", True) else []
    if kind == "Digits":
        return [regex for regex, each in _DIGITS.items() if each == bool(step.get("individual_digits"))]
    how = (step.get("behavior"), bool(step.get("invert")))
    if kind == "Split" and how in (("Isolated", False), ("Removed", True)):
        pattern = step["pattern"]
        regex = pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"])
        regex = regex.replace("\r", r"\r").replace("\n", r"\n")  # DeepSeek's file has the characters themselves
        return [re.sub(r"\\(.)", lambda pair: pair[1] if pair[1] in "'\"/" else pair[0], regex)]  # needless escapes
    raise UnsupportedError(f"tokenizer.json: pre_tokenizer step {dict(step)} has no counterpart in GGUF")


def recognise(tokenizer: Json) -> str:
    """The GGUF name of a byte-level tokenizer.json's pre-tokenizer. UnsupportedError if there is none.

    The expressions have to be the same. Among the entries that share them, the best is the one that agrees in NFC and
    in ignore_merges; what still differs goes into `OVERRIDES`. If a control token identifies the model, its own name is
    taken before the names of others with the same splitting.
    """
    steps = normalizers(tokenizer)
    splits = tuple(_splits(tokenizer["pre_tokenizer"]))
    found = [entry for entry in TABLE if splits in (entry.splits, *entry.equivalents)]
    if splits == (*_DEEPSEEK_LLM, r"\p{N}") and _joins_digits(tokenizer):
        found = []
    if not found or not {step["type"] for step in steps} <= {"NFC"}:
        raise UnsupportedError(
            f"tokenizer.json has an unknown pre-tokenizer: normalizer {[step['type'] for step in steps]}, "
            f"splits {list(splits)}. If you know its name in llama.cpp, give it with --pre NAME; known: "
            f"{', '.join(entry.names[0] for entry in TABLE)}"
        )
    wanted = (bool(tokenizer["model"].get("ignore_merges")), bool(steps))
    entry = min(found, key=lambda entry: (entry.ignore_merges != wanted[0]) + (entry.nfc != wanted[1]))
    added = {token["content"] for token in tokenizer.get("added_tokens") or ()}
    own = [name for token, name in _NAME_BY_TOKEN.items() if token in added and name in entry.names]
    return own[0] if own else entry.names[0]


def normalizers(tokenizer: Json) -> list[dict[str, Any]]:
    """The steps of a tokenizer.json's normalizer, in order; [] if it has none."""
    found = tokenizer.get("normalizer") or {"type": "Sequence", "normalizers": []}
    return list(found.get("normalizers", [found]))


def _joins_digits(tokenizer: Json) -> bool:
    """Whether a token has two adjacent digits, so that splitting digits singly and in runs gives different ids."""
    return any(re.search(r"\d\d", token) for token in tokenizer["model"].get("vocab", ()))
