"""Small real models for whole-file tests: some layers of SmolLM2, as it is or embedded in 768 columns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit import recipe
from quantkit.formats import imatrix
from quantkit.formats.gguf import GGUF, Metadata, TensorSpec, Writer
from quantkit.pipelines.quantize import quantize_with_plan

# Base types of everything the reference repacks, with the file type made of each; its build knows no MXFP4_R8, leaves
# BF16 alone and breaks Q8_KV (spec/repack.md 11).
NARROW = ("Q4_0", "Q5_0", "Q6_0", "Q8_0", "IQ4_NL", "IQ2_BN")
WIDE = ("Q2_K", "Q3_K_S", "Q4_K_M", "Q5_K_S", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_M", "IQ3_XXS", "IQ3_S", "IQ4_XS",
        "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ4_KS", "IQ5_KS")  # fmt: skip


def sliced(source: Path, out: Path, layers: int, vocabulary: int = 64) -> Path:
    """The first layers of a model and the first rows of its embedding, without a vocabulary."""
    f = quantkit.open(source)
    metadata = Metadata({k: v for k, v in f.metadata.items() if not k.startswith("tokenizer.")})
    for key, value in (("llama.block_count", layers), ("llama.vocab_size", vocabulary), ("general.file_type", 3)):
        metadata.set(key, value, "u32")
    metadata.set("tokenizer.ggml.model", "no_vocab", "str")
    remaining = [t for t in f.tensors.values() if not t.name.startswith("blk.") or int(t.name.split(".")[1]) < layers]
    rows = {t.name: vocabulary if t.name == "token_embd.weight" else t.n_rows for t in remaining}
    specs = [
        TensorSpec(t.name, (rows[t.name], *t.shape[1:]) if len(t.shape) > 1 else t.shape, t.type) for t in remaining
    ]
    with Writer(out, metadata, specs) as writer:
        for t in remaining:
            writer.write(t.name, t.rows(0, rows[t.name]))
    return out


def importance(f: GGUF, seed: int = 3) -> imatrix.Imatrix:
    """Importance for every matrix of a model, some columns a hundred times that of others."""
    rng = np.random.default_rng(seed)
    entries = {
        t.name: imatrix.Entry(10 ** rng.uniform(-1, 1, (1, t.shape[-1])).astype(np.float32), np.ones(1, np.int64), 1)
        for t in f.tensors.values()
        if len(t.shape) == 2
    }
    return imatrix.Imatrix(entries, 1, "random")


def quantized(source: Path, out: Path, target: str, **options: object) -> Path:
    """A model in the file type `target`, with effort fast."""
    f = quantkit.open(source)
    matrix = importance(f)
    flags = recipe.Options(pure=True, allow_requantize=True, **options)  # type: ignore[arg-type]
    plan = recipe.plan(f.tensors.values(), target, metadata=f.metadata, imatrix=matrix, options=flags)
    quantize_with_plan(f, out, plan, imatrix=matrix, effort="fast")
    return out


def reference_repack(source: Path, out: Path, *flags: str) -> Path:
    """The file that llama-quantize --repack writes of a file."""
    from tests.conformance.ggml import QUANTIZE_TOOL

    command = [str(QUANTIZE_TOOL), "--repack", *flags, str(source), str(out), "Q8_0", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    if not out.exists():
        pytest.fail(f"the reference wrote no {out.name}: {done.stderr[-300:]}")
    return out


def assert_same_tensors(a: Path, b: Path) -> int:
    """Names, order, types, shapes and bytes; returns the number of interleaved tensors."""
    one, two = quantkit.open(a), quantkit.open(b)
    assert list(one.tensors) == list(two.tensors)
    for name, tensor in one.tensors.items():
        other = two.tensors[name]
        assert (tensor.type.name, tensor.shape) == (other.type.name, other.shape), name
        np.testing.assert_array_equal(tensor.data, other.data, err_msg=name)
    return sum(t.type.interleave > 1 for t in one.tensors.values())
