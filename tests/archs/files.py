"""Tiny GGUF files of any architecture, random, without torch: from an architecture's EXAMPLE alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import archs, types
from quantkit.formats import gguf
from quantkit.tokenizers.tiktoken import byte_alphabet

_TABLE = "ffn_gate_tid2eid.weight"
MERGES = [f"{first} {second}" for first in "abcdefgh" for second in "stuvwxyz"][:62]


def written(path: Path, arch: str, *, tokenizer: bool = False, **change: Any) -> Path:
    """A random file of an architecture's EXAMPLE, changed; with `tokenizer` also its 320 tokens."""
    rng, of = np.random.default_rng(7), archs.get(arch)
    config = of.EXAMPLE | change
    metadata = gguf.Metadata({"general.architecture": arch})
    for key, (value, kind) in of.metadata(config).items():
        metadata.set(key, value, kind)
    if tokenizer:
        add_tokenizer(metadata)
    tensors = of.tensors(config)
    kinds = ["i32" if t.name.endswith(_TABLE) else "f32" for t in tensors]
    specs = [gguf.TensorSpec(t.name, t.shape, types.layout(kind)) for t, kind in zip(tensors, kinds)]
    with gguf.Writer(path, metadata, specs) as writer:
        for t in tensors:
            if t.name.endswith(_TABLE):
                writer.write(t.name, _experts(rng, *t.shape, count=config["n_routed_experts"]).view(np.uint8))
                continue
            x = rng.standard_normal(t.shape, np.float32) * np.float32(t.shape[-1] ** -0.5)
            if len(t.shape) == 1 or t.name.endswith("ssm_a"):
                x = 1 + x / 2
            writer.write(t.name, (-x if t.name.endswith("ssm_a") else x).astype(np.float32).reshape(-1).view(np.uint8))
    return path


def _experts(rng: np.random.Generator, tokens: int, used: int, count: int) -> np.ndarray:
    """int32[tokens, used]: different experts for each token."""
    return np.argsort(rng.random((tokens, count)), axis=1)[:, :used].astype(np.int32)


def add_tokenizer(metadata: gguf.Metadata) -> None:
    """Keys of a byte-level tokenizer: two control tokens, the bytes, some pairs of letters."""
    tokens = ["<|begin|>", "<|end|>", *byte_alphabet(), *(pair.replace(" ", "") for pair in MERGES)]
    metadata.set("tokenizer.ggml.model", "gpt2", "str")
    metadata.set("tokenizer.ggml.pre", "gpt-2", "str")
    metadata.set("tokenizer.ggml.tokens", tokens, "str")
    metadata.set("tokenizer.ggml.token_type", [3, 3, *[1] * (len(tokens) - 2)], "i32")
    metadata.set("tokenizer.ggml.merges", MERGES, "str")
    metadata.set("tokenizer.ggml.bos_token_id", 0, "u32")
    metadata.set("tokenizer.ggml.eos_token_id", 1, "u32")


def changed(source: Path, target: Path, keys: Mapping[str, tuple[Any, str] | None], drop: str = "") -> Path:
    """A copy with other keys, (value, kind) or None to leave one out, and without the tensor `drop`."""
    file = gguf.open(source)
    metadata = file.metadata.copy()
    for key, entry in keys.items():
        if entry is None:
            del metadata[key]
            continue
        metadata.pop(key, None)
        metadata.set(key, *entry)
    kept = [t for t in file.tensors.values() if t.name != drop]
    with gguf.Writer(target, metadata, [gguf.TensorSpec(t.name, t.shape, t.type) for t in kept]) as writer:
        for tensor in kept:
            writer.write(tensor.name, tensor.data)
    return target


def reshaped(source: Path, target: Path, name: str, shape: tuple[int, ...], kind: str = "f32") -> Path:
    """A copy whose tensor `name`, there or not, is random and of another shape."""
    file = gguf.open(source)
    kept = [t for t in file.tensors.values() if t.name != name]
    specs = [gguf.TensorSpec(t.name, t.shape, t.type) for t in kept]
    with gguf.Writer(target, file.metadata, [*specs, gguf.TensorSpec(name, shape, types.get(kind))]) as writer:
        for tensor in kept:
            writer.write(tensor.name, tensor.data)
        x = np.random.default_rng(1).uniform(0.5, 1.5, shape).astype(np.float32)
        writer.write(name, types.get(kind).quantize(x.reshape(-1, shape[-1])))
    return target
