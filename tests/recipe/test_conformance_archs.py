"""Plans of architectures beside llama against the reference's own: qwen3, qwen3moe, deepseek2 with latent attention.

Of every file type; of some also those that can only be planned yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common.shapes import ExpectedTensor
from quantkit.archs.deepseek2 import in_layout
from quantkit.formats import imatrix
from quantkit.formats.gguf import TensorSpec, Writer
from quantkit.recipe import parse
from quantkit.recipe.models import from_config
from tests.archs.test_listed import GLM, QWEN35, QWEN35_MOE
from tests.recipe.configs import DEEPSEEK_V3, QWEN3_235B
from tests.recipe.test_conformance import MIXED, NEED_A_MATRIX, differences, our_plan, reference_plan

_SMALL = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 8, "vocab_size": 64}
_EXPERTS = {
    "num_experts": 8,
    "shared_expert_intermediate_size": 256,
    "n_routed_experts": 8,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 2,
}
_QWEN3 = QWEN3_235B | _SMALL | {"architectures": ["Qwen3ForCausalLM"]}
_MLA = {"q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "num_key_value_heads": 8, "first_k_dense_replace": 2}  # fmt: skip

# Upstream's form: one matrix a head, and the latent as the one key/value head. The reference takes these lengths only.
_UPSTREAM = {"attn_k_b": (8, 512, 128), "attn_v_b": (8, 64, 512)}
_UPSTREAM_KEYS = {"head_count_kv": 1, "key_length": 576, "value_length": 512, "key_length_mla": 192,
                  "value_length_mla": 64}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model: its config.json, the layout of its latent attention, the vocabulary that its metadata claims."""

    name: str
    config: dict[str, Any]
    layout: str = "all"
    vocabulary: int = 64

    def write(self, folder: Path) -> Path:
        specs, metadata = from_config(self.config)
        arch = metadata["general.architecture"]
        kept = {t.name for t in in_layout([ExpectedTensor(s.name, s.shape, False) for s in specs], self.layout)}
        specs = [s for s in specs if s.name in kept]
        if self.layout == "split":
            specs = [TensorSpec(s.name, _UPSTREAM.get(s.name.split(".")[-2], s.shape), s.type) for s in specs]
            for key, value in _UPSTREAM_KEYS.items():
                metadata.set(f"{arch}.attention.{key}", value, "u32")
        metadata.set("tokenizer.ggml.model", "no_vocab", "str")
        metadata.set(f"{arch}.vocab_size", self.vocabulary, "u32")
        path = folder / f"{self.name}.gguf"
        with Writer(path, metadata, specs) as writer:
            for spec in specs:
                writer.write(spec.name, np.zeros(spec.nbytes, np.uint8))
        return path


CASES = (
    Case("qwen3-8b", _QWEN3 | {"num_hidden_layers": 36, "num_key_value_heads": 2}, vocabulary=151936),
    Case("qwen3-tied", _QWEN3 | {"num_hidden_layers": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    Case("qwen3moe", QWEN3_235B | _SMALL | _EXPERTS | {"num_hidden_layers": 16, "num_key_value_heads": 2}),
    Case("deepseek2", DEEPSEEK_V3 | _SMALL | _EXPERTS | _MLA | {"num_hidden_layers": 16}),
    Case("deepseek2-joint", DEEPSEEK_V3 | _SMALL | _EXPERTS | _MLA | {"num_hidden_layers": 8}, "joint"),
)
FURTHER = (
    Case("deepseek2-split", CASES[-1].config | {"kv_lora_rank": 512}, "split"),
    Case("glm4moe", GLM | _SMALL | _EXPERTS | {"num_hidden_layers": 8, "num_nextn_predict_layers": 1}),
    Case("qwen35", QWEN35 | _SMALL | {"num_hidden_layers": 16}),
    Case("qwen35moe", QWEN35_MOE | _SMALL | _EXPERTS | {"num_hidden_layers": 16}),
    Case("qwen3next", QWEN35_MOE | _SMALL | _EXPERTS | {"architectures": ["Qwen3NextForCausalLM"]}),
    Case("qwen2-70b", GLM | _SMALL | {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 80}),
    *(
        Case(name, archs.get(name).EXAMPLE | _SMALL | {"num_hidden_layers": 16, "intermediate_size_mlp": 256})
        for name in ("cohere2", "glm4", "granite", "granitemoe", "llama4", "phi3", "seed_oss")
    ),
    Case("gemma2", archs.get("gemma2").EXAMPLE | _SMALL | {"num_hidden_layers": 26}),
    Case("mixtral", GLM | _SMALL | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
                                    "num_hidden_layers": 8}),
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, imatrix.Imatrix]]:
    """Each case's file, and an importance matrix that has all its layers' matrices, as a file and read."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for case in CASES:
        path = case.write(folder)
        entries = {}
        for spec in from_config(case.config)[0]:
            if spec.name.startswith("blk.") and len(spec.shape) > 1:
                count = spec.shape[0] if len(spec.shape) == 3 else 1
                values, counts = np.ones((count, spec.shape[-1]), np.float32), np.ones(count, np.int64)
                entries[spec.name] = imatrix.Entry(values, counts, 1)
        matrix = imatrix.Imatrix(entries, 1, "ones")
        imatrix.write(path.with_suffix(".dat"), matrix)
        found[case.name] = (path, path.with_suffix(".dat"), matrix)
    return found


@pytest.mark.parametrize("file_type", MIXED)
def test_mix(file_type: str, models: dict[str, tuple[Path, Path, imatrix.Imatrix]]) -> None:
    for name, (path, file, matrix) in models.items():
        if file_type not in NEED_A_MATRIX and name not in ("qwen3-tied", "deepseek2-joint"):
            plain = our_plan(path, file_type, ignore_imatrix_rules=True)
            assert not differences(plain, reference_plan(path, file_type, "--ignore-imatrix-rules")), name
        theirs = reference_plan(path, file_type, "--imatrix", str(file))
        assert not differences(our_plan(path, file_type, matrix=matrix), theirs), name


@pytest.mark.parametrize("case", FURTHER, ids=lambda case: case.name)
def test_mix_of_further_models(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    for file_type in ("Q4_K_M", "Q3_K_M", "IQ2_K", "IQ3_XXS", "IQ3_KL", "IQ2_KS", "IQ4_KS_R4"):
        plain = our_plan(path, file_type, ignore_imatrix_rules=True)
        assert len(plain) > 60
        assert not differences(plain, reference_plan(path, file_type, "--ignore-imatrix-rules")), file_type


RULES = [
    r"blk\.\d+\.attn_k_b\.weight=q4_0,attn_.*_a=q8_0,ffn_down_exps=iq5_k,_shexp=q6_0,.*=iq4_k",
    r"blk\.(?:[0-9]|1[0-5])\.ffn_(?!down).*=q4_1,attn_(q|k|v)=iq6_k,token_embd=iq4_k_r4",
    "few := 0-3,11\nblk.{${few}}.ffn_down.*=q6_K  # the shorthand, as it is printed for other tools\n.*=iq4_ks",
]


@pytest.mark.parametrize("text", RULES)
def test_rules(text: str, models: dict[str, tuple[Path, Path, imatrix.Imatrix]]) -> None:
    for name, (path, *_) in models.items():
        theirs = reference_plan(path, "Q4_K_S", "--custom-q", parse(text).one_line())
        assert not differences(our_plan(path, "Q4_K_S", text), theirs), name
