"""Small models that have learned a text, for benches of what random weights do not show.

    train("qwen3moe", text, directory) -> Training

SHAPES has a mixture of experts (Qwen3-MoE) and latent attention with experts and a shared one (DeepSeek-V3); rows are
multiples of 256 columns, so that every type fits. The tokenizer is a byte-level BPE of 2048 tokens made from the text.
Weights are drawn and batches are taken by fixed seeds. The directory is a Hugging Face checkpoint in float32.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import quantkit

VOCABULARY = 2048
CONTEXT = 256
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4,
    "moe_intermediate_size": 256, "num_experts_per_tok": 4, "norm_topk_prob": True, "max_position_embeddings": 512,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3moe": _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 64,
        "num_experts": 16, "intermediate_size": 512, "output_router_logits": True, "router_aux_loss_coef": 0.01,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "deepseek2": _COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
        "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "intermediate_size": 768,
        "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1,
        "topk_group": 1, "num_nextn_predict_layers": 0, "attention_bias": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Steps of AdamW, sequences of CONTEXT tokens in each, and the largest learning rate."""

    steps: int
    batch: int
    rate: float


SCHEDULES = {"qwen3moe": Schedule(1600, 2, 3e-3), "deepseek2": Schedule(500, 4, 2e-3)}  # 5 to 15 minutes each
_BALANCING = 1e-3  # step of the routers' biases (DeepSeek-V3, 2.1.2); Qwen3's class has a loss for it


@dataclass(frozen=True)
class Training:
    """What a training did: losses in nats a token of the last tenth of the steps, and the unigram entropy."""

    steps: int
    tokens: int
    loss: float
    unigram: float
    seconds: float


def train(shape: str, text: Path, directory: Path, schedule: Schedule | None = None) -> Training:
    """Train a model of SHAPES on a text, by default as SCHEDULES says. What an earlier run left is kept."""
    record = directory / "training.json"
    if record.exists():
        return Training(**json.loads(record.read_text(encoding="utf-8")))
    import torch

    schedule = schedule or SCHEDULES[shape]
    steps = schedule.steps
    ids = np.asarray(tokenize(text, directory))
    model, begin, losses = build(shape), time.perf_counter(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.1)
    for step, batch in enumerate(batches(ids, schedule)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, schedule)
        tokens = torch.from_numpy(batch)
        found = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), tokens[:, 1:].flatten())
        total: Any = loss + getattr(model, "router_aux_loss_coef", 0) * (getattr(found, "aux_loss", None) or 0)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 50 == 49:
            seconds = time.perf_counter() - begin
            print(f"{shape}: step {step + 1}, loss {np.mean(losses[-50:]):.3f}, {seconds:.0f} s", flush=True)
    model.config.output_router_logits = False
    model.save_pretrained(directory)
    made = Training(steps, len(ids), float(np.mean(losses[-max(1, steps // 10) :])), unigram_entropy(ids),
                    time.perf_counter() - begin)  # fmt: skip
    record.write_text(json.dumps(asdict(made)), encoding="utf-8")
    return made


def as_gguf(shape: str, text: Path, folder: Path, schedule: Schedule | None = None) -> tuple[Path, Training]:
    """`train` in folder/hf, and the model as a GGUF file in 16 bits; what exists is kept."""
    training = train(shape, text, folder / "hf", schedule)
    model = folder / "f16.gguf"
    if not model.exists():
        quantkit.convert(folder / "hf", model)
    return model, training


def build(shape: str, **changes: Any) -> Any:
    """A model of transformers with random weights; `changes` of the settings in SHAPES."""
    import torch
    import transformers

    torch.manual_seed(0)
    given = SHAPES[shape] | changes
    config = type(transformers.AutoConfig.for_model(given["model_type"]))(**given)
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.float32).train()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(_balance)
    return model


def _balance(router: Any, inputs: Any, outputs: Any) -> None:
    """Raise the bias of experts that got fewer tokens than the mean, lower that of the others."""
    import torch

    load = torch.bincount(outputs[2].flatten(), minlength=router.num_experts).float()
    router.e_score_correction_bias += _BALANCING * torch.sign(load.mean() - load)


def tokenize(text: Path, directory: Path) -> list[int]:
    """Make a tokenizer of VOCABULARY tokens from a text in `directory`; the ids of the text."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    contents = text.read_text(encoding="utf-8")
    made.train_from_iterator([contents], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}), encoding="utf-8")
    ids: list[int] = made.encode(contents).ids
    return ids


def unigram_entropy(ids: np.ndarray) -> float:
    """Nats a token of the best model that knows frequencies only."""
    counts = np.unique(ids, return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def rate_at(step: int, schedule: Schedule) -> float:
    """The learning rate of a step: up for 50 steps, then a cosine down to a twentieth."""
    cosine = (1 + math.cos(math.pi * step / schedule.steps)) / 2
    return schedule.rate * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * cosine)


def batches(ids: np.ndarray, schedule: Schedule) -> Iterator[np.ndarray]:
    """int64[batch, CONTEXT + 1] at random places."""
    rng = np.random.default_rng(0)
    for _ in range(schedule.steps):
        starts = rng.integers(0, len(ids) - CONTEXT, schedule.batch)
        yield np.stack([ids[start : start + CONTEXT + 1] for start in starts]).astype(np.int64)
