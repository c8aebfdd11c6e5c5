"""The bench of a GPU runs from end to end, on tiny shapes, so that it works when there is one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_gpu, synthetic
from benchmarks.gpu import hybrid, profile, trace
from quantkit.archs.common import blocks
from quantkit.runtime.blocks import experts
from quantkit.runtime.loading import load
from tests.runtime.cuda.conftest import SIMULATED
from tests.runtime.cuda.simulated import by_torch, play

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def one_cpu() -> Iterator[None]:
    """The simulator's threads take turns: on one CPU in half the time."""
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(available)[os.getpid() % len(available)]})
    yield
    os.sched_setaffinity(0, available)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The figures of a dry run, which must succeed."""
    if not SIMULATED:
        pytest.skip("runs in the simulator, by test_simulator.py")
    play(monkeypatch)
    by_torch(monkeypatch)
    status = bench_gpu.main(["--tiny", *arguments])
    out = capsys.readouterr().out
    assert status == 0, out
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert "left_out" not in figures
    return figures


def test_rates_and_types(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    figures = run(monkeypatch, capsys, "--stage", "rates,kernels,types", "--json", str(file))
    assert json.loads(file.read_text(encoding="utf-8")) == figures
    rates = figures["rates"]
    assert list(rates) == ["copy", "bus", "gemm", "torch bf16", "torch int4", "triton int4", "quantkit q4_0"]
    assert rates["torch bf16"]["of_copy"] == rates["torch bf16"]["bytes_rate"] / figures["copy"]
    assert "unavailable" in rates["triton int4"]  # which needs a GPU
    result = figures["types"]["q8_0"]
    assert result["exact"]
    assert result["right"]
    assert 0 < result["exact_logits"] < 1e-4
    assert 0 < result["fast_logits"] < 0.05  # prompts are multiplied in bfloat16
    assert figures["kernels"]["q8_0"].keys() == {"bytes_rate", "of_copy", "batch_rate", "of_gemm"} < result.keys()


def test_models_and_their_profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(monkeypatch, capsys, "--stage", "models,profile,threads")
    model = figures["models"]["q8_0"]
    assert model.keys() == {"pp", "tg", "bytes", "tg_of_copy", "pp_of_gemm", "token", "prompt"}
    assert model["token"]["gpu"] is None  # the profiler sees no GPU here
    assert min(model["token"]["host"], model["prompt"]["host"]) > 0
    assert list(figures["profile"]) == ["q8_0, token", "q8_0, prompt", "q8_0, ncu"]
    assert "--profile-from-start off" in figures["profile"]["q8_0, ncu"]["command"]
    threads = figures["threads"]["q8_0, 1"]
    assert min(threads["pp"], threads["tg"]) > 0


def test_experts_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(monkeypatch, capsys, "--stage", "hybrid,streamed")
    for name in ("deepseek2-dry, q8_0", "qwen3moe-dry, q8_0"):
        beside, streamed = figures["hybrid"][name], figures["streamed"][name]
        assert beside["error"] < 0.05
        assert 0 < beside["experts_error"] < 0.05
        assert streamed["error"] < 0.05
        assert beside["rest"] > 0
        assert beside["of_longer_part"] == beside["step"] / max(beside["cpu"], beside["rest"])
        assert streamed["bytes"] > 3 * 2 * 34 * 64 // 32 * 32  # of two experts at least
        assert streamed["of_bus"] == streamed["bytes_rate"] / figures["bus"]


@pytest.mark.parametrize("shape", ["deepseek2-dry", "qwen3moe-dry"])
def test_wrong_experts_are_found(shape: str, tmp_path: Path) -> None:
    """One of a token's experts left out, or taken for its neighbour, by the error that the stage `hybrid` allows."""
    model, rng = load(synthetic.write(shape, "q8_0", tmp_path / "m.gguf")), np.random.default_rng(3)
    part = next(part for block in model.blocks for part in block.parts if isinstance(part, blocks.Experts))
    router = model.weights[part.router.weight].dequantize()
    for _ in range(8):
        x = rng.standard_normal((1, model.hparams.n_embd), np.float32)
        chosen, weights = experts.route(part, x @ router.T)
        left_out, mistaken = np.array(weights), (chosen + np.eye(1, part.used, dtype=int)) % part.count
        left_out[:, 0] = 0
        found = []
        for numbers, shares in ((chosen, weights), (chosen, left_out), (mistaken, weights)):
            out = experts.run(part, model.weights, x, numbers, shares, 1)
            call = hybrid.Call(SimpleNamespace(part=part), (x, numbers, shares), out)  # type: ignore[arg-type]
            found.append(call.error(model))
        assert found[0] == 0
        assert min(found[1:]) > hybrid.ONE_TOLERANCE


def test_a_failure_and_a_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What fails is named and makes the status 1; what the limit leaves out is named."""
    if not SIMULATED:
        pytest.skip("runs in the simulator, by test_simulator.py")
    play(monkeypatch)
    file = tmp_path / "figures.json"
    assert bench_gpu.main(["--tiny", "--stage", "kernels", "--types", "q9,q8_0", "--json", str(file)]) == 1
    figures = json.loads(file.read_text(encoding="utf-8"))["kernels"]
    assert "q9" in figures["q9"]["failed"]
    assert figures["q8_0"]["bytes_rate"] > 0
    options = ["--tiny", "--stage", "kernels", "--types", "q8_0", "--limit", "0", "--json", str(file)]
    assert bench_gpu.main(options) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["left_out"] == {"kernels": ["q8_0"]}
    with pytest.raises(SystemExit):
        bench_gpu.main(["--stage", "experts"])
    assert "no stage experts" in capsys.readouterr().err


def test_what_the_profiler_says() -> None:
    """Overlapping kernels count once as time of the GPU; waiting is not time of the host."""

    def event(name: str, device: str, begin: float, end: float) -> Any:
        return SimpleNamespace(
            name=name, device_type=SimpleNamespace(name=device), time_range=SimpleNamespace(start=begin, end=end)
        )

    events = [
        event("a", "CUDA", 10, 30), event("b", "CUDA", 20, 50), event("a", "CUDA", 60, 70),
        event("cudaLaunchKernel", "CPU", 0, 5), event("cudaStreamSynchronize", "CPU", 40, 75),
        event("cudaMemcpyAsync", "CPU", 70, 80),
    ]  # fmt: skip
    found = trace.of_events(events, 1e-4)
    assert found.gpu == pytest.approx(50e-6)
    assert found.host == pytest.approx(60e-6)
    assert [(k["name"], k["launches"], round(1e6 * k["seconds"])) for k in profile.by_time(found)] == [
        ("a", 2, 30), ("b", 1, 30),
    ]  # fmt: skip
    assert trace.of_events(events[3:], 1e-4).gpu is None


def test_what_ncu_prints() -> None:
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    lines += [f'"{i}","a","gpu__time_duration.sum","ns","{value}"' for i, value in enumerate(("1,000", "3,000"))]
    lines += ['"0","a","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","40.5"']
    assert profile.of_csv("==PROF== Connected\n" + "\n".join(lines)) == [
        {"name": "a", "launches": 2, "ns": 2000, "% of DRAM": 40.5}
    ]
    assert profile.of_csv("==ERROR== no permission") == []
