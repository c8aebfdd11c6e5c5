"""GGUF and safetensors files put together by hand, so that each number in them can be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

KIND = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
        "f32": (6, "f"), "bool": (7, "B"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}  # fmt: skip


def string(text: str | bytes, length: int | None = None) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def pair(key: str | bytes, kind: str, value: Any) -> bytes:
    """A key and its value; `kind` as in metadata.KINDS, with [] for an array."""
    if kind == "str":
        return string(key) + struct.pack("<I", 8) + string(value)
    if kind == "str[]":
        return string(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
    number, code = KIND[kind.removesuffix("[]")]
    if kind.endswith("[]"):
        return string(key) + struct.pack(f"<IIQ{len(value)}{code}", 9, number, len(value), *value)
    return string(key) + struct.pack(f"<I{code}", number, value)


def info(name: str | bytes, dims: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def gguf(
    pairs: list[bytes],
    infos: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (len(infos) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)
    return header + bytes(-len(header) % alignment) + data


def small_gguf() -> bytes:
    """A valid file with every kind of value and tensors of a few types."""
    pairs = [pair(f"test.{kind}", kind, 1) for kind in KIND]
    pairs += [pair(f"test.{kind}s", f"{kind}[]", [1, 0, 1]) for kind in KIND]
    pairs += [pair("general.architecture", "str", "llama"), pair("test.words", "str[]", ["a", "", "Ġthe", "日本"])]
    infos = [info("token_embd.weight", (32, 4), 8, 0), info("blk.0.attn_q.weight", (256, 2), 144, 160),
             info("output_norm.weight", (8,), 0, 448)]  # fmt: skip
    data = bytes(range(136)) + bytes(24) + bytes(280) + bytes(8) + struct.pack("<8f", *range(8))
    return gguf(pairs, infos, data)


def safetensors(table: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def small_safetensors() -> bytes:
    table = {
        "__metadata__": {"format": "pt", "note": 'quoted \\" and \u00e9'},
        "model.embed_tokens.weight": entry("BF16", [4, 6], 0, 48),
        "model.layers.0.w": entry("F8_E4M3", [3, 5], 48, 63),
        "scale": entry("F32", [], 63, 67),
    }
    return safetensors(table, bytes(67))


def put(path: Path, data: bytes) -> Path:
    path.unlink(missing_ok=True)  # ext4 waits for the disk when a file is cut to nothing and written again
    path.write_bytes(data)
    return path
