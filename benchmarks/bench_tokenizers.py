"""Whether tokenizers in GGUF give the ids and the texts that transformers gives, on mixed strings.

    python benchmarks/bench_tokenizers.py [--count 10000] [--seed 7] [--kinds NAME ...]

For every kind of tokenizer that `convert` reads, small files are made: trained here, with the expressions of the
published ones. They are converted, written to a GGUF file and read again. Strings of many scripts, code, runs of
spaces, odd Unicode, very long words and added tokens are encoded, and the ids decoded, by both. Exits with 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from quantkit import types
from quantkit.formats import gguf
from quantkit.tokenizers import vocab
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.tokenizer_files import KINDS, Files, differences, files, mixed

TABLE = Table(
    "tokenizers",
    "Do tokenizers in GGUF agree with transformers?",
    (
        Column("kind"),
        Column("pre", "`tokenizer.ggml.model`/`pre`"),
        Column("strings", "strings", "d"),
        Column("tokens", "tokens", "d"),
        Column("encode", "ids that differ", "d"),
        Column("encode as text", "control tokens as text", "d"),
        Column("decode", "texts that differ", "d"),
        Column("decode without control tokens", "without control tokens", "d"),
    ),
    "Strings whose result differs, of the same strings for every kind, apart from its added tokens. The tokenizers are "
    "small and trained for the test, with the expressions and settings of the published ones; 'with' names settings "
    "that GGUF's keys cannot express. Not compared: bytes of byte tokens that are not UTF-8, control tokens as text "
    "that are pieces of unigram models, and special tokens of Gemma 4 that GGUF shows.",
)


def through_gguf(made: Files, path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file at `path` that is converted from `made`."""
    metadata = gguf.Metadata({"general.architecture": "llama"})
    for key, (value, kind) in vocab.read(made.source, made.config).items():
        metadata.set(key, value, kind)
    with gguf.Writer(path, metadata, [gguf.TensorSpec("x", (1, 32), types.get("f32"))]) as writer:
        writer.write("x", np.zeros(128, np.uint8))
    return Tokenizer.from_gguf(gguf.open(path).metadata)


def compare(kind: str, count: int, seed: int) -> dict[str, object]:
    """The row of one kind; differences go to standard error."""
    with tempfile.TemporaryDirectory() as temporary:
        made = files(kind, Path(temporary))
        ours, texts = through_gguf(made, Path(temporary, "vocab.gguf")), mixed(count, made.named, seed)
        found = differences(ours, made.json, texts)
    for direction, (given, here, there) in found.first.items():
        print(f"{kind}, {direction}: {given!r} gives {here!r}, in transformers {there!r}", file=sys.stderr)
    metadata = ours._metadata
    return {
        "kind": kind, "pre": f"{metadata['tokenizer.ggml.model']}/{metadata['tokenizer.ggml.pre']}", "strings": count,
        "tokens": found.tokens, **found.counts, "compared": found.compared,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="strings for every kind")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME")
    records.add_option(parser)
    options = parser.parse_args()
    rows = []
    for kind in options.kinds:
        rows.append(compare(kind, options.count, options.seed))
        print(json.dumps(rows[-1]), flush=True)
    records.save(TABLE, rows, options)
    return int(any(row[direction] for row in rows for direction in row["compared"]))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
