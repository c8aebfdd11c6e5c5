"""Convert Hugging Face tokenizer files to GGUF's `tokenizer.*` keys, without a tokenizer library.

    read(directory, config)            tokenizer files -> keys

`tokenizers/hf_tokenizer.py` converts back.

GGUF has four kinds of tokenizer:

- "gpt2" is byte-level BPE: tokens in GPT-2's printable alphabet, merges, and a named pre-tokenizer
  (`tokenizers/pretokenizers.py`).
- "llama" is SentencePiece BPE: tokens with U+2581 for the space, single bytes as <0xHH>, and a score for each token
  instead of merges. The neighbours whose joint token has the highest score merge first.
- "gemma4" is the same with merges instead of scores.
- "t5" is SentencePiece unigram: a text becomes the tokens with the highest sum of scores.

A checkpoint without tokenizer.json is read from a tiktoken file (`tokenizers/tiktoken.py`), from tokenizer.model
(`tokenizers/sentencepiece.py`) or from vocab.json and merges.txt (`tokenizers/merges_txt.py`).

The key `OVERRIDES` stores what GGUF's keys cannot express, so that quantkit's runtime tokenizes as the checkpoint does.
Other programs ignore that key. They give other ids for the few texts that it concerns, such as decomposed accents.

Scores follow from the merges of a tokenizer.json: the n-th new token that a merge makes has the score -n, as in Llama's
tokenizer.model. In the other direction, each token gives a merge for every split of it into two tokens.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.json_input import Json, read_object
from quantkit.inputs.regular_file import read_text
from quantkit.tokenizers import merges_txt, pretokenizers, sentencepiece, tiktoken
from quantkit.tokenizers.checks import check_normalizer, check_pre_tokenizer
from quantkit.tokenizers.hf_tokenizer import (
    BYTE,
    BYTE_TOKEN,
    CONTROL,
    END_TOKENS,
    FIXED_SCORES,
    KNOWN_ENDS,
    NORMAL,
    OVERRIDES,
    SCORES,
    SPACE,
    SPECIAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    id_list,
    normalizer_steps,
    space_steps,
    tokenizer_json,
)

METADATA_FILE = "gguf_metadata.json"  # general.* keys that no other file of a checkpoint can hold
# Special tokens of Gemma 4 that a reply shows: files call them user-defined.
_SHOWN_BY_GEMMA4 = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
                    '<|"|>')  # fmt: skip
_LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused\d+>")


# ------------------------------------------------------------------------------------------------- Hugging Face -> GGUF


def read(directory: Path, config: Json, pre: str | None = None) -> Entries:
    """The `tokenizer.*` keys of a checkpoint's tokenizer files.

    `config` is config.json. Its vocab_size is the number of tokens; unused ids get padding tokens. `pre` names the
    pre-tokenizer of a byte-level tokenizer, which is recognised otherwise.
    """
    path = directory / "tokenizer.json"
    settings = read_object(directory / "tokenizer_config.json")
    tokenizer = read_object(path)
    try:
        if not tokenizer and (ranks := tiktoken.find(directory)):
            path = ranks
            tokenizer = tiktoken.tokenizer_json(path, settings, pre)
        if not tokenizer and not (directory / "tokenizer.model").exists() and (words := merges_txt.find(directory)):
            path = words
            tokenizer = merges_txt.tokenizer_json(path, settings, pre)
        if tokenizer:
            keeps_merges = str(config.get("model_type")).startswith("gemma4")
            entries = _model(tokenizer, config["vocab_size"], pre, keeps_merges)
        elif (directory / "tokenizer.model").exists():
            path = directory / "tokenizer.model"
            entries = _sentencepiece_model(path, settings, config["vocab_size"])
        else:
            raise FormatError(
                f"{path} is missing; a GGUF needs the tokenizer (or tokenizer.model, or a tiktoken "
                "file, or vocab.json and merges.txt)"
            )
        entries = entries | _settings(directory, tokenizer, settings, config, entries["tokenizer.ggml.tokens"][0])
        return entries | (_override_entries(tokenizer, entries) if tokenizer else {})
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise FormatError(
            f"{path}: not the tokenizer of a BPE or unigram model ({error!r} while reading it)"
        ) from error


def _model(tokenizer: Json, vocab_size: int, pre: str | None, keeps_merges: bool) -> Entries:
    """The keys of the model; `keeps_merges`: of kind "gemma4" rather than "llama"."""
    model = tokenizer["model"]
    kind = model.get("type", "BPE")
    if kind == "Unigram":
        return _unigram(tokenizer, vocab_size)
    if kind != "BPE" or "merges" not in model:
        raise UnsupportedError(f"tokenizer.json: model of type {kind}; quantkit converts BPE and Unigram")
    byte_level = _is_byte_level(tokenizer)
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
    if not byte_level:
        entries["tokenizer.ggml.add_space_prefix"] = (_adds_space(tokenizer), "bool")
    if not byte_level and keeps_merges:
        entries |= {f"tokenizer.ggml.{name}": ("gemma4", "str") for name in ("model", "pre")}
        shown = [USER_DEFINED if text in _SHOWN_BY_GEMMA4 else kind for text, kind in zip(tokens, types)]
        entries["tokenizer.ggml.token_type"] = (shown, "i32")
    if byte_level or keeps_merges:
        joined = [" ".join(part.replace(" ", "Ġ") for part in merge) for merge in merges]
        entries["tokenizer.ggml.merges"] = (joined, "str")
    else:
        entries["tokenizer.ggml.scores"] = (_scores(tokens, types, merges), "f32")
    return entries


def _is_byte_level(tokenizer: Json) -> bool:
    return '"ByteLevel"' in json.dumps(tokenizer.get("pre_tokenizer"))


def _unigram(tokenizer: Json, vocab_size: int) -> Entries:
    """The keys of a tokenizer.json with a unigram model. Scores are natural logarithms of probabilities."""
    tokens, types = _tokens(tokenizer, vocab_size, False)
    stated = [float(score) for _, score in tokenizer["model"]["vocab"]]
    scores = stated + [FIXED_SCORES.get(kind, 0.0) for kind in types[len(stated) :]]
    steps = pretokenizers.normalizers(tokenizer)
    metaspace = [step for step in _pre_steps(tokenizer) if step["type"] == "Metaspace"]
    if not metaspace:
        raise UnsupportedError("tokenizer.json: a unigram model without the pre_tokenizer Metaspace")
    stays = metaspace[0].get("prepend_scheme", "always" if metaspace[0].get("add_prefix_space", True) else "never")
    removes = any(step["type"] == "Replace" and step["pattern"].get("Regex") == " {2,}" for step in steps)
    entries = _unigram_keys(tokens, types, scores, stays != "never", removes, _charsmap(steps))
    if any(score != value for score, value in zip(stated, struct.unpack(f"<{len(stated)}f", _packed(stated)))):
        entries[SCORES] = (scores, "f64")
    return entries


def _packed(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _pre_steps(tokenizer: Json) -> list[Json]:
    found = tokenizer.get("pre_tokenizer") or {"type": "Sequence", "pretokenizers": []}
    return list(found.get("pretokenizers", [found]))


def _charsmap(steps: Sequence[Json]) -> bytes:
    """The precompiled charsmap (table of replacements) in a normalizer's steps; b"" if there is none."""
    return next((base64.b64decode(step["precompiled_charsmap"] or "") for step in steps
                 if step["type"] == "Precompiled"), b"")  # fmt: skip


def _unigram_keys(
    tokens: list[str], types: list[int], scores: list[float], prefix: bool, removes: bool, charsmap: bytes
) -> Entries:
    entries: Entries = {
        "tokenizer.ggml.model": ("t5", "str"),
        "tokenizer.ggml.pre": ("default", "str"),
        "tokenizer.ggml.tokens": (tokens, "str"),
        "tokenizer.ggml.token_type": (types, "i32"),
        "tokenizer.ggml.scores": (scores, "f32"),
        "tokenizer.ggml.add_space_prefix": (prefix, "bool"),
        "tokenizer.ggml.remove_extra_whitespaces": (removes, "bool"),
    }
    if charsmap:
        entries["tokenizer.ggml.precompiled_charsmap"] = (list(charsmap), "u8")
    return entries


def _sentencepiece_model(path: Path, settings: Json, vocab_size: int) -> Entries:
    """The keys of a tokenizer.model with the tokens that added_tokens.json and tokenizer_config.json add."""
    model = sentencepiece.read(path)
    tokens = [text for text, _, _ in model.pieces]
    scores, types = [score for _, score, _ in model.pieces], [kind for _, _, kind in model.pieces]
    added = {int(i): (text, USER_DEFINED) for text, i in read_object(path.parent / "added_tokens.json").items()}
    for i, token in settings.get("added_tokens_decoder", {}).items():
        special = token.get("special") or _LOOKS_SPECIAL.fullmatch(token["content"])
        added[int(i)] = (token["content"], CONTROL if special else USER_DEFINED)
    if (first := min(added, default=0)) < 0:
        raise FormatError(f"{path}: the added token {added[first][0]!r} has the id {first}; ids count from 0")
    last = max([len(tokens) - 1, *added])
    if last >= vocab_size:
        raise FormatError(
            f"{path} and the added tokens have token id {last}, config.json a vocab_size of {vocab_size}; "
            "the two do not belong together, or the embedding was not resized after tokens were added"
        )
    blank = range(len(tokens), vocab_size)
    tokens += [f"[PAD{i}]" for i in blank]
    types, scores = types + [UNUSED] * len(blank), scores + [FIXED_SCORES[UNUSED]] * len(blank)
    for i, (text, kind) in added.items():
        if types[i] in (UNKNOWN, BYTE):
            continue
        if i >= len(model.pieces):
            scores[i] = FIXED_SCORES[USER_DEFINED]
        tokens[i], types[i] = text, kind
    tokens = [text.replace(SPACE, " ") if kind == USER_DEFINED else text for text, kind in zip(tokens, types)]
    stated = settings.get("add_prefix_space")
    model.adds_space = stated if isinstance(stated, bool) else model.adds_space
    entries = _unigram_keys(tokens, types, scores, model.adds_space, model.removes_spaces, model.charsmap)
    entries |= {SPECIAL[name]: (i, "u32") for name, i in model.ids.items() if 0 <= i < len(tokens)}
    return entries if model.kind == "unigram" else _as_bpe(entries, model)


def _as_bpe(entries: Entries, model: sentencepiece.SentencePieceModel) -> Entries:
    """The keys of a BPE model. GGUF has no keys for its normalization, which goes into OVERRIDES."""
    unigram_only = {f"tokenizer.ggml.{name}" for name in ("remove_extra_whitespaces", "precompiled_charsmap")}
    found = {key: entry for key, entry in entries.items() if key not in unigram_only}
    found["tokenizer.ggml.model"] = ("llama", "str")
    steps = normalizer_steps(model.charsmap, model.removes_spaces)
    if steps:
        after = space_steps(model.adds_space)
        found[OVERRIDES] = (json.dumps({"normalizer": {"type": "Sequence", "normalizers": [*steps, *after]}}), "str")
    return found


def _override_entries(tokenizer: Json, entries: Entries) -> Entries:
    """The key OVERRIDES if the other keys alone describe another tokenizer than this tokenizer.json; else {}."""
    metadata = {key: value for key, (value, _) in entries.items()}
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2" and not pretokenizers.known(metadata["tokenizer.ggml.pre"]):
        return {}  # the user named it with --pre, for other runtimes
    from_keys, model = tokenizer_json(metadata), tokenizer["model"]
    overrides: dict[str, Any] = {}
    if pretokenizers.normalizers(from_keys) != pretokenizers.normalizers(tokenizer):
        check_normalizer(tokenizer.get("normalizer"), "tokenizer.json, normalizer")
        overrides["normalizer"] = _without_charsmap(tokenizer.get("normalizer"))
    if kind != "gpt2" and from_keys["pre_tokenizer"] != (tokenizer.get("pre_tokenizer") or None):
        check_pre_tokenizer(tokenizer.get("pre_tokenizer"), "tokenizer.json, pre_tokenizer")
        overrides["pre_tokenizer"] = tokenizer.get("pre_tokenizer")
    for name in ("ignore_merges", "byte_fallback"):
        if bool(model.get(name)) != bool(from_keys["model"].get(name)):
            overrides[name] = bool(model.get(name))
    texts = metadata["tokenizer.ggml.tokens"]
    names = ["single_word", "lstrip", "rstrip"] + ["normalized"] * bool(pretokenizers.normalizers(tokenizer))
    flags = {str(token["id"]): _flags(token, names, texts[token["id"]])
             for token in tokenizer.get("added_tokens") or ()}  # fmt: skip
    if any(flags.values()):
        overrides["added_tokens"] = {i: changed for i, changed in flags.items() if changed}
    if kind == "llama" and (unmerged := _unmerged(from_keys, model)):
        overrides["unmerged"] = unmerged
    return {OVERRIDES: (json.dumps(overrides, ensure_ascii=False), "str")} if overrides else {}


def _flags(token: Json, names: Sequence[str], text: str) -> dict[str, Any]:
    """The flags of an added token that are set, and its content if it differs from `text`, its entry in the keys."""
    flags: dict[str, Any] = {name: True for name in names if token.get(name)}
    flags |= {"special": True} if token.get("special") and text in _SHOWN_BY_GEMMA4 else {}
    return flags | ({"content": token["content"]} if token["content"] != text else {})


def _unmerged(from_keys: Json, model: Json) -> list[int]:
    """Ids of tokens that the merges derived from the keys produce, but the merges of the tokenizer.json do not."""
    merged = {"".join(merge) if isinstance(merge, list) else merge.replace(" ", "") for merge in model["merges"]}
    return sorted({from_keys["model"]["vocab"]["".join(merge)] for merge in from_keys["model"]["merges"]}
                  - {model["vocab"][token] for token in merged})  # fmt: skip


def _without_charsmap(normalizer: object) -> Any:
    """A normalizer without its precompiled charsmap, which has a key of its own."""
    if isinstance(normalizer, dict):
        changed = {key: _without_charsmap(value) for key, value in normalizer.items()}
        return changed | ({"precompiled_charsmap": None} if normalizer.get("type") == "Precompiled" else {})
    return [_without_charsmap(step) for step in normalizer] if isinstance(normalizer, list) else normalizer


def _tokens(tokenizer: Json, vocab_size: int, byte_level: bool) -> tuple[list[str], list[int]]:
    """The text and the type of every id below vocab_size."""
    model = tokenizer["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # unigram: pairs of token and score
        text = {i: token for i, (token, _) in enumerate(vocab)}
        unknown = model.get("unk_id")
    else:
        text = {i: token for token, i in vocab.items()}
        unknown = vocab.get(model.get("unk_token"))
    kind = dict.fromkeys(text, NORMAL)
    if not byte_level and model.get("byte_fallback"):
        kind |= {i: BYTE for i, token in text.items() if BYTE_TOKEN.fullmatch(token)}
    for added in tokenizer.get("added_tokens") or ():
        i, content = added["id"], added["content"]
        special = added.get("special") or _LOOKS_SPECIAL.fullmatch(content)
        text[i] = content if special else content.replace(SPACE, " ")
        kind[i] = CONTROL if special else USER_DEFINED
    if not byte_level and unknown is not None:
        kind[unknown] = UNKNOWN
    if text and min(text) < 0:
        raise FormatError(f"tokenizer.json has token id {min(text)} ({text[min(text)]!r}); ids count from 0")
    if text and max(text) >= vocab_size:
        raise FormatError(
            f"tokenizer.json has token id {max(text)} ({text[max(text)]!r}), config.json a vocab_size of {vocab_size}; "
            "the two do not belong together, or the embedding was not resized after tokens were added"
        )
    ids = range(vocab_size)
    return [text.get(i, f"[PAD{i}]") for i in ids], [kind.get(i, UNUSED) for i in ids]


def _scores(tokens: Sequence[str], types: Sequence[int], merges: Sequence[Sequence[str]]) -> list[float]:
    """Scores with which SentencePiece merges in the order of `merges`; see the top of this file."""
    order = {token: place for place, token in enumerate(dict.fromkeys("".join(merge) for merge in merges))}
    scores = []
    for token, kind in zip(tokens, types):
        scores.append(FIXED_SCORES[kind] if kind in FIXED_SCORES else -float(order.setdefault(token, len(order))))
    return scores


def _adds_space(tokenizer: Json) -> bool:
    """Whether a SentencePiece-like tokenizer.json puts a space before the text; in its old or its new form."""
    steps, pre = pretokenizers.normalizers(tokenizer), tokenizer.get("pre_tokenizer") or {}
    kinds = [step["type"] for step in steps]
    if pre.get("type") == "Split" and pre.get("pattern") == {"String": " "} and "Replace" in kinds:
        pre = {}  # Gemma's: no effect, because the normalizer has replaced all spaces
    if not pre and kinds in (["Prepend", "Replace"], ["Replace"]):
        return "Prepend" in kinds
    if not steps and pre.get("type") == "Metaspace":
        return bool(pre.get("prepend_scheme", "always" if pre.get("add_prefix_space", True) else "never") != "never")
    raise UnsupportedError(
        f"tokenizer.json: normalizer {kinds} with pre_tokenizer {pre or None} has no counterpart in GGUF"
    )


def _settings(
    directory: Path,
    tokenizer: Json,
    settings: dict[str, Any],
    config: Json,
    tokens: list[str],
) -> Entries:
    """Special ids, whether BOS and EOS are added, chat templates."""
    generation = read_object(directory / "generation_config.json")
    ids = {token: i for i, token in reversed(list(enumerate(tokens)))}
    settings = read_object(directory / "special_tokens_map.json") | settings
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
    entries |= _end_tokens(id_list(generation.get("eos_token_id")), id_list(config.get("eos_token_id")),
                           tokens, entries.get(SPECIAL["eos"]))  # fmt: skip
    before, after = _template_tokens(tokenizer.get("post_processor") or {})
    stated = {"bos": settings.get("add_bos_token"), "eos": settings.get("add_eos_token")}
    add_bos, add_eos = (bool(side) if stated[name] is None else bool(stated[name])
                        for name, side in (("bos", before), ("eos", after)))  # fmt: skip
    if tokenizer or stated["bos"] is not None:  # else runtimes use SentencePiece's defaults
        entries["tokenizer.ggml.add_bos_token"] = (add_bos, "bool")
    if add_eos or (
        tokenizer.get("model", {}).get("type") == "Unigram"
    ):  # for the others, runtimes add no EOS by default
        entries["tokenizer.ggml.add_eos_token"] = (add_eos, "bool")
    if isinstance(settings.get("add_prefix_space"), bool) and _is_byte_level(tokenizer):
        entries["tokenizer.ggml.add_space_prefix"] = (settings["add_prefix_space"], "bool")
    return entries | _chat_templates(directory, settings)


def _end_tokens(
    of_generation: list[int], of_config: list[int], tokens: Sequence[str], eos: tuple[Any, str] | None
) -> Entries:
    """The keys of the tokens that end a reply besides EOS, from both files' eos_token_id.

    Tokens that no runtime knows by name, such as GLM's <|user|> and <|observation|>, get the keys that are left. They
    are those that transformers stops at: of generation_config.json, or else of config.json.
    """

    def others(ids: list[int]) -> list[int]:
        return [i for i in dict.fromkeys(ids) if 0 <= i < len(tokens) and (i, "u32") != eos]

    found: Entries = {}
    for number in others(of_generation + of_config):
        if (key := END_TOKENS.get(tokens[number])) is not None:
            found.setdefault(key, (number, "u32"))
    left = [key for key in dict.fromkeys(END_TOKENS.values()) if key not in found]
    unknown = [i for i in others(of_generation or of_config) if tokens[i] not in KNOWN_ENDS]
    return found | {key: (i, "u32") for key, i in zip(left, unknown)}


def _template_tokens(processor: Json) -> tuple[list[str], list[str]]:
    """Special tokens that a tokenizer.json's post_processor puts before and after a text."""
    for step in processor.get("processors", [processor]):
        if step.get("type") == "TemplateProcessing":
            names = [item.get("SpecialToken", {}).get("id") for item in step["single"]]
            place = names.index(None)  # the text itself
            return names[:place], names[place + 1 :]
    return [], []


def _chat_templates(directory: Path, settings: Json) -> Entries:
    """`tokenizer.chat_template` and its named variants, from any of the files that may hold them.

    As in transformers, chat_template.jinja comes before tokenizer_config.json, where an older one may be left.
    """
    found: Any = settings.get("chat_template")
    if (directory / "chat_template.jinja").exists():
        found = read_text(directory / "chat_template.jinja")
    if found is None:
        found = read_object(directory / "chat_template.json").get("chat_template")
    named = {"default": found} if isinstance(found, str) else {item["name"]: item["template"] for item in found or ()}
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        named.setdefault(path.stem, read_text(path))
    entries: Entries = {}
    others = {re.sub(r"\W", "_", name): text for name, text in named.items() if name != "default"}
    if "default" in named:
        entries["tokenizer.chat_template"] = (named["default"], "str")
    entries |= {f"tokenizer.chat_template.{name}": (text, "str") for name, text in others.items()}
    if others:
        entries["tokenizer.chat_templates"] = (list(others), "str")
    return entries
