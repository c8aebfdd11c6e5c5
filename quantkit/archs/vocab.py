"""Tokenizers: Hugging Face's files <-> GGUF's `tokenizer.*` keys. Data only; no library is needed.

Two families. "gpt2" is byte-level BPE: tokens in the printable alphabet of GPT-2, merges, a named way of cutting
(archs/pretokenizers.py). "llama" is SentencePiece's BPE: tokens with U+2581 for the space, single bytes as <0xHH>,
and a score for each token instead of merges: of all neighbours, the pair whose joint token scores highest merges first.

    read(directory, vocab_size, ...)   files -> keys
    tokenizer_json(metadata)           keys -> tokenizer.json, which also builds the runtime's tokenizer
    tokenizer_config(metadata)         keys -> tokenizer_config.json

Between scores and merges: merge k of a tokenizer.json makes a token; the n-th new token made scores -n. Those are the
scores of Llama's own tokenizer.model. Back, each token gives a merge for every way of cutting it into two tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.archs import pretokenizers
from quantkit.archs.base import Entries, shortest
from quantkit.errors import FormatError, UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"

# key in tokenizer_config.json and config.json -> GGUF key, spelled as GGUF spells it
SPECIAL = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "cls": "tokenizer.ggml.cls_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
}
# further tokens that end a reply, where generation_config.json lists them
_ENDS = {
    "<|eot_id|>": "tokenizer.ggml.eot_token_id",
    "<|im_end|>": "tokenizer.ggml.eot_token_id",
    "<|end|>": "tokenizer.ggml.eot_token_id",
    "<end_of_turn>": "tokenizer.ggml.eot_token_id",
    "<|eom_id|>": "tokenizer.ggml.eom_token_id",
}
# generation_config.json -> general.sampling.*
_SAMPLING = {
    "temperature": ("temp", "f32"),
    "top_k": ("top_k", "i32"),
    "top_p": ("top_p", "f32"),
    "min_p": ("min_p", "f32"),
    "repetition_penalty": ("penalty_repeat", "f32"),
}
METADATA_FILE = "gguf_metadata.json"  # general.* keys for which a checkpoint has no place of its own
_LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused\d+>")
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


# ------------------------------------------------------------------------------------------------- Hugging Face -> GGUF


def read(directory: Path, config: Mapping[str, Any], pre: str | None = None) -> Entries:
    """The `tokenizer.*` keys of a checkpoint's tokenizer files.

    `config` is config.json: its vocab_size is the number of tokens; slots without one are padded. `pre` names the way
    of cutting of a byte-level tokenizer instead of recognising it.
    """
    path = directory / "tokenizer.json"
    tokenizer = read_json(path)
    if not tokenizer:
        if (directory / "tokenizer.model").exists():
            raise UnsupportedError(
                f"{directory}: has tokenizer.model but no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        raise FormatError(f"{path} is missing; a GGUF needs the tokenizer")
    try:
        entries = _model(tokenizer, config["vocab_size"], pre)
        settings = read_json(directory / "tokenizer_config.json")
        return entries | _settings(directory, tokenizer, settings, config, entries["tokenizer.ggml.tokens"][0])
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: not the tokenizer.json of a BPE tokenizer ({error!r} while reading it)") from error


def _model(tokenizer: Mapping[str, Any], vocab_size: int, pre: str | None) -> Entries:
    model = tokenizer["model"]
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise UnsupportedError(f"tokenizer.json: model of type {model.get('type')}; quantkit converts BPE")
    byte_level = '"ByteLevel"' in json.dumps(tokenizer.get("pre_tokenizer"))
    if not byte_level and not model.get("byte_fallback"):
        raise UnsupportedError("tokenizer.json: BPE that is neither byte-level nor has byte_fallback")
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    tokens, types = _tokens(tokenizer, vocab_size, byte_level)
    entries: Entries = {
        "tokenizer.ggml.model": ("gpt2" if byte_level else "llama", "str"),
        "tokenizer.ggml.pre": ((pre or pretokenizers.recognise(tokenizer)) if byte_level else "default", "str"),
        "tokenizer.ggml.tokens": (tokens, "str"),
        "tokenizer.ggml.token_type": (types, "i32"),
    }
    if byte_level:
        joined = [" ".join(part.replace(" ", "Ġ") for part in merge) for merge in merges]
        entries["tokenizer.ggml.merges"] = (joined, "str")
    else:
        entries["tokenizer.ggml.scores"] = (_scores(tokens, types, merges), "f32")
        entries["tokenizer.ggml.add_space_prefix"] = (_adds_space(tokenizer), "bool")
    return entries


def _tokens(tokenizer: Mapping[str, Any], vocab_size: int, byte_level: bool) -> tuple[list[str], list[int]]:
    """Text and type of every id below vocab_size."""
    model = tokenizer["model"]
    text = {i: token for token, i in model["vocab"].items()}
    kind = dict.fromkeys(text, NORMAL)
    if not byte_level:
        kind |= {i: BYTE for i, token in text.items() if BYTE_TOKEN.fullmatch(token)}
    for added in tokenizer.get("added_tokens") or ():
        i, content = added["id"], added["content"]
        special = added.get("special") or _LOOKS_SPECIAL.fullmatch(content)
        text[i] = content if special else content.replace(SPACE, " ")
        kind[i] = CONTROL if special else USER_DEFINED
    if not byte_level and model.get("unk_token") in model["vocab"]:
        kind[model["vocab"][model["unk_token"]]] = UNKNOWN
    if text and max(text) >= vocab_size:
        raise FormatError(
            f"tokenizer.json has token id {max(text)} ({text[max(text)]!r}), config.json a vocab_size of {vocab_size}; "
            "the two do not belong together, or the embedding was not resized after tokens were added"
        )
    ids = range(vocab_size)
    return [text.get(i, f"[PAD{i}]") for i in ids], [kind.get(i, UNUSED) for i in ids]


def _scores(tokens: Sequence[str], types: Sequence[int], merges: Sequence[Sequence[str]]) -> list[float]:
    """Scores under which SentencePiece merges in the order of `merges`; see the head of this file."""
    order = {token: place for place, token in enumerate(dict.fromkeys("".join(merge) for merge in merges))}
    fixed = {UNUSED: -10000.0, USER_DEFINED: -1000.0, CONTROL: 0.0, UNKNOWN: 0.0, BYTE: 0.0}
    scores = []
    for token, kind in zip(tokens, types):
        scores.append(fixed[kind] if kind in fixed else -float(order.setdefault(token, len(order))))
    return scores


def _adds_space(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a SentencePiece-like tokenizer.json puts a space before the text. Both its old and its new form."""
    normalizer, pre = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [step["type"] for step in steps]
    if not pre and kinds in (["Prepend", "Replace"], ["Replace"]):
        return "Prepend" in kinds
    if not steps and pre.get("type") == "Metaspace" and not pre.get("split", True):
        return pre.get("prepend_scheme", "always") != "never"
    raise UnsupportedError(
        f"tokenizer.json: normalizer {kinds} with pre_tokenizer {pre or None} has no counterpart in GGUF"
    )


def _settings(
    directory: Path,
    tokenizer: Mapping[str, Any],
    settings: dict[str, Any],
    config: Mapping[str, Any],
    tokens: list[str],
) -> Entries:
    """Special ids, what is added to a text, chat templates."""
    generation = read_json(directory / "generation_config.json")
    ids = {token: i for i, token in reversed(list(enumerate(tokens)))}
    settings = read_json(directory / "special_tokens_map.json") | settings
    entries: Entries = {}
    for name, key in SPECIAL.items():
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = ids.get(token) if token is not None else config.get(f"{name}_token_id")
        if number is None:
            number = generation.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) else number
        if isinstance(number, int) and 0 <= number < len(tokens):
            entries[key] = (number, "u32")
    for number in _as_list(generation.get("eos_token_id")) + _as_list(config.get("eos_token_id")):
        if number < len(tokens) and tokens[number] in _ENDS and (number, "u32") != entries.get(SPECIAL["eos"]):
            entries.setdefault(_ENDS[tokens[number]], (number, "u32"))
    before, after = _template(tokenizer.get("post_processor") or {})
    stated = {"bos": settings.get("add_bos_token"), "eos": settings.get("add_eos_token")}
    add_bos, add_eos = (bool(side) if stated[name] is None else bool(stated[name])
                        for name, side in (("bos", before), ("eos", after)))  # fmt: skip
    entries["tokenizer.ggml.add_bos_token"] = (add_bos, "bool")
    if add_eos:  # no reader adds EOS without being told
        entries["tokenizer.ggml.add_eos_token"] = (True, "bool")
    if isinstance(settings.get("add_prefix_space"), bool):
        entries["tokenizer.ggml.add_space_prefix"] = (settings["add_prefix_space"], "bool")
    return entries | _chat_templates(directory, settings)


def _as_list(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _template(processor: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Special tokens that a tokenizer.json's post_processor puts before and after a text."""
    for step in processor.get("processors", [processor]):
        if step.get("type") == "TemplateProcessing":
            names = [item.get("SpecialToken", {}).get("id") for item in step["single"]]
            place = names.index(None)  # the text itself
            return names[:place], names[place + 1 :]
    return [], []


def _chat_templates(directory: Path, settings: Mapping[str, Any]) -> Entries:
    """`tokenizer.chat_template` and its named variants, wherever the checkpoint keeps them."""
    found = settings.get("chat_template")
    if found is None and (directory / "chat_template.jinja").exists():
        found = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    if found is None:
        found = read_json(directory / "chat_template.json").get("chat_template")
    named = {"default": found} if isinstance(found, str) else {item["name"]: item["template"] for item in found or ()}
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        named.setdefault(path.stem, path.read_text(encoding="utf-8"))
    entries: Entries = {}
    others = {re.sub(r"\W", "_", name): text for name, text in named.items() if name != "default"}
    if "default" in named:
        entries["tokenizer.chat_template"] = (named["default"], "str")
    entries |= {f"tokenizer.chat_template.{name}": (text, "str") for name, text in others.items()}
    if others:
        entries["tokenizer.chat_templates"] = (list(others), "str")
    return entries


def sampling(directory: Path) -> Entries:
    """general.sampling.*: how generation_config.json says to sample, where it does."""
    generation = read_json(directory / "generation_config.json")
    if not generation.get("do_sample"):
        return {}
    stated = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    kinds = {"f32": float, "i32": int}
    return {
        f"general.sampling.{_SAMPLING[name][0]}": (kinds[_SAMPLING[name][1]](value), _SAMPLING[name][1])
        for name, value in stated.items()
    }


# ------------------------------------------------------------------------------------------------- GGUF -> Hugging Face


def token_types(metadata: Mapping[str, Any]) -> list[int]:
    """Type of every token; NORMAL where the file does not say."""
    count = len(metadata["tokenizer.ggml.tokens"])
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", [NORMAL] * count)]
    if len(types) != count:
        raise FormatError(f"tokenizer.ggml.token_type has {len(types)} entries for {count} tokens")
    return types


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json that tokenizes as the GGUF keys say, with the ids of the file.

    FormatError names a missing key, UnsupportedError a kind of tokenizer that is not handled.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(f"tokenizer.ggml.model = {kind!r}; quantkit handles 'gpt2' (byte-level BPE) and 'llama'")
    needed = ["tokenizer.ggml.tokens", "tokenizer.ggml.merges" if kind == "gpt2" else "tokenizer.ggml.scores"]
    for key in needed:
        if key not in metadata:
            raise FormatError(f"metadata key {key} is missing; a {kind} tokenizer needs it")
        if not isinstance(metadata[key], list):
            raise FormatError(f"metadata key {key} is {metadata[key]!r}; it should be an array")
    parts = _byte_level_parts(metadata) if kind == "gpt2" else _sentencepiece_parts(metadata)
    tokens, types = metadata["tokenizer.ggml.tokens"], token_types(metadata)
    added = [
        {"id": i, "content": str(token), "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[i] != USER_DEFINED}
        for i, token in enumerate(tokens)
        if token and (types[i] in (CONTROL, USER_DEFINED) or (types[i] == UNKNOWN and kind == "llama"))
    ]  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added} | parts


def _vocab(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, the lowest where a text stands twice; without the padding that fills unused slots."""
    vocab: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(metadata["tokenizer.ggml.tokens"], token_types(metadata))):
        if kind != UNUSED or token != f"[PAD{i}]":
            vocab.setdefault(str(token), i)
    return vocab


def _bpe(vocab: dict[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    fixed = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}  # fmt: skip
    return fixed | settings | {"vocab": vocab, "merges": merges}


def _byte_level_parts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    entry = pretokenizers.get(metadata.get("tokenizer.ggml.pre", "default"))
    vocab = _vocab(metadata)
    merges = [list(str(merge).partition(" ")[::2]) for merge in metadata["tokenizer.ggml.merges"]]
    for left, right in merges:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise FormatError(
                f"tokenizer.ggml.merges: '{left} {right}' merges tokens that are not in tokenizer.ggml.tokens"
            )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if entry.nfc else None,
        "pre_tokenizer": pretokenizers.to_json(entry),
        "post_processor": _post_processor(metadata, byte_level),
        "decoder": byte_level,
        "model": _bpe(vocab, merges, ignore_merges=entry.ignore_merges),
    }


def _sentencepiece_parts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokens, types = metadata["tokenizer.ggml.tokens"], token_types(metadata)
    scores = metadata["tokenizer.ggml.scores"]
    if len(scores) != len(tokens):
        raise FormatError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocab = _vocab(metadata)
    mergeable = {str(token): i for i, token in enumerate(tokens) if types[i] == NORMAL}
    ranked = sorted(mergeable, key=lambda token: (-float(scores[mergeable[token]]), mergeable[token]))
    merges = [
        [token[:cut], token[cut:]]
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    unknown = next((str(token) for token, kind in zip(tokens, types) if kind == UNKNOWN), None)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    steps = [{"type": "Prepend", "prepend": SPACE}, replace] if prefix else [replace]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, None),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def adds(metadata: Mapping[str, Any], name: str) -> bool:
    """Whether "bos" or "eos" is added to a text; the default of the tokenizer's kind where the file does not say."""
    stated = metadata.get(f"tokenizer.ggml.add_{name}_token")
    if stated is not None:
        return bool(stated)
    if name == "eos":
        return False
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return pretokenizers.get(metadata.get("tokenizer.ggml.pre", "default")).adds_bos


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Id of "bos", "eos", "unk", ... as the file says it; SentencePiece's own 1, 2, 0 where it does not.

    FormatError for one that is no token.
    """
    found = metadata.get(SPECIAL[name])
    if found is None and metadata.get("tokenizer.ggml.model") == "llama":
        found = {"bos": 1, "eos": 2, "unk": 0}.get(name)
    if found is None:
        return None
    count = len(metadata["tokenizer.ggml.tokens"])
    if not 0 <= int(found) < count:
        raise FormatError(f"{SPECIAL[name]} is {found}, but there are {count} tokens")
    return int(found)


def _post_processor(metadata: Mapping[str, Any], otherwise: dict[str, Any] | None) -> dict[str, Any] | None:
    """What puts BOS before and EOS after a text; `otherwise` where neither is added."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: special_id(metadata, name) for name in ("bos", "eos") if adds(metadata, name)}
    used = {name: i for name, i in ids.items() if i is not None}
    if not used:
        return otherwise
    item = {name: {"SpecialToken": {"id": str(tokens[i]), "type_id": 0}} for name, i in used.items()}

    def around(*texts: str) -> list[dict[str, Any]]:
        made = []
        for place, text in enumerate(texts):
            inner = [item.get("bos"), {"Sequence": {"id": text, "type_id": place}}, item.get("eos")]
            made += [step for step in inner if step is not None]
        return made

    special = {str(tokens[i]): {"id": str(tokens[i]), "ids": [i], "tokens": [str(tokens[i])]} for i in used.values()}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": special}


def tokenizer_config(metadata: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """tokenizer_config.json: the class that reads tokenizer.json as it is, special tokens, chat templates."""
    tokens = metadata["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds(metadata, "bos"),
        "add_eos_token": adds(metadata, "eos"),
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
        for name in metadata.get("tokenizer.chat_templates", ())
    }
    named = {name: text for name, text in ({"default": template} | others).items() if text is not None}
    if others:
        found["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    elif template is not None:
        found["chat_template"] = template
    return found


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the tokens that begin, end and pad a text, and how to sample."""
    found: dict[str, Any] = {}
    for name in ("bos", "eos", "pad"):
        if (number := special_id(metadata, name)) is not None:
            found[f"{name}_token_id"] = number
    ends = [metadata[key] for key in dict.fromkeys(_ENDS.values()) if key in metadata]
    if ends:
        found["eos_token_id"] = list(dict.fromkeys([*_as_list(found.get("eos_token_id")), *map(int, ends)]))
    for name, (key, kind) in _SAMPLING.items():
        if (value := metadata.get(f"general.sampling.{key}")) is not None:
            found |= {"do_sample": True, name: shortest(value) if kind == "f32" else int(value)}
    return found
