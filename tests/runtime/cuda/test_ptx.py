"""All CUDA kernels compile, without a GPU: to PTX for three generations, and to machine code without spills."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from quantkit import types
from quantkit.runtime.kernels.cuda import attention, kernels, weights
from quantkit.runtime.kernels.cuda.dispatch import product
from quantkit.runtime.kernels.cuda.kernel import CudaKernel, entry_of, link
from tests.runtime.cuda.conftest import SIMULATED

TARGETS = ((8, 0), (9, 0), (12, 0))
if SIMULATED:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

OF_TYPES = list(kernels.of_types().items())
NOT_OF_A_TYPE = list(kernels.not_of_a_type())


def check(kernel: CudaKernel, target: tuple[int, int]) -> None:
    ptx = kernel.ptx(target)
    assert f".target sm_{target[0]}{target[1]}" in ptx
    assert entry_of(ptx) in ptx
    assert ".local " not in ptx, "what is in arrays of a thread has not become registers"


@pytest.mark.parametrize("place", range(len(OF_TYPES)), ids=[name for name, _ in OF_TYPES])
def test_a_kernel_of_each_type_compiles(place: int) -> None:
    """The product with a vector of every second type, the decoder of the others; the three targets alternate."""
    expected = "matvec", "_1"
    if place % 2:
        expected = "dequantize", "_bf16"
    made = kernels.of_type(OF_TYPES[place][1])
    check(next(k for k in made if k.name.startswith(expected[0]) and k.name.endswith(expected[1])), TARGETS[place % 3])


# Attention takes two seconds to compile: one of two of its kinds; all are with -m full.
QUICK = [k for i, k in enumerate(NOT_OF_A_TYPE) if i % 2 == 0 or not k.name.startswith("attend")]


@pytest.mark.parametrize("place", range(len(QUICK)), ids=[kernel.name for kernel in QUICK])
def test_other_kernels_compile(place: int) -> None:
    check(QUICK[place], TARGETS[place % 3])


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", kernels.of_types())
def test_all_kernels_of_a_type_compile(name: str, target: tuple[int, int]) -> None:
    for kernel in kernels.of_type(kernels.of_types()[name]):
        check(kernel, target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", NOT_OF_A_TYPE, ids=lambda kernel: kernel.name)
def test_all_other_kernels_compile(kernel: CudaKernel, target: tuple[int, int]) -> None:
    check(kernel, target)


@pytest.mark.parametrize("name", ["q4_K", "iq2_k"])
def test_machine_code_spills_nothing(name: str) -> None:
    """And 16 bytes are loaded at once where a block's size allows it, as q4_K's 144 bytes do."""
    kernel = next(k for k in kernels.of_type(kernels.of_types()[name]) if k.name.startswith("matvec"))
    ptx = kernel.ptx((9, 0))
    code, message = link(ptx, (9, 0))
    assert code.startswith(b"\x7fELF")
    assert re.search(r"\b0 bytes spill stores", message), message
    assert ("ld.global.nc.v4" in ptx) is (name == "q4_K")
    assert ptx.count("dp4a.s32.s32") == 16 * weights.split_of(kernels.of_types()[name], 1).rows


@pytest.mark.parametrize(("output", "runs"), [("bf16", 4), ("f32", 8)])
def test_decoded_columns_are_staged(output: str, runs: int) -> None:
    """In shared memory, 16 bytes at a time, at addresses that the compiler knows to be there."""
    ptx = weights.dequantize(kernels.of_types()["q4_K"], output).ptx((9, 0))
    for what in ("st.shared.v4", "ld.shared.v4", "st.global.v4"):
        assert len(re.findall(rf"^\s*{re.escape(what)}", ptx, re.MULTILINE)) == runs
    assert not re.search(r"^\s*(ld|st)\.v4", ptx, re.MULTILINE)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_bytes_of_halves_are_not_seen_as_numbers(kind: str) -> None:
    """The assembler of CUDA 13.0 stores a byte of what `cvt.rn.f16.f32` gave as the number, cut to an integer."""
    ptx = attention.append(kind).ptx((9, 0))
    converted = re.findall(rf"cvt\.rn\.{kind}\.f32 +(\S+),", ptx)
    assert converted
    assert not [name for name in converted if re.search(rf"st\.global\.u8\s.*, {re.escape(name)};", ptx)]


def test_machine_code_is_kept(tmp_path, monkeypatch) -> None:
    """On disk, with the name of its entry; a stored one is not compiled again."""
    from quantkit.runtime.kernels.cuda import kernel as module

    monkeypatch.setattr(module, "_folder", lambda capability: tmp_path / "sm_90")
    kernel = next(kernels.not_of_a_type())
    code, entry = kernel.cubin((9, 0))
    assert code.startswith(b"\x7fELF")
    assert entry.encode() in code
    monkeypatch.setattr(CudaKernel, "ptx", lambda *_: pytest.fail("made again"))
    assert kernel.cubin((9, 0)) == (code, entry)


def test_every_type_of_files_has_kernels() -> None:
    assert [t.name for t in types.all() if not product(t)] == []
    assert sorted(kernels.of_types()) == sorted(t.name for t in types.all())


def test_the_table_loads_no_numba() -> None:
    code = (
        "import sys; from quantkit.runtime.kernels.cuda.dispatch import product; from quantkit import types; "
        "print(product(types.get('iq4_k')) is not None, {'numba', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "True set()\n"
