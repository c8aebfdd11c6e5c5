"""Options that a GPU cannot serve are errors before a model is read. No kernel runs in these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import DataError, QuantkitError, UnsupportedError
from quantkit.placement.devices import parse_devices
from quantkit.runtime.cuda import gpu_worker
from quantkit.runtime.kernels.cuda import driver
from quantkit.runtime.loading import load
from tests.runtime.conftest import rewrite
from tests.runtime.cuda.simulated import SimulatedGpu, play


def test_without_a_driver(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError(f"no CUDA GPU: the NVIDIA driver is not installed; {driver.REMEDY}")

    monkeypatch.setattr(driver, "library", missing)
    gpu_worker.gpu.cache_clear()
    for devices in ("cuda:0", "cuda:0=24GiB"):
        with pytest.raises(UnsupportedError, match=r"^no CUDA GPU: .*pip install 'quantkit\[cuda\]'") as raised:
            load(tiny, devices=devices)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [({"devices": "cuda:7"}, "no CUDA GPU number 7: there are 2"),
     ({"devices": "cuda:0,cuda:1", "split_mode": "graph", "cache_type": "f16 khad"}, "CUDA0: caches on a GPU"),
     ({"devices": "cuda:0,cuda:1", "split_mode": "graph", "kv_on_cpu": True}, "-nkvo: with -sm graph"),
     ({"cache_type": "q4_0"}, "no CUDA kernel writes a cache of q4_0; use f32, f16, bf16 or q8_0"),
     ({"cache_type": "f16 khad"}, "CUDA0: caches on a GPU are not rotated .*[(]-nkvo"),
     ({"devices": "cuda:0=1MiB"}, r"CUDA0.*-c|CUDA0.*memory")],
)  # fmt: skip
def test_what_cannot_be(how: dict[str, Any], message: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    with pytest.raises(QuantkitError, match=message):
        load(tiny, **{"devices": "cuda:0", **how})


def test_caches_that_a_gpu_cannot_have_stay_on_the_cpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    model = load(tiny, devices="cuda:0", kv_on_cpu=True, cache_type="q4_0 khad")
    cache: Any = model.new_cache(8)
    assert {name for name, part in cache.parts.items() if part.nbytes} == {"CPU"}
    with pytest.raises(UnsupportedError, match="writes a cache of q4_0"):
        load(tiny, devices="cuda:0").new_cache(8, "q4_0")
    output = load(tiny, devices="cuda:0", gpu_layers=0, override_tensor="output=CUDA0")
    assert output.new_cache(8, "q4_0").nbytes > 0


def test_types_that_have_no_kernels(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    path = rewrite(tiny, tmp_path / "model.gguf", "f16", ffn_up="q8_0")
    monkeypatch.setattr(gpu_worker, "product", lambda kind: "" if kind.name == "q8_0" else "float")
    with pytest.raises(UnsupportedError, match=r"blk.0.ffn_up.weight is q8_0, for which CUDA0 has no kernels") as e:
        load(path, devices="cuda:0")
    assert r"-ot '^blk\.0\.ffn_up\.weight$=CPU'" in str(e.value)
    load(path, devices="cuda:0", override_tensor="ffn_up=CPU")


def test_memory_that_is_free_is_what_a_gpu_has(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    monkeypatch.setattr(SimulatedGpu, "memory", 1 << 20)
    (_, result) = map(gpu_worker.with_memory, parse_devices("cuda:0"))
    assert result.memory == 1 << 20
    assert gpu_worker.with_memory(parse_devices("cuda:0=2GiB")[1]).memory == 2 << 30
    with pytest.raises(DataError, match="CUDA0"):
        load(tiny, devices="cuda:0")
