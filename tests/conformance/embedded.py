"""SmolLM2 in 768 columns instead of 576: the same function, with rows that types of 256-blocks can hold.

Q is a random matrix [768, 576] with orthonormal columns; every hidden state h becomes Q h. Norm weights are folded into
the linears that read the normed state; these become W diag(norm) Q^T, those that write the hidden state Q W. The norm
of 768 values differs from that of 576 by a constant: every norm gets the weight sqrt(576 / 768), and eps the factor
576 / 768. Heads go from 9 (3 of keys) to 12 (4), the new ones zero. The output matrix, tied before, becomes its own.

    embed(source, out)    a GGUF of f16 weights; its perplexity is that of the source
    pad(source, out)      the same with zeros in place of the rotation: the model in its own axes. Q is the first 576
                          columns of the identity, and norm weights stay in the norms.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quantkit import types
from quantkit.formats import gguf
from quantkit.formats.gguf.writer import TensorSpec, Writer

WIDE, Q_HEADS, KV_HEADS = 768, 12, 4


def _rows(weights: np.ndarray, count: int) -> np.ndarray:
    """`weights` with zero rows below, `count` in all."""
    return np.concatenate([weights, np.zeros((count - len(weights), weights.shape[1]), weights.dtype)])


def embed(source: Path, out: Path, seed: int = 0) -> None:
    narrow = int(gguf.open(source).metadata["llama.embedding_length"])
    lift = np.linalg.qr(np.random.default_rng(seed).standard_normal((WIDE, narrow)))[0]
    _write(source, out, lift, fold_norms=True)


def pad(source: Path, out: Path) -> None:
    narrow = int(gguf.open(source).metadata["llama.embedding_length"])
    _write(source, out, np.eye(WIDE, narrow), fold_norms=False)


def _write(source: Path, out: Path, lift: np.ndarray, fold_norms: bool) -> None:
    """`lift` is Q."""
    f = gguf.open(source)
    narrow, dim = lift.shape[1], 64

    def weight(name: str) -> np.ndarray:
        return f.tensors[f"{name}.weight"].dequantize().astype(np.float64)

    def norm(name: str) -> np.ndarray:
        kept = np.ones(WIDE) if fold_norms else lift @ weight(name)
        return kept * np.sqrt(narrow / WIDE)

    def reads(name: str, before: str) -> np.ndarray:
        return weight(name) * (weight(before) if fold_norms else 1) @ lift.T

    made: dict[str, np.ndarray] = {"token_embd": weight("token_embd") @ lift.T, "output_norm": norm("output_norm")}
    made["output"] = reads("token_embd", "output_norm")
    for i in range(int(f.metadata["llama.block_count"])):
        b = f"blk.{i}"
        made[f"{b}.attn_norm"], made[f"{b}.ffn_norm"] = norm(f"{b}.attn_norm"), norm(f"{b}.ffn_norm")
        made[f"{b}.attn_q"] = _rows(reads(f"{b}.attn_q", f"{b}.attn_norm"), Q_HEADS * dim)
        made[f"{b}.attn_k"] = _rows(reads(f"{b}.attn_k", f"{b}.attn_norm"), KV_HEADS * dim)
        made[f"{b}.attn_v"] = _rows(reads(f"{b}.attn_v", f"{b}.attn_norm"), KV_HEADS * dim)
        made[f"{b}.attn_output"] = _rows((lift @ weight(f"{b}.attn_output")).T, Q_HEADS * dim).T
        made[f"{b}.ffn_gate"] = reads(f"{b}.ffn_gate", f"{b}.ffn_norm")
        made[f"{b}.ffn_up"] = reads(f"{b}.ffn_up", f"{b}.ffn_norm")
        made[f"{b}.ffn_down"] = lift @ weight(f"{b}.ffn_down")

    metadata = f.metadata
    metadata["llama.embedding_length"] = WIDE
    metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"] = Q_HEADS, KV_HEADS
    key = "llama.attention.layer_norm_rms_epsilon"
    metadata[key] = float(metadata[key]) * narrow / WIDE
    metadata["general.file_type"] = 1
    kinds = {name: types.get("f32" if w.ndim == 1 else "f16") for name, w in made.items()}
    specs = [TensorSpec(f"{name}.weight", w.shape, kinds[name]) for name, w in made.items()]
    with Writer(out, metadata, specs) as writer:
        for name, w in made.items():
            writer.write(f"{name}.weight", kinds[name].quantize(w.reshape(-1, w.shape[-1])))
