"""Tiny checkpoints with MTP layers, and what these compute, in torch.

transformers has no MTP layers, so a model with more layers is built: the last ones become the blocks of MTP layers. The
formula around them is DeepSeek-V3's (arXiv:2412.19437, 2.2) as vLLM's deepseek_mtp and qwen3_next_mtp have it, with the
state that SGLang's deepseek_nextn passes on: projection([norm(embedding), norm(state)]), block, norm, output.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.archs.checkpoints import tiny
from tests.archs.test_hybrid import rewritten

_PARTS = {"deepseek": ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"),
          "qwen": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}  # fmt: skip


@dataclass
class MtpCheckpoint:
    """A checkpoint's directory, the model of transformers with its layers, and what is around each MTP layer."""

    directory: Path
    model: Any
    n_main: int
    parts: list[dict[str, np.ndarray]]  # by name in a GGUF under nextn; norms as they multiply

    def states(self, tokens: np.ndarray) -> np.ndarray:
        """float32[len, n]: the states after the last norm of the main layers."""
        import torch

        inner = self.model.model
        layers, count = inner.layers, inner.config.num_hidden_layers
        inner.layers, inner.config.num_hidden_layers = layers[: self.n_main], self.n_main
        try:
            with torch.no_grad():
                found: np.ndarray = inner(torch.from_numpy(tokens)[None], use_cache=False).last_hidden_state[0].numpy()
        finally:
            inner.layers, inner.config.num_hidden_layers = layers, count
        return found

    def draft(self, tokens: np.ndarray, steps: int, start: int) -> list[np.ndarray]:
        """By step, the logits float32[vocab] that are drafted from position `start`, the last layer repeating."""
        h = self.states(tokens)
        g, entered = h[: start + 1], np.empty((0, 0), np.float32)
        found = []
        for step in range(steps):
            number = min(step, len(self.parts) - 1)
            if step == number:  # rows of all positions so far
                entered = self._entering(number, tokens[step + 1 : step + 2 + start], g)
            else:
                entered = np.concatenate([entered, self._entering(number, tokens[start + step + 1 :][:1], g[-1:])])
            g = self._block(number, entered)
            output = self.parts[number].get("shared_head_head", self.model.lm_head.weight.detach().numpy())
            found.append(g[-1] @ output.T)
        return found

    def _entering(self, number: int, tokens: np.ndarray, states: np.ndarray) -> np.ndarray:
        part = self.parts[number]
        table = part.get("embed_tokens", self.model.model.embed_tokens.weight.detach().numpy())
        both = [self._norm(table[tokens], part["enorm"]), self._norm(states, part["hnorm"])]
        return np.asarray(np.concatenate(both, axis=1) @ part["eh_proj"].T, np.float32)

    def _block(self, number: int, x: np.ndarray) -> np.ndarray:
        import torch

        inner, n = self.model.model, len(x)
        hidden, positions = torch.from_numpy(x)[None], torch.arange(n)[None]
        mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
        with torch.no_grad():
            y = inner.layers[self.n_main + number](
                hidden, attention_mask=mask, position_ids=positions,
                position_embeddings=inner.rotary_emb(hidden, positions),
            )  # fmt: skip
        y = y[0] if isinstance(y, tuple) else y
        return self._norm(y.reshape(x.shape).numpy(), self.parts[number]["shared_head_norm"])

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean + self.model.config.rms_norm_eps) * weight, np.float32)


def mtp_checkpoint(directory: Path, arch: str, layers: int = 1, shared: bool = False, **config: Any) -> MtpCheckpoint:
    """A tiny checkpoint with MTP layers. `shared`: they have no embedding and no output of their own."""
    from quantkit import archs

    qwen = arch.startswith("qwen")
    n_main = 3  # the fourth layer of qwen35 has attention
    model = tiny(directory / "longer", arch=arch, num_hidden_layers=n_main + layers, **config)
    model.set_attn_implementation("eager")
    example = archs.get(arch).EXAMPLE
    n, vocab, rng = example["hidden_size"], example["vocab_size"], np.random.default_rng(3)
    shapes = {"eh_proj": (n, 2 * n), "fc": (n, 2 * n), "embed_tokens": (vocab, n), "shared_head.head": (vocab, n)}
    parts: list[dict[str, np.ndarray]] = []

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = dict(tensors)
        for i in range(layers):
            stem, part = f"model.layers.{n_main + i}.", {}
            for name in _PARTS["qwen" if qwen else "deepseek"]:
                if shared and name in ("embed_tokens", "shared_head.head"):
                    continue
                x = rng.standard_normal(shapes.get(name, (n,)), np.float32)
                x = x * x.shape[-1] ** -0.5 if x.ndim == 2 else np.float32(0.2) * x + np.float32(not qwen)
                found[f"mtp.{name}.weight" if qwen else f"{stem}{name}.weight"] = x
                part[_in_gguf(name)] = x + np.float32(qwen and x.ndim == 1)
            parts.append(part)
            if qwen:
                for name in [name for name in found if name.startswith(stem)]:
                    found[f"mtp.layers.{i}.{name.removeprefix(stem)}"] = found.pop(name)
        return found

    def settings() -> dict[str, Any]:
        if not qwen:
            return {"num_hidden_layers": n_main, "num_nextn_predict_layers": layers}
        return {"num_hidden_layers": n_main, "mtp_num_hidden_layers": layers, "layer_types": None}

    target = rewritten(directory / "longer", directory / "hf", change, settings())
    return MtpCheckpoint(target, model, n_main, parts)


def _in_gguf(name: str) -> str:
    theirs = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
              "norm": "shared_head_norm"}  # fmt: skip
    return theirs.get(name, name.replace(".", "_"))
