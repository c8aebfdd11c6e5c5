"""A real model against figures and files of the reference's own tools.

Tolerances: the reference rounds activations to f16 on the way (its own logits differ from transformers by 0.018), so
running perplexities agree to 0.1 %; its importance matrix likewise to 0.5 %. Of a base file the codes are exact to 24
nats / 65535, so the KLD of the same model against it is that rounding's.
"""

from __future__ import annotations

import math
import shutil
import subprocess

import numpy as np
import pytest

from quantkit.evaluate import divergence
from quantkit.evaluate.imatrix import collect as collect_imatrix
from quantkit.evaluate.perplexity import perplexity_of_chunks
from quantkit.evaluate.text import chunked
from quantkit.formats import gguf
from quantkit.formats import imatrix as files
from quantkit.formats.kld.base_file import BaseReader
from quantkit.runtime.loading import load


@pytest.fixture(scope="module")
def collected(golden, f16_model):
    """Importance matrix, perplexity, and its running values."""
    model = load(f16_model)
    running: list[float] = []
    found, ppl = collect_imatrix.collect(
        model, chunked(model.tokenizer, golden / "eval.txt"), on_chunk=lambda i, p: running.append(p.value)
    )
    return found, ppl, running


@pytest.mark.slow
def test_importance_matrix_and_running_perplexity_are_the_reference_s(golden, golden_ppl, collected, tmp_path):
    found, ppl, running = collected
    np.testing.assert_allclose(running, golden_ppl, rtol=1e-3)
    assert ppl is not None
    assert f"{ppl.error:.2f}" == "0.51"  # golden: 0.50527

    files.write(tmp_path / "ours.dat", found)
    ours, theirs = files.read(tmp_path / "ours.dat"), files.read(golden / "smollm2-135m-f16.imatrix.dat")
    assert set(ours.entries) == set(theirs.entries)
    assert ours.chunks == theirs.chunks
    for name, entry in theirs.entries.items():
        rms = math.sqrt(np.mean((ours[name].values - entry.values) ** 2) / np.mean(entry.values**2))
        assert rms < 0.005, (name, rms)


@pytest.mark.full
def test_the_reference_quantizes_alike_with_our_matrix_and_golden_s(golden, f16_model, collected, tmp_path):
    """Fewer than 1% of the bytes of its file differ."""
    pytest.importorskip("ik_llama_cpp", reason="the reference wheel is not installed")
    from tests.conformance.ggml import QUANTIZE_TOOL

    files.write(tmp_path / "ours.dat", collected[0])
    shutil.copyfile(golden / "smollm2-135m-f16.imatrix.dat", tmp_path / "golden.dat")
    made = {}
    for name in ("ours", "golden"):
        command = [QUANTIZE_TOOL, "--imatrix", f"{name}.dat", f16_model, f"{name}.gguf", "IQ4_NL", "2"]
        subprocess.run(list(map(str, command)), cwd=tmp_path, check=True, capture_output=True)
        made[name] = gguf.open(tmp_path / f"{name}.gguf").tensors
    differ = sum(np.count_nonzero(t.data != made["golden"][name].data) for name, t in made["ours"].items())
    assert 0 < differ < 0.01 * sum(t.nbytes for t in made["ours"].values())


def test_the_same_model_read_against_golden_s_base(golden, f16_model):
    found = divergence.divergence_from_base(load(f16_model), BaseReader(golden / "smollm2-135m-f16.c64.kld"))
    assert abs(found.ppl_base.value - 30.5198) < 6e-4  # a code's rounding, 31 times
    assert abs(found.ppl.value / 30.5198 - 1) < 1e-3
    assert abs(found.mean_kld.value) < 1e-4
    assert found.same_top.all()


def test_q8_0_diverges_less_than_in_the_reference(golden, q8_0_model):
    found = divergence.divergence_from_base(load(q8_0_model), BaseReader(golden / "smollm2-135m-f16.c64.kld"))
    assert 0 < found.mean_kld.value < 0.00375  # what the reference's own kernels make of the same weights
    assert abs(found.ppl.value / 30.7851 - 1) < 0.02
    assert found.top_agreement.value >= 0.96774


@pytest.mark.slow
def test_q4_1_as_shipped_is_as_good_as_its_f16_form(golden, golden_ppl, smollm2_q4_1):
    """The reference gives 46.9446 here: on CPUs without VNNI its Q4_1 product is broken."""
    model = load(smollm2_q4_1)
    found = perplexity_of_chunks(model, chunked(model.tokenizer, golden / "eval.txt", limit=4))
    assert abs(found.value / golden_ppl[3] - 1) < 0.01
