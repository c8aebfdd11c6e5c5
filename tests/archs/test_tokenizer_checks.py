"""Hostile tokenizers: none may exhaust memory, run forever or abort the process."""

from __future__ import annotations

import base64
import json
import math
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import FormatError, QuantkitError, UnsupportedError
from quantkit.tokenizers import pretokenizers, vocab
from quantkit.tokenizers.checks import check_charsmap, check_normalizer, check_pre_tokenizer
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.checkpoints import sentencepiece, write_tokenizer
from tests.archs.tokenizer_files import charsmap

UNIGRAM = {
    "tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["<unk>", "a", "b", "\u2581"],
    "tokenizer.ggml.token_type": [2, 1, 1, 1], "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0],
}  # fmt: skip


def made(exact: Any = None, **keys: Any) -> Tokenizer:
    stated = {"quantkit.tokenizer": exact if isinstance(exact, str) else json.dumps(exact)} if exact else {}
    return Tokenizer.from_gguf(UNIGRAM | stated | {f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def replace(content: str, pattern: str = "a", kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def table(units: list[int], texts: bytes = b"x\0", size: int | None = None) -> bytes:
    return struct.pack(f"<{len(units) + 1}I", 4 * len(units) if size is None else size, *units) + texts


def entry(value: int, count: int = 256) -> list[int]:
    """A trie that replaces "a" by the text at `value`."""
    units = [0] * count
    units[ord("a")] = ord("a") | 1 << 8 | (ord("a") ^ 0x80) << 10
    units[0x80] = 1 << 31 | value
    return units


NORMALIZERS = {
    "chain": (sequence(*[replace("a" * 60)] * 4), "over 1000 characters of one"),
    "long": (replace("a" * 10000), "content is 'aaa.*up to 64 characters"),
    "prepended": ({"type": "Prepend", "prepend": "a" * 10**6}, "prepend is"),
    "many": (sequence(*[{"type": "NFC"}] * 10000), "over (32 steps|1000 characters)"),
    "many prepended": (sequence(*[{"type": "Prepend", "prepend": "a"}] * 100), "over 32 steps"),
    "forms": (sequence(*[{"type": "NFKD"}] * 3), "up to 5832"),
    "nothing": (replace("aa", ""), "pattern is {'String': ''}"),
    "expression": (replace("x", "(a*)*b", "Regex"), "could take forever"),
    "quadratic": (replace("x", r"\s*a*b", "Regex"), "could take forever"),
    "recursion": (replace("x", r"(a\g<0>?b)", "Regex"), "could take forever"),
    "named": (replace("x", r"(?<x>a\k<x>?b)", "Regex"), "could take forever"),
    "unknown": ({"type": "Shell"}, "a step of type 'Shell'; known: NFC"),
    "no step": ("NFC", "not a step of a tokenizer.json"),
    "no list": ({"type": "Sequence", "normalizers": {}}, "not a list"),
    "no base64": ({"type": "Precompiled", "precompiled_charsmap": "é"}, "is not base64"),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizers_of_files(name: str) -> None:
    step, match = NORMALIZERS[name]
    with pytest.raises(QuantkitError, match=match):
        made({"normalizer": step})
    with pytest.raises(QuantkitError, match=match):
        check_normalizer(step, "here")


def test_deep_sequences() -> None:
    step: dict[str, Any] = {"type": "NFC"}
    for _ in range(12):
        step = sequence(step)
    with pytest.raises(FormatError, match="nested over 8 deep"):
        made({"normalizer": step})
    with pytest.raises(FormatError, match="JSON nested deeper than 64"):
        made("[" * 100000)


@pytest.mark.parametrize("step", [
    {"type": "Split", "pattern": {"Regex": "(a|a)*b"}, "behavior": "Isolated", "invert": False}, {"type": "Code"}, 5,
    sequence(*[{"type": "Whitespace"}] * 40, name="pretokenizers"),
])  # fmt: skip
def test_pre_tokenizers_of_files(step: Any) -> None:
    with pytest.raises(
        QuantkitError, match=r"pre_tokenizer: .*(could take forever|of type 'Code'|not a step|over 32 steps)"
    ):
        made({"pre_tokenizer": step})


def test_what_is_published_is_taken() -> None:
    for entry_ in pretokenizers.TABLE:
        check_pre_tokenizer(pretokenizers.to_json(entry_), "here")
    for pattern in (r"\s+", " {2,}", r"[^\w\s]", r"\p{L}+", "a|b", r"\n"):
        check_normalizer(sequence({"type": "NFKC"}, replace(" ", pattern, "Regex"), {"type": "Lowercase"}), "here")
    gemma = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    check_pre_tokenizer(gemma, "here")
    check_normalizer(None, "here")


TABLES = {
    "empty": b"", "short": b"\1", "no trie": table([]), "huge": table([0] * 256, size=0xFFFFFFF0),
    "odd": table([0] * 256, size=1023), "outside": table([5000 << 10] * 256), "no whole block": table([0] * 100),
    "value": table(entry(100000)), "no text": table(entry(0), b""), "middle": table(entry(1), "é\0".encode()),
    "long": table(entry(0), b"y" * 100000), "no UTF-8": table(entry(0), b"\xff\0"),
    "root": table([1 << 31 | 5000 << 10] + [0] * 255),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_damaged_tables_of_replacements(name: str) -> None:
    """The library panics on these, and aborts on a size that is too large."""
    with pytest.raises(FormatError, match=r"(its table of replacements|precompiled_charsmap)"):
        check_charsmap(TABLES[name], "here")
    if TABLES[name]:
        with pytest.raises(FormatError, match="its table of replacements"):
            made(precompiled_charsmap=list(TABLES[name]))


def test_sound_tables() -> None:
    assert check_charsmap(charsmap(), "here") == 1
    assert check_charsmap(table(entry(2), "x\0éü\0".encode()), "here") == 2
    ours = made(precompiled_charsmap=list(table(entry(0), b"b\0")), add_space_prefix=False)
    assert ours.encode("a", bos=False) == ours.encode("b", bos=False) == [2]
    with pytest.raises(FormatError, match="precompiled_charsmap"):
        made(precompiled_charsmap=[300])


@pytest.mark.parametrize("kind", ["t5", "llama", "gpt2"])
def test_long_tokens(kind: str) -> None:
    """Trying every split of a token in two takes time quadratic in its length."""
    started = time.process_time()
    with pytest.raises(FormatError, match=r"token 1 of tokenizer\.ggml\.tokens has 200000 characters, up to 1024"):
        made(model=kind, tokens=["<unk>", "a" * 200000, "b", "c"], merges=["a b"])
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("tokens", [1, 2, 3, 4], "tokens = .*a list of strings"),
        ("tokens", "abcd", "a list of strings"),
        ("token_type", ["x", 1, 1, 1], "token_type = .*a list of numbers, each a whole number"),
        ("scores", ["x"] * 4, "scores = .*a list of numbers, each a number"),
        ("token_type", 5, "token_type = 5; it has to be a list"),
        ("bos_token_id", "x", "bos_token_id = 'x'; it has to be a whole number"),
        ("model", [], r"model = \[\]; it has to be a string"),
        ("precompiled_charsmap", ["x"], "precompiled_charsmap = .*each a whole number from 0 to 255"),
        ("precompiled_charsmap", [1, 256], "precompiled_charsmap = .*each a whole number from 0 to 255"),
        ("tokens", ["a"] * 99 + [5], "tokens = .*entry 99 is 5; it has to be a list of strings"),
        (
            "scores",
            [0.0] * 99 + [math.nan],
            "scores = .*entry 99 is nan; it has to be a list of numbers, each a number",
        ),
        ("scores", [0.0] * 99 + ["x"], "scores = .*entry 99 is 'x'; it has to be a list of numbers, each a number"),
        ("cls_token_id", "x", "cls_token_id = 'x'; it has to be a whole number"),
    ],
)
def test_keys_of_other_kinds(key: str, value: Any, match: str) -> None:
    with pytest.raises(QuantkitError, match=match):
        made(**{key: value})


@pytest.mark.parametrize(
    "exact", [{"added_tokens": []}, {"added_tokens": {"1": 5}}, {"unmerged": [[]]}, {"unmerged": 5}]
)
def test_what_is_stated_exactly_has_the_right_kinds(exact: Any) -> None:
    with pytest.raises(FormatError, match=r"quantkit\.tokenizer: (added_tokens|unmerged) should be"):
        made(exact)


def test_panics_are_errors_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PanicException is no Exception. One of the library's own, in a process of its own: it prints to stderr."""
    script = f"""
from quantkit.tokenizers import hf_tokenizer
from quantkit.errors import FormatError
from quantkit.tokenizers.tokenizer import Tokenizer
hf_tokenizer.check_normalizer = lambda *_: None
for units in ([5000 << 10] * 256, []):
    charsmap = list({table.__name__}(units))
    try:
        Tokenizer.from_gguf({UNIGRAM!r} | {{"tokenizer.ggml.precompiled_charsmap": charsmap}}).encode("abc")
    except FormatError as error:
        print(error)
"""
    script = "import struct\nfrom tests.archs.test_tokenizer_checks import table\n" + script
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout.count("index out of bounds") == 2

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    ours = made()
    monkeypatch.setitem(ours.__dict__, "_engines", {False: type("Engine", (), {"encode": interrupt})()})
    with pytest.raises(KeyboardInterrupt):
        ours.encode("a")


def test_checkpoints_are_checked_when_they_are_converted(tmp_path: Path) -> None:
    """Before the steps go into a GGUF."""
    definition = json.loads(json.dumps(sentencepiece()))
    for step in definition["normalizer"]["normalizers"]:
        if step["type"] == "Replace":
            step["content"] = "\u2581" * 10000
    write_tokenizer(tmp_path, definition)
    with pytest.raises(FormatError, match=r"tokenizer\.json, normalizer: Replace's content"):
        vocab.read(tmp_path, {"vocab_size": 400})
    damaged = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\1").decode()}
    with pytest.raises(FormatError, match="a trie of 1 bytes in 1"):
        check_normalizer(damaged, "here")
    (tmp_path / "tokenizer.json").write_text("[" * 100000)
    with pytest.raises(FormatError, match=r"tokenizer\.json: JSON nested deeper than 64"):
        vocab.read(tmp_path, {"vocab_size": 400})


def test_unknown_steps_say_what_is_known() -> None:
    with pytest.raises(UnsupportedError, match="known: BertPreTokenizer, ByteLevel"):
        check_pre_tokenizer({"type": "X"}, "here")
