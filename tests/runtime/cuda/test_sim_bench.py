"""The bench of a GPU runs from end to end, on tiny shapes, so that it works when there is one."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_gpu
from tests.runtime.cuda.conftest import SIMULATED
from tests.runtime.cuda.simulated import by_torch, play

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def test_all_that_the_bench_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not SIMULATED:
        pytest.skip("runs in the simulator, by test_simulator.py")
    play(monkeypatch)
    by_torch(monkeypatch)
    status = bench_gpu.main(["--tiny", "--types", "q8_0", "--models", "q8_0"])
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])
    assert status == 0, out
    result = figures["types"]["q8_0"]
    assert result["exact"]
    assert 0 < result["exact_logits"] < 1e-4
    assert 0 < result["fast_logits"] < 0.05  # prompts are multiplied in bfloat16
    assert figures["models"]["q8_0"].keys() == {"pp", "tg", "bytes", "tg_of_copy", "pp_of_gemm"}
    ways = figures["experts"]
    assert list(ways) == ["CPU", "hybrid", "streamed", "GPU", "graph"]
    assert 0 == ways["CPU"]["to_gpu"] < ways["hybrid"]["to_gpu"] < ways["streamed"]["to_gpu"]
    assert all(way["error"] < 0.05 for way in ways.values())
