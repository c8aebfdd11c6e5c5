"""A small DeepSeek-V3 with one MTP (multi-token prediction) layer that have learned a text together.

    train(text, directory) -> MtpTraining

The shape is that of benchmarks/trained.py. transformers has no MTP layers: a model with one layer more is built, whose
last layer becomes the block of the MTP layer (DeepSeek-V3, arXiv:2412.19437, 2.2). It shares embedding and output with
the trunk. The loss is that of the next token plus WEIGHT times that of the next but one. The directory is a Hugging
Face checkpoint in float32 with the names that DeepSeek publishes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.trained import SHAPES, Schedule, batches, build, rate_at, tokenize, unigram_entropy

SHAPE = "deepseek2"
MAIN = int(SHAPES[SHAPE]["num_hidden_layers"])
SCHEDULE = Schedule(600, 4, 2e-3)
WEIGHT = 0.3  # of the MTP layer's loss, as DeepSeek-V3 has it at first


@dataclass(frozen=True)
class MtpTraining:
    """Losses in nats a token of the last tenth of the steps, of both predictions, and the unigram entropy."""

    steps: int
    tokens: int
    loss: float
    mtp_loss: float
    unigram: float
    seconds: float


def train(text: Path, directory: Path, schedule: Schedule = SCHEDULE) -> MtpTraining:
    """Train the model on a text. What an earlier run left is kept."""
    record = directory / "training.json"
    if record.exists():
        return MtpTraining(**json.loads(record.read_text(encoding="utf-8")))
    import torch

    ids = np.asarray(tokenize(text, directory))
    model = build(SHAPE, num_hidden_layers=MAIN + 1)
    around = _around(model)
    parameters = [*model.parameters(), *around.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.1)
    begin, history = time.perf_counter(), []
    for step, batch in enumerate(batches(ids, schedule)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, schedule)
        found = losses(model, around, torch.from_numpy(batch))
        optimizer.zero_grad()
        (found[0] + WEIGHT * found[1]).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        history.append([float(x.detach()) for x in found])
        if step % 50 == 49:
            mean = np.mean(history[-50:], axis=0)
            print(f"step {step + 1}, losses {mean[0]:.3f} and {mean[1]:.3f}, {time.perf_counter() - begin:.0f} s",
                  flush=True)  # fmt: skip
    _save(model, around, directory)
    last = np.mean(history[-max(1, schedule.steps // 10) :], axis=0)
    made = MtpTraining(schedule.steps, len(ids), float(last[0]), float(last[1]), unigram_entropy(ids),
                       time.perf_counter() - begin)  # fmt: skip
    record.write_text(json.dumps(asdict(made)), encoding="utf-8")
    return made


def _around(model: Any) -> Any:
    """What is around the block of the MTP layer, by the names of checkpoints with "-" for the point."""
    import torch

    torch.manual_seed(1)
    n, eps = model.config.hidden_size, model.config.rms_norm_eps
    parts: dict[str, Any] = {name: torch.nn.RMSNorm(n, eps) for name in ("enorm", "hnorm", "shared_head-norm")}
    parts["eh_proj"] = torch.nn.Linear(2 * n, n, bias=False)
    return torch.nn.ModuleDict(parts)


def load(directory: Path) -> tuple[Any, Any]:
    """The model of a saved checkpoint, with one layer more, and what is around that layer."""
    import torch
    import transformers
    from safetensors.torch import load_file

    models: Any = transformers.AutoModelForCausalLM
    model = models.from_pretrained(directory, num_hidden_layers=MAIN + 1).eval()
    around, stored = _around(model), load_file(directory / "model.safetensors")
    with torch.no_grad():
        for name, part in around.items():
            part.weight.copy_(stored[_name(name)])
    return model, around


def _name(part: str) -> str:
    return f"model.layers.{MAIN}.{part.replace('-', '.')}.weight"


def losses(model: Any, around: Any, tokens: Any) -> tuple[Any, Any]:
    """The losses of the next token and of the next but one, of int64[batch, length + 1]."""
    import torch

    inner, layers = model.model, model.model.layers
    inner.layers, inner.config.num_hidden_layers = layers[:MAIN], MAIN
    try:
        hidden = inner(tokens[:, :-1], use_cache=False).last_hidden_state
    finally:
        inner.layers, inner.config.num_hidden_layers = layers, MAIN + 1
    embedded = inner.embed_tokens(tokens[:, 1:-1])
    x = around["eh_proj"](torch.cat([around["enorm"](embedded), around["hnorm"](hidden[:, :-1])], dim=-1))
    length = x.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
    angles = inner.rotary_emb(x, positions)
    y = layers[MAIN](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
    y = around["shared_head-norm"](y[0] if isinstance(y, tuple) else y)
    entropy = torch.nn.functional.cross_entropy
    first = entropy(model.lm_head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    return first, entropy(model.lm_head(y).flatten(0, 1), tokens[:, 2:].flatten())


def _save(model: Any, around: Any, directory: Path) -> None:
    """Save the checkpoint: that of the longer model with what is around its last layer, counted as an MTP layer."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, part in around.items():
        tensors[_name(name)] = part.weight.detach().contiguous()
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": MAIN, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
