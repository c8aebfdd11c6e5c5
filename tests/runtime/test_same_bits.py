"""Fast numerics give the same logits, bit by bit, whatever instructions the CPU has.

So the tokens that a model writes do not depend on the machine. Models whose matrices are of many types run here and in
processes whose kernels are compiled for simpler CPUs, and hashes of their logits are compared.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.codegen import cpu_target
from quantkit.formats import gguf
from quantkit.runtime.kernels.cpu.dequantize import FLOAT_TYPES
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.other_cpus import CPUS, environment_of, next_simpler
from tests.runtime.conftest import rewrite
from tests.runtime.test_experts import moe as moe  # a fixture
from tests.runtime.test_latent import latent_model

SOME = ("q6_K", "q8_0", "iq4_k_r4", "bf16")  # those of test_kernels.py on other CPUs, which are compiled once
PATHS = [path if path == next_simpler() else pytest.param(path, marks=pytest.mark.full) for path in CPUS]
TOKENS = np.random.default_rng(4).integers(0, 320, 40)


def digests(paths: list[str]) -> list[str]:
    """Of each model: a hash of the logits of a prompt, and of those of tokens that follow it one by one."""
    result = []
    for path in paths:
        model = load(path, numerics="fast", threads=2)
        assert model.fallback_reason is None
        cache = model.new_cache(64)
        prompt = model.forward(TOKENS, cache)
        tokens = np.concatenate([model.forward([token], cache) for token in TOKENS[:8]])
        assert np.isfinite(prompt).all()
        assert np.isfinite(tokens).all()
        result += [hashlib.sha256(logits.tobytes()).hexdigest() for logits in (prompt, tokens)]
    return result


def of_types(source: Path, target: Path, kinds: Sequence[str]) -> Path:
    """A copy of a model, one matrix after another in one of these types."""
    matrices = [t.name for t in gguf.open(source).tensors.values() if len(t.shape) > 1 and "gate_inp" not in t.name]
    return rewrite(source, target, "f32", **{name: kinds[i % len(kinds)] for i, name in enumerate(matrices)})


def check(paths: list[Path], isa: str) -> None:
    names = list(map(str, paths))
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.test_same_bits", *names], env=environment_of(isa), text=True,
        cwd=Path(__file__).parents[2], capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ran_as, theirs = json.loads(done.stdout)
    assert ran_as == isa
    assert theirs == digests(names)


@pytest.mark.parametrize("isa", PATHS)
def test_a_few_types(isa: str, tiny: Path, moe: Path, tmp_path: Path) -> None:
    hybrid = written(tmp_path / "hybrid.gguf", "qwen35moe", hidden_size=96, linear_value_head_dim=48)
    paths = [of_types(tiny, tmp_path / "a.gguf", SOME), of_types(moe, tmp_path / "b.gguf", SOME[1:2])]
    latent = of_types(latent_model(tmp_path / "latent.gguf"), tmp_path / "d.gguf", SOME[1:2])
    check([*paths, of_types(hybrid, tmp_path / "c.gguf", ("q8_0",)), latent], isa)


@pytest.mark.parametrize("isa", PATHS)
def test_features_of_architectures(isa: str, tmp_path: Path) -> None:
    """Each operation that some architectures need, over weights of Q8_0; heads are alike, to compile them once."""
    paths = []
    for name in ("gpt-oss", "gemma3", "gemma3n", "gemma4", "hunyuan-moe", "minimax-m2", "mistral3", "bitnet-b1.58"):
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1} if name == "bitnet-b1.58" else {"head_dim": 32}
        source = written(tmp_path / f"{name}-f32.gguf", name, **heads)
        paths.append(rewrite(source, tmp_path / f"{name}.gguf", "q8_0"))
    paths.append(written(tmp_path / "heads.gguf", "llama", head_dim=40, num_key_value_heads=1))
    paths.append(written(tmp_path / "entries.gguf", "deepseek4", index_topk=5))
    paths.append(written(tmp_path / "blocks.gguf", "qwen4exp", indexer_budget=8))
    check(paths, isa)


@pytest.mark.full
@pytest.mark.parametrize("isa", CPUS)
def test_every_type(isa: str, tiny: Path, tmp_path: Path) -> None:
    numbers = [*FORMATS, *FLOAT_TYPES]
    kinds = [t.name for t in types.all() if t.ggml_type in numbers and types.layout(t.name).encode_rows is not None]
    assert len(kinds) > 40
    paths = [of_types(tiny, tmp_path / f"{i}.gguf", kinds[i : i + 14]) for i in range(0, len(kinds), 14)]
    check(paths, isa)


if __name__ == "__main__":
    print(json.dumps([cpu_target.isa(), digests(sys.argv[1:])]))
