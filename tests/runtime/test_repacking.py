"""Repacking at load: which tensors, the same results, and the printed lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit.cli import main
from quantkit.pipelines.repack_file import plan_repack, write_repacked
from quantkit.runtime.kernels import dispatch
from quantkit.runtime.loading import load
from tests.runtime.conftest import LAYERS, rewrite

TOKENS = np.random.default_rng(6).integers(0, 320, 70)
MATRICES = 7 * LAYERS + 1  # of the blocks and the output; the embedding stays


@pytest.mark.parametrize("kind", ["iq4_k", "q4_0", "iq2_xxs", "iq4_ks", "bf16", "q6_0"])
def test_exact_results_are_the_same(tiny: Path, tmp_path: Path, kind: str) -> None:
    """Bit for bit: one token, a batch of several rows of panels, and sequences."""
    path = rewrite(tiny, tmp_path / "model.gguf", kind)
    plain, woven = load(path), load(path, repack=True)
    assert plain.repacked is None
    assert woven.repacked is not None
    assert len(woven.repacked) == MATRICES
    assert woven.weights["token_embd.weight"].type.name == kind
    assert woven.weights["blk.0.attn_q.weight"].type.interleave > 1
    np.testing.assert_array_equal(woven.logits(TOKENS), plain.logits(TOKENS))
    np.testing.assert_array_equal(woven.logits(TOKENS[:1]), plain.logits(TOKENS[:1]))


@pytest.mark.parametrize("kind", ["iq4_k", "iq2_xxs"])
def test_the_bytes_are_those_of_repack(tiny: Path, tmp_path: Path, kind: str) -> None:
    path = rewrite(tiny, tmp_path / "model.gguf", kind)
    write_repacked(plan_repack(quantkit.open(path)), tmp_path / "r4.gguf")
    expected, model = quantkit.open(tmp_path / "r4.gguf").tensors, load(path, repack=True, threads=2)
    for name, tensor in model.weights.items():
        assert tensor.type is expected[name].type, name
        np.testing.assert_array_equal(tensor.data, expected[name].data, err_msg=name)
    np.testing.assert_array_equal(load(tmp_path / "r4.gguf").logits(TOKENS), model.logits(TOKENS))


def test_what_would_lose_bits_or_has_no_form_stays(tiny: Path, tmp_path: Path) -> None:
    for kind in ("f16", "iq6_k", "q4_k_r4"):
        model = load(rewrite(tiny, tmp_path / f"{kind}.gguf", kind), repack=True)
        assert model.repacked is not None
        assert len(model.repacked) == 0
        assert model.weights["blk.0.attn_q.weight"].type.name == kind


def test_fast_numerics_run_repacked_tensors(tiny: Path, tmp_path: Path) -> None:
    path = rewrite(tiny, tmp_path / "model.gguf", "q8_0")
    model, expected = load(path, numerics="fast", repack=True), load(path).logits(TOKENS)
    assert model.fallback_reason is None
    assert model.repacked is not None
    assert not model.repacked.slower
    result = model.logits(TOKENS)
    assert np.sqrt(np.mean((result - expected) ** 2)) < 0.05 * expected.std()


def test_commands_say_what_was_repacked(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(rewrite(tiny, tmp_path / "model.gguf", "q8_0"))
    flags = ["-p", "4", "-n", "2", "-r", "1", "-rtr", "--json", "--cpu-moe", "-ot", "attn_v=cpu", "-ot", "output=CPU"]
    assert main(["bench", path, *flags]) == 0
    message = capsys.readouterr()
    assert [row["repacked"] for row in json.loads(message.out)["runs"]] == [MATRICES, MATRICES]
    assert f"repacked {MATRICES} tensors, " in message.err
    assert "warning: --cpu-moe decides no tensor" in message.err
    assert "-ot" not in message.err
    assert main(["sweep-bench", path, "-c", "8", "-b", "4", "--run-time-repack"]) == 0
    assert f"repacked {MATRICES} tensors, " in capsys.readouterr().err
    assert main(["bench", path, "-ngl", "3", "--devices", "cpu=8GiB"]) == 1
    assert "-ngl 3: there is no GPU device" in capsys.readouterr().err


def test_a_form_without_a_fast_kernel_is_told(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    product = dispatch.product
    monkeypatch.setattr(dispatch, "product", lambda kind: None if kind.interleave > 1 else product(kind))
    path = str(rewrite(tiny, tmp_path / "model.gguf", "q8_0"))
    arguments = ["bench", path, "-p", "2", "-n", "1", "-r", "1", "-rtr"]
    assert main(arguments) == 0
    expected = f"warning: -rtr makes {MATRICES} tensors slower: q8_0_r8 has no fast kernel here, q8_0 has one"
    assert expected in capsys.readouterr().err
    assert main([*arguments, "--numerics", "exact"]) == 0
    assert "slower" not in capsys.readouterr().err
