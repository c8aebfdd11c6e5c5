"""Predicted working memory against the buffers of loaded models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import jit
from quantkit.files import gguf
from quantkit.runtime import step, work_size
from quantkit.runtime.model import load
from tests.runtime.conftest import rewrite
from tests.runtime.test_experts import moe  # noqa: F401


def actual(path: Path, n_ctx: int, threads: int) -> int:
    """Of a model that has run a prompt and a token."""
    model = load(path, numerics="fast", threads=threads, n_ctx=n_ctx)
    cache = model.new_cache(n_ctx)
    model.forward(np.arange(5), cache)
    model.forward([7], cache)
    assert model._fast is not None, model.slow_because
    return model._fast.work_bytes


@pytest.mark.skipif(not jit.isa().startswith("avx512"), reason="tiles are those of AVX-512")
@pytest.mark.parametrize(
    ("which", "kind"),
    [("tiny", "q8_0"), ("moe", "q8_0")]
    + [
        pytest.param(which, kind, marks=pytest.mark.full)
        for which, kind in (("tiny", "iq4_k"), ("tiny", "f16"), ("moe", "iq4_k"), ("moe", "f16"),
                            ("smollm2_f16", "q8_0"), ("smollm2_f16", "q4_0"), ("smollm2_f16", "f16"))
    ],
)  # fmt: skip
def test_within_a_tenth(which: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = rewrite(request.getfixturevalue(which), tmp_path / "m.gguf", kind)
    file = gguf.open(path)
    for n_ctx, threads in ((64, 1), (100, 2)):
        predicted = work_size.work_bytes(file.tensors, file.metadata, n_ctx, threads)
        measured = actual(path, n_ctx, threads)
        print(which, kind, threads, predicted, measured)
        assert abs(predicted / measured - 1) < 0.1


def test_the_batch_is_the_runtime_s() -> None:
    assert work_size.BATCH == step.BATCH_TOKENS


def test_other_models_are_not_guessed(moe: Path) -> None:  # noqa: F811
    file = gguf.open(moe)
    tensors = {name: t for name, t in file.tensors.items() if name != "blk.1.attn_k.weight"}
    assert work_size.work_bytes(tensors, file.metadata, 64, 2) is None
