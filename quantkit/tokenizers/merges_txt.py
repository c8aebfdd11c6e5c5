"""The files of a byte-level BPE before tokenizer.json: vocab.json, token -> id, and merges.txt, in order, one a line.

Tokens are written in GPT-2's printable alphabet. How text is cut, and whether it is composed first (NFC), was in the
class that tokenizer_config.json names; the tokens it looks for in the text are in added_tokens.json, in
tokenizer_config.json and among the special ones.
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
_COMPOSED = ("Qwen2Tokenizer",)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_END = "<|endoftext|>"  # what both classes have as special tokens unless they are told others


def find(directory: Path) -> Path | None:
    """A checkpoint's vocab.json, where merges.txt stands beside it."""
    path = directory / "vocab.json"
    return path if path.exists() and (directory / "merges.txt").exists() else None


def tokenizer_json(path: Path, settings: Json, pre: str | None = None) -> dict[str, Any]:
    """The tokenizer.json that says what the files beside `path` and `settings`, tokenizer_config.json, say.

    `pre` names the pre-tokenizer instead of the class. UnsupportedError for a class whose way is not known.
    """
    kind = pretokenizers.class_of(path, settings, _BY_CLASS, pre)
    vocab = {str(token): int(i) for token, i in read_object(path).items()}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": _merges(path.with_name("merges.txt"), vocab)},
        "normalizer": {"type": "NFC"} if kind in _COMPOSED else None,
        "pre_tokenizer": pretokenizers.to_json(pretokenizers.get(pre or _BY_CLASS[kind])),
        "added_tokens": [{"id": i, **token} for i, token in sorted(_added(path, vocab, settings).items())],
    }


def _added(path: Path, vocab: Mapping[str, int], settings: Json) -> dict[int, dict[str, Any]]:
    """Tokens that are looked for in the text, by id."""
    stated = read_object(path.with_name("special_tokens_map.json")) | dict(settings)
    special = [stated.get(name) for name in _SPECIAL] + list(stated.get("additional_special_tokens") or ()) + [_END]
    names = {token["content"] if isinstance(token, dict) else token for token in special if token}
    found = {int(i): {"content": text, "special": text in names}
             for text, i in read_object(path.with_name("added_tokens.json")).items()}  # fmt: skip
    found |= {vocab[name]: {"content": name, "special": True} for name in names if name in vocab}
    return found | {int(i): dict(token) for i, token in (settings.get("added_tokens_decoder") or {}).items()}


def _merges(path: Path, vocab: Mapping[str, int]) -> list[list[str]]:
    """Pairs of tokens in order; a first line may name the version."""
    found = []
    for number, line in enumerate(read_text(path, MAX_BYTES).split("\n"), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise FormatError(f"{path}: line {number} is not a merge of two tokens of vocab.json: {line[:60]!r}")
        found.append(pair)
    return found
