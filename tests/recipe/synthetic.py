"""Small models with every class of tensor, for plans: the right names, shapes and keys, all weights zero."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit import types
from quantkit.formats.gguf import Metadata, TensorSpec, Writer

COLUMNS, HEADS, FFN, VOCABULARY = 256, 8, 256, 64


@dataclass(frozen=True)
class Shape:
    """A llama: `keys` key/value heads of 8, `experts` of them or a dense feed-forward, tied embeddings or not."""

    layers: int = 32
    keys: int = 8
    experts: int = 0
    tied: bool = False
    shuffled: bool = False  # layers in the order 0 1 10 11 … 2 20 …, as converters that sort names leave them

    def specs(self) -> list[TensorSpec]:
        f16, f32 = types.get("f16"), types.get("f32")
        kv = COLUMNS * self.keys // HEADS
        specs = [TensorSpec("token_embd.weight", (VOCABULARY, COLUMNS), f16)]
        if not self.tied:
            specs.append(TensorSpec("output.weight", (VOCABULARY, COLUMNS), f16))
        specs.append(TensorSpec("output_norm.weight", (COLUMNS,), f32))
        for i in sorted(range(self.layers), key=str if self.shuffled else int):
            at = f"blk.{i}."
            specs += [
                TensorSpec(f"{at}attn_norm.weight", (COLUMNS,), f32),
                TensorSpec(f"{at}ffn_norm.weight", (COLUMNS,), f32),
            ]
            rows = {"attn_q": COLUMNS, "attn_k": kv, "attn_v": kv, "attn_output": COLUMNS}
            specs += [TensorSpec(f"{at}{name}.weight", (n, COLUMNS), f16) for name, n in rows.items()]
            lead, end = ((self.experts,), "_exps") if self.experts else ((), "")
            if self.experts:
                specs.append(TensorSpec(f"{at}ffn_gate_inp.weight", (self.experts, COLUMNS), f32))
            specs += [
                TensorSpec(f"{at}ffn_{part}{end}.weight", (*lead, 32, COLUMNS), f16) for part in ("gate", "down", "up")
            ]
        return specs

    def metadata(self) -> Metadata:
        values = {
            "block_count": self.layers, "context_length": 128, "embedding_length": COLUMNS, "feed_forward_length": FFN,
            "attention.head_count": HEADS, "attention.head_count_kv": self.keys, "vocab_size": VOCABULARY,
            "rope.dimension_count": COLUMNS // HEADS,
        }  # fmt: skip
        if self.experts:
            values |= {"expert_count": self.experts, "expert_used_count": 2}
        made = Metadata({"general.architecture": "llama"})
        for key, value in values.items():
            made.set(f"llama.{key}", value, "u32")
        made.set("llama.attention.layer_norm_rms_epsilon", 1e-5, "f32")
        made.set("tokenizer.ggml.model", "no_vocab", "str")
        return made

    def write(self, path: Path) -> Path:
        specs = self.specs()
        with Writer(path, self.metadata(), specs) as writer:
            for spec in specs:
                writer.write(spec.name, np.zeros(spec.nbytes, np.uint8))
        return path
