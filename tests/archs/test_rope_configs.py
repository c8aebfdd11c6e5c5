"""RoPE settings of config.json, in every form and with omissions: the logits are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit.errors import UnsupportedError
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.export import export_gguf
from tests.archs.checkpoints import tiny

TOKENS = np.random.default_rng(4).integers(2, 320, 256)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SAID = ("rope_parameters", "rope_scaling", "rope_theta")
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def saved(directory: Path, arch: str, said: dict[str, Any], **config: Any) -> Path:
    """A checkpoint whose config.json has these RoPE settings and no others."""
    tiny(directory, arch=arch, **config)
    path = directory / "config.json"
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in SAID}
    path.write_text(json.dumps(kept | said))
    return directory


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def of_transformers(directory: Path) -> np.ndarray:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return log_probabilities(model(torch.tensor(TOKENS[None])).logits.numpy()[0])


@pytest.mark.parametrize(
    ("arch", "said", "config"),
    [
        ("llama", {"rope_scaling": YARN | {"attention_factor": 1.3}, "rope_theta": 1e4}, {}),
        ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}}, {}),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 8.0}}, {}),
        ("llama", {"rope_scaling": YARN | {"factor": None}}, {}),
        ("llama", {}, MIXTRAL),
        ("minimax-m2", {}, {}),
        ("bitnet-b1.58", {}, {}),
        pytest.param(
            "llama", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, {}, marks=pytest.mark.full
        ),
        pytest.param("smollm3", {}, {}, marks=pytest.mark.full),
        pytest.param("gpt-oss", {}, {}, marks=pytest.mark.full),
        pytest.param("ernie4_5", {}, {}, marks=pytest.mark.full),
        pytest.param("glm4moe", {"rope_parameters": YARN | {"attention_factor": 0.8}}, {}, marks=pytest.mark.full),
        pytest.param("mistral3", {"rope_parameters": YARN | {"attention_factor": 0.8, "rope_theta": 1e4,
                                                             "llama_4_scaling_beta": 0.1}}, {}, marks=pytest.mark.full),
        pytest.param("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                "high_freq_factor": 4.0}}, {}, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_what_config_says_of_rope(tmp_path: Path, arch: str, said: dict[str, Any], config: dict[str, Any]) -> None:
    saved(tmp_path / "hf", arch, said, **config)
    wanted = of_transformers(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    assert np.abs(log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(TOKENS)) - wanted).max() < 2e-3


def test_a_factor_of_attention_in_the_reference_and_back(tmp_path: Path) -> None:
    """The GGUF key multiplies the usual factor of YaRN, so that other runtimes compute the same; export undoes it."""
    said = {"rope_scaling": YARN | {"attention_factor": 1.3}, "rope_theta": 1e4}
    saved(tmp_path / "hf", "llama", said)
    wanted = of_transformers(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    export_gguf(tmp_path / "m.gguf", tmp_path / "back", "auto")
    scaling = json.loads((tmp_path / "back" / "config.json").read_text())["rope_scaling"]
    assert abs(scaling["attention_factor"] - 1.3) < 1e-6
    libllama = pytest.importorskip("tests.conformance.libllama")
    with libllama.Llama(tmp_path / "m.gguf", n_ctx=256, threads=1) as llama:
        assert np.abs(log_probabilities(llama.logits(TOKENS)) - wanted).max() < 0.05


@pytest.mark.parametrize(
    ("arch", "said", "match"),
    [
        ("bitnet-b1.58", {"rope_scaling": YARN}, "rope_type = 'yarn'"),
        ("deepseek2", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.3}},
         "attention_factor = 1.3"),
    ],
)  # fmt: skip
def test_what_files_cannot_say_is_refused(tmp_path: Path, arch: str, said: dict[str, Any], match: str) -> None:
    saved(tmp_path / "hf", arch, said)
    with pytest.raises(UnsupportedError, match=match):
        convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
