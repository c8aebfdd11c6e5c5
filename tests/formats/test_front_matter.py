"""The front matter of model cards: what YAML says it is, as text; what is hostile or broken is refused, at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from quantkit.errors import FormatError
from quantkit.formats import front_matter

CARD = r"""---
# a comment
license: apache-2.0   # behind a value
language: [en, "no", 'de', zh,]
tags:
- text-generation  # another
- "with: colon"
- 'it''s'
- 1.10
- yes
- 2024-01-02
- [nested, {a: b}]
folded: >-
  one
  two

  three
literal: |
  tags:
  - not a tag
quoted: "a \"b\" \u00e9 # no comment"
model-index:
- name: x
  results:
  - task: {type: text}
    metrics: [{value: 0x1F}]
base_model: null
empty:
tilde: ~
"on": off
date: 2024-01-02
spans: a
  second line
---
# Title
license: none
"""


@pytest.fixture
def read(tmp_path: Path):
    def call(text: str | bytes):
        path = tmp_path / "README.md"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return front_matter.read(path)

    return call


def test_every_form_of_yaml(read) -> None:
    found = read(CARD)
    assert found["license"] == "apache-2.0"
    assert found["language"] == ["en", "no", "de", "zh"]
    assert found["tags"] == [
        "text-generation", "with: colon", "it's", "1.10", "yes", "2024-01-02", ["nested", {"a": "b"}],
    ]  # fmt: skip
    assert found["folded"] == "one two\nthree"
    assert found["literal"] == "tags:\n- not a tag\n"
    assert found["quoted"] == 'a "b" é # no comment'
    assert found["model-index"] == [
        {"name": "x", "results": [{"task": {"type": "text"}, "metrics": [{"value": "0x1F"}]}]}
    ]
    assert [found[key] for key in ("base_model", "empty", "tilde")] == [None] * 3
    assert (found["on"], found["date"], found["spans"]) == ("off", "2024-01-02", "a second line")
    assert list(found) == ["license", "language", "tags", "folded", "literal", "quoted", "model-index", "base_model",
                           "empty", "tilde", "on", "date", "spans"]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# Title\n---\nlicense: mit\n---\n",
        "--- \n---",
        "---\nlicense: mit\n",
        "---\n# only a comment\n---\n",
        "----\na: b\n----\n",
    ],
)
def test_cards_without_front_matter(read, text) -> None:
    assert read(text) == {}


def test_ends_of_lines_and_marks(read) -> None:
    assert read("\ufeff---\r\nlicense: mit\r\ntags:\r\n- a\r\n---\r\nx") == {"license": "mit", "tags": ["a"]}
    assert read("---\nlicense: mit\n---") == {"license": "mit"}


@pytest.mark.parametrize(("block", "message"), [
    ("license: mit\nlicense: apache-2.0", "line 3: a second key 'license'"),
    ("a: {b: 1, b: 2}", "a second key 'b'"),
    ("a: &x [1]\nb: *x", "line 2: anchors and aliases"),
    ("license: !!python/object/apply:os.system ['true']", "line 2: tags are not read"),
    ("a: !x b", "tags are not read"),
    ("license: [mit", "not plain YAML"),
    ("license: mit\n tags: [a]", "not plain YAML"),
    ("license: mit\n\ttags: [a]", "not plain YAML"),  # a tab is two spaces
    ("- license: mit", "not a mapping"),
    ("just text", "not a mapping"),
    ("[a]: b", "a key that is not text"),
    ("a: " + "[" * 40 + "]" * 40, "nested deeper than 32"),
    # libyaml 0.2.6 refuses 1,000 levels by itself, before it gives the first event
    ("a: " + "[" * 200_000, "nested deeper than 32|maximum nesting depth"),
    ("a: \x00b", "not plain YAML"),
    (b"a: \xff", "not plain YAML"),
])  # fmt: skip
def test_what_is_broken_or_hostile(read, block, message) -> None:
    data = block if isinstance(block, bytes) else block.encode()
    began = time.process_time()
    with pytest.raises(FormatError, match=message):
        read(b"---\n" + data + b"\n---\n")
    assert time.process_time() - began < 5


def test_a_billion_laughs(read) -> None:
    lines = ["a0: &a0 [lol, lol]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    with pytest.raises(FormatError, match="anchors and aliases"):
        read("---\n" + "\n".join(lines) + "\n---\n")


def test_a_block_without_measure(read) -> None:
    with pytest.raises(FormatError, match="more than 1048576 bytes"):
        read(b"---\n" + b"- a\n" * (1 << 19) + b"---\n")


def test_yaml_is_loaded_when_there_is_front_matter(read, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert read("# Title") == {}
