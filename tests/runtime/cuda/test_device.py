"""The host's part: errors without a GPU, packing of parameters, and products on a GPU where there is one."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import struct
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError, QuantkitError, UnsupportedError
from quantkit.runtime.kernels.cuda import device, driver
from quantkit.runtime.kernels.cuda.device import Gpu, Matrices


@pytest.fixture
def gpu() -> Gpu:
    try:
        return Gpu()
    except UnsupportedError as error:
        pytest.skip(f"needs a GPU: {error}")


def no_driver() -> Any:
    raise UnsupportedError("no CUDA GPU: the NVIDIA driver is not installed (libcuda.so.1 is not found)")


def test_no_driver_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr(driver, "library", no_driver)
    with pytest.raises(UnsupportedError) as caught:
        Gpu()
    assert "driver is not installed" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_driver_that_is_not_there(monkeypatch) -> None:
    driver.library.cache_clear()

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    try:
        with pytest.raises(
            UnsupportedError, match=r"driver is not installed \(libcuda.so.1 is not found\); install an NVIDIA driver"
        ):
            driver.library()
    finally:
        driver.library.cache_clear()


def test_missing_packages(monkeypatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba_cuda" else original(name))
    with pytest.raises(UnsupportedError, match=r"numba_cuda cannot be imported; install .*quantkit\[cuda\]"):
        Gpu()


def test_a_torch_without_cuda(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(driver, "library", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match="is built without CUDA; install an NVIDIA driver"):
        Gpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="finds none; install an NVIDIA driver"):
        Gpu()


def test_a_gpu_that_is_not_there_or_too_old(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(device, "torch_with_cuda", lambda: torch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UnsupportedError, match="number 2: there are 2, counted from 0"):
        Gpu(2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(UnsupportedError, match=r"Tesla T4 has compute capability 7.5; kernels need 8.0"):
        Gpu(0)


def packed(kinds: list[str], arguments: list[Any]) -> bytes:
    parameters = driver.Parameters(kinds)
    return parameters.packer.pack(*parameters.values(arguments))


def test_parameters() -> None:
    """An array argument is seven fields of eight bytes; a number is in the low bytes of its field."""
    fields = packed(["u16[]", "i32", "f32", "i64"], [(4096, 12), -3, 1.5, 1 << 40])
    assert struct.unpack("<7q", fields[:56]) == (0, 0, 12, 2, 4096, 12, 2)
    assert struct.unpack_from("<i", fields, 56) == (-3,)
    assert struct.unpack_from("<f", fields, 64) == (1.5,)
    assert struct.unpack_from("<q", fields, 72) == (1 << 40,)
    with pytest.raises(TypeError, match="1 arguments for the parameters i32 f32"):
        packed(["i32", "f32"], [1])


def test_parameters_are_those_of_the_compiled_kernel() -> None:
    """As many as PTX declares, of the sizes that `slots` gives them."""
    from quantkit.runtime.kernels.cuda import elementwise

    kernel = elementwise.rms_norm()  # f32[] f32[] i32 f32 f32[]
    declared = kernel.ptx((8, 0)).split(".visible .entry ", 1)[1].split(")", 1)[0]
    widths = [line.split(".param .")[1][:3] for line in declared.splitlines() if ".param ." in line]
    assert (
        widths == ["u64"] * 14 + ["u32", "f32"] + ["u64"] * 7 or widths == ["u64"] * 14 + ["b32", "b32"] + ["u64"] * 7
    )
    assert kernel.packed.packer.size == 8 * len(widths)


def test_a_failing_call_is_an_error(monkeypatch) -> None:
    class Driver:
        def cuModuleLoadData(self, *_: Any) -> int:
            return 209

        def cuGetErrorString(self, status: int, text: Any) -> int:
            text._obj.value = b"no kernel image is available"
            return 0

    monkeypatch.setattr(driver, "library", Driver)
    with pytest.raises(QuantkitError, match="cuModuleLoadData failed with 209: no kernel image is available"):
        driver.load(b"")


class OnCpu:
    """A Gpu whose tensors are on the CPU and whose decoded tiles are numpy's: the host's grouping and tiling alone."""

    import torch

    torch_device = torch.device("cpu")
    array, empty, matrices = Gpu.array, Gpu.empty, Gpu.matrices

    def multiply_bfloats(self, a: Any, b: Any) -> Any:
        return self.torch.matmul(a, b).float()


def on_cpu(monkeypatch, name: str, count: int, rows: int, n: int) -> tuple[Any, np.ndarray]:
    """Matrices, and their values float32[count, rows, n]."""
    kind = types.get(name)
    values = np.random.default_rng(0).standard_normal((count * rows, n)).astype(np.float32)
    data = kind.quantize(values)
    plain = kind.dequantize(data, n).reshape(count, rows, n)

    def decoded(self: Any, start: int = 0, stop: int | None = None, matrix: int = 0) -> Any:
        return OnCpu.torch.from_numpy(plain[matrix, start:stop].copy()).bfloat16()

    monkeypatch.setattr(Matrices, "decoded", decoded)
    monkeypatch.setattr(device, "TILE_ELEMENTS", 16 * n)
    return OnCpu().matrices(data, kind, rows, n), plain  # type: ignore[attr-defined]


def test_batches_go_by_tiles(monkeypatch) -> None:
    matrices, plain = on_cpu(monkeypatch, "q8_0", 1, 40, 64)
    x = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
    np.testing.assert_allclose(matrices(OnCpu.torch.from_numpy(x)).numpy(), x @ plain[0].T, atol=0.3)


@pytest.mark.parametrize("each", [False, True])
def test_batches_go_by_experts(monkeypatch, each: bool) -> None:
    """Every slot by its own matrix, of the token's row or of a row for each slot; some experts are not chosen, and
    some slots left out."""
    matrices, plain = on_cpu(monkeypatch, "q8_0", 5, 24, 32)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((10, 2, 32) if each else (10, 32)).astype(np.float32)
    ids = np.array([[0, 4], [4, 2], [-1, 2], [0, -1], [-1, -1]] * 2, np.int32)
    out = matrices.of_experts(OnCpu.torch.from_numpy(x), OnCpu.torch.from_numpy(ids)).numpy()
    for t in range(10):
        for j in range(2):
            row = x[t, j] if each else x[t]
            right = plain[ids[t, j]] @ row if ids[t, j] >= 0 else np.zeros(24)
            np.testing.assert_allclose(out[t, j], right, atol=0.2)


def test_matrices_that_do_not_fit() -> None:
    data = OnCpu.torch.zeros(100, dtype=OnCpu.torch.uint8)
    with pytest.raises(DataError, match="100 bytes are not whole matrices of 4 x 32 in q8_0, 136 bytes each"):
        Matrices(OnCpu(), data, types.get("q8_0"), 4, 32)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="6 rows of q4_0_r8, which interleaves 8"):
        Matrices(OnCpu(), data, types.get("q4_0_r8"), 6, 32)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="no CUDA kernels for q8_1"):
        Matrices(OnCpu(), data, types.layout("q8_1"), 6, 32)  # type: ignore[arg-type]


def test_tensors_that_a_kernel_cannot_read() -> None:
    from quantkit.runtime.kernels.cuda import elementwise

    class Cpu(OnCpu):
        launch = Gpu.launch

    x = OnCpu.torch.zeros(4, 6).T
    with pytest.raises(TypeError, match="add: a tensor on cpu is not a contiguous one on cpu"):
        Cpu().launch(elementwise.add(), 1, 32, x, x, 4, 24)  # type: ignore[misc]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
@pytest.mark.parametrize("name", ["q4_K", "iq4_k", "q8_0", "iq2_k", "iq4_k_r4", "bf16"])
def test_products_on_a_gpu(gpu: Gpu, name: str, tokens: int) -> None:
    kind = types.get(name)
    rng = np.random.default_rng(0)
    data = kind.quantize(rng.standard_normal((72, 512)).astype(np.float32))
    x = rng.standard_normal((tokens, 512)).astype(np.float32)
    result = gpu.matrices(data, kind, 72, 512)(gpu.array(x)).cpu().numpy()
    right = x @ kind.dequantize(data, 512, products=True).T
    assert np.sqrt(np.mean((result - right) ** 2) / np.mean(right**2)) < 0.01


@pytest.mark.gpu
def test_a_graph_reads_changed_tensors(gpu: Gpu) -> None:
    kind = types.get("q4_K")
    matrices = gpu.matrices(kind.quantize(np.ones((16, 256), np.float32)), kind, 16, 256)
    x, out = gpu.empty(1, 256), gpu.empty(1, 16)
    x.fill_(1)
    graph = gpu.capture(lambda: out.copy_(matrices(x)))
    for value in (1.0, 2.0):
        x.fill_(value)
        graph.replay()
        np.testing.assert_allclose(out.cpu().numpy(), 256 * value, rtol=0.02)


def test_the_bench_without_a_gpu_says_so() -> None:
    import subprocess
    from pathlib import Path

    bench = Path(__file__).parents[3] / "benchmarks" / "bench_gpu.py"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(bench)], env=environment, capture_output=True, text=True, check=False, cwd=bench.parents[1]
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("bench-gpu: no CUDA GPU: ")


def test_nothing_heavy_is_loaded() -> None:
    import subprocess

    code = "import sys; import quantkit.runtime.kernels.cuda.device; print({'numba', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_a_launch_gives_the_driver_what_it_reads(monkeypatch) -> None:
    """Grid, block, stream, and the parameters by their addresses."""
    seen: list[Any] = []

    class Driver:
        def cuModuleLoadData(self, *_: Any) -> int:
            return 0

        def cuModuleGetFunction(self, *_: Any) -> int:
            return 0

        def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:
            assert extra is None
            sizes, (stream, attributes) = struct.unpack_from("<7I", config), struct.unpack_from("<2Q", config, 32)
            assert (attributes, *struct.unpack_from("<I", config, 48), len(config)) == (0, 0, 56)
            array = [ctypes.c_int64.from_address(pointers[i]).value for i in range(7)]
            others = ctypes.c_float.from_address(pointers[7]).value, ctypes.c_int.from_address(pointers[8]).value
            seen.append((list(sizes), stream, array, others))
            return 0

    monkeypatch.setattr(driver, "library", Driver)
    function = driver.Function(b"", "entry", driver.Parameters(["f32[]", "f32", "i32"]))
    function.launch((5, 2), 64, 77, function.parameters.values([(4096, 12), 1.5, -3]))
    assert seen == [([5, 2, 1, 64, 1, 1, 0], 77, [0, 0, 12, 4, 4096, 12, 4], (1.5, -3))]


class Lifetimes:
    """A GPU that keeps nothing: `alive` says which of the tensors that it gave are still held."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[Any]] = []

    def pinned(self, nbytes: int) -> Any:
        return self.zeros((nbytes,), "uint8")

    def zeros(self, shape: tuple[int, ...], kind: str) -> Any:
        import torch

        tensor = torch.zeros(shape, dtype=getattr(torch, kind))
        self.given.append(weakref.ref(tensor))
        return tensor

    def event(self) -> Any:
        return None

    def capture(self, step: Callable[[], None]) -> Any:
        step()

    def alive(self) -> list[bool]:
        gc.collect()
        return [ref() is not None for ref in self.given]


def test_a_graph_of_an_embedding_keeps_its_memory() -> None:
    """A graph holds addresses only: memory that was freed would be another tensor's at the next replay."""
    from quantkit.runtime.cuda.cuda_graph import CapturedEmbedding

    gpu: Any = Lifetimes()
    embedding = CapturedEmbedding(gpu, 34, lambda row: row.float()[None])
    assert gpu.alive() == [True, True]
    del embedding
    assert gpu.alive() == [False, False]
