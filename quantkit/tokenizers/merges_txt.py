"""vocab.json and merges.txt: the files of a byte-level BPE tokenizer without tokenizer.json.

vocab.json maps token -> id; merges.txt has one merge a line, in order. Tokens are written in GPT-2's printable
alphabet. The class that tokenizer_config.json names determines the pre-tokenizer and whether text is normalized to NFC.
Added tokens are in added_tokens.json, in tokenizer_config.json and among the special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError
from quantkit.inputs.json_input import MAX_BYTES, Json, read_object
from quantkit.inputs.regular_file import read_text
from quantkit.tokenizers import pretokenizers

_BY_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_NFC_CLASSES = ("Qwen2Tokenizer",)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_END = "<|endoftext|>"  # both classes' default for their special tokens


def find(directory: Path) -> Path | None:
    """The path of a checkpoint's vocab.json, if it has merges.txt as well."""
    path = directory / "vocab.json"
    return path if path.exists() and (directory / "merges.txt").exists() else None


def tokenizer_json(path: Path, settings: Json, pre: str | None = None) -> dict[str, Any]:
    """The tokenizer.json equivalent to vocab.json (`path`), the files beside it and tokenizer_config.json (`settings`).

    `pre` names the pre-tokenizer. Without it, the class does; UnsupportedError for an unknown class.
    """
    kind = pretokenizers.tokenizer_class(path, settings, _BY_CLASS, pre)
    vocab = {str(token): int(i) for token, i in read_object(path).items()}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": _merges(path.with_name("merges.txt"), vocab)},
        "normalizer": {"type": "NFC"} if kind in _NFC_CLASSES else None,
        "pre_tokenizer": pretokenizers.to_json(pretokenizers.get(pre or _BY_CLASS[kind])),
        "added_tokens": [{"id": i, **token} for i, token in sorted(_added(path, vocab, settings).items())],
    }


def _added(path: Path, vocab: Mapping[str, int], settings: Json) -> dict[int, dict[str, Any]]:
    """Added tokens, which are matched in the text before it is split, by id."""
    stated = read_object(path.with_name("special_tokens_map.json")) | dict(settings)
    special = [stated.get(name) for name in _SPECIAL] + list(stated.get("additional_special_tokens") or ()) + [_END]
    names = {token["content"] if isinstance(token, dict) else token for token in special if token}
    found = {int(i): {"content": text, "special": text in names}
             for text, i in read_object(path.with_name("added_tokens.json")).items()}  # fmt: skip
    found |= {vocab[name]: {"content": name, "special": True} for name in names if name in vocab}
    return found | {int(i): dict(token) for i, token in (settings.get("added_tokens_decoder") or {}).items()}


def _merges(path: Path, vocab: Mapping[str, int]) -> list[list[str]]:
    """Pairs of tokens, in order. The first line may name the version."""
    found = []
    for number, line in enumerate(read_text(path, MAX_BYTES).split("\n"), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise FormatError(f"{path}: line {number} is not a merge of two tokens of vocab.json: {line[:60]!r}")
        found.append(pair)
    return found
