"""Tiny checkpoints for the tests: tokenizers trained on a few lines, random weights saved by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import types
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter, open_checkpoint

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind; it's 1234 times lazier than that.",
    "Numbers 0 1 2 3 4 5 6 7 8 9 10 100 1000, spaces   and\ttabs, the end of the line.\n\nThe others there, then.",
    "Größe, naïve café, 你好 世界, привет мир: the bytes of these are many.",
]
HARD = (
    "Hello world's 12345 I'LL we'Ve  \n\n\n  tabs\t\tand   spaces \r\n ümlaut ÀÉÎ 你好，世界 カタカナ 한국어 हिन्दी 😀 "
    "a.b,c;d/e\\f #include path/\nx (x+y)==z <<<>>> $100 3.14 ½ Ⅷ ² snake_case CamelCaseWord HTTPServer "
    "... !!! ???\n\nend   "
)

GEMMA_E: dict[str, Any] = {  # as E2B: per-layer embeddings, and layers without keys and values, with wide feed-forwards
    "hidden_size": 96, "num_key_value_heads": 2, "num_hidden_layers": 8, "num_global_key_value_heads": None,
    "attention_k_eq_v": False, "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
    "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
}  # fmt: skip


def byte_level(vocab_size: int = 320, **changes: Any) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE, pre-tokenizer "gpt-2"; tokens 0 and 1 are <|begin|> and <|end|>, control."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer)
    return json.loads(made.to_str()) | changes


def merging_across_words() -> dict[str, Any]:
    """tokenizer.json whose merges cross the bounds of words, so that every pre-tokenizer gives other ids of HARD."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([HARD[i : i + 40] for i in range(0, len(HARD), 7)], trainer)
    found = json.loads(made.to_str())
    found["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return found


def sentencepiece(vocab_size: int = 400, prefix: bool = True) -> dict[str, Any]:
    """tokenizer.json as Llama 2 has it: BPE over U+2581 text with byte fallback; <unk> <s> </s>, then the bytes."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [tokenizers.normalizers.Prepend("▁")] if prefix else []
    made.normalizer = tokenizers.normalizers.Sequence([*steps, tokenizers.normalizers.Replace(" ", "▁")])
    controls = ["<unk>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=controls + [f"<0x{byte:02X}>" for byte in range(256)],
        limit_alphabet=60,
        show_progress=False,
    )
    made.train_from_iterator([word for line in TEXT for word in line.split(" ")], trainer)
    found = json.loads(made.to_str())
    found["added_tokens"] = [token for token in found["added_tokens"] if token["content"] in controls]
    return found


def write_tokenizer(directory: Path, tokenizer: dict[str, Any], **config: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def tiny(directory: Path, dtype: str = "float32", arch: str = "llama", **config: Any) -> Any:
    """Save a random model of an architecture's EXAMPLE, changed, with a tokenizer; gives the model back.

    Norm weights and biases are random too, so that a tensor in the wrong place shows. AssertionError where transformers
    builds a model that `convert` takes for another architecture: an EXAMPLE that is inherited would test the parent.
    """
    import torch
    import transformers

    from quantkit import archs

    example = archs.get(arch).EXAMPLE | config
    torch.manual_seed(5)
    if example["model_type"] == "bailing_moe":
        return _bailing(directory, dtype, example)
    kind = transformers.AutoConfig.for_model(example["model_type"])
    if type(kind) in transformers.AutoModelForCausalLM._model_mapping:
        model = transformers.AutoModelForCausalLM.from_config(type(kind)(**example)).eval()
    elif getattr(transformers, example["architectures"][0]).config_class is type(kind):
        model = getattr(transformers, example["architectures"][0])(type(kind)(**example)).eval()
    else:
        model = _multimodal(example)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += torch.rand_like(parameter) - 0.5  # from 1, or where it is stored less 1 from 0
            elif name.endswith(("bias", "sinks", "scale", "_hc.base", "hc_base")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith((".alpha_p", ".alpha_n", "rotary_emb.alpha")):
                parameter += torch.rand_like(parameter) - 0.5
            elif parameter.ndim >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.uniform_(0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("tid2eid"):
                experts = example["n_routed_experts"]
                rows = [torch.randperm(experts)[: buffer.shape[1]] for _ in range(len(buffer))]
                buffer.copy_(torch.stack(rows))
            elif name.endswith("act_fn.beta"):
                buffer.uniform_(0.3, 0.7)
            elif name.endswith("act_fn.eps"):
                buffer.uniform_(-0.2, -0.1)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    found = archs.from_hf(archs.language_model(json.loads((directory / "config.json").read_text(encoding="utf-8"))))
    assert found.name == arch, (
        f"EXAMPLE of {arch} (model_type {example['model_type']}) makes a {type(model).__name__}, which is converted as "
        f"{found.name}: give {arch} an EXAMPLE with its own model_type and architectures"
    )
    write_tokenizer(directory, byte_level(example["vocab_size"]), bos_token="<|begin|>", eos_token="<|end|>")
    return model


_OF_BAILING = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}  # fmt: skip


def _bailing(directory: Path, dtype: str, example: dict[str, Any]) -> Any:
    """Ling 2.0, which transformers lacks: a GLM-4.5 with norms of queries and keys computes the same."""
    names = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    given = {names.get(key, key): value for key, value in example.items()}
    given |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": False}
    model = tiny(directory, dtype, "glm4moe", **given)
    stored, tensors = open_checkpoint(directory).tensors, dict[str, np.ndarray]()
    for name, tensor in stored.items():
        ours = name
        for theirs, here in _OF_BAILING.items():
            ours = ours.replace(theirs, here)
        if ".q_proj." in name:
            ours = name.replace("self_attn.q_proj", "attention.query_key_value")
            three = (stored[name.replace("q_proj", f"{part}_proj")].dequantize() for part in "qkv")
            tensors[ours] = np.concatenate(list(three))
        elif not any(f"self_attn.{part}_proj." in name for part in "kv"):
            tensors[ours] = tensor.dequantize()
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    specs = [CheckpointSpec(name, x.shape, "F32") for name, x in tensors.items()]
    with CheckpointWriter(directory, specs) as writer:
        for name, x in tensors.items():
            writer.write(name, np.ascontiguousarray(x, "<f4").reshape(-1).view(np.uint8))
    (directory / "config.json").write_text(json.dumps(example), encoding="utf-8")
    return model


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """log softmax of `logits` over the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def loaded(directory: Path) -> Any:
    """The model of a checkpoint in transformers, also of a class that AutoModelForCausalLM does not list."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    auto = transformers.AutoModelForCausalLM
    kind = auto if type(config) in auto._model_mapping else getattr(transformers, config.architectures[0])
    return kind.from_pretrained(directory)


def _multimodal(text: dict[str, Any]) -> Any:
    """A multimodal model with this language model and a tiny image encoder, for classes without one of text alone."""
    import transformers

    vision = {"depth": 4, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": text["hidden_size"], "num_position_embeddings": 16,
              "deepstack_visual_indexes": [0, 2]}  # fmt: skip
    if text["model_type"] == "step3p5":
        vision = {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
    if text["model_type"] == "mistral_large4_text":
        vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "patch_size": 14, "image_size": 28}  # fmt: skip
    kind = {"step3p5": "step3p7"}.get(text["model_type"], text["model_type"].removesuffix("_text"))
    outer = transformers.AutoConfig.for_model(kind)
    config = type(outer)(text_config=text, vision_config=vision,
                         tie_word_embeddings=text["tie_word_embeddings"])  # fmt: skip
    return getattr(transformers, text["architectures"][0])(config).eval()


Coded = list[tuple[str, str, np.ndarray]]  # name, dtype, values


def as_fp8(source: Path, target: Path, rng: np.random.Generator, block: tuple[int, int] | None = (128, 128)) -> Path:
    """A checkpoint's projections with random FP8 codes and scales in their place, as DeepSeek ships them.

    The rest is in bf16. Without `block` there is one scale a matrix.
    """

    def coded(name: str, rows: int, n: int) -> Coded:
        codes = rng.integers(0, 127, (rows, n), np.uint8) | rng.integers(0, 2, (rows, n), np.uint8) << 7
        grid = (-(-rows // block[0]), -(-n // block[1])) if block else ()
        scales = rng.uniform(0.5, 2, grid).astype("<f4") / np.float32(2**14)
        return [(name, "F8_E4M3", codes), (f"{name}_scale_inv", "F32", scales)]

    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return coded_checkpoint(
        source, target, "_proj.weight", coded, settings | ({"weight_block_size": list(block)} if block else {})
    )


def as_int4(source: Path, target: Path, rng: np.random.Generator) -> Path:
    """A checkpoint's experts with random integers of 4 bits in their place, 32 to a scale, as Kimi K2 Thinking's."""

    def coded(name: str, rows: int, n: int) -> Coded:
        words = rng.integers(-(2**31), 2**31, (rows, n // 8)).astype("<i4")
        scales = types.get("bf16").quantize(rng.uniform(0.01, 0.05, (rows, n // 32)).astype("<f4")).view("<u2")
        shape = np.array([rows, n], "<i8")
        return [(f"{name}_packed", "I32", words), (f"{name}_scale", "BF16", scales), (f"{name}_shape", "I64", shape)]

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, "strategy": "group"}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    settings |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    return coded_checkpoint(source, target, "", coded, settings, ".mlp.experts.")


def coded_checkpoint(
    source: Path, target: Path, ending: str, coded: Callable[[str, int, int], Coded], settings: Any, part: str = ""
) -> Path:
    """The checkpoint with what `coded(name, rows, columns)` gives in place of some weights; the rest is bf16."""
    specs: list[CheckpointSpec] = []
    data: list[np.ndarray] = []

    def add(name: str, dtype: str, x: np.ndarray) -> None:
        specs.append(CheckpointSpec(name, x.shape, dtype))
        data.append(np.ascontiguousarray(x).reshape(-1).view(np.uint8))

    for tensor in open_checkpoint(source).tensors.values():
        if not tensor.name.endswith(ending) or part not in tensor.name:
            add(tensor.name, "BF16", types.get("bf16").quantize(tensor.dequantize().reshape(-1, tensor.shape[-1]))
                .view("<u2").reshape(tensor.shape))  # fmt: skip
            continue
        for name, dtype, x in coded(tensor.name, *tensor.shape):
            add(name, dtype, x)
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": settings}
    (target / "config.json").write_text(json.dumps(config))
    with CheckpointWriter(target, specs) as writer:
        for spec, values in zip(specs, data):
            writer.write(spec.name, values)
    return target
