"""Convert GGUF's `tokenizer.*` keys to Hugging Face tokenizer files. The runtime builds its tokenizer from these too.

    tokenizer_json(metadata)           keys -> tokenizer.json
    tokenizer_config(metadata)         keys -> tokenizer_config.json
    generation_config(metadata)        keys -> generation_config.json

`tokenizers/vocab.py` converts in the other direction and explains the keys.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gguf.constants import TokenType

from quantkit.archs.common import checked
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import shortest
from quantkit.inputs import json_input
from quantkit.inputs.json_input import Json
from quantkit.tokenizers import pretokenizers
from quantkit.tokenizers.checks import check_normalizer, check_pre_tokenizer, check_tokens

# Numbers, because metadata holds no enums.
NORMAL, UNKNOWN, CONTROL = int(TokenType.NORMAL), int(TokenType.UNKNOWN), int(TokenType.CONTROL)
USER_DEFINED, UNUSED, BYTE = int(TokenType.USER_DEFINED), int(TokenType.UNUSED), int(TokenType.BYTE)
SPACE = "\u2581"

# name in tokenizer_config.json and config.json, without "_token" -> GGUF key ("seperator" is GGUF's spelling)
SPECIAL = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "cls": "tokenizer.ggml.cls_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
}
# Added tokens that end a message in one chat format or another: runtimes know them by name.
KNOWN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>",
              "<|eom_id|>", "<|eom|>", "</s>", "<eos>", "[EOS]", "[EOT]", "<|return|>", "<|call|>")  # fmt: skip
# tokens that end a reply besides EOS, if generation_config.json lists them -> GGUF key
END_TOKENS = {
    "<|eot_id|>": "tokenizer.ggml.eot_token_id",
    "<|im_end|>": "tokenizer.ggml.eot_token_id",
    "<|end|>": "tokenizer.ggml.eot_token_id",
    "<end_of_turn>": "tokenizer.ggml.eot_token_id",
    "<turn|>": "tokenizer.ggml.eot_token_id",
    "<|eom_id|>": "tokenizer.ggml.eom_token_id",
    "<|eom|>": "tokenizer.ggml.eom_token_id",
}
# generation_config.json -> general.sampling.*
SAMPLING = {
    "temperature": ("temp", "f32"),
    "top_k": ("top_k", "i32"),
    "top_p": ("top_p", "f32"),
    "min_p": ("min_p", "f32"),
    "repetition_penalty": ("penalty_repeat", "f32"),
}
# A JSON object with the parts of a tokenizer.json that GGUF's own keys would make differently: "normalizer",
# "pre_tokenizer", "ignore_merges", "byte_fallback"; "added_tokens", id -> flags that are true, and the content if it
# differs from GGUF's; "unmerged", ids of tokens that no merge makes although two other tokens join to them.
OVERRIDES = "quantkit.tokenizer"
SCORES = "quantkit.tokenizer.scores"  # f64, if float32 is not exact for the scores of a unigram model
FIXED_SCORES = {UNUSED: -10000.0, USER_DEFINED: -1000.0, CONTROL: 0.0, UNKNOWN: 0.0, BYTE: 0.0}
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def id_list(value: int | Iterable[int] | None) -> list[int]:
    """A setting that is one id, a list of ids or absent, as a list."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def token_texts(metadata: Mapping[str, object]) -> list[str]:
    """The text of every token, by id. FormatError if the file has no tokenizer."""
    found = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(found, list):
        raise FormatError("metadata key tokenizer.ggml.tokens is missing; the file has no tokenizer")
    return found


def _array(metadata: Mapping[str, object], key: str) -> list[Any] | None:
    """The array of a key, whose entries `check_tokenizer` has checked; None if the key is absent."""
    found = metadata.get(key)
    return found if isinstance(found, list) else None


def _pre_tokenizer(metadata: Mapping[str, object]) -> pretokenizers.PreTokenizer:
    """The pre-tokenizer that `tokenizer.ggml.pre` names; "default" if the key is absent."""
    return pretokenizers.get(str(metadata.get("tokenizer.ggml.pre", "default")))


def token_types(metadata: Mapping[str, object]) -> list[int]:
    """The type of every token, by id; all NORMAL if the file does not say."""
    count = len(token_texts(metadata))
    stated = _array(metadata, "tokenizer.ggml.token_type")
    types: list[int] = [NORMAL] * count if stated is None else list(stated)
    if len(types) != count:
        raise FormatError(f"tokenizer.ggml.token_type has {len(types)} entries for {count} tokens")
    return types


def tokenizer_json(metadata: Mapping[str, object]) -> dict[str, Any]:
    """The tokenizer.json that is equivalent to the GGUF keys, with the same ids.

    FormatError names a missing key, UnsupportedError an unsupported kind of tokenizer.
    """
    checked.check_tokenizer(metadata)
    check_tokens(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _PARTS:
        raise UnsupportedError(
            f"tokenizer.ggml.model = {kind!r}; quantkit handles 'gpt2' (byte-level BPE), "
            "'llama' and 'gemma4' (SentencePiece BPE) and 't5' (unigram)"
        )
    with_merges = kind in ("gpt2", "gemma4")
    needed = ["tokenizer.ggml.tokens", "tokenizer.ggml.merges" if with_merges else "tokenizer.ggml.scores"]
    for key in needed:
        if key not in metadata:
            raise FormatError(f"metadata key {key} is missing; a {kind} tokenizer needs it")
    overrides = _overrides(metadata)
    parts = _PARTS[kind](metadata, overrides)
    where = OVERRIDES if "normalizer" in overrides or "pre_tokenizer" in overrides else "the tokenizer in the metadata"
    check_normalizer(parts["normalizer"], f"{where}, normalizer")
    if kind != "gpt2":  # whose pre-tokenizer is one of pretokenizers.TABLE
        check_pre_tokenizer(parts["pre_tokenizer"], f"{where}, pre_tokenizer")
    flags = overrides.get("added_tokens", {})
    tokens, types = token_texts(metadata), token_types(metadata)
    added = [
        {"id": i, "content": str(token), "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[i] != USER_DEFINED} | flags.get(str(i), {})
        for i, token in enumerate(tokens)
        if token and (types[i] in (CONTROL, USER_DEFINED) or (types[i] == UNKNOWN and kind != "gpt2"))
    ]  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added} | parts


def _overrides(metadata: Mapping[str, object]) -> dict[str, Any]:
    """The parsed value of OVERRIDES; {} if the file has no such key."""
    stated = metadata.get(OVERRIDES, "{}")
    if not isinstance(stated, str):
        raise FormatError(f"metadata key {OVERRIDES} is {checked.brief(stated)}; it should be JSON, a string")
    found = json_input.parse(stated, f"metadata key {OVERRIDES}")
    if not isinstance(found, dict):
        raise FormatError(f"metadata key {OVERRIDES} is {found!r}; it should be a JSON object")
    flags, unmerged = found.get("added_tokens", {}), found.get("unmerged", [])
    if not isinstance(flags, dict) or not all(isinstance(each, dict) for each in flags.values()):
        raise FormatError(f"metadata key {OVERRIDES}: added_tokens should be an object of objects")
    if not isinstance(unmerged, list) or not all(isinstance(each, int) for each in unmerged):
        raise FormatError(f"metadata key {OVERRIDES}: unmerged should be a list of token ids")
    return found


def _vocab(metadata: Mapping[str, object]) -> dict[str, int]:
    """Token -> id, the lowest if a text occurs twice, without the padding tokens of unused ids."""
    vocab: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(token_texts(metadata), token_types(metadata))):
        if kind != UNUSED or token != f"[PAD{i}]":
            vocab.setdefault(str(token), i)
    return vocab


def _bpe(vocab: dict[str, int], merges: list[list[str]], **settings: object) -> dict[str, Any]:
    fixed = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}  # fmt: skip
    return fixed | settings | {"vocab": vocab, "merges": merges}


def _byte_level_parts(metadata: Mapping[str, object], overrides: Json) -> dict[str, Any]:
    entry = _pre_tokenizer(metadata)
    vocab = _vocab(metadata)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "normalizer": overrides.get("normalizer", {"type": "NFC"} if entry.nfc else None),
        "pre_tokenizer": pretokenizers.to_json(entry),
        "post_processor": _post_processor(metadata, byte_level),
        "decoder": byte_level,
        "model": _bpe(
            vocab,
            _stated_merges(metadata, vocab),
            ignore_merges=overrides.get("ignore_merges", entry.ignore_merges),
        ),
    }


def _stated_merges(metadata: Mapping[str, object], vocab: Mapping[str, int]) -> list[list[str]]:
    """Pairs of tokens that merge, in the order of the file. FormatError for a token that the vocabulary lacks."""
    merges = [list(str(merge).partition(" ")[::2]) for merge in _array(metadata, "tokenizer.ggml.merges") or ()]
    for left, right in merges:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise FormatError(
                f"tokenizer.ggml.merges: '{left} {right}' merges tokens that are not in tokenizer.ggml.tokens"
            )
    return merges


def _merges_by_score(metadata: Mapping[str, object], overrides: Json) -> list[list[str]]:
    """For every split of a token into two tokens a merge; those that make the highest scores come first."""
    tokens, types, scores = token_texts(metadata), token_types(metadata), _stated_scores(metadata)
    mergeable = {str(token): i for i, token in enumerate(tokens) if types[i] == NORMAL}
    unmerged = set(overrides.get("unmerged", ()))
    ranked = sorted(mergeable, key=lambda token: (-float(scores[mergeable[token]]), mergeable[token]))
    return [
        [token[:cut], token[cut:]]
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable and mergeable[token] not in unmerged
    ]


def _sentencepiece_parts(metadata: Mapping[str, object], overrides: Json) -> dict[str, Any]:
    prefix, vocab = bool(metadata.get("tokenizer.ggml.add_space_prefix", True)), _vocab(metadata)
    keeps_merges = metadata["tokenizer.ggml.model"] == "gemma4"
    merges = _stated_merges(metadata, vocab) if keeps_merges else _merges_by_score(metadata, overrides)
    pairs = zip(token_texts(metadata), token_types(metadata))
    unknown = next((str(token) for token, kind in pairs if kind == UNKNOWN), None)
    usual = {"type": "Sequence", "normalizers": space_steps(prefix)}
    model = _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=overrides.get("byte_fallback", True),
                 ignore_merges=overrides.get("ignore_merges", False))  # fmt: skip
    return {
        "normalizer": _with_charsmap(overrides.get("normalizer", usual), metadata),
        "pre_tokenizer": overrides.get("pre_tokenizer"),
        "post_processor": _post_processor(metadata, None),
        "decoder": _sentencepiece_decoder(prefix),
        "model": model,
    }


def _unigram_parts(metadata: Mapping[str, object], overrides: Json) -> dict[str, Any]:
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokens, types, scores = token_texts(metadata), token_types(metadata), _stated_scores(metadata)
    steps = normalizer_steps(_charsmap(metadata), metadata.get("tokenizer.ggml.remove_extra_whitespaces"))
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always" if prefix else "never",
                 "split": False}  # fmt: skip
    added = (
        CONTROL,
        USER_DEFINED,
        UNUSED,
    )  # the unigram model must not produce these; they are matched in the text beforehand
    plain = [[str(token), float(score) if kind not in added else FIXED_SCORES[UNUSED]]
             for token, score, kind in zip(tokens, scores, types)]  # fmt: skip
    unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), None)
    bytes_known = sum(kind == BYTE for kind in types) == 256
    usual = {"type": "Sequence", "normalizers": steps} if steps else None
    return {
        "normalizer": _with_charsmap(overrides.get("normalizer", usual), metadata),
        "pre_tokenizer": overrides.get("pre_tokenizer", metaspace),
        "post_processor": _post_processor(metadata, None),
        "decoder": _sentencepiece_decoder(prefix),
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": plain,
                  "byte_fallback": overrides.get("byte_fallback", bytes_known)},
    }  # fmt: skip


_PARTS = {"gpt2": _byte_level_parts, "llama": _sentencepiece_parts, "gemma4": _sentencepiece_parts,
          "t5": _unigram_parts}  # fmt: skip


def _stated_scores(metadata: Mapping[str, object]) -> list[float]:
    scores = _array(metadata, SCORES) or _array(metadata, "tokenizer.ggml.scores") or []
    if len(scores) != (count := len(token_texts(metadata))):
        raise FormatError(f"tokenizer.ggml.scores has {len(scores)} entries for {count} tokens")
    return scores


def space_steps(prefix: bool) -> list[dict[str, Any]]:
    """Normalizer steps that put a space before the text, if `prefix`, and replace every space by U+2581."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return [{"type": "Prepend", "prepend": SPACE}, replace] if prefix else [replace]


def normalizer_steps(charsmap: bytes, removes_spaces: object) -> list[dict[str, Any]]:
    """Normalizer steps: the precompiled charsmap, then removal of spaces at the ends and of repeated spaces."""
    steps: list[dict[str, Any]] = []
    if charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if removes_spaces:
        ends = r"\A +| +\z"  # the step Strip would remove line ends too; SentencePiece does not
        steps.append({"type": "Replace", "pattern": {"Regex": ends}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return steps


def _charsmap(metadata: Mapping[str, object]) -> bytes:
    """The precompiled charsmap (table of replacements); b"" if the file has none."""
    return bytes(_array(metadata, "tokenizer.ggml.precompiled_charsmap") or ())


def _with_charsmap(normalizer: object, metadata: Mapping[str, object]) -> Any:
    """A normalizer with the precompiled charsmap from its key put back; the inverse of `vocab._without_charsmap`."""
    if isinstance(normalizer, dict):
        changed = {key: _with_charsmap(value, metadata) for key, value in normalizer.items()}
        if normalizer.get("type") == "Precompiled" and normalizer.get("precompiled_charsmap") is None:
            changed["precompiled_charsmap"] = base64.b64encode(_charsmap(metadata)).decode()
        return changed
    return [_with_charsmap(step, metadata) for step in normalizer] if isinstance(normalizer, list) else normalizer


def _sentencepiece_decoder(prefix: bool) -> dict[str, Any]:
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": decoders}


def adds_token(metadata: Mapping[str, object], name: str) -> bool:
    """Whether "bos" or "eos" (`name`) is added to a text; if the file does not say, the default of its tokenizer."""
    stated = metadata.get(f"tokenizer.ggml.add_{name}_token")
    if stated is not None:
        return bool(stated)
    if name == "eos":
        return False
    if metadata.get("tokenizer.ggml.model") in ("llama", "gemma4"):
        return True
    return _pre_tokenizer(metadata).adds_bos


def special_id(metadata: Mapping[str, object], name: str) -> int | None:
    """The id of "bos", "eos", "unk", ...; None if the file does not say it. "llama" defaults to 1, 2 and 0.

    FormatError if the id is not that of a token.
    """
    key = SPECIAL[name]
    found = metadata.get(key)
    if found is None and metadata.get("tokenizer.ggml.model") == "llama":
        found = {"bos": 1, "eos": 2, "unk": 0}.get(name)
    if found is None:
        return None
    count = len(token_texts(metadata))
    if not isinstance(found, int) or not 0 <= found < count:
        raise FormatError(f"metadata key {key} is {found!r}, but there are {count} tokens")
    return found


def _post_processor(metadata: Mapping[str, object], otherwise: dict[str, Any] | None) -> dict[str, Any] | None:
    """The post_processor that adds BOS and EOS; `otherwise` if neither is added."""
    tokens = token_texts(metadata)
    ids = {name: special_id(metadata, name) for name in ("bos", "eos") if adds_token(metadata, name)}
    used = {name: i for name, i in ids.items() if i is not None}
    if not used:
        return otherwise
    item = {name: {"SpecialToken": {"id": str(tokens[i]), "type_id": 0}} for name, i in used.items()}

    def around(*texts: str) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []
        for place, text in enumerate(texts):
            inner = [item.get("bos"), {"Sequence": {"id": text, "type_id": place}}, item.get("eos")]
            steps += [step for step in inner if step is not None]
        return steps

    special = {str(tokens[i]): {"id": str(tokens[i]), "ids": [i], "tokens": [str(tokens[i])]} for i in used.values()}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": special}


def tokenizer_config(metadata: Mapping[str, object], context_length: int) -> dict[str, Any]:
    """The tokenizer_config.json: a class that takes tokenizer.json as it is, special tokens, chat templates."""
    tokens = token_texts(metadata)
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_token(metadata, "bos"),
        "add_eos_token": adds_token(metadata, "eos"),
    }
    for name in SPECIAL:
        number = special_id(metadata, name)
        if number is not None:
            found[f"{name}_token"] = str(tokens[number])
    if "tokenizer.ggml.add_space_prefix" in metadata:
        found["add_prefix_space"] = bool(metadata["tokenizer.ggml.add_space_prefix"])
    template = metadata.get("tokenizer.chat_template")
    others = {
        str(name): metadata.get(f"tokenizer.chat_template.{name}")
        for name in _array(metadata, "tokenizer.chat_templates") or ()
    }
    named = {name: text for name, text in ({"default": template} | others).items() if text is not None}
    if others:
        found["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    elif template is not None:
        found["chat_template"] = template
    return found


def generation_config(metadata: Mapping[str, object]) -> dict[str, Any]:
    """The generation_config.json: ids of the BOS, EOS and padding tokens, and sampling settings."""
    found: dict[str, Any] = {}
    for name in ("bos", "eos", "pad"):
        if (number := special_id(metadata, name)) is not None:
            found[f"{name}_token_id"] = number
    ends = [end for key in dict.fromkeys(END_TOKENS.values()) if isinstance(end := metadata.get(key), int)]
    if ends:
        found["eos_token_id"] = list(dict.fromkeys([*id_list(found.get("eos_token_id")), *ends]))
    for name, (key, kind) in SAMPLING.items():
        if (value := metadata.get(f"general.sampling.{key}")) is not None:
            if not isinstance(value, (int, float)):
                raise FormatError(f"metadata key general.sampling.{key} is {value!r}; it should be a number")
            found |= {"do_sample": True, name: shortest(value) if kind == "f32" else int(value)}
    return found
